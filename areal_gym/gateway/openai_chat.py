"""The formats of `/v1/chat/completions` and `/v1/completions`: requests, replies and streams."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal_gym.chat import Tokenizer
from areal_gym.gateway.completions import (
    Completion,
    CompletionRequest,
    MaxTokens,
    PolicyRequest,
    Shape,
    Stops,
    tool_call,
)
from areal_gym.gateway.output_constraints import called_tools, constraint_of, may_call, refuse
from areal_gym.gateway.pictures import Part, PictureReader, Text, text_of
from areal_gym.gateway.reply_formats import ReplyFormat
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message, ToolCall


class Called(BaseModel):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class Call(BaseModel):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Called


class ChatMessage(BaseModel):
    """A message in OpenAI's format."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def to_message(self, pictures: PictureReader) -> Message:
        """Return the message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        is_policy = role == "assistant"
        content = text_of(self.content) if is_policy else pictures.content(self.content)
        message: Message = {"role": role, "content": content}
        if self.reasoning_content is not None and is_policy:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls and is_policy:
            message["tool_calls"] = [
                tool_call(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls
            ]
        if role == "tool":
            message["tool_call_id"] = self.tool_call_id or ""
            if self.name is not None:
                message["name"] = self.name
        return message


class Function(BaseModel):
    """A function that the policy may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    """Options for further events of a stream."""

    include_usage: bool | None = None


class CompletionFields(PolicyRequest):
    """The fields that both routes share."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: MaxTokens | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Stops | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `CompletionRequest` about sampling.

        Raises ApiError for an option that would change the policy's distribution.
        """
        for field in ("frequency_penalty", "presence_penalty", "logit_bias"):
            refuse(field, getattr(self, field), "tokens are sampled from the policy as it is")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return {
            "n": self.n or 1,
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stops": [stop for stop in stops if stop],
        }


class ChatRequest(CompletionFields):
    """The body of a request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=100_000)]
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: MaxTokens | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Shape | None = None

    def to_request(self, pictures: PictureReader) -> CompletionRequest:
        """Return the body as a completion request; raise ApiError for an unsupported field."""
        refuse("top_logprobs", self.top_logprobs, "only sampled tokens have log-probabilities here")
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        call = called_tools(self.tool_choice, tools)
        sampling = self.sampling()
        if self.max_completion_tokens is not None:
            sampling["max_new_tokens"] = self.max_completion_tokens
        return CompletionRequest(
            messages=[message.to_message(pictures) for message in self.messages],
            tools=tools,
            has_calls=may_call(self.tool_choice, self.parallel_tool_calls),
            constraint=call or constraint_of("response_format", self.response_format),
            top_k=None if self.top_k is None else max(self.top_k, 0),
            **sampling,
        )


class TextCompletionRequest(CompletionFields):
    """The body of a request to continue a text."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def to_request(self) -> CompletionRequest:
        """Return the body as a completion request; raise ApiError for an unsupported field."""
        refuse("echo", self.echo, "the reply has sampled text only")
        refuse("suffix", self.suffix, "the policy continues a text")
        refuse("best_of", (self.best_of or 1) > (self.n or 1), "ask for n, and choose")
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt[0]
        return CompletionRequest(prompt=prompt, **self.sampling())


# ---- replies -----------------------------------------------------------------------------------


class _CompletionReplies(ReplyFormat):
    """The common parts of both routes' replies: choices, their events, and the usage."""

    stream_end = b"data: [DONE]\n\n"
    object_type: str
    chunk_type: str
    request: ChatRequest | TextCompletionRequest

    def __init__(self, id: str, request: CompletionFields, tokenizer: Tokenizer) -> None:
        super().__init__(id, request)
        self._tokenizer = tokenizer

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, choice) for index, choice in enumerate(completions)]
        return self._object(self.object_type, choices, usage=_usage(completions))

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        for index, completion in enumerate(completions):
            yield from self._last_chunks(index, completion)
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._object(self.chunk_type, [], usage=_usage(completions))

    @abstractmethod
    def _choice(self, index: int, completion: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def _last_chunks(self, index: int, completion: Completion) -> Iterable[dict[str, Any]]: ...

    def _chunk(
        self, index: int, content: dict[str, Any], completion: Completion | None = None
    ) -> dict[str, Any]:
        """Return the event for new content of a choice; its last event has the completion."""
        choice = {"index": index, **content, **self._end(completion)}
        return self._object(self.chunk_type, [choice])

    def _object(self, type: str, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": type, "created": int(self.created)}
        return {**head, "model": self.request.model, "choices": choices, **fields}

    def _end(self, completion: Completion | None) -> dict[str, Any]:
        if completion is None:
            return {"finish_reason": None, "logprobs": None}
        reason = "tool_calls" if completion.calls else "stop"
        logprobs, option = None, self.request.logprobs
        if option is not None and option is not False:  # 0 asks for no alternatives, not for none
            logprobs = self._logprobs(_token_logprobs(completion, self._tokenizer))
        return {"finish_reason": "length" if completion.is_cut else reason, "logprobs": logprobs}

    @abstractmethod
    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]: ...


class Chat(_CompletionReplies):
    """Replies of chat completions."""

    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the role of each choice."""
        for index in range(self.request.n or 1):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text of a choice."""
        for kind, text in deltas:
            yield self._chunk(index, {"delta": {kind: text}})

    def _last_chunks(self, index: int, completion: Completion) -> Iterable[dict[str, Any]]:
        for number, call in enumerate(completion.calls):
            yield self._chunk(index, {"delta": {"tool_calls": [{"index": number, **_call(call)}]}})
        yield self._chunk(index, {"delta": {}}, completion)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message, calls = completion.message, completion.calls
        reply: dict[str, Any] = {
            "role": "assistant",
            "content": message["content"] if message["content"] or not calls else None,
            "refusal": None,
        }
        if "reasoning_content" in message:
            reply["reasoning_content"] = message["reasoning_content"]
        if calls:
            reply["tool_calls"] = [_call(call) for call in calls]
        return {"index": index, "message": reply, **self._end(completion)}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": tokens, "refusal": None}


class TextCompletion(_CompletionReplies):
    """Replies of text completions."""

    object_type = chunk_type = "text_completion"

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text of a choice."""
        for _, text in deltas:
            yield self._chunk(index, {"text": text})

    def _last_chunks(self, index: int, completion: Completion) -> Iterable[dict[str, Any]]:
        yield self._chunk(index, {"text": ""}, completion)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {"index": index, "text": completion.message["content"], **self._end(completion)}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": None,
            "text_offset": None,
        }


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    num_prompt = completions[0].num_prompt_tokens
    num_sampled = sum(len(completion.generation.token_ids) for completion in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": completions[0].num_cached_tokens},
    }


def _token_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    generation = completion.generation
    tokens = [tokenizer.decode([token_id]) for token_id in generation.token_ids]
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, generation.logprobs, strict=True)
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call["id"], "type": "function", "function": function}
