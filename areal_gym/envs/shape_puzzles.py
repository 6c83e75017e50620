"""Generated pictures and what is asked about them: the puzzles of the environment `shapes`.

The seed alone decides the picture and the answer. A task holds the seed, and no text that the
policy reads depends on the answer: whoever does not see the picture can only guess.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from areal_gym.images.reading import pillow

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "blue": (50, 70, 220),
    "green": (40, 170, 70),
    "black": (20, 20, 20),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS: Mapping[str, tuple[int, int]] = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
_NUM_MOVES = 3


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One question about one picture; several of them are the turns of an episode."""

    question: str
    answer: str
    answers: Sequence[str]
    """All that may be right, each as often as the others."""
    draw: Callable[[], Image.Image]


@dataclass(frozen=True, slots=True)
class _Thing:
    color: str
    shape: str


def puzzles_of(level: int, seed: int) -> Sequence[Puzzle]:
    """Return the puzzles of an episode, in order; equal arguments give equal pictures."""
    rng = random.Random(f"shapes/{level}/{seed}")
    if level == 4:
        return _walk(rng)
    if level == 3:
        return [rng.choice((_compare, _beside, _clock))(rng)]
    return [_count_red(rng) if level == 1 else _count(rng)]


# ---- level 1 and 2: counting ---------------------------------------------------------------------


def _count_red(rng: random.Random) -> Puzzle:
    num = rng.randint(0, 4)
    others = [_Thing(rng.choice(["blue", "green", "black"]), "square") for _ in range(4)]
    things = [_Thing("red", "square")] * num + others[: rng.randint(0, 4)]
    answers = [str(i) for i in range(5)]
    return Puzzle("How many red squares?", str(num), answers, _scene(rng, things, 64))


def _count(rng: random.Random) -> Puzzle:
    asked = _Thing(rng.choice([*COLORS]), rng.choice(SHAPES))
    num = rng.randint(0, 9)
    # Some have the color, some the shape: neither alone is enough.
    near = [_Thing(asked.color, s) for s in SHAPES if s != asked.shape]
    near += [_Thing(c, asked.shape) for c in COLORS if c != asked.color]
    things = [asked] * num + [rng.choice(near) for _ in range(rng.randint(2, 8))]
    answers = [str(i) for i in range(10)]
    return Puzzle(f"How many {_plural(asked)}?", str(num), answers, _scene(rng, things, 96))


# ---- level 3: comparing, places, clocks ----------------------------------------------------------


def _compare(rng: random.Random) -> Puzzle:
    one, two = _two_kinds(rng)
    few = rng.randint(1, 7)
    many = few + rng.randint(1, 3)
    is_more = rng.random() < 0.5
    things = [one] * (many if is_more else few) + [two] * (few if is_more else many)
    question = f"Are there more {_plural(one)} than {_plural(two)}? Yes or no?"
    return Puzzle(question, "yes" if is_more else "no", ("yes", "no"), _scene(rng, things, 96))


def _beside(rng: random.Random) -> Puzzle:
    one, two = _two_kinds(rng)
    left, right = sorted(rng.sample(range(6), 2))
    is_left = rng.random() < 0.5
    columns = (left, right) if is_left else (right, left)
    places = [(column, rng.randrange(6)) for column in columns]
    question = f"Is the {one.color} {one.shape} left of the {two.color} {two.shape}? Yes or no?"
    draw = _scene(rng, [one, two], 96, places)
    return Puzzle(question, "yes" if is_left else "no", ("yes", "no"), draw)


def _clock(rng: random.Random) -> Puzzle:
    answers = [f"{hour}:{5 * part:02}" for hour in range(1, 13) for part in range(12)]
    answer = rng.choice(answers)
    draw = partial(_draw_clock, *map(int, answer.split(":")))
    return Puzzle("What time is it, to five minutes, as in 7:05?", answer, answers, draw)


