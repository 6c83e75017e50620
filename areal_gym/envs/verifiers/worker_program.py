"""The program that plays environments of verifiers: it runs in another Python than areal-gym.

It imports verifiers (0.3 or 0.4) and nothing of areal-gym. Requests and replies are lines of JSON:

    {"id": 1, "call": "open", "env": ID, "arguments": {...}}  -> num_tasks by split, version
    {"id": 2, "call": "prompt", "split": "train", "index": 3} -> messages
    {"id": 3, "call": "play", "split", "index", "url", "key", "harness"} -> reward, parts, ...
    {"id": 4, "call": "cancel", "of": 3}

A reply has `result`, or `error` and its `kind`: policy, sandbox, environment, agent or usage.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import types
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

_MAX_TURNS = 64
_MAX_TASKS = 100_000
_HARNESS = "areal_gym_in_process"
_KINDS = {
    "ProviderError": "policy",
    "ModelError": "policy",
    "InvalidModelResponseError": "policy",
    "EmptyModelResponseError": "policy",
    "OverlongPromptError": "policy",
    "InterceptionError": "sandbox",
    "TunnelError": "sandbox",
    "SandboxError": "sandbox",
    "InfraError": "sandbox",
    "HarnessError": "agent",
}
"""Errors of verifiers -> whose failure they are; all others are the environment's."""


class PlayError(Exception):
    """A rollout failed; `kind` says whose failure it is."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Legacy:
    """An environment of verifiers 0.3: `load_environment` of a module."""

    def __init__(self, id: str, arguments: dict[str, Any]) -> None:
        import verifiers as vf

        self._vf = vf
        self._env = vf.load_environment(id, **arguments)
        self._rows = {
            "train": _rows_of(self._env.get_dataset),
            "test": _rows_of(self._env.get_eval_dataset),
        }

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return len(self._rows[split])

    def prompt(self, split: str, index: int) -> Any:
        """Return the messages that open a task."""
        return self._rows[split][index]["prompt"]

    async def play(
        self, split: str, index: int, url: str, variable: str, harness: str
    ) -> dict[str, Any]:
        """Play a task with the policy at `url`; raises PlayError."""
        from verifiers.types import ClientConfig

        client = ClientConfig(
            client_type="openai_chat_completions",
            api_key_var=variable,
            api_base_url=url,
            max_retries=0,
        )
        row = self._rows[split][index]
        out = await self._env.run_rollout(row, client, "policy", {})
        error = out.get("error")
        if error:
            name = error.get("error", "") if isinstance(error, dict) else type(error).__name__
            raise PlayError(str(error), _KINDS.get(str(name), "environment"))
        return {
            "reward": float(out["reward"]),
            "parts": {},
            "metrics": _numbers(out.get("metrics") or {}),
            "stop": str(out.get("stop_condition") or ""),
        }


class Current:
    """A taskset of verifiers 0.4, played by one agent."""

    def __init__(self, id: str, arguments: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders

        self._vf = vf
        kind = loaders.environment_class(id)
        if kind is not vf.SingleAgentEnv:
            raise PlayError(
                f"{id} is played by several agents ({kind.__name__}); only tasksets with one are "
                "supported",
                "usage",
            )
        settings = {"id": id, **arguments}
        resolved = vf.EnvConfig.model_validate({"taskset": settings}).taskset
        taskset = loaders.load_taskset(resolved)
        self._tasks = list(itertools.islice(iter(taskset), _MAX_TASKS))
        _register_harness()

    def num_tasks(self, split: str) -> int:
        """Return how many tasks a split has."""
        return len(self._share(split))

    def prompt(self, split: str, index: int) -> Any:
        """Return the messages that open a task."""
        data = self._share(split)[index].data
        prompt = data.prompt
        if prompt is None or isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt or ""}]
        else:
            messages = [{"role": m.role, "content": _text(m.content)} for m in prompt]
        if data.system_prompt:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        return messages

    async def play(
        self, split: str, index: int, url: str, variable: str, harness: str
    ) -> dict[str, Any]:
        """Play a task with the policy at `url`; raises PlayError."""
        vf = self._vf
        agent = vf.make_agent(
            vf.AgentConfig(
                model="policy",
                harness={"id": _HARNESS if harness == "in-process" else harness},
                runtime={"type": "subprocess"},
                client=vf.EvalClientConfig(base_url=url, api_key_var=variable),
            )
        )
        async with agent:
            trace = await agent.run(self._share(split)[index])
        if trace.last_error is not None:
            name = getattr(trace.last_error, "type", "")
            raise PlayError(str(trace.last_error), _KINDS.get(str(name), "environment"))
        return {
            "reward": float(trace.reward),
            "parts": _numbers(trace.rewards),
            "metrics": _numbers(trace.metrics),
            "stop": str(trace.stop_condition or ""),
        }

    def _share(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split: every tenth is held out, since tasksets have none."""
        if split == "test":
            return self._tasks[::10]
        return [task for place, task in enumerate(self._tasks) if place % 10]


