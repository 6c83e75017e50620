"""Profiles chosen steps: a trace for each rank, and its accelerator's allocations.

step-000012-rank-0.trace.json      for ui.perfetto.dev or chrome://tracing
step-000012-rank-0.memory.pickle   for pytorch.org/memory_viz; only if the accelerator records them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.device import MemoryHistory, profiler_activities

_P = ParamSpec("_P")
_Owner = TypeVar("_Owner", bound="_Profiled")
_Result = TypeVar("_Result")


class StepProfiler:
    """Profiles the steps listed in `trainer.profile`, on one rank.

    Raises:
        ConfigError: steps are listed, but no directory is set.
    """

    def __init__(self, config: TrainerConfig, device: torch.device, rank: int) -> None:
        self._steps = frozenset(config.profile.steps)
        if self._steps and config.profile.directory is None:
            raise ConfigError(
                "trainer.profile.steps needs a directory for the profiles",
                hints=["a run has one; a trainer made by hand: profile={..., 'directory': DIR}"],
            )
        self._directory = Path(config.profile.directory or "")
        self._device, self._rank = device, rank

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Profile the block if the step is listed.

        A profile that cannot be written only gives a warning, because the step has been taken.
        """
        if step not in self._steps:
            yield
            return
        name = f"step-{step:06d}-rank-{self._rank}"
        history = MemoryHistory(self._device)
        history.begin()
        profiler = torch.profiler.profile(
            activities=profiler_activities(self._device), record_shapes=True, profile_memory=True
        )
        try:
            with profiler, torch.profiler.record_function(f"areal_gym.step {step}"):
                yield
            self._directory.mkdir(parents=True, exist_ok=True)
            part = self._directory / f".{name}.trace.json"
            profiler.export_chrome_trace(str(part))
            part.replace(self._directory / f"{name}.trace.json")
            history.end(self._directory / f"{name}.memory.pickle")
        except OSError as error:
            history.end(None)
            warnings.warn(f"no profile of step {step}: {error}", stacklevel=2)
        except BaseException:
            history.end(None)
            raise


class _Profiled(Protocol):
    num_steps: int
    profiler: StepProfiler


def profiled(
    step: Callable[Concatenate[_Owner, _P], _Result],
) -> Callable[Concatenate[_Owner, _P], _Result]:
    """Decorate a trainer's method `step` so that the listed steps are profiled."""

    @wraps(step)
    def watched(self: _Owner, /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        with self.profiler.watch(self.num_steps + 1):
            return step(self, *args, **kwargs)

    return cast(Callable[Concatenate[_Owner, _P], _Result], watched)
