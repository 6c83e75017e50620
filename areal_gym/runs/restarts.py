"""Restarts a run from its newest checkpoint when a rank of the trainer has died."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from areal_gym.config import RunConfig
from areal_gym.errors import LostRankError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.run_display import Display

_T = TypeVar("_T")


def restart_on_lost_rank(
    attempt: Callable[[bool, int | None], _T],
    config: RunConfig,
    directory: RunDir,
    display: Display,
    *,
    is_resumed: bool,
    from_step: int | None,
) -> _T:
    """Return what `attempt(is_resumed, from_step)` returns; call it again when a rank has died.

    It then goes on from the newest checkpoint: a death costs the steps since that.

    Raises:
        LostRankError: ranks die without any new checkpoint between two deaths, or not on a cluster.
    """
    from areal_gym.trainer.checkpoint import latest_checkpoint

    restarted_from: int | None = None
    while True:
        try:
            return attempt(is_resumed, from_step)
        except LostRankError as error:
            checkpoint = latest_checkpoint(directory.checkpoints_dir)
            if (
                config.cluster.address is None
                or checkpoint is None
                or checkpoint[0] == restarted_from
            ):
                raise
            restarted_from, is_resumed, from_step = checkpoint[0], True, None
            display.say(f"{error}: going on from the checkpoint of step {restarted_from}")
