"""A Gymnasium space for any text.

`gymnasium.spaces.Text` rejects spaces and most Unicode by default and scans every character in
Python; this one checks type and length only.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Tuple
from gymnasium.vector import utils as vector_utils

_SAMPLE_ALPHABET = string.ascii_letters + string.digits + " .,!?+-*/()\n"


class TextSpace(Space[str]):
    """All strings of at most `max_length` characters (Unicode code points)."""

    def __init__(
        self, max_length: int = 2**24, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(dtype=str, seed=seed)
        self.max_length = max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a short random text."""
        length = int(self.np_random.integers(0, min(32, self.max_length) + 1))
        letters = self.np_random.integers(0, len(_SAMPLE_ALPHABET), size=length)
        return "".join(_SAMPLE_ALPHABET[i] for i in letters)

    def contains(self, x: Any) -> bool:
        """Return whether `x` is a string that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        """False: text does not flatten into an array."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_length == self.max_length

    def __repr__(self) -> str:
        return f"TextSpace(max_length={self.max_length})"


# A batch of texts is a tuple of strings: what sync and async vector environments need to know.
# `iterate` stays unregistered: Gymnasium then walks over the tuple, which is what we want.
@vector_utils.batch_space.register(TextSpace)
def _batch_space(space: TextSpace, n: int = 1) -> Space[Any]:
    return Tuple(tuple(TextSpace(space.max_length) for _ in range(n)))


@vector_utils.concatenate.register(TextSpace)
def _concatenate(space: TextSpace, items: Iterable[str], out: Any) -> tuple[str, ...]:
    return tuple(items)


@vector_utils.create_empty_array.register(TextSpace)
def _create_empty_array(
    space: TextSpace, n: int = 1, fn: Callable[..., Any] = np.zeros
) -> tuple[str, ...]:
    return ("",) * n
