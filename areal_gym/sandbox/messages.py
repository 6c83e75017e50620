"""Parses the untrusted messages that a cell writes, within the bounds of the cell protocol.

A message is one line of ASCII; an answer has a text after it:

    ready
    NONCE begun
    NONCE STATUS PEAK_KB value|traceback|nothing
    TEXT

It is flat, so that nothing can nest, and its numbers have at most twelve digits. For anything else
`parse_cell_message` returns None; it never raises. The constants limit the length of a message and
the number of messages per call.
"""

from __future__ import annotations

import re
from typing import NamedTuple

READY = b"ready"
MESSAGE_BYTES = 128 * 1024
"""Longer messages are cut, which only shortens their text."""
MESSAGES_PER_CALL = 1024
"""An honest call sends two messages. The cell is ended after this many, invalid ones included."""
BYTES_PER_CALL = 8 << 20
"""The limit of all messages of a call together; beyond it the cell is ended."""

_MAX_HEAD_BYTES = 64
_HEAD = re.compile(
    rb"([0-9a-f]{16}) (?:(begun)|(ok|error|memory) ([0-9]{1,12}) (value|traceback|nothing))"
)


class CellMessage(NamedTuple):
    """A well-formed message about the call `nonce`; it may still be forged."""

    nonce: str
    status: str
    """"begun", or "ok", "error" or "memory" in an answer."""
    peak_kb: int = 0
    value: str | None = None
    traceback: str = ""


def parse_cell_message(data: bytes) -> CellMessage | None:
    """Return the message in `data`, or None if it is not valid; never raises."""
    end = data.find(b"\n", 0, _MAX_HEAD_BYTES + 1)
    head = data[: end if end >= 0 else _MAX_HEAD_BYTES + 1]
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    nonce, begun, status, peak_kb, kind = match.groups()
    if begun:
        return CellMessage(nonce.decode(), "begun")
    text = data[end + 1 :].decode("utf-8", "replace") if end >= 0 else ""
    return CellMessage(
        nonce.decode(),
        status.decode(),
        int(peak_kb),
        value=text if kind == b"value" else None,
        traceback=text if kind == b"traceback" else "",
    )
