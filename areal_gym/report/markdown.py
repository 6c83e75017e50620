"""Write a report in Markdown, with its curves in one image."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_gym.report.charts import HEIGHT, WIDTH, draw
from areal_gym.report.content import Report, evaluation_table
from areal_gym.types import readable
from areal_gym.utils.markup import number, visible

_COLUMNS = 3
_GAP = 16
_LONGEST = 1_500
"""Characters of a message that are shown at most."""


def sheet(report: Report) -> str:
    """Draw all charts in one SVG, on white: it looks the same in dark themes."""
    num_rows = -(-len(report.charts) // _COLUMNS)
    width, height = _COLUMNS * (WIDTH + _GAP) + _GAP, num_rows * (HEIGHT + _GAP) + _GAP
    charts = "".join(
        draw(
            chart,
            ink="#1c1e22",
            x=_GAP + i % _COLUMNS * (WIDTH + _GAP),
            y=_GAP + i // _COLUMNS * (HEIGHT + _GAP),
        )
        for i, chart in enumerate(report.charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><rect width="100%" height="100%" fill="#ffffff"/>{charts}</svg>\n'
    )


def as_markdown(report: Report, picture: str) -> str:
    """Return the page; `picture` is the name of the file that holds `sheet`."""
    lines = [f"# {_inline(report.title)}", "", _inline(report.lead), ""]
    lines += _table(("", ""), report.facts.items())
    if report.charts:
        lines += [f"![curves]({picture})", ""]
    if report.evaluations:
        lines += ["## Held-out tasks", "", *_table(*evaluation_table(report.evaluations))]
    if report.examples:
        lines += ["## Examples from the newest step", ""]
        for kind, row in report.examples:
            lines += _example(kind, row)
    lines += ["## Settings", "", *_table(("setting", "value"), report.changed.items())]
    lines += ["## Plugins", ""]
    lines += _table(
        ("kind", "id", "from"),
        ((e["kind"], e["id"], f"{e['distribution']} {e['version']}") for e in report.used),
    )
    lines += ["## Environment", "", *_table(("", ""), report.environment.items())]
    return "\n".join(lines).rstrip() + "\n"


def _inline(text: object) -> str:
    """Escape a text, so that nothing in it is markup or ends a cell."""
    plain = visible(str(text)).replace("\n", " ")
    return re.sub(r"([\\`*_{}\[\]<>#|!~&$])", r"\\\1", plain)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(_inline(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return []
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines, ""]


def _example(kind: str, row: Mapping[str, Any]) -> Iterator[str]:
    facts = f"{kind}: reward {number(row['reward'])}, {row['stop_reason']}, {row['task']['id']}"
    yield from (f"### {_inline(facts)}", "")
    roles = _roles_of_messages(row)
    for message, role in zip(row["messages"], roles, strict=True):
        text = readable(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            text += f"\n{function['name']}({arguments})"
        cut = "" if len(text) <= _LONGEST else f"\n[{len(text) - _LONGEST:,} more characters]"
        shown = visible(text[:_LONGEST]).strip("\n") + cut
        longest = max((len(run) for run in re.findall("`+", shown)), default=0)
        fence = "`" * max(3, longest + 1)
        who = f"{message['role']} {role}" if role else message["role"]
        yield from (f"**{_inline(who)}**", "", fence, *shown.split("\n"), fence, "")


def _roles_of_messages(row: Mapping[str, Any]) -> list[str]:
    """Return the role that wrote each message; empty texts if only one role plays."""
    roles = [""] * len(row["messages"])
    written = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    turns = row.get("turns", ())
    for place, turn in zip(reversed(written), reversed(turns), strict=False):
        roles[place] = turn.get("role") or ""
    return roles
