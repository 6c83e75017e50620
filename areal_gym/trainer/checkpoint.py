"""Checkpoints of a run: the policy in Hugging Face's layout, and the state of training.

    checkpoints/step-000010/      config.json, model.safetensors, tokenizer files
                trainer/          states of optimizer and critic, counters (`trainer.states`)
                trainer/master_weights/  if the weight files are rounded: see `exported_weights`
                trainer.json      the step, and the state of rollouts
    checkpoints/best              a link to the best of the evaluated checkpoints

A new checkpoint is a new directory, which appears complete. `keep_checkpoints` deletes old ones.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError, DataError, GymError, TrainError, UsageError
from areal_gym.models.tiny.checkpoint_files import (
    fresh_directory,
    require_whole_weights,
    write_config,
    write_file,
)
from areal_gym.trainer.base import Trainer
from areal_gym.trainer.exported_weights import MASTER_WEIGHTS, STATES, save_checkpoint
from areal_gym.trainer.states import require_whole_states
from areal_gym.utils.files import read_json

_NAME = re.compile(r"step-(\d{6,})")
_FACTS = "trainer.json"


def checkpoint_name(step: int) -> str:
    """Return the directory name of a step's checkpoint, such as `"step-000010"`."""
    return f"step-{step:06d}"


def save_trainer(
    trainer: Trainer[Any],
    directory: Path,
    step: int,
    tokenizer_dir: Path,
    rollout_state: Mapping[str, Any] | None = None,
    *,
    on_copied: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint of a step below `directory` and return its path.

    Args:
        trainer: nothing else may use it before `on_copied` is called.
        directory: the run's directory of checkpoints.
        step: the number of the step.
        tokenizer_dir: a checkpoint with the policy's tokenizer files.
        rollout_state: the rollouts' state as JSON values, which `restore_trainer` returns.
        on_copied: called when everything to be written has been copied.

    Raises:
        TrainError: the disk is full or not writable; earlier checkpoints are unchanged.
    """
    path = directory / checkpoint_name(step)
    facts = {"step": step, "rollout": dict(rollout_state or {})}
    with fresh_directory(path) as fresh:
        written = save_checkpoint(trainer, fresh)
        try:
            on_copied()
        finally:
            wait([written])  # a thread must not write into a directory that is being deleted
        written.result()
        decoder = trainer.decoder
        dtype = decoder.stored_types.main or next(decoder.parameters()).dtype
        write_config(decoder, dtype, fresh, tokenizer_dir=tokenizer_dir)
        facts["master_weights"] = (fresh / STATES / MASTER_WEIGHTS).is_dir()
        write_file(fresh / _FACTS, (json.dumps(facts) + "\n").encode())
    return path


def keep_checkpoints(
    directory: Path,
    newest: int,
    scores: Mapping[int, float | tuple[float, ...] | None],
    *,
    protected: Collection[int] = (),
) -> str | None:
    """Delete all checkpoints except the newest, the best, and those being evaluated.

    Args:
        directory: the run's directory of checkpoints.
        newest: how many of the newest stay; at least one, which a resumed run needs.
        scores: the policy's score after each evaluated step, None while it is being evaluated. Of a
            tuple, the first number decides.
        protected: steps whose checkpoints stay.

    Returns:
        The name of the best checkpoint, which `best` links to; None if none was evaluated.
    """
    checkpoints = {_step(path): path for path in _all(directory)}
    measured = [(s, step) for step, s in scores.items() if s is not None and step in checkpoints]
    best = checkpoints[max(measured)[1]] if measured else None
    if best is not None:
        link = directory / ".best.new"
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        os.replace(link, directory / "best")
    for step, path in list(checkpoints.items())[:-newest]:
        is_being_measured = scores.get(step, 0.0) is None
        if path != best and not is_being_measured and step not in protected:
            shutil.rmtree(path, ignore_errors=True)
    return None if best is None else best.name


def require_space(trainer: Trainer[Any], directory: Path, num_kept: int) -> None:
    """Check that the disk has room for the kept checkpoints, the best one and a new one.

    Raises:
        TrainError: the disk has too little free space.
    """
    missing = max(1, num_kept + 2 - len(_all(directory)))
    needed = missing * trainer.checkpoint_bytes()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise TrainError(
            f"{existing} has {free / 1e6:.1f} MB left, but checkpoints need {needed / 1e6:.1f} MB",
            hints=[
                "free some space, or choose another disk with --out",
                f"keep fewer checkpoints: trainer.keep_checkpoints=1 (it is {num_kept})",
            ],
        )


def latest_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """Return the newest checkpoint's step and path."""
    paths = _all(directory)
    return (_step(paths[-1]), paths[-1]) if paths else None


def checkpoint_of(directory: Path, step: int) -> tuple[int, Path]:
    """Return the checkpoint of a step; raise a UsageError that lists the available steps."""
    path = directory / checkpoint_name(step)
    if not path.is_dir():
        existing = ", ".join(str(_step(other)) for other in _all(directory))
        raise UsageError(
            f"{directory} holds no checkpoint of step {step}",
            hints=[f"available: the steps {existing}"] if existing else [],
        )
    return step, path


def require_whole(path: Path) -> None:
    """Raise ConfigError if a checkpoint is of an old version, or has a missing or damaged file."""
    try:
        if (path / "trainer.pt").exists() and not (path / STATES).exists():
            raise ConfigError("trainer.pt was written by an older version of areal-gym")
        require_whole_weights(path)
        require_whole_states(path / STATES)
        if _read_facts(path).get("master_weights"):
            require_whole_states(path / STATES / MASTER_WEIGHTS)
    except GymError as error:
        raise _unusable(path, error) from error


def restore_trainer(trainer: Trainer[Any], path: Path) -> dict[str, Any] | None:
    """Restore a trainer that has the checkpoint's weights; return the saved rollout state.

    Raises:
        ConfigError: a file is damaged, or was written with other settings.
    """
    try:
        trainer.load(path / STATES)
    except Exception as error:
        raise _unusable(path, error) from error
    return _read_facts(path)["rollout"] or None


def _read_facts(path: Path) -> Mapping[str, Any]:
    file = path / _FACTS
    try:
        facts = read_json(file)
        state = facts["rollout"]
    except (OSError, DataError, KeyError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"cannot read {file}: its rollout is not an object")
    return facts


def _unusable(path: Path, error: BaseException) -> ConfigError:
    reason = error.message if isinstance(error, GymError) else error
    others = [_step(other) for other in _all(path.parent) if _step(other) < _step(path)]
    return ConfigError(
        f"cannot continue from {path}: {reason}",
        hints=[
            *([f"continue from an older one: --resume --from-step {others[-1]}"] if others else []),
            f"or start again from its weights: engine.model={path}",
        ],
    )


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _all(directory: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    paths = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return sorted(paths, key=_step)
