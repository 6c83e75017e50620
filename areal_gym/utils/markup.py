"""Make HTML for notebooks and reports, with the standard library only.

Texts of models and environments are untrusted: they are escaped, and invisible characters are
shown as their code points.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_INLINED = re.compile("data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
_MOST_MESSAGES = 16
_FOLD = 600

# Controls, marks of direction, and characters without width can disguise a text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

# The colors are readable on white and on black, because notebooks may have either.
_STYLE = """
.areal-gym { line-height: 1.45; max-width: 900px; }
.areal-gym table { border-collapse: collapse; margin: 4px 0; }
.areal-gym th, .areal-gym td { text-align: left; font-weight: 400; padding: 1px 14px 1px 0;
  vertical-align: top; overflow-wrap: anywhere; background: none; }
.areal-gym th, .areal-gym small, .areal-gym summary { color: #848a94; white-space: nowrap; }
.areal-gym .message { border-left: 3px solid #8886; padding-left: 10px; margin: 6px 0; }
.areal-gym .message small { display: block; }
.areal-gym .policy { border-color: #4a80d6; } .areal-gym .env { border-color: #d2742c; }
.areal-gym pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; background: none;
  unicode-bidi: isolate; }
.areal-gym .call { font-family: monospace; }
"""


def visible(text: str) -> str:
    """Return the text with invisible characters replaced by their code points: `[U+200B]`."""
    return _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text)


def escaped(value: object) -> str:
    """Return the value as text, escaped for HTML."""
    return escape(visible(str(value)))


def short(value: object, limit: int = 80) -> str:
    """Return the value as one line of at most `limit` characters."""
    text = visible(" ".join(str(value)[: 4 * limit].split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `"1 turn"`, `"2 turns"`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number(value: object) -> str:
    """Format a number for people."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "–"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def three_digits(value: float | None) -> str:
    """Return a score for a table; "-" if there is none."""
    return "-" if value is None else f"{value:.3f}"


def gigabytes(num_bytes: float) -> str:
    """Return a number of bytes in gigabytes (1e9), without the unit: `"1.5"`."""
    return f"{num_bytes / 1e9:.1f}"


def block(title: str, *parts: str) -> str:
    """Return the HTML of an object in a notebook: a heading, if any, and parts in HTML."""
    heading = f"<b>{escaped(title)}</b>" if title else ""
    return f'<div class="areal-gym"><style>{_STYLE}</style>{heading}{"".join(parts)}</div>'


def pairs(values: Mapping[str, object]) -> str:
    """Return a table of names and values."""
    rows = (f"<tr><th>{escaped(n)}</th><td>{escaped(v)}</td></tr>" for n, v in values.items())
    return f"<table>{''.join(rows)}</table>" if values else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a header row; an empty string if there are no rows."""
    names = "".join(f"<th>{escaped(name)}</th>" for name in head)
    lines = [f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table><thead><tr>{names}</tr></thead>{''.join(lines)}</table>" if lines else ""


def dialogue(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of messages, colored by origin: the prompt, the policy, the environment.

    The middle of long dialogues and the end of long messages are left out.
    """
    spoken = [i for i, entry in enumerate(messages) if entry.get("role") == "assistant"]
    num_prompts = spoken[0] if spoken else len(messages)
    shown = list(range(len(messages)))
    if len(shown) > _MOST_MESSAGES:
        half = _MOST_MESSAGES // 2
        shown = [*shown[:half], -1, *shown[-half:]]
    left_out = f"<small>… {len(messages) - _MOST_MESSAGES:,} more messages …</small>"
    return "".join(
        left_out
        if i < 0
        else message(messages[i], origin="prompt" if i < num_prompts else None, fold=_FOLD)
        for i in shown
    )


def message(entry: Mapping[str, Any], *, origin: str | None = None, fold: int) -> str:
    """Return the HTML of a message.

    Args:
        entry: the message.
        origin: "prompt", "policy" or "env"; by default its role decides.
        fold: the number of characters that are shown at once; the next ones, up to 20 times as
            many, are folded, and the rest is cut.
    """
    role = str(entry.get("role", "?"))
    origin = origin or ("policy" if role == "assistant" else "env")
    kind = role if role in ("assistant", "tool") else "other"
    thought = entry.get("reasoning_content")
    thinking = f"<details><summary>thinking</summary>{_folded(thought, fold)}</details>"
    calls = "".join(
        f'<div class="call">{_call(c, fold)}</div>' for c in entry.get("tool_calls") or ()
    )
    return (
        f'<div class="message {kind} {origin}"><small>{escaped(role)}</small>'
        f"{thinking if thought else ''}{_content(entry, fold)}{calls}</div>"
    )


def _content(entry: Mapping[str, Any], fold: int) -> str:
    content = entry.get("content") or ""
    if not isinstance(content, list):
        return _folded(content, fold)
    return "".join(_part(part, entry.get("pictures") or {}, fold) for part in content)


def _part(part: Mapping[str, Any], pictures: Mapping[str, str], fold: int) -> str:
    if part.get("type") != "image":
        return _folded(part.get("text") or "", fold)
    name = f"[image {part.get('width')}x{part.get('height')} {str(part.get('sha256'))[:4]}]"
    url = pictures.get(str(part.get("sha256")), "")
    if not _INLINED.fullmatch(url):
        return _folded(name, fold)
    return f'<div><img src="{url}" alt="{escaped(name)}"></div>'


def _call(call: Mapping[str, Any], fold: int) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False, default=str)
    return f"{escaped(function['name'])}({escaped(arguments[:fold])})"


def _folded(content: object, fold: int) -> str:
    text = str(content)
    if len(text) <= fold:
        return f"<pre>{escaped(text)}</pre>" if text else ""
    rest = text[fold : 20 * fold]
    more = "" if len(text) <= 20 * fold else f" (of {len(text):,})"
    return (
        f"<pre>{escaped(text[:fold])}</pre><details><summary>{len(rest):,} more characters{more}"
        f"</summary><pre>{escaped(rest)}</pre></details>"
    )
