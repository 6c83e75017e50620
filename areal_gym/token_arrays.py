"""Arrays of numbers that belong to tokens, packed as bytes. Standard library, and numpy on request.

`areal_gym.types` has these names, too.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that a mixture chose for `T` tokens in `L` layers, `K` in each: [T, L, K].

    A layer without experts has zeros, and a token without a record has -1 everywhere.
    """

    data: bytes
    """Little-endian int16, in the order of the axes."""
    num_layers: int
    top_k: int
    """Experts of a token in one layer."""

    def __post_init__(self) -> None:
        if len(self.data) % self._row_bytes:
            raise ValueError(
                f"{len(self.data)} bytes are no whole number of tokens with {self.num_layers} "
                f"layers x {self.top_k} experts"
            )

    def __len__(self) -> int:
        return len(self.data) // self._row_bytes

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        start, stop, step = tokens.indices(len(self))
        assert step == 1
        data = self.data[start * self._row_bytes : max(start, stop) * self._row_bytes]
        return RoutedExperts(data, self.num_layers, self.top_k)

    @property
    def _row_bytes(self) -> int:
        return 2 * self.num_layers * self.top_k

    @staticmethod
    def joined(parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
        """Return the parts' tokens one after the other; None where a part, or all, is missing."""
        known = list(parts)
        first = known[0] if known else None
        if first is None or None in known:
            return None
        data = b"".join(part.data for part in known if part is not None)
        return RoutedExperts(data, first.num_layers, first.top_k)

    def unknown(self, num_tokens: int) -> RoutedExperts:
        """Return the record of as many tokens of the same model of which nothing is known."""
        return RoutedExperts(b"\xff" * (num_tokens * self._row_bytes), self.num_layers, self.top_k)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        shape = [len(self), self.num_layers, self.top_k]
        return {"shape": shape, "int16": b64encode(self.data).decode("ascii")}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> RoutedExperts:
        """Make it from the form that `to_dict` returns."""
        return cls(b64decode(row["int16"]), *row["shape"][1:])


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The `K` likeliest tokens of a distribution at each of `T` places, likeliest first: [T, K]."""

    ids: bytes
    """Little-endian int32, in the order of the axes."""
    logprobs: bytes
    """Little-endian float32: the tokens' log-probabilities."""
    top_k: int
    """The tokens of a place, at least 1."""

    def __post_init__(self) -> None:
        row_bytes = 4 * self.top_k
        if len(self.ids) != len(self.logprobs) or self.top_k < 1 or len(self.ids) % row_bytes:
            raise ValueError(
                f"{len(self.ids)} bytes of ids and {len(self.logprobs)} of log-probabilities are "
                f"no whole number of places with {self.top_k} tokens"
            )

    def __len__(self) -> int:
        return len(self.ids) // (4 * self.top_k)

    def __getitem__(self, places: slice) -> TopTokens:
        start, stop, step = places.indices(len(self))
        assert step == 1
        part = slice(start * 4 * self.top_k, max(start, stop) * 4 * self.top_k)
        return TopTokens(self.ids[part], self.logprobs[part], self.top_k)

    @classmethod
    def from_arrays(cls, ids_TK: NDArray[Any], logprobs_TK: NDArray[Any]) -> TopTokens:
        """Pack two arrays [T, K]."""
        ids, logprobs = ids_TK.astype("<i4").tobytes(), logprobs_TK.astype("<f4").tobytes()
        return cls(ids, logprobs, ids_TK.shape[1])

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the ids and the log-probabilities, both [T, K], read-only."""
        import numpy as np

        return (
            np.frombuffer(self.ids, "<i4").reshape(-1, self.top_k),
            np.frombuffer(self.logprobs, "<f4").reshape(-1, self.top_k),
        )

    @staticmethod
    def joined(parts: Iterable[TopTokens | None]) -> TopTokens | None:
        """Return the parts' places one after the other; None where a part, or all, is missing."""
        known = list(parts)
        first = known[0] if known else None
        if first is None or None in known:
            return None
        whole = [part for part in known if part is not None]
        return TopTokens(
            b"".join(part.ids for part in whole),
            b"".join(part.logprobs for part in whole),
            first.top_k,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        packed = {"int32": self.ids, "float32": self.logprobs}
        texts = {name: b64encode(data).decode("ascii") for name, data in packed.items()}
        return {"shape": [len(self), self.top_k], **texts}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> TopTokens:
        """Make it from the form that `to_dict` returns."""
        return cls(b64decode(row["int32"]), b64decode(row["float32"]), row["shape"][1])
