"""The rule of environments with pictures: whoever does not see them earns what guessing earns.

A blind policy is fitted to what texts alone tell. It watches the gold policy on one half of the
tasks, and notes which answer is most frequent after each text, and after each word of it: an answer
that hides in a file name or a hint is found by a word. It then plays the other half.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from areal_gym.envs.base import TextEnv
from areal_gym.envs.checker.env_under_test import EnvUnderTest, RuleViolation, Skipped, play
from areal_gym.message_types import images_of, text_of
from areal_gym.types import Message

_NUM_TASKS = 400
"""Tasks of each half: chance 0.5 is then measured to 0.025."""
_FEWEST = 5
"""A word that was seen less often tells nothing."""
_ALMOST_ALL = 0.95
"""Pictures are not needed where the texts alone earn this much."""


def check_blind(subject: EnvUnderTest) -> str | None:
    """Pictures are needed: a policy that reads only the texts earns what guessing earns."""
    env = subject.make()
    _, info = env.reset(seed=0)
    if not any(images_of(message["content"]) for message in info["messages"]):
        env.close()
        return None
    if not env.has_gold:
        env.close()
        raise Skipped("no perfect policy is known (has_gold = False)")
    policy = _BlindPolicy()
    for options in _tasks(env, 0):
        play(env, policy.watch, options=options)
    rewards = [
        sum(step.reward for step in play(env, policy, options=options))
        for options in _tasks(env, 1)
    ]
    env.close()
    mean = sum(rewards) / len(rewards)
    guess, measured = env.blind_reward, f"{mean:.3f} without pictures"
    if guess is None:
        if mean >= _ALMOST_ALL:
            raise RuleViolation(f"a policy that sees no picture earns {mean:.3f}")
        return f"{measured}; the class does not say what guessing earns (blind_reward)"
    # Four standard deviations of a mean of rewards between 0 and 1.
    tolerance = 4 * math.sqrt(max(guess * (1 - guess), 0.01) / len(rewards))
    if mean > guess + tolerance:
        raise RuleViolation(
            f"a policy that sees no picture earns {mean:.3f}; guessing earns {guess:.3f} "
            f"(blind_reward). {policy.best_clue()}"
        )
    return f"{measured}, guessing earns {guess:.3f}"


def _tasks(env: TextEnv, half: int) -> Iterable[dict[str, Any]]:
    known = env.num_tasks("train")
    num_tasks = 2 * _NUM_TASKS if known is None else min(known, 2 * _NUM_TASKS)
    return ({"split": "train", "index": index} for index in range(half, num_tasks, 2))


class _BlindPolicy:
    """Answers by the texts alone; `watch` plays the gold action, and learns it."""

    def __init__(self) -> None:
        self._answers: dict[str, Counter[str]] = defaultdict(Counter)
        """The gold answers after each clue: a text, or a word of it."""

    def watch(self, env: TextEnv) -> str:
        action = env.gold_action()
        for clue in _clues(env.messages):
            self._answers[clue][action] += 1
        return action

    def __call__(self, env: TextEnv) -> str:
        counts = [self._answers[clue] for clue in _clues(env.messages) if clue in self._answers]
        frequent = [c for c in counts if c.total() >= _FEWEST] or counts
        best = max(frequent, key=_share, default=None)
        return env.noop_action() if best is None else best.most_common(1)[0][0]

    def best_clue(self) -> str:
        """Return a sentence about the text that tells most."""
        seen = {clue: c for clue, c in self._answers.items() if c.total() >= _FEWEST}
        if not seen:
            return ""
        clue = max(seen, key=lambda clue: _share(seen[clue]))
        answer = seen[clue].most_common(1)[0][0]
        return f"After {clue[:80]!r} the answer is {answer[:40]!r} in {_share(seen[clue]):.0%}"


def _share(counts: Counter[str]) -> float:
    # A lower bound: a rare clue is not believed as readily.
    total, most = counts.total(), counts.most_common(1)[0][1]
    return most / total - math.sqrt(0.25 / total)


def _clues(messages: Sequence[Message]) -> list[str]:
    """Return what the texts say now: the newest ones whole, and each of their words."""
    newest: list[str] = []
    for message in reversed(messages):
        if message["role"] == "assistant":
            break
        newest.append(text_of(message["content"]))
    text = " ".join(reversed(newest))
    turn = sum(message["role"] == "assistant" for message in messages)
    words = {word for word in re.findall(r"[A-Za-z]+|\d+", text)}
    return [f"turn {turn}: {text}", *sorted(words)]
