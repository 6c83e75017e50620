"""`/v1/completions`: texts that the policy continues."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from areal_gym.chat import Tokenizer
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.openai_chat import (
    MaxTokens,
    Seed,
    Stops,
    StreamOptions,
    Text,
    refuse_penalties,
    token_logprobs,
    usage_of,
)
from areal_gym.gateway.output_constraints import refuse
from areal_gym.gateway.text_stream import Delta


class TextCompletionRequest(BaseModel):
    """The body of a request. Other fields are ignored."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    model: str = "policy"
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def to_request(self) -> CompletionRequest:
        """Return the request as a completion request.

        Raises:
            ApiError: it has a field that is not supported.
        """
        refuse_penalties(self.frequency_penalty, self.presence_penalty, self.logit_bias)
        refuse("echo", self.echo, "the reply has sampled text only")
        refuse("suffix", self.suffix, "the policy continues a text")
        refuse("best_of", (self.best_of or 1) > (self.n or 1), "ask for n, and choose")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return CompletionRequest(
            prompt=self.prompt if isinstance(self.prompt, str) else self.prompt[0],
            n=self.n or 1,
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stops=[stop for stop in stops if stop],
        )


class TextCompletion:
    """Replies of text completions; a `ReplyFormat`."""

    stream_end = b"data: [DONE]\n\n"

    def __init__(self, id: str, request: TextCompletionRequest, tokenizer: Tokenizer) -> None:
        self.id = id
        self.request = request
        self.is_stream = bool(request.stream)
        self._tokenizer = tokenizer
        self._created = int(time.time())

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        choices = [
            self._choice(index, completion.message["content"], completion)
            for index, completion in enumerate(completions)
        ]
        return {**self._head(), "choices": choices, "usage": usage_of(completions)}

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Return no events."""
        return ()

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text of a choice."""
        for _, text in deltas:
            yield {**self._head(), "choices": [self._choice(index, text)]}

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yield finish reasons."""
        for index, completion in enumerate(completions):
            yield {**self._head(), "choices": [self._choice(index, "", completion)]}
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield {**self._head(), "choices": [], "usage": usage_of(completions)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self.request.model,
        }

    def _choice(
        self, index: int, text: str, completion: Completion | None = None
    ) -> dict[str, Any]:
        finish_reason = None if completion is None else "length" if completion.is_cut else "stop"
        logprobs = None
        if completion is not None and self.request.logprobs is not None:
            tokens = token_logprobs(completion, self._tokenizer)
            logprobs = {
                "tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
