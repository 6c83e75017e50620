"""An engine without a model, which replies from a script.

Use it in tests, to try an environment, or to measure everything but the model::

    engine = ScriptedEngine(["<tool_call>...</tool_call>", "The answer is 4."])
    trajectory = await play_episode(env, ChatAgent(), engine, byte_renderer())
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from areal_gym.chat import Renderer, Tokenizer
from areal_gym.engines.base import Generation, GrammarEngine, SamplingParams
from areal_gym.errors import EngineError, GrammarError
from areal_gym.types import FinishReason, ImageRef

if TYPE_CHECKING:
    import torch

CHATML = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A plain ChatML template with tools."""


class ByteTokenizer:
    """A tokenizer with one id per UTF-8 byte, and three control tokens."""

    SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    vocab_size = 256 + len(SPECIAL)
    eos_token_id = 257

    control_tokens = SPECIAL

    _ids = {token: 256 + index for index, token in enumerate(SPECIAL)}  # noqa: RUF012
    _split = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; lone surrogates become a question mark."""
        if "<|" not in text:
            return list(text.encode("utf-8", "replace"))
        ids: list[int] = []
        for part in self._split.split(text):
            special = self._ids.get(part)
            if special is None:
                ids += part.encode("utf-8", "replace")
            else:
                ids.append(special)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:  # control tokens do not fit a byte
            pieces = (bytes([i]) if i < 256 else self.SPECIAL[i - 256].encode() for i in ids)
            return b"".join(pieces).decode("utf-8", "replace")


def byte_renderer() -> Renderer:
    """Make a ChatML renderer over bytes, to play whole episodes without a checkpoint."""
    return Renderer(ByteTokenizer(), CHATML)


@dataclass(slots=True)
class Question:
    """One engine call, as a scripted policy sees it."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    turn: int
    """The number of earlier turns of this session."""
    tokenizer: Tokenizer
    images: Sequence[ImageRef] = ()

    @property
    def text(self) -> str:
        """The whole prompt, decoded."""
        return self.tokenizer.decode(self.prompt_ids)


Reply = str | Sequence[int]
"""A text, to which the end of turn is added, or exact ids."""


class ScriptedEngine:
    """Replies from a script: a list with one entry per turn of a session, or a function.

    It fulfils the whole `Engine` contract: limits cut replies, `publish` changes the version (a
    reply in flight then carries both), and sampling can be cancelled. All log-probabilities are -1.
    """

    takes_urls: ClassVar[bool] = False
    takes_images: bool = True
    """Whether prompts may have images, at which a script may look."""

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Question], Reply],
        *,
        tokenizer: Tokenizer | None = None,
        end_of_turn_id: int = ByteTokenizer.eos_token_id,
        max_context: int = 32768,
        latency_s: float | Callable[[Question], float] = 0.0,
    ) -> None:
        """Prepare the script.

        Args:
            replies: the script.
            tokenizer: encodes texts; by default into bytes.
            end_of_turn_id: ends a reply that is given as text.
            max_context: the most tokens of a sequence.
            latency_s: how many seconds a turn takes.
        """
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.end_of_turn_id = end_of_turn_id
        self.policy_version = 0
        self.max_context = max_context
        self.num_calls = 0
        """Calls of `generate`."""
        self._replies = replies if callable(replies) else [self._ids(reply) for reply in replies]
        self._latency_s = latency_s
        self._turns: dict[str | None, int] = {}

    async def start(self) -> None:
        """Do nothing: there is no model to load."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Return the script's next reply.

        Raises:
            EngineError: the script has ended, the prompt is empty, or the context is full.
            GrammarError: a grammar is given, and the engine is not a `GrammarEngine`.
        """
        room = min(params.max_new_tokens, self.max_context - len(prompt_ids))
        if not prompt_ids:
            raise EngineError("the prompt is empty")
        if room <= 0:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens fills the context of {self.max_context}"
            )
        if params.grammar is not None and not isinstance(self, GrammarEngine):
            raise GrammarError("a script is not constrained by a grammar")
        self.num_calls += 1
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        question = Question(prompt_ids, params, turn, self.tokenizer, tuple(images))
        before = self.policy_version
        latency_s = self._latency_s(question) if callable(self._latency_s) else self._latency_s
        await asyncio.sleep(latency_s)
        ids, finish_reason = _cut(self._reply(question), room, params.stop_token_ids)
        after = self.policy_version
        half = len(ids) // 2 if before != after else 0
        return Generation(
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(before,) * half + (after,) * (len(ids) - half),
            finish_reason=finish_reason,
        )

    def release(self, session: str) -> None:
        """Forget the session's position in the script."""
        self._turns.pop(session, None)

    async def publish(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Set the version of further samples; the weights are read and discarded."""
        for _ in weights:
            pass
        self.policy_version = version

    async def aclose(self) -> None:
        """Do nothing: no resources are held."""

    def _reply(self, question: Question) -> tuple[int, ...]:
        if callable(self._replies):
            return self._ids(self._replies(question))
        if question.turn < len(self._replies):
            return self._replies[question.turn]
        raise EngineError(
            f"the script has {len(self._replies)} replies, and a session asks for one more"
        )

    def _ids(self, reply: Reply) -> tuple[int, ...]:
        if isinstance(reply, str):
            return (*self.tokenizer.encode(reply), self.end_of_turn_id)
        return tuple(reply)


def _cut(
    ids: tuple[int, ...], room: int, stop_token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason]:
    """Cut `ids` after the first stop token, or to `room` tokens."""
    end = min((ids.index(stop) for stop in stop_token_ids if stop in ids), default=len(ids)) + 1
    if end <= min(room, len(ids)):
        return ids[:end], FinishReason.STOP
    return ids[:room], FinishReason.LENGTH
