"""The messages of a perfect assistant, from the task's own solution: for checks and
demonstrations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from areal_gym.envs.tau2.benchmark_data import Action, Case
from areal_gym.envs.tau2.users.phone_owner import REQUESTS

_REQUESTS = {**REQUESTS, "read_card": "What is your card number?"}
_ASKING = "Is everything working now?"
_TRANSFERRING = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
_CLOSING = "I am sorry, but I cannot do more than that. Is there anything else I can help you with?"


def gold_text(case: Case, number: int, *, is_solo: bool, closing: str | None = None) -> str:
    """Return the assistant's message of that number; the last one may have to be repeated.

    In solo mode the assistant calls the user's tools itself, and `done` at the end.

    Args:
        case: the task.
        number: of messages before it.
        is_solo: nobody is there to be asked.
        closing: the last text; by default one that tells what has to be communicated.
    """
    if number < len(case.gold_actions):
        return _text(case.gold_actions[number], is_solo)
    facts = " ".join(f"{info}." for info in case.communicate_info)
    if is_solo:
        return f"{closing or facts}\n{_tool_call('done', {})}".strip()
    return closing or f"{facts} {_closing_of(case)}".strip()


def _closing_of(case: Case) -> str:
    if any(action.name == "transfer_to_human_agents" for action in case.gold_actions):
        return _TRANSFERRING
    return _ASKING if case.domain == "telecom" else _CLOSING


def _text(action: Action, is_solo: bool) -> str:
    if action.requestor == "assistant" or is_solo:
        return _tool_call(action.name, action.arguments)
    return _REQUESTS[action.name].format_map(action.arguments)


def _tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
