"""Checkpoints of a run: the policy in Hugging Face's layout, and what training needs to go on.

    checkpoints/step-000010/      config.json, model.safetensors, tokenizer files
                trainer.pt        optimizer states, number of steps
                trainer.json      the step, and which tasks come next

A new checkpoint is a new directory, which appears whole; then all but the last two are deleted.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from areal_gym.errors import ConfigError, TrainError
from areal_gym.modeling.checkpoint import save_checkpoint
from areal_gym.trainer.learner import Learner

__all__ = [
    "checkpoint_name",
    "latest_checkpoint",
    "require_space",
    "restore_learner",
    "save_learner",
]

_NAME = re.compile(r"step-(\d{6,})")
_KEPT = 2


def checkpoint_name(step: int) -> str:
    """`"step-000010"`."""
    return f"step-{step:06d}"


def save_learner(
    learner: Learner,
    directory: Path,
    step: int,
    tokenizer_dir: Path,
    rollout_state: Mapping[str, Any] | None = None,
) -> Path:
    """Write checkpoint `step` below `directory` and return its path.

    `rollout_state` (JSON) says which tasks come next; `restore_learner` gives it back.

    Raises:
        TrainError: the disk is full or not writable; earlier checkpoints are as they were.
    """
    facts = {"step": step, "rollout": dict(rollout_state or {})}
    states = io.BytesIO()
    torch.save(learner.state_dict(), states)
    path = save_checkpoint(
        learner.decoder,
        directory / checkpoint_name(step),
        tokenizer_dir=tokenizer_dir,
        extra_files={
            "trainer.pt": states.getvalue(),
            "trainer.json": (json.dumps(facts) + "\n").encode(),
        },
    )
    for old in _all(directory)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def require_space(learner: Learner, directory: Path) -> None:
    """Refuse to begin what could not be saved: room for two checkpoints and the one being written.

    Raises:
        TrainError: the disk has too little room left.
    """
    # Weights and two Adam states, all float32.
    needed = 3 * 3 * 4 * sum(p.numel() for p in learner.decoder.parameters())
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise TrainError(
            f"{directory} has {free / 1e6:.1f} MB left, but checkpoints need {needed / 1e6:.1f} MB",
            hints=["free some space, or choose another disk with --out"],
        )


def latest_checkpoint(directory: Path) -> tuple[int, Path] | None:
    """The newest checkpoint's step and path."""
    found = _all(directory)
    return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None


def restore_learner(learner: Learner, path: Path) -> dict[str, Any] | None:
    """Bring optimizer and counters back; the weights were loaded with the decoder.

    Returns:
        The rollout's state, None when none was saved.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    file = path / "trainer.pt"
    try:
        learner.load_state_dict(torch.load(file, weights_only=True))
        state: dict[str, Any] = json.loads((path / "trainer.json").read_text())["rollout"]
    except Exception as error:
        raise ConfigError(
            f"cannot continue from {file}: {error}",
            hints=["start again from its weights: engine.model=" + str(path)],
        ) from error
    return state or None


def _all(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
