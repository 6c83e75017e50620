"""A rule-based customer of the shop and of the airline, without a language model.

It opens with its reason for the call, fills the slots it is asked for from what the task says it
knows, confirms what fits the task's gold solution and refuses what does not. It knows that
solution, so that it ends the conversation neither too early nor too late, but never tells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from areal_gym.envs.tau2.domain_state import CallResult, load_tools
from areal_gym.envs.tau2.retail import CANCEL_REASONS
from areal_gym.envs.tau2.users.base import (
    STOP,
    TRANSFER,
    TRANSFERRED,
    RuleUser,
    Scene,
    UserTurn,
    in_first_person,
)

_NUM_REFUSALS = 2
"""Refusals that the customer needs to hear before accepting them."""

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


class Customer(RuleUser):
    """One customer."""

    max_unheard = 4

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        names = ("known_info", "reason_for_call", "task_instructions")
        texts = [scene.case.instructions.get(name) for name in names]
        text = " ".join(str(text) for text in texts if text)
        self._unsaid = [in_first_person(sentence) for sentence in _sentences(text) if sentence]
        self._slots = _slots_of(text)
        writes = [
            action
            for action in scene.case.gold_actions
            if load_tools(scene.domain.name)["assistant"][action.name].mutates
        ]
        should_hear = "COMMUNICATE" in scene.case.reward_basis
        self._untold = {info.lower() for info in scene.case.communicate_info if should_hear}
        self._has_wish = bool(writes or self._untold)
        arguments = json.dumps([action.arguments for action in writes], ensure_ascii=False)
        self._wanted_ids = set(_ID.findall(arguments))
        self._num_refusals = 0

    async def respond(self, event: str | Sequence[CallResult]) -> UserTurn:
        """Answer by rule; the customer has no tools."""
        assert isinstance(event, str)
        return UserTurn(self._answer(event))

    def _answer(self, text: str) -> str:
        if TRANSFERRED.search(text):
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
        return f"My {name} is {' and '.join(values)}." if values else f"I don't remember my {name}."

    def _repeat(self, word: str) -> str:
        return self._insist(f"{word} {self._opening}")

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
    slots["reason"] = [reason for reason in CANCEL_REASONS if reason in text.lower()]
    return {name: values for name, values in slots.items() if values}


def _without_closing(text: str) -> str:
    """Return the text without questions such as "anything else?"."""
    return " ".join(sentence for sentence in _sentences(text) if not _CLOSED.search(sentence))


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)
