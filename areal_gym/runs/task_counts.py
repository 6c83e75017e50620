"""Says which tasks a run trains and is evaluated on, before anything slow begins."""

from __future__ import annotations

from collections.abc import Callable

from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE
from areal_gym.errors import NothingToDoError
from areal_gym.runs.components import Components


def announce_tasks(
    config: RunConfig, components: Components, say: Callable[[str], None]
) -> RunConfig:
    """Compare the settings with the available tasks, and say what the run does about it.

    Returns the settings, with `eval.num_tasks=0` (no evaluation) if no task is held out.

    Raises:
        NothingToDoError: there is no training task.
        UsageError: the environment has no such split.
    """
    if config.env.id == ONLINE:
        return config
    num_train = _count(components, "train", say)
    if num_train == 0:
        raise NothingToDoError(
            f"{config.env.id} has no task in split 'train': there is nothing to train on",
            hints=[f"look at its tasks: areal-gym data show {config.env.id}"],
        )
    num_groups = config.rollout.batch_groups
    if num_train is not None and num_train < num_groups:
        say(
            f"tasks: {num_train} to train on, and a step takes {num_groups} groups "
            "(rollout.batch_groups): tasks repeat within a step"
        )
    if config.eval.num_tasks == 0:
        return config
    num_heldout = _count(components, config.eval.split)
    if num_heldout == 0:
        say(
            f"tasks: none in split {config.eval.split!r}: the run is not evaluated on held-out "
            "tasks (eval.num_tasks=0)"
        )
        settings = config.eval.model_copy(update={"num_tasks": 0})
        return config.model_copy(update={"eval": settings})
    _say_fewer(config, num_heldout, say)
    return config


def announce_heldout(config: RunConfig, components: Components, say: Callable[[str], None]) -> None:
    """Say how many tasks an evaluation has; raise NothingToDoError if there are none."""
    num_heldout = _count(components, config.eval.split, say) if config.eval.num_tasks else 0
    if num_heldout == 0:
        raise NothingToDoError(
            "eval.num_tasks = 0: there is nothing to evaluate"
            if config.eval.num_tasks == 0
            else f"the split {config.eval.split!r} has no tasks to evaluate on",
            hints=["take another one (eval.split=train), or larger data"],
        )
    _say_fewer(config, num_heldout, say)


def _say_fewer(config: RunConfig, num_heldout: int | None, say: Callable[[str], None]) -> None:
    num_requested = config.eval.num_tasks
    if num_heldout is not None and num_heldout < num_requested:
        say(
            f"tasks: evaluates on all {num_heldout:,} of split {config.eval.split!r} "
            f"(eval.num_tasks = {num_requested})"
        )


def _count(
    components: Components, split: str, say: Callable[[str], None] | None = None
) -> int | None:
    """Return the number of tasks in a split, after passing the source's notes to `say`."""
    env = components.make_env()
    try:
        if say is not None:
            for note in getattr(env.tasks, "notes", ()):
                say(f"tasks: {note}")
        return env.num_tasks(split)
    finally:
        env.close()
