"""Loads the examples that supervised objectives train on, and the held-out ones."""

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
"""The share of a file that is held out if there is no heldout_file."""
_MAX_REJECTED = 1000
"""The most demonstrations in a row that may miss `data.min_reward`."""


def load_examples(
    config: RunConfig, components: Components | None, renderer: Renderer, display: Display
) -> tuple[list[Example], list[Example]]:
    """Return the examples to learn from, and the examples to measure on.

    `components` may be None if the settings name a file.

    Raises:
        DataError: a file is missing or has an invalid line.
        NothingToDoError: no example is left to learn from, or to measure on.
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
        hint = "give a larger file, or a separate heldout_file"
        if encoded.num_too_long:
            hint = "are they all longer than engine.max_context?"
            display.say(
                f"data: {encoded.num_too_long} examples to {name} are left out, because they are "
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
    flags = {"is_preference": is_preference, "is_labelled": config.objective == "kto"}
    rows = read_file(Path(data.file), **flags)
    if data.heldout_file is not None:
        return rows, read_file(Path(data.heldout_file), **flags)
    random.Random(config.seed).shuffle(rows)
    num_heldout = round(len(rows) * _HELDOUT)
    return rows[num_heldout:], rows[:num_heldout]


def _from_env(config: RunConfig, env: TextEnv) -> tuple[Data, Data]:
    from areal_gym.trainer.batch.dialogue_files import labelled

    def make(split: str, count: int) -> Data:
        rng = random.Random(f"{config.seed}/{split}")
        if config.objective == "sft":
            return [_demonstration(env, rng, split, config.data.min_reward) for _ in range(count)]
        pairs = [_preference(env, rng, split) for _ in range(count)]
        if config.objective == "kto":
            return [answer for pair in pairs for answer in labelled(pair)]
        return pairs

    learned = make("train", config.data.num_examples)
    return learned, make(config.eval.split, config.eval.num_tasks)


def _demonstration(
    env: TextEnv, rng: random.Random, split: str, min_reward: float | None
) -> Written:
    from areal_gym.trainer.batch.dialogue_files import Written
    from areal_gym.warm_start.demonstrations import demonstrate

    for _ in range(_MAX_REJECTED):
        demonstration = demonstrate(env, rng, split=split)
        if min_reward is None or demonstration.reward >= min_reward:
            messages = (*demonstration.first_messages, *_continuation(demonstration))
            return Written(messages=messages, tools=[tool.schema() for tool in demonstration.tools])
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


def _continuation(demonstration: Demonstration) -> list[Message]:
    """Return the answers and replies as messages, with tool calls in the policy's dialect."""
    messages: list[Message] = []
    for turn, text in enumerate(demonstration.texts):
        message = parse_assistant(text)
        messages.append(message)
        if turn < len(demonstration.replies):
            ids = [call["id"] for call in message.get("tool_calls", [])]
            for reply in demonstration.replies[turn]:
                if reply["role"] == "tool" and ids:
                    reply = {"tool_call_id": ids.pop(0), **reply}
                messages.append(reply)
    return messages