def _rows_of(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except ValueError:  # it has no such data set
        return []


def _numbers(given: Any) -> dict[str, float]:
    """Return the numbers of a table; the rewards of 0.4 are records with a `value`."""
    values = {name: getattr(value, "value", value) for name, value in dict(given).items()}
    return {n: float(value) for n, value in values.items() if isinstance(value, int | float)}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(getattr(part, "text", "") or "" for part in content or [])


# ---- the in-process harness of 0.4 --------------------------------------------------------------


def _register_harness() -> None:
    """Offer a harness that runs its loop here, instead of a Python process for each rollout."""
    import aiohttp
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    class InProcessConfig(vf.HarnessConfig):  # type: ignore[misc]
        pass

    class InProcessHarness(vf.Harness[InProcessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages: list[dict[str, Any]] = []
            if system:
                messages.append({"role": "system", "content": system})
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or []]
            headers = {"Authorization": f"Bearer {secret}"}
            async with _servers(mcp_urls) as (tools, call), aiohttp.ClientSession() as session:
                for _ in range(_MAX_TURNS):
                    body: dict[str, Any] = {"model": ctx.model, "messages": messages}
                    if tools:
                        body["tools"] = tools
                    url = f"{endpoint}/chat/completions"
                    async with session.post(url, json=body, headers=headers) as reply:
                        answer = await reply.json(content_type=None)
                        if reply.status != 200:
                            return ProgramResult(1, "", f"HTTP {reply.status}: {answer}")
                    message = answer["choices"][0]["message"]
                    messages.append(message)
                    if not message.get("tool_calls"):
                        break
                    for wanted in message["tool_calls"]:
                        output = await call(wanted["function"])
                        messages.append(
                            {"role": "tool", "tool_call_id": wanted["id"], "content": output}
                        )
            return ProgramResult(0, "", "")

    module: Any = types.ModuleType(_HARNESS)
    InProcessHarness.__module__ = InProcessConfig.__module__ = _HARNESS
    module.InProcessHarness, module.InProcessConfig = InProcessHarness, InProcessConfig
    module.__all__ = ["InProcessHarness"]
    module.__spec__ = types.SimpleNamespace(name=_HARNESS, submodule_search_locations=None)
    sys.modules[_HARNESS] = module


class _servers:
    """The tool servers of a task: their tools in OpenAI's shape, and a function that calls one."""

    def __init__(self, urls: dict[str, str]) -> None:
        from contextlib import AsyncExitStack

        self._urls = urls
        self._stack = AsyncExitStack()
        self._owners: dict[str, tuple[Any, str]] = {}

    async def __aenter__(self) -> tuple[list[dict[str, Any]], Callable[[Any], Awaitable[str]]]:
        tools: list[dict[str, Any]] = []
        for server, url in self._urls.items():
            from mcp import Client

            client = await self._stack.enter_async_context(Client(url))
            for tool in (await client.list_tools()).tools:
                name = tool.name if tool.name not in self._owners else f"{server}__{tool.name}"
                self._owners[name] = (client, tool.name)
                text = tool.description or ""
                schema = tool.input_schema
                function = {"name": name, "description": text, "parameters": schema}
                tools.append({"type": "function", "function": function})
        return tools, self._call

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _call(self, function: dict[str, Any]) -> str:
        if function["name"] not in self._owners:
            return f"error: no tool {function['name']!r}"
        client, name = self._owners[function["name"]]
        try:
            result = await client.call_tool(name, json.loads(function["arguments"] or "{}"))
        except Exception as error:
            return f"error: {error}"
        return "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)


# ---- requests -----------------------------------------------------------------------------------


class Worker:
    """Answers requests; many rollouts at once."""

    def __init__(self, reply: Callable[[dict[str, Any]], None]) -> None:
        self._reply = reply
        self._env: Any = None
        self._playing: dict[int, asyncio.Task[None]] = {}

    def handle(self, request: dict[str, Any]) -> None:
        """Start to answer a request."""
        if request["call"] == "cancel":
            if task := self._playing.get(request["of"]):
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._playing[request["id"]] = task
        task.add_done_callback(lambda _: self._playing.pop(request["id"], None))

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            result = await getattr(self, request["call"])(request)
            self._reply({"id": request["id"], "result": result})
        except asyncio.CancelledError:
            self._reply({"id": request["id"], "error": "cancelled", "kind": "agent"})
        except PlayError as error:
            self._reply({"id": request["id"], "error": str(error), "kind": error.kind})
        except BaseException as error:
            kind = _KINDS.get(type(error).__name__, "environment")
            text = f"{type(error).__name__}: {error}"
            self._reply({"id": request["id"], "error": text, "kind": kind})

    async def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Load the environment."""
        number = version("verifiers")
        is_legacy = tuple(map(int, number.split(".")[:2])) < (0, 4)
        make = Legacy if is_legacy else Current
        self._env = make(request["env"], request["arguments"])
        counts = {split: self._env.num_tasks(split) for split in ("train", "test")}
        return {"version": number, "num_tasks": counts}

    async def prompt(self, request: dict[str, Any]) -> Any:
        """Return the messages that open a task."""
        return self._env.prompt(request["split"], request["index"])

    async def play(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play a rollout with a key of its own."""
        # Keys are read from variables only; children of the subprocess runtime inherit none.
        variable = f"AREAL_GYM_{request['id']}_API_KEY"
        os.environ[variable] = request["key"]
        try:
            result: dict[str, Any] = await self._env.play(
                request["split"], request["index"], request["url"], variable, request["harness"]
            )
            return result
        finally:
            os.environ.pop(variable, None)


async def main() -> None:
    """Answer the requests of standard input until it ends."""
    # Libraries print: standard output is theirs no more.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        output.write(json.dumps(message) + "\n")
        output.flush()

    worker = Worker(reply)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        worker.handle(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main())
