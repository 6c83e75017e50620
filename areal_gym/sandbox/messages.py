"""What a cell writes on its channel, read without trust: the bounds of the cell protocol.

A message is one line of ASCII, and for an answer a text behind it:

    ready
    NONCE begun
    NONCE STATUS PEAK_KB value|traceback|nothing
    TEXT

It is flat, so that nothing in it can nest; its numbers have at most twelve digits; whatever does
not match is junk, which `parse_cell_message` answers with None and never with an exception. How
long a message may be, and how many a call may send, are the constants here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

READY = b"ready"
MESSAGE_BYTES = 128 * 1024
"""Longer messages are cut, which makes at most their text shorter."""
MESSAGES_PER_CALL = 1024
"""An honest call sends two. Beyond this many, junk included, the cell is ended."""
BYTES_PER_CALL = 8 << 20
"""Of all messages of a call together; beyond it the cell is ended."""

_MAX_HEAD_BYTES = 64
_HEAD = re.compile(
    rb"([0-9a-f]{16}) (?:(begun)|(ok|error|memory) ([0-9]{1,12}) (value|traceback|nothing))"
)


class CellMessage(NamedTuple):
    """A well-formed message about the call `nonce`. It may be forged all the same."""

    nonce: str
    status: str
    """"begun", or in an answer "ok", "error" or "memory"."""
    peak_kb: int = 0
    value: str | None = None
    traceback: str = ""


def parse_cell_message(data: bytes) -> CellMessage | None:
    """Returns the message in `data`, or None when it is not one; never raises."""
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
