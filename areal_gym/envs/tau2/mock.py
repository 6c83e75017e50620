"""The built-in domain: a library that lends tools. No data, no language model, endless tasks.

A person with a card wants to keep a tool for another week or to bring it back. The assistant asks
for the number on the card (the user reads it with a tool of its own), looks it up, does what is
asked, and says so. What is overdue cannot be renewed. Small enough for a tiny model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from areal_gym.envs.tau2.benchmark_data import Action, Case, Domain
from areal_gym.envs.tau2.database import Tables
from areal_gym.envs.tau2.domain_state import CallResult, DatabaseWorld, load_tools
from areal_gym.envs.tau2.users.base import STOP, RuleUser, Scene, UserTurn
from areal_gym.tasks import Draft, GeneratedTasks

_POLICY = (
    "You serve a library of tools. Ask for the card number, look it up, do what is asked and say "
    "so. What is overdue cannot be renewed."
)
_ITEMS = ("drill", "hammer", "ladder", "saw", "rake", "spade", "wrench", "torch")
_WEEK = 7
_OVERDUE = "overdue"


@cache
def library_tasks() -> GeneratedTasks:
    """Make the tasks.

    `task.data` holds the loans (`loans`: card -> tool -> day, or "overdue") and the customer's
    wish: `card`, `wish` ("renew" or "take_back") and `item`.
    """

    def make_draft(rng: random.Random) -> Draft:
        cards = [f"{number:04d}" for number in rng.sample(range(10_000), 2)]
        loans = {
            card: {
                item: _OVERDUE if rng.random() < 0.25 else rng.randint(10, 23)
                for item in rng.sample(_ITEMS, 2)
            }
            for card in cards
        }
        card = cards[0]
        item = rng.choice(list(loans[card]))
        wish = rng.choice(("renew", "renew", "take_back"))
        data = {"loans": loans, "card": card, "item": item, "wish": wish}
        return Draft(key=f"{card} {item} {wish} {loans[card]}", data=data)

    return GeneratedTasks("tau2/mock", make_draft)


def library_domain(data: Mapping[str, Any]) -> tuple[Domain, Case]:
    """Return the task as a domain of its own with one case."""
    card, item, wish = data["card"], data["item"], data["wish"]
    loans = {key: {"card": key, "items": dict(items)} for key, items in data["loans"].items()}
    tables = Tables({"loans": loans})
    arguments = {"card": card, "item": item}
    outcome = _outcome(data)
    gold = [Action("user", "read_card", {}), Action("assistant", "look_up", arguments)]
    if outcome != _OVERDUE:
        gold.append(Action("assistant", wish, arguments))
    verb = "renew" if wish == "renew" else "return"
    case = Case(
        id=f"{card}/{item}/{wish}",
        domain="mock",
        instructions={
            "domain": "mock",
            "reason_for_call": f"You want to {verb} your {item}.",
            "known_info": "You have your card at hand.",
        },
        ticket=f"The customer wants to {verb} the {item}.",
        gold_actions=gold,
        communicate_info=(outcome,),
    )
    domain = Domain(
        name="mock",
        version="1",
        make_world=lambda: LibraryWorld(tables, card),
        tools=load_tools("mock"),
        cases={case.id: case},
        splits={},
        policies={"manual": _POLICY, "solo": _POLICY},
        guidelines="You play a customer of a library of tools. Answer in one short sentence.",
    )
    return domain, case


def library_closing(data: Mapping[str, Any]) -> str:
    """Return the assistant's last message of a solved task."""
    outcome = _outcome(data)
    return f"The {data['item']} is {'due on ' if outcome.startswith('day') else ''}{outcome}."


def _outcome(data: Mapping[str, Any]) -> str:
    due = data["loans"][data["card"]][data["item"]]
    if data["wish"] == "take_back":
        return "back"
    return _OVERDUE if due == _OVERDUE else f"day {due + _WEEK}"


class LibraryWorld(DatabaseWorld):
    """The library and the user's card in one episode."""

    domain = "mock"

    def __init__(self, tables: Tables, card: str) -> None:
        super().__init__(tables)
        self._card = card

    def look_up(self, card: str, item: str) -> str:
        """Return when the item is due."""
        due = self._due(card, item)
        return f"{item}: {due if due == _OVERDUE else f'day {due}'}"

    def renew(self, card: str, item: str) -> str:
        """Lend the item for another week."""
        due = self._due(card, item)
        if due == _OVERDUE:
            raise ValueError(f"the {item} is overdue")
        self.db.edit("loans", card)["items"][item] = due + _WEEK
        return f"{item}: day {due + _WEEK}"

    def take_back(self, card: str, item: str) -> str:
        """Remove the item from the card."""
        self._due(card, item)
        del self.db.edit("loans", card)["items"][item]
        return f"{item}: back"

    def read_card(self) -> str:
        """Return the number of the user's own card."""
        return self._card

    def _due(self, card: str, item: str) -> Any:
        items = self.db.require("loans", card, f"no card {card}")["items"]
        if item not in items:
            raise ValueError(f"no {item} on card {card}")
        return items[item]


class Borrower(RuleUser):
    """The library's rule-based user: reads its card when asked, and leaves after a statement."""

    max_unheard = 3

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._opening = self._opening.replace("I want to", "Please")

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Read out the card's number, or end the conversation."""
        if not isinstance(event, str):
            return UserTurn(f"It is {event[0].text}.")
        if "?" not in event:
            return UserTurn(STOP)
        if "card" in event.lower() or "number" in event.lower():
            return UserTurn(calls=[("read_card", {})])
        return UserTurn(self._insist(self._opening))
