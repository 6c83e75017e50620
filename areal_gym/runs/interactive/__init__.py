"""A training run in one line, from a script or a notebook.

import areal_gym

result = areal_gym.train(env="tir", steps=60)
areal_gym.evaluate(result.policy, "tir", n=200)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from areal_gym.runs.interactive.train_arguments import (
    own_settings,
    refuse_nested_training,
    require_named_model,
    require_task,
)
from areal_gym.runs.run_inputs import with_copies
from areal_gym.runs.train import train as run_training
from areal_gym.utils.markup import number

__all__ = ["TrainingResult", "train"]


@dataclass(frozen=True, slots=True, repr=False)
class TrainingResult:
    """A finished run."""

    run: RunDir
    """The run directory, with all metrics and trajectories."""
    summary: Mapping[str, Any]
    """The content of `summary.json`."""

    @property
    def stopped(self) -> str | None:
        """The reason for which the run ended early; None if it took all its steps."""
        reason: str | None = self.summary["stopped"]
        return reason

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the last step (docs/metrics.md); empty if there was none."""
        rows = self.run.read_metrics()
        return rows[-1] if rows else {}

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last step, in Hugging Face's format."""
        return self.run.path / str(self.summary["checkpoint"])

    @property
    def start(self) -> Path:
        """The initial policy, to compare with."""
        return Path(self.summary["initial_policy"])

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint that was best on held-out tasks, of those that still exist."""
        name = self.summary["best_checkpoint"]
        return None if name is None else self.run.path / name

    @property
    def policy(self) -> Path:
        """The best checkpoint, else the last one, for `rollout` and `evaluate`."""
        return self.best_checkpoint or self.checkpoint

    def __repr__(self) -> str:
        heldout = [number(self.summary.get(f"heldout_{when}")) for when in ("before", "after")]
        stopped = "" if self.stopped is None else f", stopped: {self.stopped}"
        return (
            f"<TrainingResult {self.run.path}: {self.summary['num_steps']} steps, held out "
            f"{' -> '.join(heldout)}{stopped}>"
        )

    def _repr_html_(self) -> str:
        return self.run._repr_html_()


def train(
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    data: Any = None,
    reward: Any = None,
    tools: Any = None,
    model: str | Path | Mapping[str, Any] | None = None,
    env: Any = None,
    out: str | Path | None = None,
    mode: RunMode = "new",
    from_step: int | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> TrainingResult:
    """Train a policy: what `areal-gym train` does.

    Example::

        def exact(completion, answer):
            return float(completion.strip() == answer)

        rows = [{"prompt": "What is 2+2?", "answer": "4"}, ...]
        areal_gym.train(data=rows, reward=exact, model="Qwen/Qwen3-0.6B")

    In an environment: `areal_gym.train(env="tir", steps=60, rollout={"group_size": 8})`.

    It also works inside a running event loop. Ctrl-C, or a notebook's "interrupt", saves the
    progress, stops everything that was started and raises KeyboardInterrupt; `mode="resume"` with
    the same `out` continues.

    Args:
        data: rows with a prompt each: a list, a pandas or `datasets` object, a file, or an id on
            the hub. The environment is then `prompts`, unless `env` is given.
        reward: a function of the completion and the row's columns; an id (`areal-gym list
            rewards`); a list of them, or weights by reward (docs/rewards.md).
        tools: functions that the policy may call, or classes with `@areal_gym.tool` methods.
        model: a checkpoint's directory, OWNER/NAME on the Hugging Face hub, or "starter".
        env: an environment's id, a class, a function that makes one, or `FILE.py:CLASS`.
        config: settings, as a `RunConfig`, as a mapping, or as the file of a recipe. With
            `mode="resume"`, the default is the run's own settings.
        out: the run's directory; by default `runs/ENV-DATE-TIME`.
        mode: "new", "resume" (continue the run in `out`) or "clean" (replace it).
        from_step: with "resume", the checkpoint to continue from; by default the newest.
        callbacks: receive steps, evaluations and checkpoints; they may stop training.
        progress: whether a live display is shown; by default on terminals and in notebooks only.
        settings: single settings that override `config`: `steps=60`, `trainer={"lr": 1e-4}`;
            `agent="chat"` and the like name a plugin.

    Raises:
        GymError: see `areal_gym.errors`; the progress so far is saved if the disk allows.
    """
    refuse_nested_training()
    run_dir = None if out is None else Path(out)
    settings = own_settings(
        data=data, reward=reward, tools=tools, model=model, env=env, settings=settings
    )
    resolved = _settings_of_run(config, settings, run_dir, mode)
    with run_path(run_dir, resolved.label) as path, shown_display(progress) as display:
        summary = run_training(
            resolved,
            run_dir=path,
            mode=mode,
            from_step=from_step,
            display=display,
            callbacks=callbacks,
        )
    return TrainingResult(RunDir(path), summary)


def _settings_of_run(
    config: RunConfig | Mapping[str, Any] | str | Path | None,
    settings: Mapping[str, Any],
    run_dir: Path | None,
    mode: RunMode,
) -> RunConfig:
    """Return the settings to train with; those of the run in `run_dir` if it is resumed."""
    if mode not in get_args(RunMode):
        raise ConfigError(f"mode={mode!r} is none of: {', '.join(get_args(RunMode))}")
    if mode != "new" and run_dir is None:
        raise ConfigError(f"mode={mode!r} needs the run's directory", hints=["name it: out=..."])
    if mode == "resume" and config is None and run_dir is not None:
        recipe = RunDir(run_dir).recipe()
        resolved, remarks = with_copies(_resolve(recipe, settings), run_dir)
        require_chosen(resolved, recipe, [key for key, _ in _leaves(settings)])
        for remark in remarks:
            warnings.warn(remark, stacklevel=3)
        return resolved
    require_task(config, settings)
    resolved = _resolve(config, settings)
    require_named_model(config, settings, resolved.env.id, resolved.engine.model)
    return resolved


def _resolve(
    config: RunConfig | Mapping[str, Any] | str | Path | None, settings: Mapping[str, Any]
) -> RunConfig:
    overrides = [
        f"{key}={json.dumps(value, ensure_ascii=False, default=str)}"
        for key, value in _leaves(settings)
    ]
    if isinstance(config, str | Path):
        resolved = load_config(Path(config), overrides)
    elif isinstance(config, RunConfig):
        base = config.model_dump(mode="json")
        resolved = load_config(overrides=overrides, base=base) if overrides else config
    else:
        resolved = load_config(overrides=overrides, base=config)
    entries_used(resolved)  # reports an unknown id before anything is made
    return resolved


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, str) and not prefix and key in ("env", "agent", "engine"):
            yield f"{key}.id", value
        else:
            yield prefix + key, value
