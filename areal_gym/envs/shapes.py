"""`shapes`: questions about drawn pictures, an environment that needs eyes and no download."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import ClassVar

from areal_gym.envs.base import Response
from areal_gym.envs.questions import QuestionEnv
from areal_gym.envs.shape_puzzles import Puzzle, puzzles_of
from areal_gym.errors import UsageError
from areal_gym.images import ImageLimits, ImageStore, image_limits, image_store
from areal_gym.message_types import ImagePart
from areal_gym.tasks import Draft, GeneratedTasks
from areal_gym.types import Content, Message, Task, text_of

_LEVELS: Mapping[int, str] = {
    1: "how many red squares, 0 to 4",
    2: "how many of a color and a shape, 0 to 9",
    3: "more or fewer, left or right, the time on a clock",
    4: "three turns with a picture each: which way",
}
_BLIND: Mapping[int, float] = {1: 1 / 5, 2: 1 / 10, 3: (1 / 2 + 1 / 2 + 1 / 144) / 3, 4: 1 / 64}


@cache
def shape_tasks(level: int) -> GeneratedTasks:
    """Return tasks whose data holds `level` and `seed`, of which the picture is drawn."""
    if isinstance(level, bool) or level not in _LEVELS:
        raise UsageError(f"no level {level!r}", hints=["levels are 1 to 4"])

    def make_draft(rng: random.Random) -> Draft:
        seed = rng.getrandbits(40)
        return Draft(f"{level}/{seed}", {"level": level, "seed": seed})

    return GeneratedTasks(f"shapes, level {level}", make_draft)


class ShapesEnv(QuestionEnv):
    """Questions about drawn pictures: counting, comparing, a clock, and a walk of several turns.

    The answer is the last word or number of the text. Only the picture tells it: a policy that
    does not see earns `blind_reward`.
    """

    suspends = False
    max_turns = 3
    all_levels: ClassVar[Sequence[int]] = tuple(_LEVELS)

    def __init__(self, *, level: int = 1, render_mode: str | None = None) -> None:
        """Choose the level.

        Args:
            level: 1 counts red squares; 2 counts a color and a shape, up to 9; 3 compares, asks for
                places and reads a clock; 4 has three turns with a picture each.
            render_mode: of Gymnasium.
        """
        super().__init__(shape_tasks(level), levels=shape_tasks, render_mode=render_mode)
        self.blind_reward = _BLIND[level]
        self._puzzles: Sequence[Puzzle] = ()
        self._place = 0

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the first picture and its question."""
        self._puzzles = puzzles_of(int(task.data["level"]), int(task.data["seed"]))
        self._place = 0
        return [{"role": "user", "content": self._shown()}]

    async def respond(self, message: Message) -> Response:
        """Grade the answer; a right one that is not the last brings the next picture."""
        is_right = False
        with self.judging():
            answer = _last_answer(text_of(message["content"]), self._puzzle.answers)
            is_right = answer == self._puzzle.answer
        self._place += 1
        if is_right and self._place < len(self._puzzles):
            return Response(messages=[{"role": "user", "content": self._shown()}])
        return Response(reward=float(is_right), is_terminated=True)

    def gold_action(self) -> str:
        """Return the right answer."""
        return self._puzzle.answer

    @property
    def _puzzle(self) -> Puzzle:
        return self._puzzles[self._place]

    def _shown(self) -> Content:
        store, limits, data = image_store(), image_limits(), self.task.data
        picture = _picture(store, limits, int(data["level"]), int(data["seed"]), self._place)
        if picture["sha256"] not in store:  # the store has been cleaned since
            picture = store.add(self._puzzle.draw(), limits=limits)
        return [picture.copy(), {"type": "text", "text": self._puzzle.question}]


@lru_cache(maxsize=256)
def _picture(
    store: ImageStore, limits: ImageLimits, level: int, seed: int, place: int
) -> ImagePart:
    """Return a picture that is in the store; siblings of a group have it drawn once."""
    return store.add(puzzles_of(level, seed)[place].draw(), limits=limits)


def _last_answer(text: str, answers: Sequence[str]) -> str | None:
    """Return the last of the possible answers in a text; other numbers are wrong answers."""
    words = re.findall(r"\d+:\d+|\d+|[a-z]+", text.lower())
    known = [word for word in words if word in answers or word[0].isdigit()]
    return known[-1] if known else None
