"""Examples that supervised objectives learn from, and those that they are measured on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.chat import Renderer
from areal_gym.chat.tool_call_formats import parse_assistant
from areal_gym.config import RunConfig
from areal_gym.envs.base import TextEnv
from areal_gym.errors import NothingToDoError
from areal_gym.runs.components import Components
from areal_gym.runs.run_display import Display
from areal_gym.types import Message

if TYPE_CHECKING:
    from areal_gym.trainer.batch.dialogue_files import Preference, Written
    from areal_gym.trainer.batch.examples import Example
    from areal_gym.warm_start.demonstrations import Demonstration

_HELDOUT = 0.1
"""Part of a file that is measured on, without a file for that."""
_MAX_REJECTED = 1000
"""Demonstrations in a row that may miss `data.min_reward`."""


def load_examples(
    config: RunConfig, components: Components | None, renderer: Renderer, display: Display
) -> tuple[list[Example], list[Example]]:
    """Return examples to learn from and examples to measure on.

    `components` may be None where there is a file.

    Raises:
        DataError: a file is missing or has a broken line.
        NothingToDoError: nothing is left to learn from, or to measure on.
        UsageError: the environment has no demonstrators, or they are all alike.
    """
    from areal_gym.trainer.batch.dialogue_files import encode

    if config.data.file is not None:
        raw, source = _from_files(config), config.data.file
    else:
        assert components is not None
        raw, source = _from_env(config, components.make_env()), f"demonstrators of {config.env.id}"
    sets: list[list[Example]] = []
    for name, data in zip(("learn from", "measure on"), raw, strict=True):
        max_context, has_closing = config.engine.max_context, config.objective == "rm"
        encoded = encode(data, renderer, max_context=max_context, has_closing=has_closing)
        hint = "give a larger file, or a heldout_file of its own"
        if encoded.num_too_long:
            hint = "are they all longer than engine.max_context?"
            display.say(
                f"data: {encoded.num_too_long} examples to {name} are left out, for they are "
                f"longer than engine.max_context = {max_context} tokens"
            )
        if not encoded.examples:
            raise NothingToDoError(f"no example to {name} in {source}", hints=[hint])
        sets.append(encoded.examples)
    learned, measured = sets
    num_tokens = sum(len(row.token_ids) for rows in learned for row in rows)
    display.say(
        f"data: {len(learned)} examples to learn from ({num_tokens:,} tokens), {len(measured)} to "
        f"measure on, from {source}"
    )
    return learned, measured


Data = Sequence["Written | Preference"]


def _from_files(config: RunConfig) -> tuple[Data, Data]:
    from areal_gym.trainer.batch.dialogue_files import read_file

    data, is_preference = config.data, config.objective != "sft"
    assert data.file is not None
    kind = {"is_preference": is_preference, "is_labelled": config.objective == "kto"}
    rows = read_file(Path(data.file), **kind)
    if data.heldout_file is not None:
        return rows, read_file(Path(data.heldout_file), **kind)
    random.Random(config.seed).shuffle(rows)
    num_heldout = round(len(rows) * _HELDOUT)
    return rows[num_heldout:], rows[:num_heldout]


def _from_env(config: RunConfig, env: TextEnv) -> tuple[Data, Data]:
    from areal_gym.trainer.batch.dialogue_files import labelled

    def made(split: str, count: int) -> Data:
        rng = random.Random(f"{config.seed}/{split}")
        if config.objective == "sft":
            return [_demonstration(env, rng, split, config.data.min_reward) for _ in range(count)]
        pairs = [_preference(env, rng, split) for _ in range(count)]
        if config.objective == "kto":
            return [answer for pair in pairs for answer in labelled(pair)]
        return pairs

    learned = made("train", config.data.num_examples)
    return learned, made(config.eval.split, config.eval.num_tasks)


def _demonstration(
    env: TextEnv, rng: random.Random, split: str, min_reward: float | None
) -> Written:
    from areal_gym.trainer.batch.dialogue_files import Written
    from areal_gym.warm_start.demonstrations import demonstrate

    for _ in range(_MAX_REJECTED):
        shown = demonstrate(env, rng, split=split)
        if min_reward is None or shown.reward >= min_reward:
            messages = (*shown.first_messages, *_continuation(shown))
            return Written(messages=messages, tools=[tool.schema() for tool in shown.tools])
    raise NothingToDoError(
        f"{_MAX_REJECTED} demonstrations in a row had a reward below data.min_reward = {min_reward}"
    )


def _preference(env: TextEnv, rng: random.Random, split: str) -> Preference:
    from areal_gym.trainer.batch.dialogue_files import Preference
    from areal_gym.warm_start.demonstrations import demonstrate_pair

    better, worse = demonstrate_pair(env, rng, split=split)
    return Preference(
        messages=better.first_messages,
        chosen=_continuation(better),
        rejected=_continuation(worse),
        tools=[tool.schema() for tool in better.tools],
    )


def _continuation(shown: Demonstration) -> list[Message]:
    """Return what was said and answered, as messages, with calls in the policy's dialect."""
    messages: list[Message] = []
    for turn, text in enumerate(shown.texts):
        message = parse_assistant(text)
        messages.append(message)
        if turn < len(shown.replies):
            ids = [call["id"] for call in message.get("tool_calls", [])]
            for reply in shown.replies[turn]:
                if reply["role"] == "tool" and ids:
                    reply = {"tool_call_id": ids.pop(0), **reply}
                messages.append(reply)
    return messages
