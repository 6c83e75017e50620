"""The format of `/v1/messages`, Anthropic's API, whose messages are lists of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal_gym.gateway.completions import (
    Completion,
    CompletionRequest,
    MaxTokens,
    PolicyRequest,
    Stops,
    function_tool,
    tool_call,
)
from areal_gym.gateway.output_constraints import called_tools, may_call, unsupported
from areal_gym.gateway.pictures import Part, PictureReader, Text, text_of
from areal_gym.gateway.reply_formats import ReplyFormat
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message, ToolCall


class Block(Part):
    """A piece of a message."""

    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Text | list[Block] | None = None
    is_error: bool | None = None


class AnthropicTurn(BaseModel):
    """A message in Anthropic's format."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    def to_messages(self, pictures: PictureReader) -> list[Message]:
        """Return the tool outputs, each as a separate message, and then the text."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        messages: list[Message] = []
        texts: list[Block] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block in self.content:
            if block.type == "tool_result" and self.role == "user":
                content, call_id = pictures.content(block.content), block.tool_use_id
                messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
            elif block.type == "tool_use" and self.role == "assistant":
                calls.append(tool_call(block.id, block.name, block.input or {}))
            elif block.type in ("thinking", "redacted_thinking"):
                thoughts.append(block.thinking or "")
            else:
                texts.append(block)
        if texts or calls or not messages:
            is_policy = self.role == "assistant"
            content = text_of(texts) if is_policy else pictures.content(texts)
            message: Message = {"role": self.role, "content": content}
            if any(thoughts):
                message["reasoning_content"] = "".join(thoughts)
            if calls:
                message["tool_calls"] = calls
            messages.append(message)
        return messages


class AnthropicTool(BaseModel):
    """A tool that the policy may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    type: str | None = None

    def to_function(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format; raise ApiError for a tool of Anthropic's."""
        if self.type not in (None, "custom"):
            raise unsupported("tools", self.type, "only tools of the client are")
        return function_tool(self.name, self.description, self.input_schema)


class ToolChoice(BaseModel):
    """Whether the policy must or may call tools."""

    type: str
    name: str | None = None
    """The name of the tool that must be called."""
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(PolicyRequest):
    """The body of a request."""

    messages: Annotated[list[AnthropicTurn], Field(min_length=1, max_length=100_000)]
    max_tokens: MaxTokens
    system: Text | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Stops | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None

    def to_request(self, pictures: PictureReader) -> CompletionRequest:
        """Return the body as a completion request; raise ApiError for an unsupported field."""
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system)})
        for turn in self.messages:
            messages += turn.to_messages(pictures)
        choice = self.tool_choice
        is_single = choice is not None and choice.disable_parallel_tool_use
        tools = [tool.to_function() for tool in self.tools or ()]
        tool_choice: object = choice and choice.type
        if choice is not None and tool_choice == "tool":
            tool_choice = {"type": "tool", "name": choice.name}
        return CompletionRequest(
            messages=messages,
            tools=tools,
            has_calls=may_call(tool_choice, False if is_single else None),
            constraint=called_tools(tool_choice, tools),
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stops=[stop for stop in self.stop_sequences or () if stop],
        )


class AnthropicMessage(ReplyFormat):
    """Replies of the messages API."""

    def __init__(self, id: str, request: MessagesRequest) -> None:
        super().__init__(id, request)
        self._index = -1
        """The index of the newest block of a stream."""
        self._open_block = ""
        """The open block of a stream: "text", "thinking", or a tool call's id; empty if none is."""

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        (completion,) = completions
        message = completion.message
        blocks: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            blocks.append(_thinking(message["reasoning_content"]))
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"], "citations": None})
        blocks += [_tool_use(call, call["function"]["arguments"]) for call in completion.calls]
        return self._body(blocks, completion)

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the start of the message, without content."""
        yield {"type": "message_start", "message": self._body([], None)}

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text, in a block of text or of thinking."""
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
        for call in completion.calls:
            yield from self._open(call["id"], _tool_use(call, {}))
            text = json.dumps(call["function"]["arguments"])
            yield self._delta({"type": "input_json_delta", "partial_json": text})
        yield from self._close()
        delta = {"stop_reason": _stop_reason(completion), "stop_sequence": completion.stop}
        yield {"type": "message_delta", "delta": delta, "usage": _usage(completion)}
        yield {"type": "message_stop"}

    def _open(self, name: str, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Close the open block and start a new one, unless the open one has this name."""
        if name == self._open_block:
            return
        yield from self._close()
        self._open_block = name
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._open_block:
            yield {"type": "content_block_stop", "index": self._index}
        self._open_block = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

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


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    name = call["function"]["name"]
    return {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _stop_reason(completion: Completion) -> str:
    if completion.stop is not None:
        return "stop_sequence"
    if completion.is_cut:
        return "max_tokens"
    return "tool_use" if completion.calls else "end_turn"


def _usage(completion: Completion | None) -> dict[str, Any]:
    if completion is None:
        return {"input_tokens": 0, "output_tokens": 0}
    return {
        "input_tokens": completion.num_prompt_tokens - completion.num_cached_tokens,
        "output_tokens": len(completion.generation.token_ids),
        "cache_read_input_tokens": completion.num_cached_tokens,
        "cache_creation_input_tokens": 0,
    }
