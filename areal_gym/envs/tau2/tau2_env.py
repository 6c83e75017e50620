"""The tau2 environments: `tau2/retail`, `tau2/airline`, `tau2/telecom` and the built-in `tau2`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from areal_gym.chat.chat_client import ChatClient
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.responses import tool_message
from areal_gym.envs.tau2.actions import parse_action
from areal_gym.envs.tau2.benchmark_data import POLICIES, Case
from areal_gym.envs.tau2.domain_state import Arguments, load_tools
from areal_gym.envs.tau2.language_models import LLMJudge, LLMUser
from areal_gym.envs.tau2.mock import Borrower, library_closing
from areal_gym.envs.tau2.simulation import Call, Judge, Simulation, Verdict
from areal_gym.envs.tau2.sources import source_of
from areal_gym.envs.tau2.users.base import STOP, UserFactory
from areal_gym.envs.tau2.users.customer import Customer
from areal_gym.envs.tau2.users.phone_owner import REQUESTS, PhoneOwner
from areal_gym.envs.tools import Tool
from areal_gym.errors import UsageError, choices
from areal_gym.types import FunctionCall, Message, Task, ToolCall, text_of

_SOLO_DOMAINS = ("telecom", "mock")
_RULES: Mapping[str, UserFactory] = {
    "retail": Customer,
    "airline": Customer,
    "telecom": PhoneOwner,
    "mock": Borrower,
}
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_DONE = Tool(name="done", description="Say that the task is finished.", parameters=_NO_ARGUMENTS)
_INSTRUCTIONS = (
    "You work in customer service, and the policy below binds you. Every message of yours is "
    "either text for the customer or tool calls; text beside calls reaches nobody."
)
_SOLO_INSTRUCTIONS = (
    "You work in customer service on a ticket, and the policy below binds you. Nobody reads what "
    "you write: work by tool calls alone, and call `done` at the end."
)


class Tau2Env(TextEnv):
    """Customer service with a user, tools and a database, judged as tau2-bench judges.

    Task: a user calls a shop (`tau2/retail`), an airline, a telecom carrier, or the built-in
        library of tools (`tau2`, also `tau2/mock`), which needs no data.
    Tools: the domain's own, see `areal-gym show tau2/retail`. Telecom's user has a phone with 30
        more, which only the user can operate.
    Observation: the policy of the house and what the user says; results of tools.
    Action: a text for the user, or tool calls. The user does not read text beside calls.
    Reward: once, at the end: the product of the parts that the task names (database, assertions
        about the world, what was communicated, actions, assertions in natural language), each 0
        or 1. Parts are named as in the benchmark, in lower case.
    Episode end: terminated by the user's or (solo) the assistant's stop, by ten tool errors, by an
        empty message, or when a rule-based user hangs up (the last three are worth 0); truncated
        after `max_steps`.
    Splits: the benchmark's: `train`, `test`, `base` (both), telecom also `small` and `full`. The
        library: `train` and `test`, endless.
    Metrics: `tool_calls`, `tool_errors`; at the end `db_match`, `nl_unjudged` (1: assertions in
        natural language stood in the verdict and were not judged), `solved_by_inaction` (1:
        doing nothing would have been worth 1), `own_tool_texts` (1: the tools were described in
        our words, 0: in those of a file).
    Data: tau2-bench, MIT, Copyright (c) 2025 Sierra Research; not contained, see docs/tau2.md. The
        id of a task names the version of the tasks: `retail@1.0.1/5`. History: v0.

    Args:
        domain: `retail`, `airline`, `telecom` or `mock`.
        user: "rule"; the URL of an OpenAI-compatible server; or "package.module:factory".
        user_model: the name of the model behind that URL.
        judge: of assertions in natural language: None (stands in by `communicate_info`, flagged);
            the URL of an OpenAI-compatible server; or "package.module:Judge".
        judge_model: the name of the model behind that URL.
        policy: telecom's technical support as a "manual" or as a "workflow".
        solo: no user; the assistant has a ticket and the user's tools (telecom and mock).
        data_dir: the folder that holds `tau2/domains`; else TAU2_DATA_DIR, else what
            `areal-gym data pull tau2` has fetched.
        tool_texts: a file whose descriptions of the tools replace ours, for results that are to
            compare with the benchmark's; else the data's `tau2/tool_schemas.json`, if it is there.
        max_steps: messages of all parties after which the episode is truncated.
        max_errors: failed tool calls after which it ends.
        action_strings: also read a whole text that is `name(key='value')`, or the JSON of a call,
            as a call, as the benchmark's own gym does.
    """

    def __init__(
        self,
        *,
        domain: str = "mock",
        user: str | UserFactory = "rule",
        user_model: str = "default",
        judge: str | Judge | None = None,
        judge_model: str = "default",
        policy: str = "manual",
        solo: bool = False,
        data_dir: str | None = None,
        tool_texts: str | None = None,
        max_steps: int = 100,
        max_errors: int = 10,
        action_strings: bool = False,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._source = source_of(domain, data_dir, tool_texts)
        if solo and domain not in _SOLO_DOMAINS:
            available = f"available for: {', '.join(_SOLO_DOMAINS)}"
            raise UsageError(f"tau2/{domain} has no solo mode", hints=[available])
        if policy not in POLICIES:
            raise UsageError(f"no policy {policy!r}", hints=choices(policy, POLICIES))
        self._has_own_texts = self._source.tools is load_tools(domain)
        self.metadata = {  # type: ignore[misc]
            **self.metadata,
            "tau2_tasks": self.version,
            "tau2_tool_texts": "own" if self._has_own_texts else "given",
        }
        self.max_turns = max_steps
        self._policy = "solo" if solo else policy if domain == "telecom" else "manual"
        self._user = None if solo else _user_factory(user, user_model, domain)
        self._judge = _judge(judge, judge_model)
        self.suspends = not (user == "rule" and judge is None)
        # A user-supplied user may raise for reasons of its own.
        self.judges_all_output = user == "rule"
        self._reads_action_strings = action_strings
        self._limits = {"max_steps": max_steps, "max_errors": max_errors}
        tools = self._source.tools
        users = [*tools["user"].values()] if solo else []
        self.tools = tuple(info.tool for info in (*tools["assistant"].values(), *users))
        self.tools += (_DONE,) if solo else ()
        self._simulation: Simulation | None = None

    @property
    def version(self) -> str:
        """The version of the benchmark's tasks, such as "1.0.1"; a hash for unknown tasks."""
        return self._source.version

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks in the split; None for the library."""
        return self._source.num_tasks(split)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a drawn task, or the one that `options` names."""
        return self._source.sample(rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the policy, and the user's first message or the ticket."""
        domain, case = self._source.case_of(task)
        self._simulation = Simulation(domain, case, self._user, **self._limits)
        policy = domain.policies[self._policy]
        if domain.name != "mock":
            instructions = _SOLO_INSTRUCTIONS if self._simulation.is_solo else _INSTRUCTIONS
            policy = (
                f"<instructions>\n{instructions}\n</instructions>\n<policy>\n{policy}\n</policy>"
            )
        opening = self._simulation.open() if self._user else case.ticket or ""
        return [{"role": "system", "content": policy}, {"role": "user", "content": opening}]

    async def respond(self, message: Message) -> Response:
        """Run the calls, or pass the text on to the user."""
        simulation = self._simulation
        assert simulation is not None
        if self._reads_action_strings:
            message = _with_action_string(message)
        num_calls, num_errors = len(message.get("tool_calls", ())), simulation.num_errors
        messages: list[Message] = []
        if message.get("parse_error"):
            simulation.misspell(text_of(message["content"]))
            messages.append({"role": "tool", "content": f"Error: {message['parse_error']}"})
        if num_calls and simulation.termination is None:
            with self.judging() as judged:
                messages += self._call(simulation, message)
            if judged.num_errors:
                simulation.end("agent_error")
        metrics = {"tool_calls": num_calls, "tool_errors": simulation.num_errors - num_errors}
        if not messages and simulation.termination is None:
            messages += await self._say(simulation, text_of(message["content"]))
        if simulation.termination is None:
            return Response(messages=messages, metrics=metrics)
        verdict = Verdict(reward=0.0)
        with self.judging():
            verdict = await simulation.verdict(self._judge)
        return Response(
            reward=verdict.reward,
            reward_parts={name.lower(): part for name, part in (verdict.breakdown or {}).items()},
            is_terminated=simulation.termination != "max_steps",
            is_truncated=simulation.termination == "max_steps",
            metrics=metrics | self._metrics_of(verdict),
        )

    def _call(self, simulation: Simulation, message: Message) -> list[Message]:
        calls = message["tool_calls"]
        run = calls[: self.max_calls]
        names = [call["function"]["name"] for call in run]
        is_done = simulation.is_solo and _DONE.name in names
        if is_done:
            run = run[: names.index(_DONE.name)]
        tool_calls = [
            Call("assistant", call["function"]["name"], call["function"]["arguments"])
            for call in run
        ]
        results = simulation.call(tool_calls, beside=text_of(message["content"]))
        messages = [
            tool_message(call, result.text) for call, result in zip(run, results, strict=True)
        ]
        if is_done:
            simulation.end("agent_stop")
        elif len(calls) > len(run):
            left = len(calls) - len(run)
            text = f"Error: {left} more calls were not run; at most {self.max_calls} are"
            messages.append({"role": "tool", "content": text})
        return messages

    def _metrics_of(self, verdict: Verdict) -> dict[str, float]:
        metrics = {
            "nl_unjudged": float(not verdict.is_nl_judged),
            "solved_by_inaction": float(self.task.data.get("solved_by_inaction", False)),
        }
        if verdict.db_match is not None:
            metrics["db_match"] = float(verdict.db_match)
        return {**metrics, "own_tool_texts": float(self._has_own_texts)}

    async def _say(self, simulation: Simulation, text: str) -> list[Message]:
        if simulation.is_solo or not text.strip():
            is_stop = simulation.is_solo and STOP in text
            simulation.end("agent_stop" if is_stop else "agent_error")
            return []
        reply = await simulation.say(text)
        return [] if simulation.termination else [{"role": "user", "content": reply}]

    def gold_action(self) -> str:
        """Return the next message of the task's own solution."""
        simulation = self._simulation
        assert simulation is not None
        closing = library_closing(self.task.data) if simulation.domain.name == "mock" else None
        return gold_text(
            simulation.case, self.num_turns, is_solo=simulation.is_solo, closing=closing
        )


# ---- the messages of a perfect assistant ---------------------------------------------------------

_REQUESTS = {**REQUESTS, "read_card": "What is your card number?"}
_TRANSFERRING = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
_CLOSING = "I am sorry, but I cannot do more than that. Is there anything else I can help you with?"


def gold_text(case: Case, number: int, *, is_solo: bool, closing: str | None = None) -> str:
    """Return the message of that number; the last one may have to be repeated.

    In solo mode the assistant calls the user's tools itself, and `done` at the end. `closing` is
    the last text; by default one that tells what has to be communicated.
    """
    if number < len(case.gold_actions):
        action = case.gold_actions[number]
        if action.requestor == "assistant" or is_solo:
            return _tool_call(action.name, action.arguments)
        return _REQUESTS[action.name].format_map(action.arguments)
    facts = " ".join(f"{info}." for info in case.communicate_info)
    if is_solo:
        return f"{closing or facts}\n{_tool_call(_DONE.name, {})}".strip()
    if any(action.name == "transfer_to_human_agents" for action in case.gold_actions):
        end = _TRANSFERRING
    else:
        end = "Is everything working now?" if case.domain == "telecom" else _CLOSING
    return closing or f"{facts} {end}".strip()


def _tool_call(name: str, arguments: Arguments) -> str:
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


# ---- parts of the environment --------------------------------------------------------------------


def _with_action_string(message: Message) -> Message:
    if message.get("tool_calls") or not text_of(message["content"]).strip():
        return message
    parsed = parse_action(text_of(message["content"]))
    if parsed.content is not None:
        return message
    function = FunctionCall(name=parsed.name, arguments=dict(parsed.arguments))
    call = ToolCall(id="call00000", type="function", function=function)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _user_factory(user: str | UserFactory, model: str, domain: str) -> UserFactory:
    if not isinstance(user, str):
        return user
    named = _RULES[domain] if user == "rule" else _named(user, model, "user")
    return (lambda scene: LLMUser(scene, named)) if isinstance(named, ChatClient) else named


def _judge(judge: str | Judge | None, model: str) -> Judge | None:
    if not isinstance(judge, str):
        return judge
    named = _named(judge, model, "judge")
    return LLMJudge(named) if isinstance(named, ChatClient) else named()


def _named(path: str, model: str, what: str) -> Any:
    """Return the client of a URL, or the object at `package.module:Name`."""
    if path.startswith(("http://", "https://")):
        return ChatClient(path, model=model)
    module, separator, name = path.partition(":")
    if not separator:
        ways = [f"{what}=http://HOST:PORT (OpenAI-compatible), or {what}=package.module:Name"]
        rule = ["user=rule"] if what == "user" else []
        raise UsageError(f"no {what} {path!r}", hints=[*rule, *ways])
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{what} {path!r} cannot be imported: {error}") from None
