"""Known benchmarks: where their data come from, how they are asked, graded and sampled."""

from areal_gym.envs.benchmarks.benchmark import Benchmark, DataFile

__all__ = ["Benchmark", "DataFile"]