def _draw_clock(hour: int, minute: int) -> Image.Image:
    canvas, pen = _canvas(96)
    middle = 48
    pen.ellipse((3, 3, 92, 92), outline=COLORS["black"], width=2)
    for part in range(12):
        x, y = _toward(part / 12)
        ends = (middle + 38 * x, middle + 38 * y, middle + 43 * x, middle + 43 * y)
        pen.line(ends, fill=COLORS["black"], width=2)
    for turn, length, width, color in (
        ((hour % 12 + minute / 60) / 12, 22, 5, "black"),
        (minute / 60, 36, 2, "red"),
    ):
        x, y = _toward(turn)
        ends = (middle, middle, middle + length * x, middle + length * y)
        pen.line(ends, fill=COLORS[color], width=width)
    return canvas


def _toward(turn: float) -> tuple[float, float]:
    return math.sin(2 * math.pi * turn), -math.cos(2 * math.pi * turn)


# ---- level 4: a walk, a picture per move ---------------------------------------------------------


def _walk(rng: random.Random) -> list[Puzzle]:
    """Return moves of a blue circle; the red square is elsewhere after each, in any direction."""
    place = (rng.randint(3, 4), rng.randint(3, 4))
    question = "Which way is the red square from the blue circle: left, right, up or down?"
    moves = []
    for _ in range(_NUM_MOVES):
        answer = rng.choice([*DIRECTIONS])
        x, y = DIRECTIONS[answer]
        # It starts near the middle of 8 x 8 cells, so that there is room in every direction.
        room = 0
        while all(0 <= at + (room + 1) * step < 8 for at, step in zip(place, (x, y), strict=True)):
            room += 1
        distance = rng.randint(1, room)
        goal = (place[0] + distance * x, place[1] + distance * y)
        things = [_Thing("blue", "circle"), _Thing("red", "square")]
        draw = _scene(rng, things, 96, [place, goal], num_cells=8)
        moves.append(Puzzle(question, answer, tuple(DIRECTIONS), draw))
        place = (place[0] + x, place[1] + y)
    return moves


# ---- drawing -------------------------------------------------------------------------------------


def _two_kinds(rng: random.Random) -> tuple[_Thing, _Thing]:
    kinds = [_Thing(color, shape) for color in COLORS for shape in SHAPES]
    one, two = rng.sample(kinds, 2)
    return one, two


def _plural(thing: _Thing) -> str:
    return f"{thing.color} {thing.shape}s"


def _scene(
    rng: random.Random,
    things: Sequence[_Thing],
    side: int,
    places: Sequence[tuple[int, int]] | None = None,
    num_cells: int | None = None,
) -> Callable[[], Image.Image]:
    """Return what draws the things in cells of their own; all that is random is drawn now."""
    num_cells = num_cells or side // 16
    cells = [(x, y) for x in range(num_cells) for y in range(num_cells)]
    if places is None:
        places = rng.sample(cells, len(things))
    size = side // num_cells
    boxes = []
    for x, y in places:
        width = rng.randint(size // 2, size - 5)
        left = x * size + 2 + rng.randint(0, size - 4 - width)
        top = y * size + 2 + rng.randint(0, size - 4 - width)
        boxes.append((left, top, left + width, top + width))
    return partial(_draw_scene, things, boxes, side)


def _draw_scene(things: Sequence[_Thing], boxes: Sequence[Any], side: int) -> Image.Image:
    canvas, pen = _canvas(side)
    for thing, box in zip(things, boxes, strict=True):
        color = COLORS[thing.color]
        if thing.shape == "square":
            pen.rectangle(box, fill=color)
        elif thing.shape == "circle":
            pen.ellipse(box, fill=color)
        else:
            left, top, right, bottom = box
            pen.polygon(((left, bottom), (right, bottom), ((left + right) // 2, top)), fill=color)
    return canvas


def _canvas(side: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    library = pillow()
    from PIL import ImageDraw

    canvas: Image.Image = library.new("RGB", (side, side), "white")
    return canvas, ImageDraw.Draw(canvas)
