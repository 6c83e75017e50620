"""A rank of the trainer may die with its machine; the run goes on from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from areal_gym.config import RunConfig
from areal_gym.errors import LostRankError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.run_display import Display

_T = TypeVar("_T")


def restart_on_lost_rank(
    play: Callable[[bool, int | None], _T],
    config: RunConfig,
    directory: RunDir,
    display: Display,
    *,
    is_resumed: bool,
    from_step: int | None,
) -> _T:
    """What `play(is_resumed, from_step)` returns, which is called again when a rank has died.

    It then goes on from the newest checkpoint: a death costs the steps since that.

    Raises:
        LostRankError: ranks die without any new checkpoint between two deaths, or not on a cluster.
    """
    from areal_gym.trainer.checkpoint import latest_checkpoint

    went_on_from: int | None = None
    while True:
        try:
            return play(is_resumed, from_step)
        except LostRankError as error:
            found = latest_checkpoint(directory.checkpoints_dir)
            if config.cluster.address is None or found is None or found[0] == went_on_from:
                raise
            went_on_from, is_resumed, from_step = found[0], True, None
            display.say(f"{error}: going on from the checkpoint of step {went_on_from}")
