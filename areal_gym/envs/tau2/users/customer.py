"""A rule-based customer of the shop and of the airline, without a language model.

It opens with its reason for the call, fills the slots it is asked for from what the task says it
knows, confirms what fits the task's gold solution and refuses what does not. It knows that
solution, so that it ends the conversation neither too early nor too late, but never tells it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from areal_gym.envs.tau2.domain_state import CallResult, load_tools
from areal_gym.envs.tau2.users.base import (
    GIVE_UP,
    STOP,
    TRANSFER,
    Scene,
    UserTurn,
    in_first_person,
    opening_of,
)

_MAX_UNHEARD = 4
"""Useless messages of the assistant after which the customer hangs up."""
_NUM_REFUSALS = 2
"""Refusals that the customer needs to hear before accepting them."""

_TRANSFERRED = re.compile(r"transferred to a human|transferring you", re.IGNORECASE)
_REFUSED = re.compile(
    r"\b(cannot|can't|can not|unable|not (able|possible|allowed|eligible)|do(es)? not qualify"
    r"|doesn't qualify|against (our|the) policy|sorry, but)\b",
    re.IGNORECASE,
)
_CLOSED = re.compile(
    r"anything else|something else|further assistance|other questions|have a (great|nice|good)"
    r"|glad (I|to)|all set|you're welcome",
    re.IGNORECASE,
)
_CONFIRM = re.compile(
    r"yes\W+(or|/)\W*no|\(yes|confirm|proceed|go ahead|shall I|should I|would you like (me )?to"
    r"|do you want (me )?to|is (this|that) (correct|right|okay|ok)|do you agree",
    re.IGNORECASE,
)
_ASKED = re.compile(r"\?|please|could you|may I|can you|provide|share|tell me", re.IGNORECASE)
_ID = re.compile(
    r"#W\d{7}|\b\d{10}\b|\b(?:credit_card|gift_card|paypal|certificate)_\d+|\bHAT\d{3}\b"
)
"""Ids whose mention in a proposal tells what it would change."""

_SLOTS: Mapping[str, tuple[str, str]] = {
    # slot -> (how the assistant asks for it, how it looks in the task)
    "email": (r"e-?mail", r"[\w.+-]+@[\w-]+\.[\w.]+\w"),
    "zip code": (r"zip|postal", r"\b\d{5}\b"),
    "user id": (r"user ?id|user_id|username|customer id", r"\b[a-z]+_[a-z]+_\d{3,5}\b"),
    "order number": (r"order", r"#W\d{7}"),
    "reservation number": (
        r"reservation|booking|confirmation (number|code)",
        r"\b(?=[A-Z0-9]*\d)(?=[A-Z0-9]*[A-Z])(?!HAT\d)[A-Z0-9]{6}\b",
    ),
    "phone number": (r"phone", r"\b\d{3}-\d{3}-\d{4}\b"),
    "date of birth": (r"birth|\bdob\b", r"\b(?:19|20)\d\d-\d\d-\d\d\b"),
}
_NAME = re.compile(r"(?:[Yy]ou are|[Nn]ame is|I am|I'm)\s+([A-Z][a-z]+(?: [A-Z][a-z'-]+)+)")
_REASONS = ("no longer needed", "ordered by mistake")


class Customer:
    """One customer."""

    def __init__(self, scene: Scene) -> None:
        instructions = scene.case.instructions
        self._scene = scene
        self._opening = opening_of(scene.case)
        self._text = " ".join(
            str(instructions[name])
            for name in ("known_info", "reason_for_call", "task_instructions")
            if instructions.get(name)
        )
        self._sentences = [in_first_person(s) for s in re.split(r"(?<=[.!?])\s+", self._text) if s]
        self._unsaid = list(self._sentences)
        self._slots = _slots_of(self._text)
        writes = [
            action
            for action in scene.case.gold_actions
            if load_tools(scene.domain.name)["assistant"][action.name].mutates
        ]
        should_hear = "COMMUNICATE" in scene.case.reward_basis
        self._untold = {info.lower() for info in scene.case.communicate_info if should_hear}
        self._has_wish = bool(writes or self._untold)
        self._wanted_ids = {
            mentioned
            for action in writes
            for text in _texts_in(action.arguments)
            for mentioned in _ID.findall(text)
        }
        self._num_unheard = 0
        self._num_refusals = 0

    def open(self, greeting: str) -> str:
        """Return the reason for the call."""
        return self._opening

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Answer by rule; the customer has no tools."""
        assert isinstance(event, str)
        return UserTurn(self._answer(event))

    def _answer(self, text: str) -> str:
        if _TRANSFERRED.search(text):
            return TRANSFER
        heard = text.lower().replace(",", "")
        self._untold = {info for info in self._untold if info not in heard}
        is_done = self._has_wish and self._is_satisfied()
        if is_done and not _CONFIRM.search(_without_closing(text)):
            return STOP
        if _REFUSED.search(text):
            self._num_refusals += 1
            if self._num_refusals >= _NUM_REFUSALS:
                return STOP if self._is_satisfied() else self._repeat("But")
            return f"Are you sure? {self._opening}"
        if _CONFIRM.search(text) and not self._asked_slots(text):
            if is_done:
                return "No, thank you. That is all."
            proposed = set(_ID.findall(text))
            if proposed <= self._wanted_ids | set(self._slots.get("order number", ())):
                return "Yes, please."
            return f"No, that is not what I want. {self._opening}"
        if _ASKED.search(text):
            answers = [self._slot(name) for name in self._asked_slots(text)]
            if answers:
                return " ".join(answers)
        if _CLOSED.search(text):
            return self._repeat("Yes:")
        return self._nearest(text)

    def _is_satisfied(self) -> bool:
        scene = self._scene
        return not self._untold and scene.world.state() == scene.domain.gold_state(scene.case)

    def _asked_slots(self, text: str) -> list[str]:
        asked = [name for name, (how, _) in _SLOTS.items() if re.search(how, text, re.IGNORECASE)]
        if re.search(r"\bname\b", text, re.IGNORECASE):
            asked.insert(0, "name")
        if re.search(r"\breason\b", text, re.IGNORECASE) and "reason" in self._slots:
            asked.append("reason")
        return asked

    def _slot(self, name: str) -> str:
        values = self._slots.get(name)
        if not values:
            return f"I don't remember my {name}."
        return f"My {name} is {' and '.join(values)}."

    def _repeat(self, word: str) -> str:
        self._num_unheard += 1
        if self._num_unheard > _MAX_UNHEARD:
            return GIVE_UP
        return f"{word} {self._opening}"

    def _nearest(self, text: str) -> str:
        """Return the task's unused sentence that shares the most words with the text."""
        words = set(re.findall(r"[a-z]{4,}", text.lower()))
        scores = [len(words & set(re.findall(r"[a-z]{4,}", s.lower()))) for s in self._unsaid]
        if not scores or max(scores) < 2:
            return self._repeat("I do not know about that.")
        return self._unsaid.pop(scores.index(max(scores)))


@lru_cache(maxsize=1024)
def _slots_of(text: str) -> Mapping[str, list[str]]:
    slots = {
        name: list(dict.fromkeys(re.findall(pattern, text)))
        for name, (_, pattern) in _SLOTS.items()
    }
    named = _NAME.search(text)
    if named:
        slots["name"] = [named[1]]
    elif slots["user id"]:
        first, last, _ = slots["user id"][0].split("_")
        slots["name"] = [f"{first.capitalize()} {last.capitalize()}"]
    slots["reason"] = [reason for reason in _REASONS if reason in text.lower()]
    return {name: values for name, values in slots.items() if values}


def _without_closing(text: str) -> str:
    """Return the text without questions such as "anything else?"."""
    return " ".join(
        sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if not _CLOSED.search(sentence)
    )


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts_in(item)
