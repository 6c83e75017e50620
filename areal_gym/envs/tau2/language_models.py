"""The user and the judge played by language models, behind OpenAI-compatible servers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal_gym.chat.chat_client import ChatClient
from areal_gym.envs.tau2.domain_state import Arguments, CallResult
from areal_gym.envs.tau2.simulation import Transcript
from areal_gym.envs.tau2.users.base import Scene, UserTurn, opening_of
from areal_gym.errors import EnvError
from areal_gym.rewards.verdicts import last_object


class LLMUser:
    """A user who reads the benchmark's guidelines and the scenario, as in the benchmark.

    It sees the conversation with the roles swapped, its own tool calls and their results, and
    nothing of the assistant's. Its first words are made from the scenario by rule, so that `reset`
    does not wait; everything after them is the model's.
    """

    def __init__(self, scene: Scene, client: ChatClient) -> None:
        guidelines = scene.domain.guidelines.replace("<PERSONA_GUIDELINES>", "")
        prompt = f"{guidelines}\n\n<scenario>\n{describe_scenario(scene)}\n</scenario>"
        self._client = client
        self._opening = opening_of(scene.case)
        self._tools = [info.schema for info in scene.domain.tools["user"].values()]
        self._call_ids: list[str] = []
        self._history: list[Mapping[str, Any]] = [{"role": "system", "content": prompt}]

    def open(self, greeting: str) -> str:
        """Return the reason for the call, in the first person."""
        self._history += [
            {"role": "user", "content": greeting},
            {"role": "assistant", "content": self._opening},
        ]
        return self._opening

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Ask the model for its next text or calls; raise EnvError if there is neither."""
        if isinstance(event, str):
            self._history.append({"role": "user", "content": event})
        else:
            self._history += [
                {"role": "tool", "tool_call_id": call_id, "content": result.text}
                for call_id, result in zip(self._call_ids, event, strict=True)
            ]
        answer = await self._client.ask(self._history, tools=self._tools)
        calls = answer.get("tool_calls") or []
        text = str(answer.get("content") or "")
        self._history.append(
            {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}
        )
        if not calls and not text.strip():
            raise EnvError("the user's language model said nothing")
        self._call_ids = [str(call.get("id", "")) for call in calls]
        return UserTurn(text, [_parse_call(call) for call in calls])


_FACTS = ("persona", "domain", "reason_for_call", "known_info", "unknown_info", "task_instructions")


def describe_scenario(scene: Scene) -> str:
    """Return the description of the role that the model plays."""
    texts = {**scene.case.instructions, "persona": scene.case.persona}
    return "\n".join(
        f"{name.replace('_', ' ').capitalize()}:\n\t" + str(texts[name]).replace("\n", "\n\t")
        for name in _FACTS
        if texts.get(name)
    )


def _parse_call(call: Mapping[str, Any]) -> tuple[str, Arguments]:
    try:
        name, raw = call["function"]["name"], call["function"].get("arguments") or "{}"
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except (KeyError, TypeError, ValueError):
        name, arguments = None, None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise EnvError(f"the user's language model made no well-formed call: {call!r:.200}")
    return name, arguments


_PROMPT = """\
Below is a conversation between a customer-service agent and a user, then a numbered list of
statements about it. Decide for each statement whether the conversation shows it to be true.
Answer with one JSON object and nothing else: {"met": [true, false, ...]}, one value per statement,
in order."""


_NUM_ASKS = 3
"""How often a judge whose answer has no verdicts is asked."""


class LLMJudge:
    """A judge at temperature 0."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool]:
        """Return one verdict per assertion; raise EnvError if the model gives no such list."""
        lines = [f"{message['role']}: {message['content']}" for message in transcript]
        numbered = [f"{i}. {text}" for i, text in enumerate(assertions, start=1)]
        question = "\n".join(["Conversation:", *lines, "", "Statements:", *numbered])
        messages = [{"role": "system", "content": _PROMPT}, {"role": "user", "content": question}]
        for _ in range(_NUM_ASKS):
            text = (await self._client.complete(messages)).text
            met = _parse_verdicts(text, len(assertions))
            if met is not None:
                return met
        raise EnvError(f"the judge gave no list of {len(assertions)} truth values: {text[:200]!r}")


def _parse_verdicts(text: str, num_assertions: int) -> list[bool] | None:
    """Return the verdicts in the judge's last JSON object; None if they are not in order."""
    met = (last_object(text) or {}).get("met")
    if not isinstance(met, list) or [type(value) for value in met] != [bool] * num_assertions:
        return None
    return met
