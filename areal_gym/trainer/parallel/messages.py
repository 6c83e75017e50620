"""Messages between a trainer's processes, with large arrays beside the pickle, not inside.

Pickling copies arrays while it holds Python's lock, and a run's event loop stands still meanwhile.
Pipes are written and read without the lock.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_LARGE_BYTES = 2**12
"""A separate message costs about as much as copying this many bytes."""


@dataclass(frozen=True, slots=True)
class Message:
    """A pickled value, and its large arrays."""

    head: bytes
    arrays: Sequence[pickle.PickleBuffer | bytes | bytearray]

    @staticmethod
    def of(value: Any) -> Message:
        """Pickle a value; its arrays must not change until the message is sent."""
        arrays: list[pickle.PickleBuffer] = []

        def is_small(array: pickle.PickleBuffer) -> bool:
            if array.raw().nbytes < _LARGE_BYTES:
                return True
            arrays.append(array)
            return False

        return Message(pickle.dumps(value, protocol=5, buffer_callback=is_small), arrays)

    def send(self, pipe: Connection) -> None:
        """Write the message to a pipe."""
        arrays = [memoryview(array).cast("B") for array in self.arrays]
        pipe.send_bytes(pickle.dumps([array.readonly for array in arrays]))
        pipe.send_bytes(self.head)
        for array in arrays:
            pipe.send_bytes(array)

    @staticmethod
    def receive(pipe: Connection) -> Message:
        """Read the next message; raise EOFError if the other end is closed."""
        are_readonly = pickle.loads(pipe.recv_bytes())
        head = pipe.recv_bytes()
        raw = ((pipe.recv_bytes(), is_readonly) for is_readonly in are_readonly)
        return Message(head, [data if fixed else bytearray(data) for data, fixed in raw])

    def value(self) -> Any:
        """Return the value that was sent."""
        return pickle.loads(self.head, buffers=self.arrays)
