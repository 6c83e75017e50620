"""The reward that a task's verifier wrote, and the reward of several steps together."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Mapping, Sequence

from areal_gym.envs.harbor.archives import is_complete
from areal_gym.errors import TaskError
from areal_gym.utils.markup import short

REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
MOST_BYTES = 1 << 16
"""The limit of a reward file."""


def read_reward_file(raw: bytes, path: str) -> str | None:
    """Return the text of a reward file in an archive that was taken of it; None: there is none.

    Raises:
        TaskError: it is not a regular file, or larger than 64 kB.
    """
    too_large = TaskError(f"{path} is larger than {MOST_BYTES >> 10} kB")
    if not is_complete(raw):
        raise too_large
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
        member = archive.next()
        if member is None:
            return None
        if not member.isreg():
            raise TaskError(f"{path} is not a regular file: no reward is read from it")
        if member.size > MOST_BYTES:
            raise too_large
        file = archive.extractfile(member)
        data = b"" if file is None else file.read()
    return data.decode("utf-8", "replace")


def parse_rewards(text: str, path: str) -> dict[str, float]:
    """Return the named rewards of a reward file's text.

    Raises:
        TaskError: it is empty, or not one finite number, or not an object of finite numbers.
    """
    if not text.strip():
        raise TaskError(f"{path} is empty")
    if path.endswith(".txt"):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise TaskError(f"{path} holds {short(text.strip(), 80)!r}, not one finite number")
        return {"reward": value}
    try:
        rewards = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not JSON: {error}") from None
    if not isinstance(rewards, dict) or not rewards:
        raise TaskError(f"{path} is not an object with at least one number")
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not _is_finite(value):
            raise TaskError(f"{path}: {name} is {short(value, 80)}, not a finite number")
    return {name: float(value) for name, value in rewards.items()}


def main_reward(rewards: Mapping[str, float]) -> float:
    """Return the reward named `reward`; of others the only one, or their mean."""
    if "reward" in rewards:
        return rewards["reward"]
    return sum(rewards.values()) / len(rewards)


def passes(rewards: Mapping[str, float], least: float | Mapping[str, float] | None) -> bool:
    """Return whether a step's rewards reach its `min_reward`; a missing one does not."""
    if least is None:
        return True
    if isinstance(least, Mapping):
        return all(rewards.get(name, -math.inf) >= bound for name, bound in least.items())
    return main_reward(rewards) >= least


def combined(steps: Sequence[Mapping[str, float]], strategy: str | None) -> float:
    """Return the reward of an episode: of its last step ("final"), or the mean of those played."""
    if not steps:
        return 0.0
    if strategy == "final":
        return main_reward(steps[-1])
    names = {name for rewards in steps for name in rewards}
    means = {name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names}
    return main_reward(means)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False
