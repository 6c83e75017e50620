"""Your prompts, your rewards, your tools: the environment of `areal-gym train --data --reward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.given_tools import GivenTools
from areal_gym.envs.prompt_rows import drafts, messages_of, plain_value, prompt_column, row_messages
from areal_gym.errors import UsageError
from areal_gym.images import image_limits
from areal_gym.rewards import RewardInput, RewardSet, load_rewards
from areal_gym.tasks import TaskSource
from areal_gym.tasks.given_tasks import open_tasks, read_once
from areal_gym.types import Message, Task, text_of
from areal_gym.utils.session_objects import with_objects


class PromptsEnv(TextEnv):
    """Your own prompts and reward: each row of data is a task, and functions score the answer.

    A row has a prompt in the column `prompt` (a text, or messages), `messages` or `question`; the
    rewards get the answer and all columns (docs/rewards.md). With tools, the policy calls them
    until it writes a message without a call. The final message is scored; a dialogue that reaches
    `max_turns` is scored as it is.

    Args:
        tasks: the rows: a list, a file, a data set, or settings with `test`, `where`, `fields`
            and `heldout` (docs/data.md).
        reward: one reward or several with weights: functions, `FILE.py:NAME`, or ids
            (`areal-gym list rewards`).
        tools: functions that the policy may call, or classes with `@areal_gym.tool` methods, or
            `FILE.py:NAME` of them.
        system_prompt: goes before prompts that have no system message of their own.
        prompt: the column of the prompt [prompt, messages or question].
        max_turns: assistant messages per episode, when there are tools.
    """

    suspends = True
    has_gold = False

    def __init__(
        self,
        tasks: Any = None,
        reward: Any = None,
        *,
        tools: Any = (),
        system_prompt: str | None = None,
        prompt: str | None = None,
        max_turns: int = 8,
        render_mode: str | None = None,
    ) -> None:
        _require_given(tasks, reward)
        self.rewards = _load_rewards(with_objects(reward))
        required = tuple((c, each.name) for each in self.rewards for c in each.required_columns)
        source = open_tasks(with_objects(tasks), drafts(prompt, required, image_limits()))
        super().__init__(tasks=source, render_mode=render_mode)
        self._given_tools = GivenTools(tools)
        self._system_prompt = system_prompt
        self._prompt_column = prompt
        self._num_first = 0
        self.tools = self._given_tools.fresh()
        self.max_turns = max_turns if self.tools else 1
        # `gold` is an answer that earns all; other columns need not be.
        self.has_gold = "gold" in _first_row(source)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the row's prompt, after the system prompt."""
        self.tools = self._given_tools.fresh()
        messages = self._prompt_messages(task)
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        self._num_first = len(messages)
        return messages

    async def respond(self, message: Message) -> Response:
        """Run the calls of tools; score a message that has none, and the last one."""
        metrics: dict[str, float] = {}
        results: Sequence[Message] = ()
        if self.tools:
            called = await self.call_tools(message)
            results = called.messages
            metrics = {"tool_calls": called.num_calls, "tool_errors": called.num_errors}
            if results and self.num_turns < self.max_turns:
                return Response(messages=results, metrics=metrics)
        messages = (*self.messages, *results)
        answers = messages[self._num_first :]
        score = await self.rewards.score(
            RewardInput(
                completion=text_of(message["content"]),
                messages=messages,
                prompt=self._prompt,
                tool_results=tuple(text_of(m["content"]) for m in answers if m["role"] == "tool"),
                row=plain_value(self.task.data),  # lists are lists again
                where=self.place_of(self.task),
            )
        )
        return Response(
            messages=results,
            reward=score.reward,
            reward_parts=score.parts,
            metrics={**metrics, **score.metrics},
            is_terminated=not results,
        )

    def _prompt_messages(self, task: Task) -> list[Message]:
        column = prompt_column(task.data, self._prompt_column)
        return row_messages(plain_value(task.data), str(column))

    async def try_rewards(self, task: Task) -> None:
        """Score a plausible answer to a task by the functions that are not built in.

        Raises:
            EnvError: a function fails, or returns no reward.
        """
        answer = task.data.get("gold", task.data.get("answer"))
        completion = _PLAUSIBLE if answer is None else str(answer)
        column = prompt_column(task.data, self._prompt_column)
        prompt = plain_value(task.data[column]) if column is not None else ""
        asked = self._prompt_messages(task) if column is not None else messages_of(prompt)
        await self.rewards.try_own(
            RewardInput(
                completion=completion,
                messages=(*asked, {"role": "assistant", "content": completion}),
                prompt=prompt,
                row=plain_value(task.data),
                where=self.place_of(task),
            )
        )

    def place_of(self, task: Task) -> str:
        """Return the words for a task: the line or row that it was made of, where its id says so.

        Example: `"prompts.jsonl, line 3 (task prompts/3-64f77295)"`
        """
        data, _, row = task.id.rpartition("/")
        number = row.partition("-")[0]
        if not number.isdigit():
            return f"task {task.id}"
        file = Path(str(getattr(self.tasks, "name", ""))).name
        if file == data or file.partition(".")[0] != data:  # an object, or one file of several
            return f"row {number} of {data} (task {task.id})"
        unit = "line" if ".jsonl" in file or ".ndjson" in file else "row"
        return f"{file}, {unit} {number} (task {task.id})"

    def gold_action(self) -> str:
        """Return the row's `gold`, or else its `answer`; a row with neither is a UsageError."""
        for column in ("gold", "answer"):
            if (gold := self.task.data.get(column)) is not None:
                return str(gold)
        raise UsageError(
            "the rows have no column 'answer' that a small policy could imitate",
            hints=["name a model: --model Qwen/Qwen3-0.6B"],
        )

    @property
    def _prompt(self) -> Any:
        column = prompt_column(self.task.data, self._prompt_column)
        if column is None:  # a task that was given, from elsewhere
            raise UsageError(f"task {self.task.id} has no prompt")
        return plain_value(self.task.data[column])


_PLAUSIBLE = "The answer is 42."


def _require_given(tasks: Any, reward: Any) -> None:
    if tasks is None:
        raise UsageError(
            "which data? The environment 'prompts' asks the prompts of your rows",
            hints=["from the command line: --data prompts.jsonl", "from Python: data=rows"],
        )
    if reward is None:
        raise UsageError(
            "which reward? The environment 'prompts' scores answers by your reward",
            hints=[
                "a function of yours: --reward rewards.py:exact, or from Python reward=exact",
                "one of ours: --reward exact (areal-gym list rewards)",
            ],
        )


def _load_rewards(reward: Any) -> RewardSet:
    """Return the rewards, of one run's environments the same: they share threads and clients."""
    return _loaded_once(reward, _versions(reward))


@read_once
def _loaded_once(reward: Any, versions: Any) -> RewardSet:
    return load_rewards(reward)


def _versions(reward: Any) -> Any:
    """Return the times of the files that are named: a file that was edited is loaded again."""
    if isinstance(reward, Mapping):
        return [_versions([*reward.keys(), *reward.values()])]
    if isinstance(reward, list | tuple):
        return [_versions(each) for each in reward]
    file, separator, _ = str(reward).rpartition(".py:")
    path = Path(f"{file}.py")
    return path.stat().st_mtime_ns if separator and path.is_file() else None


def _first_row(source: TaskSource) -> Mapping[str, Any]:
    split = "train" if source.num_tasks("train") != 0 else "test"
    return source.at(0, split).data
