"""Judges of assertions in natural language: an LLM behind a URL, or a stand-in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from areal_gym.envs.chat_client import ChatClient
from areal_gym.errors import EnvError, GymError

_PROMPT = """\
Below is a conversation between a customer-service agent and a user, then a numbered list of
statements about it. Decide for each statement whether the conversation shows it to be true.
Answer with one JSON object and nothing else: {"met": [true, false, ...]}, one value per statement,
in order."""


Transcript = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`."""


class Judge(Protocol):
    """Decides which assertions a conversation meets."""

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool] | None:
        """Return one verdict per assertion, or None if the judge cannot tell.

        Raises:
            EnvError: it should have been able to.
        """
        ...


class NoJudge:
    """The offline stand-in: it cannot tell, so the verdict falls back and is flagged."""

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool] | None:
        """Return None."""
        return None


class ForeignJudge:
    """A user-supplied judge: its exceptions are failures of the environment, not the policy's."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool] | None:
        """Return the judge's verdicts.

        Raises:
            EnvError: it raised.
        """
        try:
            return await self._judge.judge(transcript, assertions)
        except GymError:
            raise
        except Exception as error:
            raise EnvError(f"{type(self._judge).__name__}.judge failed: {error!r}") from error


class LLMJudge:
    """Asks an OpenAI-compatible server, at temperature 0."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool] | None:
        """Return one verdict per assertion.

        Raises:
            EnvError: the server fails, or does not answer in the asked-for form.
        """
        lines = [f"{message['role']}: {message['content']}" for message in transcript]
        numbered = [f"{i}. {text}" for i, text in enumerate(assertions, start=1)]
        question = "\n".join(["Conversation:", *lines, "", "Statements:", *numbered])
        answer = await self._client.ask(
            [{"role": "system", "content": _PROMPT}, {"role": "user", "content": question}]
        )
        return _parse(str(answer.get("content") or ""), len(assertions))


def _parse(text: str, num_assertions: int) -> list[bool]:
    answer = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        met = json.loads(answer[0])["met"] if answer else None
    except (ValueError, KeyError, TypeError):
        met = None
    if not isinstance(met, list) or [type(value) for value in met] != [bool] * num_assertions:
        raise EnvError(f"the judge gave no list of {num_assertions} truth values: {text[:200]!r}")
    return met
