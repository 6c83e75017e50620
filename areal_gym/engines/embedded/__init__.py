"""A policy sampled in this process: scheduler, network, sampler."""

from areal_gym.engines.embedded.embedded_engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
