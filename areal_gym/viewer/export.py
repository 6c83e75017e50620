"""The viewer as one HTML file with its data: it opens without a server or a network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from areal_gym.run_dir.shown_images import inlined
from areal_gym.utils.files import to_json, write_atomic
from areal_gym.viewer.catalog import Catalog, Run
from areal_gym.viewer.evaluation_catalog import EvaluationCatalog

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)


def export(catalog: Catalog, file: Path) -> int:
    """Write the page with all runs of the catalog; return its size in bytes.

    Trajectories are packed file by file, and unpacked by the browser when they are looked at.
    """
    static = resources.files("areal_gym.viewer").joinpath("static")
    chunks: list[str] = []
    runs = [_packed(run, chunks) for run in catalog.runs() if not run.is_evaluation]
    known_evaluations = EvaluationCatalog(catalog)
    known = {run["about"]["card"]["name"]: run for run in runs}
    evaluations = [
        _packed_evaluation(known_evaluations, card, known, chunks)
        for card in known_evaluations.cards()
    ]
    data = {"runs": runs, "evaluations": evaluations}
    script = _bundled()
    style = static.joinpath("style.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<title>areal-gym</title><link rel="icon" href="data:,">',
            f"<style>{style}</style></head><body>",
            f'<script type="application/json" id="data">{_inert(data)}</script>',
            *chunks,
            f'<script type="module">{script}</script>',
            "</body></html>\n",
        ]
    )
    raw = page.encode("utf-8", "replace")
    write_atomic(file.absolute(), raw)
    return len(raw)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(run: Run, chunks: list[str]) -> dict[str, Any]:
    names: dict[str, str] = {}
    lists: dict[str, Any] = {}
    ids: set[int] = set()
    for name in run.file_names():
        num = len(run.file(name).page())
        details = [run.trajectory(name, place, has_texts=False) for place in range(num)]
        for row in details:
            row["pictures"] = inlined(run.path, row)
        ids.update(i for row in details for span in row["spans"] for i in span["token_ids"])
        names[name] = f"chunk-{len(chunks)}"
        lists[name] = run.page(name)
        chunks.append(_chunk(names[name], details))
    return {
        "about": run.about(),
        "curves": run.curves(),
        "rows": lists,
        "chunks": names,
        "texts": run.vocabulary.texts(ids),
    }


def _packed_evaluation(
    evaluations: EvaluationCatalog,
    card: dict[str, Any],
    runs: dict[str, dict[str, Any]],
    chunks: list[str],
) -> dict[str, Any]:
    """Return an evaluation; of one on a run's schedule, the run has the trajectories already."""
    id, run = card["id"], runs.get(card["run"])
    samples = evaluations.page(id)
    about = {**card, "details": {}}
    if run is not None and (chunk := run["chunks"].get(evaluations.file_of(id))) is not None:
        return {"about": about, "samples": samples, "chunk": chunk, "texts": run["texts"]}
    num = len(samples["columns"]["task"])
    details = [evaluations.trajectory(id, place, has_texts=False) for place in range(num)]
    for row in details:
        row["pictures"] = inlined(evaluations.directory_of(id), row)
    ids = {i for row in details for span in row["spans"] for i in span["token_ids"]}
    name = f"chunk-{len(chunks)}"
    chunks.append(_chunk(name, details))
    texts = evaluations.texts(id, iter(ids))
    return {"about": about, "samples": samples, "chunk": name, "texts": texts}


def _chunk(name: str, details: list[dict[str, Any]]) -> str:
    text = json.dumps(details, ensure_ascii=False, separators=(",", ":"))
    packed = gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)
    data = base64.b64encode(packed).decode()
    return f'<script type="text/plain" id="{name}">{data}</script>'


def _inert(value: Any) -> str:
    # Nothing in a script element may end it.
    return to_json(value).replace("<", "\\u003c")


def _bundled() -> str:
    """Join all modules, each after those that it imports; their names do not clash."""
    static = resources.files("areal_gym.viewer").joinpath("static")
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = static.joinpath(f"{name}.js").read_text(encoding="utf-8")
        done[name] = ""
        for other in _IMPORT.findall(text):
            add(other)
        del done[name]
        done[name] = re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)

    add("app")
    return "\n".join(done.values())
