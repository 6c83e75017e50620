"""`/v1/messages`: Anthropic's API, whose messages are lists of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.openai_chat import MaxTokens, Stops, Text, may_call
from areal_gym.gateway.output_constraints import called_tools, unsupported
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message, ToolCall


class Block(BaseModel):
    """A piece of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Text | list[Block] | None = None
    is_error: bool | None = None


class AnthropicTurn(BaseModel):
    """A message as Anthropic writes it."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class AnthropicTool(BaseModel):
    """A tool that the policy may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    type: str | None = None


class ToolChoice(BaseModel):
    """Whether the policy must or may call tools."""

    type: str
    name: str | None = None
    """The name of the tool that must be called."""
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(BaseModel):
    """The body of a request. Other fields are ignored."""

    messages: Annotated[list[AnthropicTurn], Field(min_length=1, max_length=100_000)]
    max_tokens: MaxTokens
    model: str = "policy"
    system: Text | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Stops | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    stream: bool | None = None

    def to_request(self) -> CompletionRequest:
        """Return the request as a completion request.

        Raises:
            ApiError: it has a field that is not supported.
        """
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for turn in self.messages:
            messages += _messages(turn)
        choice = self.tool_choice
        is_single = choice is not None and choice.disable_parallel_tool_use
        tools = [_schema(tool) for tool in self.tools or ()]
        kind: object = choice and choice.type
        if choice is not None and kind == "tool":
            kind = {"type": "tool", "name": choice.name}
        return CompletionRequest(
            messages=messages,
            tools=tools,
            has_calls=may_call(kind, False if is_single else None),
            constraint=called_tools(kind, tools),
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stops=[stop for stop in self.stop_sequences or () if stop],
        )


def _schema(tool: AnthropicTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported("tools", tool.type, "only tools of the client are")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _text(content: str | Sequence[Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text" or block.text is None:
            raise ApiError(400, f"a block of type {block.type!r}; text is read, nothing else")
    return "".join(block.text or "" for block in content)


def _messages(turn: AnthropicTurn) -> list[Message]:
    """Return tool outputs first, each as a message of its own, then the text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[Message] = []
    texts: list[Block] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in turn.content:
        if block.type == "tool_result" and turn.role == "user":
            messages.append(
                {
                    "role": "tool",
                    "content": _text(block.content),
                    "tool_call_id": block.tool_use_id,
                }
            )
        elif block.type == "tool_use" and turn.role == "assistant":
            function = {"name": block.name, "arguments": block.input or {}}
            calls.append(ToolCall(id=block.id, type="function", function=function))  # type: ignore[typeddict-item]
        elif block.type in ("thinking", "redacted_thinking"):
            thoughts.append(block.thinking or "")
        else:
            texts.append(block)
    if texts or calls or not messages:
        message: Message = {"role": turn.role, "content": _text(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        messages.append(message)
    return messages


class AnthropicMessage:
    """Replies of the messages API; a `ReplyFormat`."""

    stream_end = b""

    def __init__(self, id: str, request: MessagesRequest) -> None:
        self.id = id
        self.request = request
        self.is_stream = bool(request.stream)
        self._block = -1
        self._kind = ""
        """The kind of the open block of a stream."""

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        (completion,) = completions
        message = completion.message
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            blocks.append(_thinking(message["reasoning_content"]))
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"], "citations": None})
        blocks += [_use(call, call["function"]["arguments"]) for call in _calls(completion)]
        return self._body(blocks, completion)

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the message without content."""
        yield {"type": "message_start", "message": self._body([], None)}

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text, in a block of its kind."""
        for kind, text in deltas:
            if kind == "content":
                yield from self._open("text", {"type": "text", "text": "", "citations": None})
                yield self._delta({"type": "text_delta", "text": text})
            else:
                yield from self._open("thinking", _thinking(""))
                yield self._delta({"type": "thinking_delta", "thinking": text})

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yield tool calls and the stop reason."""
        (completion,) = completions
        for call in _calls(completion):
            yield from self._open(call["id"], _use(call, {}))
            text = json.dumps(call["function"]["arguments"])
            yield self._delta({"type": "input_json_delta", "partial_json": text})
        yield from self._close()
        delta = {"stop_reason": _stop_reason(completion), "stop_sequence": completion.stop}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(completion)}
        yield {"type": "message_stop"}

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        if kind == self._kind:
            return
        yield from self._close()
        self._kind = kind
        self._block += 1
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._block}
        self._kind = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _body(self, blocks: list[dict[str, Any]], completion: Completion | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": blocks,
            "stop_reason": None if completion is None else _stop_reason(completion),
            "stop_sequence": None if completion is None else completion.stop,
            "usage": _usage(completion),
        }


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _calls(completion: Completion) -> Sequence[ToolCall]:
    return completion.message.get("tool_calls", ())


def _use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _stop_reason(completion: Completion) -> str:
    if completion.stop is not None:
        return "stop_sequence"
    if completion.is_cut:
        return "max_tokens"
    return "tool_use" if _calls(completion) else "end_turn"


def _usage(completion: Completion | None) -> dict[str, Any]:
    if completion is None:
        return {"input_tokens": 0, "output_tokens": 0}
    return {
        "input_tokens": completion.num_prompt_tokens - completion.num_cached_tokens,
        "output_tokens": len(completion.generation.token_ids),
        "cache_read_input_tokens": completion.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }
