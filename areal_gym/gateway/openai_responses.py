"""The format of `/v1/responses`, OpenAI's newer API, whose replies are lists of items."""

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
    Shape,
    function_tool,
    tool_call,
)
from areal_gym.gateway.http_messages import ApiError
from areal_gym.gateway.output_constraints import (
    called_tools,
    constraint_of,
    may_call,
    refuse,
    unsupported,
)
from areal_gym.gateway.pictures import Part, PictureReader, Text, text_of
from areal_gym.gateway.reply_formats import ReplyFormat
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message
from areal_gym.types import text_of as plain_text


class Item(BaseModel):
    """A message, a tool call, the output of a call, or an item that is ignored."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Text | list[Part] | None = None


class Tool(BaseModel):
    """A function that the policy may call; OpenAI's own tools are not supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_function(self) -> dict[str, Any]:
        """Return the tool in the format of chat completions; raise ApiError for other types."""
        if self.type != "function" or self.name is None:
            raise unsupported("tools", self.type, "functions with a name are the only tools here")
        return function_tool(self.name, self.description, self.parameters)


class TextOptions(BaseModel):
    """The format of the text."""

    format: Shape | None = None


class ResponseRequest(PolicyRequest):
    """The body of a request."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=100_000)]
    instructions: Text | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None

    def to_request(self, before: Sequence[Message], pictures: PictureReader) -> CompletionRequest:
        """Return the body as a completion request, with the messages `before` in front.

        Raises ApiError for an unsupported field.
        """
        refuse("top_logprobs", self.top_logprobs, "only sampled tokens have log-probabilities here")
        tools = [tool.to_function() for tool in self.tools or ()]
        call = called_tools(self.tool_choice, tools)
        shape = None if self.text is None else self.text.format
        system: list[Message] = []
        if self.instructions:
            system = [{"role": "system", "content": self.instructions}]
        return CompletionRequest(
            messages=[*system, *before, *self.messages(pictures)],
            tools=tools,
            has_calls=may_call(self.tool_choice, self.parallel_tool_calls),
            constraint=call or constraint_of("text.format", shape),
            max_new_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def messages(self, pictures: PictureReader) -> list[Message]:
        """Return the input as messages; the items of one completion become one message.

        Raises ApiError for an item of an unknown type.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        is_answering = False
        """Whether the newest message is the policy's, and may still get tool calls."""
        for item in self.input:
            if item.type == "reasoning":
                continue
            if item.type == "message" and item.role is not None:
                role = "system" if item.role == "developer" else item.role
                is_answering = role == "assistant"
                content_of = text_of if is_answering else pictures.content
                messages.append({"role": role, "content": content_of(item.content)})
            elif item.type == "function_call":
                if not is_answering:
                    messages.append({"role": "assistant", "content": ""})
                    is_answering = True
                call = tool_call(item.call_id, item.name, item.arguments)
                messages[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                content = pictures.content(item.output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
                is_answering = False
            else:
                raise ApiError(400, f"an input item of type {item.type!r} cannot be read here")
        if not messages:
            raise ApiError(400, "the input has no message", param="input")
        return messages


class Response(ReplyFormat):
    """Replies of the responses API."""

    request: ResponseRequest

    def __init__(self, id: str, request: ResponseRequest) -> None:
        super().__init__(id, request)
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        """The items of a stream so far."""

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        (completion,) = completions
        thought = completion.message.get("reasoning_content")
        content = plain_text(completion.message["content"])
        self._output = []
        if thought:
            self._output.append(self._text_item("reasoning_content", thought))
        if content or not (thought or completion.calls):
            self._output.append(self._text_item("content", content))
        self._output += self._call_items(completion)
        return self._body(completion)

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the response without output."""
        yield self._event("response.created", response=self._body(None))
        yield self._event("response.in_progress", response=self._body(None))

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text, in a message or a reasoning item."""
        for kind, text in deltas:
            if not self._output or self._output[-1]["type"] != _ITEM_TYPES[kind]:
                yield from self._close()
                yield from self._open(kind)
            self._output[-1]["content"][0]["text"] += text
            yield self._text_event("delta", delta=text)

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yield the tool calls, and then the complete response."""
        (completion,) = completions
        yield from self._close()
        for item in self._call_items(completion):
            arguments = item["arguments"]
            place = {"item_id": item["id"], "output_index": len(self._output)}
            self._output.append({**item, "arguments": "", "status": "in_progress"})
            yield self._item_event("added", self._output[-1])
            event = "response.function_call_arguments"
            yield self._event(f"{event}.delta", **place, delta=arguments)
            yield self._event(f"{event}.done", **place, name=item["name"], arguments=arguments)
            self._output[-1] = item
            yield self._item_event("done", item)
        if not self._output:
            yield from self._open("content")
            yield from self._close()
        event = "response.incomplete" if completion.is_cut else "response.completed"
        yield self._event(event, response=self._body(completion))

    # ---- items --------------------------------------------------------------------------------

    def _open(self, kind: str) -> Iterable[dict[str, Any]]:
        item = self._text_item(kind, "")
        self._output.append(item)
        yield self._item_event("added", {**item, "content": [], "status": "in_progress"})
        yield self._part_event("response.content_part.added", part={**item["content"][0]})

    def _close(self) -> Iterable[dict[str, Any]]:
        if self._output and "content" in self._output[-1]:
            item = self._output[-1]
            part = item["content"][0]
            yield self._text_event("done", text=part["text"])
            yield self._part_event("response.content_part.done", part=part)
            yield self._item_event("done", item)

    def _text_item(self, kind: str, text: str) -> dict[str, Any]:
        name = f"{self.id.removeprefix('resp_')}_{len(self._output)}"
        item: dict[str, Any] = {"type": _ITEM_TYPES[kind], "status": "completed"}
        if kind == "reasoning_content":
            part = {"type": "reasoning_text", "text": text}
            return {"id": f"rs_{name}", **item, "summary": [], "content": [part]}
        message = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"id": f"msg_{name}", **item, "role": "assistant", "content": [message]}

    def _call_items(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {
                "id": f"fc_{self.id.removeprefix('resp_')}_{call['id']}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            }
            for call in completion.calls
        ]

    # ---- events -------------------------------------------------------------------------------

    def _body(self, completion: Completion | None) -> dict[str, Any]:
        status, usage = "in_progress", None
        if completion is not None:
            status = "incomplete" if completion.is_cut else "completed"
            num_prompt = completion.num_prompt_tokens
            num_sampled = len(completion.generation.token_ids)
            num_cached = completion.num_cached_tokens
            usage = {
                "input_tokens": num_prompt,
                "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": num_prompt + num_sampled,
            }
        request = self.request
        is_cut = status == "incomplete"
        tools = [tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or ()]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.instructions,
            "metadata": {},
            "model": request.model,
            "output": list(self._output),
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "temperature": request.temperature,
            "tool_choice": request.tool_choice or "auto",
            "tools": tools,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "usage": usage,
        }

    def _text_event(self, change: str, **content: Any) -> dict[str, Any]:
        part = self._output[-1]["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        return self._part_event(f"response.{part}.{change}", **content, **logprobs)

    def _part_event(self, type: str, **content: Any) -> dict[str, Any]:
        item_id, index = self._output[-1]["id"], len(self._output) - 1
        return self._event(type, item_id=item_id, output_index=index, content_index=0, **content)

    def _item_event(self, change: str, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self._output) - 1
        return self._event(f"response.output_item.{change}", output_index=index, item=item)

    def _event(self, type: str, **content: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": type, "sequence_number": self._num_events - 1, **content}


_ITEM_TYPES = {"content": "message", "reasoning_content": "reasoning"}
