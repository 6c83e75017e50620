"""`/v1/responses`: OpenAI's newer API, whose replies are lists of items."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.openai_chat import (
    MaxTokens,
    Part,
    Shape,
    Text,
    arguments_of,
    may_call,
    text_of,
)
from areal_gym.gateway.output_constraints import called_tools, constraint_of, refuse, unsupported
from areal_gym.gateway.text_stream import Delta
from areal_gym.types import Message


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
    """A function that the policy may call; other kinds of tools run at OpenAI only."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(BaseModel):
    """How the text must look."""

    format: Shape | None = None


class ResponseRequest(BaseModel):
    """The body of a request. Other fields are ignored."""

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=100_000)]
    model: str = "policy"
    instructions: Text | None = None
    previous_response_id: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    stream: bool | None = None

    def to_request(self, before: Sequence[Message]) -> CompletionRequest:
        """What the policy is asked, after the messages `before`.

        Raises:
            ApiError: it has a field that is not supported.
        """
        refuse(
            "top_logprobs",
            self.top_logprobs,
            "only log-probabilities of the sampled tokens are known",
        )
        shape = None if self.text is None else self.text.format
        tools = [_schema(tool) for tool in self.tools or ()]
        call = called_tools(self.tool_choice, tools)
        system: list[Message] = []
        if self.instructions:
            system = [{"role": "system", "content": self.instructions}]
        return CompletionRequest(
            messages=[*system, *before, *self.messages()],
            tools=tools,
            has_calls=may_call(self.tool_choice, self.parallel_tool_calls),
            constraint=call or constraint_of("text.format", shape),
            max_new_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def messages(self) -> list[Message]:
        """Return the input as messages; items of one completion become one message.

        Raises:
            ApiError: it has an item of an unknown kind.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Message] = []
        is_answering = False
        """Whether the newest message is the policy's, and may still get calls."""
        for item in self.input:
            if item.type == "reasoning":
                continue
            if item.type == "message" and item.role is not None:
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": text_of(item.content)})
                is_answering = role == "assistant"
            elif item.type == "function_call":
                if not is_answering:
                    messages.append({"role": "assistant", "content": ""})
                    is_answering = True
                messages[-1].setdefault("tool_calls", []).append(
                    {
                        "id": item.call_id,
                        "type": "function",
                        "function": {"name": item.name, "arguments": arguments_of(item.arguments)},
                    }
                )
            elif item.type == "function_call_output":
                content = text_of(item.output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
                is_answering = False
            else:
                raise ApiError(400, f"an input item of type {item.type!r} cannot be read here")
        if not messages:
            raise ApiError(400, "the input has no message", param="input")
        return messages


def _schema(tool: Tool) -> dict[str, Any]:
    if tool.type != "function" or tool.name is None:
        raise unsupported("tools", tool.type, "functions with a name are the only tools here")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class Response:
    """Replies of the responses API; a `ReplyFormat`."""

    stream_end = b""

    def __init__(self, id: str, request: ResponseRequest) -> None:
        self.id = id
        self.request = request
        self.is_stream = bool(request.stream)
        self._created = time.time()
        self._number = 0
        self._output: list[dict[str, Any]] = []
        """The items of a stream so far."""

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""
        (completion,) = completions
        self._output = []
        thought, content = (
            completion.message.get("reasoning_content"),
            completion.message["content"],
        )
        if thought:
            self._output.append(self._item("reasoning_content", thought))
        if content or not (thought or completion.message.get("tool_calls")):
            self._output.append(self._item("content", content))
        self._output += self._calls(completion)
        return self._body(completion)

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Yield the empty response."""
        yield self._event("response.created", response=self._body(None))
        yield self._event("response.in_progress", response=self._body(None))

    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Yield new text, in an item of its kind."""
        for kind, text in deltas:
            if not self._output or self._output[-1]["type"] != _ITEM[kind]:
                yield from self._close()
                yield from self._open(kind)
            part = self._output[-1]["content"][0]
            part["text"] += text
            more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
            yield self._event(f"response.{part['type']}.delta", **self._here(), delta=text, **more)

    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Yield tool calls, and the whole response."""
        (completion,) = completions
        yield from self._close()
        for item in self._calls(completion):
            arguments = item["arguments"]
            self._output.append({**item, "arguments": "", "status": "in_progress"})
            where = {"item_id": item["id"], "output_index": len(self._output) - 1}
            yield self._event(
                "response.output_item.added",
                output_index=where["output_index"],
                item=self._output[-1],
            )
            kind = "response.function_call_arguments"
            yield self._event(f"{kind}.delta", **where, delta=arguments)
            yield self._event(f"{kind}.done", **where, name=item["name"], arguments=arguments)
            self._output[-1] = item
            yield self._event(
                "response.output_item.done", output_index=where["output_index"], item=item
            )
        if not self._output:
            yield from self._open("content")
            yield from self._close()
        kind = "response.incomplete" if completion.is_cut else "response.completed"
        yield self._event(kind, response=self._body(completion))

    # ---- items --------------------------------------------------------------------------------

    def _open(self, kind: str) -> Iterable[dict[str, Any]]:
        item = self._item(kind, "")
        self._output.append(item)
        place = len(self._output) - 1
        added = {**item, "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=place, item=added)
        part = item["content"][0]
        yield self._event("response.content_part.added", **self._here(), part={**part})

    def _close(self) -> Iterable[dict[str, Any]]:
        if not self._output or "content" not in self._output[-1]:
            return
        item = self._output[-1]
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(
            f"response.{part['type']}.done", **self._here(), text=part["text"], **more
        )
        yield self._event("response.content_part.done", **self._here(), part=part)
        yield self._event(
            "response.output_item.done", output_index=len(self._output) - 1, item=item
        )

    def _here(self) -> dict[str, Any]:
        place = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": place, "content_index": 0}

    def _item(self, kind: str, text: str) -> dict[str, Any]:
        name = f"{self.id.removeprefix('resp_')}_{len(self._output)}"
        if kind == "reasoning_content":
            content = [{"type": "reasoning_text", "text": text}]
            return {
                "id": f"rs_{name}",
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": content,
            }
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{name}",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }

    def _calls(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {
                "id": f"fc_{self.id.removeprefix('resp_')}_{call['id']}",
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
            }
            for call in completion.message.get("tool_calls", ())
        ]

    def _body(self, completion: Completion | None) -> dict[str, Any]:
        status, usage = "in_progress", None
        if completion is not None:
            status = "incomplete" if completion.is_cut else "completed"
            prompt, sampled = completion.num_prompt_tokens, len(completion.generation.token_ids)
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {
                    "cached_tokens": completion.num_cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            }
        request = self.request
        is_cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
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
            "tools": [
                tool.model_dump() | {"strict": bool(tool.strict)} for tool in request.tools or ()
            ],
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "usage": usage,
        }

    def _event(self, type: str, **content: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": type, "sequence_number": self._number - 1, **content}


_ITEM = {"content": "message", "reasoning_content": "reasoning"}
