"""`/v1/chat/completions`: requests, and replies whole or as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal_gym.chat import Tokenizer
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.output_constraints import called_tools, constraint_of, refuse
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message, ToolCall
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper

Text = Annotated[str, Field(max_length=8_000_000)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
MaxTokens = Annotated[int, Field(ge=1, le=2**31)]
Shape = Annotated[dict[str, Any], Field(max_length=64)]
Stops = Annotated[list[str], Field(max_length=16)]


class Part(BaseModel):
    """A piece of a message."""

    type: str
    text: str | None = None


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
    """A message as OpenAI writes it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


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
    """Further events of a stream."""

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The body of a request. Other fields are ignored."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=100_000)]
    model: str = "policy"
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    seed: Seed | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Shape | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def to_request(self) -> CompletionRequest:
        """Return the request as a completion request.

        Raises:
            ApiError: it has a field that is not supported.
        """
        refuse(
            "top_logprobs",
            self.top_logprobs,
            "only log-probabilities of the sampled tokens are known",
        )
        refuse_penalties(self.frequency_penalty, self.presence_penalty, self.logit_bias)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        call = called_tools(self.tool_choice, tools)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return CompletionRequest(
            messages=[_message(message) for message in self.messages],
            tools=tools,
            has_calls=may_call(self.tool_choice, self.parallel_tool_calls),
            constraint=call or constraint_of("response_format", self.response_format),
            n=self.n or 1,
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            seed=self.seed,
            stops=[stop for stop in stops if stop],
        )


def refuse_penalties(frequency: float | None, presence: float | None, bias: object) -> None:
    """Raise ApiError if a client wants to sample from another distribution than the policy."""
    why = "tokens are sampled from the policy as it is"
    refuse("frequency_penalty", frequency, why)
    refuse("presence_penalty", presence, why)
    refuse("logit_bias", bias, why)


def may_call(choice: object, parallel: bool | None) -> bool:
    """Return whether tool calls in the text are parsed.

    Raises:
        ApiError: at most one call is wanted, which is up to the policy.
    """
    if parallel is False and choice in (None, "auto", "none"):
        why = "the policy decides how many calls it makes"
        raise ApiError(400, f"parallel_tool_calls = false is not supported: {why}")
    return choice != "none"


def text_of(content: str | Sequence[Part] | None) -> str:
    """Return the text of a message's content.

    Raises:
        ApiError: it has a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise ApiError(400, f"a content part of type {part.type!r}; text is read, nothing else")
    return "".join(part.text or "" for part in content)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call; text that is not a JSON object is kept under one name."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    is_usable = isinstance(arguments, dict) and not is_nested_deeper(arguments, MAX_JSON_DEPTH)
    return arguments if is_usable else {"arguments": text}


def _message(item: ChatMessage) -> Message:
    role = "system" if item.role == "developer" else item.role
    message: Message = {"role": role, "content": text_of(item.content)}
    if item.reasoning_content is not None and role == "assistant":
        message["reasoning_content"] = item.reasoning_content
    if item.tool_calls and role == "assistant":
        message["tool_calls"] = [
            ToolCall(
                id=call.id,
                type="function",
                function={
                    "name": call.function.name,
                    "arguments": arguments_of(call.function.arguments),
                },
            )
            for call in item.tool_calls
        ]
    if role == "tool":
        message["tool_call_id"] = item.tool_call_id or ""
        if item.name is not None:
            message["name"] = item.name
    return message


# ---- replies -----------------------------------------------------------------------------------


class Chat:
    """Replies of chat completions; a `ReplyFormat`.

    Args:
        id: the reply's id.
        request: the request.
        tokenizer: spells tokens for their log-probabilities.
    """

    stream_end = b"data: [DONE]\n\n"

    def __init__(self, id: str, request: ChatRequest, tokenizer: Tokenizer) -> None:
        self.id = id
        self.request = request
        self.is_stream = bool(request.stream)
        self._tokenizer = tokenizer
        self._created = int(time.time())

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": _reply_message(completion.message),
                    "finish_reason": _finish(completion),
                    "logprobs": self._logprobs(completion),
                }
                for index, completion in enumerate(completions)
            ],
            "usage": usage_of(completions),
        }

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the role of each choice."""
        for index in range(self.request.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text of a choice."""
        for kind, text in deltas:
            yield self._chunk(index, {kind: text})

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yield tool calls, which are known at the end, and finish reasons."""
        for index, completion in enumerate(completions):
            for place, call in enumerate(completion.message.get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{"index": place, **_call(call)}]})
            yield self._chunk(index, {}, _finish(completion), self._logprobs(completion))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield {
                **self._head("chat.completion.chunk"),
                "choices": [],
                "usage": usage_of(completions),
            }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.request.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": logprobs,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": token_logprobs(completion, self._tokenizer), "refusal": None}


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the numbers of tokens."""
    prompt = completions[0].num_prompt_tokens
    sampled = sum(len(completion.generation.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": completions[0].num_cached_tokens},
    }


def token_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the text and log-probability of each sampled token."""
    generation = completion.generation
    spelled = [tokenizer.decode([token_id]) for token_id in generation.token_ids]
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(spelled, generation.logprobs, strict=True)
    ]


def _reply_message(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls")
    reply: dict[str, Any] = {
        "role": "assistant",
        "content": message["content"] if message["content"] or not calls else None,
        "refusal": None,
    }
    if "reasoning_content" in message:
        reply["reasoning_content"] = message["reasoning_content"]
    if calls:
        reply["tool_calls"] = [_call(call) for call in calls]
    return reply


def _call(call: ToolCall) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": json.dumps(function["arguments"])},
    }


def _finish(completion: Completion) -> str:
    if completion.is_cut:
        return "length"
    return "tool_calls" if completion.message.get("tool_calls") else "stop"
