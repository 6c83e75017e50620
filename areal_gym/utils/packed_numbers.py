"""Immutable sequences of numbers, packed as C arrays, with a tenth of a tuple's memory and time.

    Ints((9, 12)) == (9, 12)          compares, hashes, slices, adds and prints as a tuple does
    numpy.asarray(Ints((9, 12)))      int32, read-only, without copying

Tuples of Python numbers take 36 to 60 bytes and about 50 ns per number and copy, which is too much
for batches of millions of tokens. The module uses the standard library; numpy is imported only when
an array is requested.
"""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

_N = TypeVar("_N", int, float, bool)

if sys.byteorder != "little":  # files and messages contain the bytes as they are in memory
    raise ImportError("areal_gym needs a little-endian machine")


class PackedNumbers(Sequence[_N], Generic[_N]):
    """The base class of `Ints`, `Floats` and `Bools`; `values` are numbers of the type.

    Raises:
        OverflowError: a number is too large for the type.
        TypeError: a value is not a number of the type.
    """

    __slots__ = ("_make", "_view")
    _view: memoryview[Any]
    _make: Callable[[], PackedNumbers[_N]]
    CODE: ClassVar[str]
    """The format character of the numbers' type in `struct`."""
    NAME: ClassVar[str]
    """The name of the numbers' type in numpy."""

    def __init__(self, values: Iterable[_N] = ()) -> None:
        self._view = self.from_bytes(_bytes_of(values, self.CODE))._view

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview[Any]) -> Self:
        """Return the numbers with these little-endian bytes, which are not copied."""
        numbers = cls.__new__(cls)
        view: memoryview[Any] = memoryview(raw)
        if len(view):  # Python cannot cast an empty view
            view = view.cast("B").cast(cls.CODE).toreadonly()  # type: ignore[call-overload]
        numbers._view = view
        return numbers

    @classmethod
    def from_array(cls, numbers: Any) -> Self:
        """Return the numbers of a 1-D numpy array, which must not be changed afterwards."""
        return cls.from_bytes(memoryview(numbers.astype(cls.NAME, order="C", copy=False)))

    @classmethod
    def deferred(cls, make: Callable[[], Self]) -> Self:
        """Return a sequence whose numbers `make` returns when they are first read."""
        numbers = cls.__new__(cls)
        numbers._make = make
        return numbers

    def __getattr__(self, name: str) -> Any:
        # Python calls this for an unset slot: `_view` is unset until deferred numbers are read.
        if name != "_view":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._view = self._make()._view
        del self._make
        return self._view

    @classmethod
    def of(cls, values: Iterable[_N]) -> Self:
        """Return the values packed; if they are packed already, return the same object."""
        return values if isinstance(values, cls) else cls(values)

    @classmethod
    def repeated(cls, value: _N, count: int) -> Self:
        """Return `count` times the same number."""
        return cls.from_bytes(_bytes_of((value,), cls.CODE) * count)

    @classmethod
    def joined(cls, parts: Iterable[Sequence[_N]]) -> Self:
        """Return the concatenated numbers of all parts."""
        return cls.from_bytes(b"".join(cls.of(part).raw for part in parts))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the numbers that `to_text` has written.

        Raises:
            ValueError: the text is not base64 of whole numbers.
        """
        try:
            return cls.from_bytes(b64decode(text, validate=True))
        except TypeError as error:  # memoryview: the length is not a multiple
            raise ValueError(f"{cls.NAME}: {error}") from None

    @property
    def raw(self) -> memoryview[int]:
        """The little-endian bytes, read-only."""
        return self._view.cast("B") if len(self._view) else memoryview(b"")

    def to_text(self) -> str:
        """Return base64 of the little-endian bytes."""
        return b64encode(self.raw).decode("ascii")

    def to_packed(self) -> dict[str, str]:
        """Return a JSON object of the type's name and `to_text`; see `from_packed`."""
        return {self.NAME: self.to_text()}

    def tolist(self) -> list[_N]:
        """Return the numbers as a list of Python numbers."""
        numbers: list[Any] = self._view.tolist()
        return numbers

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[_N]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> _N: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> _N | Self:
        if not isinstance(index, slice):
            return cast("_N", self._view[index])
        part = self._view[index]
        return self.from_bytes(part if part.c_contiguous else part.tobytes())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedNumbers):
            # Equal bytes count as equal numbers, even NaN, so that a record equals its copy.
            is_same = self.CODE == other.CODE and self.raw == other.raw
            return is_same or self._view == other._view
        if isinstance(other, tuple | list):
            return len(self) == len(other) and self.tolist() == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.tolist()))

    # Adding is defined for tuples only, so that `list += numbers` extends the list.
    def __add__(self, other: object) -> Self | tuple[Any, ...]:
        if isinstance(other, type(self)):
            return self.joined((self, other))
        if isinstance(other, tuple | PackedNumbers):
            return tuple(self) + tuple(other)
        return NotImplemented

    def __radd__(self, other: object) -> tuple[Any, ...]:
        return other + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __repr__(self) -> str:
        return repr(tuple(self.tolist()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # From protocol 5 on, bytes may be sent out of band; before, the pickle has a copy.
        raw = PickleBuffer(self.raw) if protocol >= 5 else bytes(self.raw)
        return type(self).from_bytes, (raw,)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        numbers = np.frombuffer(self._view, self.NAME) if len(self) else np.empty(0, self.NAME)
        is_other = dtype is not None and np.dtype(dtype) != numbers.dtype
        if is_other and copy is False:
            raise ValueError(f"{self.NAME} as {dtype} is a copy, and copy=False was asked for")
        return numbers.astype(dtype) if is_other else numbers.copy() if copy else numbers


class Ints(PackedNumbers[int]):
    """Integers of 32 bits: token ids, policy versions, turns."""

    __slots__ = ()
    CODE, NAME = "i", "int32"


class Floats(PackedNumbers[float]):
    """Floating-point numbers of 64 bits, such as log-probabilities."""

    __slots__ = ()
    CODE, NAME = "d", "float64"

    def to_packed(self) -> dict[str, str]:
        """Return a JSON object; its type is "float32" if that is exact, as for engines' values."""
        import numpy as np

        numbers = np.asarray(self)
        with np.errstate(over="ignore"):
            short = numbers.astype("float32")
        # To the bit, also of a nan.
        if not np.array_equal(short.astype("float64").view("int64"), numbers.view("int64")):
            return super().to_packed()
        return {"float32": b64encode(short.tobytes()).decode("ascii")}


class Bools(PackedNumbers[bool]):
    """Truth values of 8 bits: masks."""

    __slots__ = ()
    CODE, NAME = "?", "bool"


def from_packed(value: Any) -> Sequence[Any]:
    """Return the numbers of a JSON value: a list of numbers, or the result of `to_packed`.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(value, list | tuple | PackedNumbers):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"neither numbers nor packed numbers: {str(value)[:80]}")
    ((name, text),) = value.items()
    if not isinstance(text, str):
        raise ValueError(f"packed numbers are base64, not {str(text)[:80]}")
    if name == "float32":
        import numpy as np

        short = np.frombuffer(b64decode(text, validate=True), "float32")
        return Floats.from_array(short.astype("float64"))
    types: dict[str, type[PackedNumbers[Any]]] = {cls.NAME: cls for cls in (Ints, Floats, Bools)}
    if name not in types:
        raise ValueError(f"packed numbers of the type {name!r}; known: float32, {', '.join(types)}")
    return types[name].from_text(text)


def _bytes_of(values: Iterable[Any], code: str) -> bytes:
    to_list = getattr(values, "tolist", None)  # arrays, tensors, and packed numbers of other types
    if to_list is not None:
        numbers = to_list()
    else:
        numbers = values if isinstance(values, list | tuple) else list(values)
    return bytes(map(bool, numbers)) if code == "?" else array(code, numbers).tobytes()


def json_floats(value: Any) -> Sequence[float] | None:
    """Return the numbers of a JSON value; in lists, null stands for NaN. None stays None."""
    if value is None:
        return None
    values = from_packed(value)
    is_packed = isinstance(values, PackedNumbers)
    return values if is_packed else [math.nan if v is None else v for v in values]
