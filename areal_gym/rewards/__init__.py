"""Reward functions score a completion; they are named by reference, weighted and summed.

    rewards = load_rewards([{"reward": "math"}, {"reward": "rewards.py:polite", "weight": 0.2}])
    rewards.check_columns(["prompt", "answer"])
    score = await rewards.score(RewardInput(completion="It is 4.", row={"answer": "4"}))

docs/rewards.md describes the calling convention, the built-in rewards and how bad values are
handled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.rewards.base import RewardInput, Score
    from areal_gym.rewards.reward_set import RewardSet, load_rewards

__all__ = ["RewardInput", "RewardSet", "Score", "load_rewards"]

_MODULES = {"RewardInput": "base", "Score": "base"}


def __getattr__(name: str) -> Any:
    # Imported on first use, because commands that only list plugins do not need these modules.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'reward_set')}")
    return getattr(module, name)
