"""The embedded engine: scheduler, network and sampler in this process."""

from areal_gym.engines.embedded.embedded_engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
