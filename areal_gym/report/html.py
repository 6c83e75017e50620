"""Write a report as one HTML file, without scripts or external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from areal_gym.report.charts import draw
from areal_gym.report.content import Report, evaluation_table
from areal_gym.utils.markup import escaped, message, number, pairs, table

_FOLD = 1_500
"""Characters of a message shown unfolded; beyond 20 times as many, it is cut."""

_STYLE = """
:root { --paper: #fff; --ink: #1c1e22; --soft: #666b73; --line: #e5e5e1; --sunk: #f4f4f2;
  --accent: #2d5fb4; --good: #25784a; --bad: #b3412d; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #dcdfe4; --soft: #979da7;
  --line: #2d3138; --sunk: #1f2227; --accent: #86aef0; --good: #6cc592; --bad: #ec8a76; } }
body { margin: 0 auto; max-width: 1080px; padding: 28px 20px 60px; background: var(--paper);
  color: var(--ink); font: 14px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 15px; margin: 34px 0 8px; }
.lead { color: var(--soft); margin: 2px 0 18px; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 34px; }
.facts div { display: flex; flex-direction: column; }
.facts b { font-size: 17px; font-weight: 600; }
.facts span, small { color: var(--soft); font-size: 12px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr));
  gap: 18px 14px; }
.charts svg { width: 100%; height: auto; max-width: 420px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; font-weight: 400; padding: 3px 16px 3px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); white-space: nowrap; width: 1%; }
thead th { width: auto; }
.from { overflow-wrap: normal; }
summary { cursor: pointer; color: var(--soft); margin: 8px 0; }
.examples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  gap: 18px; align-items: start; }
article { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; min-width: 0; }
article header { margin-bottom: 8px; }
.best b { color: var(--good); } .worst b { color: var(--bad); }
.message { border-left: 2px solid var(--line); padding-left: 10px; margin: 8px 0; }
.assistant { border-color: var(--accent); } .message small { display: block; }
.message img { max-width: 100%; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: inherit;
  unicode-bidi: isolate; }
.call, .tool pre { font: 12px/1.5 ui-monospace, Menlo, "DejaVu Sans Mono", monospace; }
.call { background: var(--sunk); border-radius: 5px; padding: 4px 8px; }
footer { color: var(--soft); margin-top: 40px; font-size: 12px; }
"""


def as_html(report: Report) -> str:
    """Return the page."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'"
    charts = "".join(f"<div>{draw(chart)}</div>" for chart in report.charts)
    examples = "".join(_example(kind, row) for kind, row in report.examples)
    examples = f'<div class="examples">{examples}</div>' if examples else ""
    settings = f"<summary>all {len(report.settings)}</summary>{pairs(report.settings)}"
    facts = (
        f"<div><span>{escaped(name)}</span><b>{escaped(value)}</b></div>"
        for name, value in report.facts.items()
    )
    body = [
        f"<h1>{escaped(report.title)}</h1>",
        f'<p class="lead">{escaped(report.lead)}</p>',
        f'<div class="facts">{"".join(facts)}</div>',
        _section("Curves", f'<div class="charts">{charts}</div>' if charts else ""),
        _section("Held-out tasks", table(*evaluation_table(report.evaluations))),
        _section("Examples from the newest step", examples),
        _section("Settings", f"{pairs(report.changed)}<details>{settings}</details>"),
        _section("Plugins", _used(report.used)),
        _section("Environment", pairs(report.environment)),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(report.title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "<footer>areal-gym report</footer></body></html>",
            "",
        ]
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _used(used: Iterable[Mapping[str, Any]]) -> str:
    rows = (
        f"<tr><th>{escaped(entry['kind'])}</th><td>{escaped(entry['id'])} "
        f"<small>{escaped(entry['summary'])}</small></td>"
        f"<td class=from>{escaped(entry['distribution'])} {escaped(entry['version'])}</td></tr>"
        for entry in used
    )
    return f"<table>{lines}</table>" if (lines := "".join(rows)) else ""


def _example(kind: str, row: Mapping[str, Any]) -> str:
    messages = "".join(message(entry, fold=_FOLD) for entry in row["messages"])
    return (
        f'<article class="{kind}"><header><b>{escaped(number(row["reward"]))}</b> {kind}, '
        f"{escaped(row['stop_reason'])}, {escaped(row['task']['id'])}</header>{messages}</article>"
    )
