"""A training run in one line, from a script or a notebook.

import areal_gym

result = areal_gym.train(env="tir", steps=60)
areal_gym.evaluate(result.policy, "tir", n=200)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from areal_gym.config import RunConfig, load_config
from areal_gym.config.trust import require_chosen
from areal_gym.errors import ConfigError
from areal_gym.run_dir.provenance import entries_used
from areal_gym.run_dir.run_dir import RunDir, RunMode
from areal_gym.run_dir.run_list import run_path
from areal_gym.runs.callbacks import Callback
from areal_gym.runs.interactive.notebook_display import shown_display
from areal_gym.runs.interactive.train_result import TrainingResult
from areal_gym.runs.train import train as run_training

__all__ = ["TrainingResult", "train"]


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path | None = None,
    mode: RunMode = "new",
    from_step: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy: what `areal-gym train` does.

    Example::

        class Enough(areal_gym.Callback):
            def on_evaluation(self, step, metrics):
                if metrics["eval/sampled"] > 0.9:
                    raise areal_gym.StopTraining("good enough")

        result = areal_gym.train(
            env="tir", steps=60, rollout={"group_size": 8}, callbacks=[Enough()]
        )

    It also works inside a running event loop. Ctrl-C, or a notebook's "interrupt", saves the
    progress, stops everything that was started and raises KeyboardInterrupt; `mode="resume"` with
    the same `out` continues.

    Args:
        config: settings, as a `RunConfig`, as a mapping, or as the file of a recipe. With
            `mode="resume"`, those of the run unless others are given.
        out: the run's directory; by default `runs/ENV-DATE-TIME`.
        mode: "new", "resume" (continue the run in `out`) or "clean" (replace it).
        from_step: with "resume", the checkpoint to continue from; by default the newest.
        callbacks: receive steps, evaluations and checkpoints; they may stop training.
        progress: a live display; by default on terminals and in notebooks only.
        settings: single settings, on top of `config`: `steps=60`, `trainer={"lr": 1e-4}`;
            `env="tir"` and the like name a plugin.

    Raises:
        GymError: see `areal_gym.errors`; the progress so far is saved where the disk allows.
    """
    place = None if out is None else Path(out)
    if mode not in get_args(RunMode):
        raise ConfigError(f"mode={mode!r} is none of: {', '.join(get_args(RunMode))}")
    if mode != "new" and place is None:
        raise ConfigError(f"mode={mode!r} needs the run's directory", hints=["name it: out=..."])
    is_from_run = mode == "resume" and config is None
    if is_from_run:
        assert place is not None
        config = RunDir(place).recipe()
    resolved = _resolve(config, settings)
    if is_from_run:
        assert place is not None
        require_chosen(resolved, RunDir(place).config_file, [k for k, _ in _leaves(settings)])
    with run_path(place, resolved.label) as path, shown_display(progress) as display:
        summary = run_training(
            resolved,
            run_dir=path,
            mode=mode,
            from_step=from_step,
            display=display,
            callbacks=callbacks,
        )
    return TrainingResult(RunDir(path), summary)


def _resolve(
    config: RunConfig | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]
) -> RunConfig:
    overrides = [
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in _leaves(settings)
    ]
    if isinstance(config, RunConfig) and not overrides:
        resolved = config
    elif isinstance(config, RunConfig):
        resolved = load_config(overrides=overrides, base=config.model_dump(mode="json"))
    elif isinstance(config, str | Path):
        resolved = load_config(Path(config), overrides)
    else:
        resolved = load_config(overrides=overrides, base=config)
    entries_used(resolved)  # an unknown id is found before anything is made
    return resolved


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, str) and not prefix and key in ("env", "agent", "engine"):
            yield f"{key}.id", value
        else:
            yield prefix + key, value
