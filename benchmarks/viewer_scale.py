"""How long the viewer takes to open many runs, and a large evaluation, in Chromium.

    python benchmarks/viewer_scale.py [--runs 2000] [--samples 100000] [--json]

The directories are made in a temporary folder: runs of 60 steps, and one evaluation with four
attempts at each task, whose trajectories are short. `first_s` is the time until the page shows
its first rows and how many there are, `all_s` until everything has been read. The server is a
process of its own and has read nothing before. Needs playwright and a Chromium
(AREAL_GYM_CHROMIUM, or `chromium` on the PATH).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from areal_gym.config import RunConfig
from areal_gym.utils.files import to_json

STEPS = 60
ATTEMPTS = 4
PAGES = {
    "runs": ("#/", ".run"),
    "evaluation": ("#/eval/large", ".samples .space .row"),
}


def metrics(step: int, rng: random.Random) -> dict[str, float]:
    """A line of metrics.jsonl as wide as those of a real run."""
    row: dict[str, float] = {"step": step, "reward/mean": min(1.0, step / 80 + rng.random() / 5)}
    return row | {f"group{i % 8}/metric_{i}": rng.gauss(0, 1) for i in range(60)}


def make_runs(root: Path, num: int) -> None:
    """Write the files that the list of runs reads."""
    rng = random.Random(0)
    config = RunConfig.model_validate({"steps": STEPS}).model_dump(mode="json")
    text = yaml.safe_dump(config, sort_keys=False)
    lines = "".join(to_json(metrics(step, rng)) + "\n" for step in range(1, STEPS + 1))
    for i in range(num):
        run = root / f"tir-sweep-{i:05d}"
        run.mkdir()
        (run / "config.yaml").write_text(text)
        (run / "metrics.jsonl").write_text(lines)
        (run / "evaluations.jsonl").write_text('{"step": 0, "sampled": {"pass@1": 0.25}}\n')
        (run / "summary.json").write_text(to_json({"num_steps": STEPS, "train_s": 60.0}))
        (run / "status.json").write_text(
            to_json(
                {
                    "state": "finished",
                    "started_at": "2026-01-02T03:04:05+00:00",
                    "updated_at": "2026-01-02T04:04:05+00:00",
                }
            )
        )


def make_evaluation(path: Path, num: int) -> None:
    """Write an evaluation as `areal-gym eval` does."""
    rng = random.Random(0)
    (path / "trajectories").mkdir(parents=True)
    offset, solved = 0, 0
    samples = (path / "samples.jsonl").open("w", encoding="utf-8")
    trajectories = (path / "trajectories" / "eval.jsonl").open("wb")
    with samples, trajectories:
        for i in range(num):
            index, attempt = divmod(i, ATTEMPTS)
            reward = float(rng.random() < (index % 10) / 10)
            solved += int(reward)
            line = (
                to_json({"id": f"eval-{index:06d}-{attempt}", "messages": [], "spans": []}) + "\n"
            ).encode()
            trajectories.write(line)
            row = {
                **{"index": index, "attempt": attempt, "task": f"test/{index}", "env": "math"},
                **{"reward": reward, "success": reward > 0, "parts": {"answer": reward}},
                **{"metrics": {"length": rng.random()}, "stop": "completed", "turns": 2},
                **{"tokens": rng.randrange(800), "seconds": round(rng.random() * 9, 4)},
                **{"error": None, "preview": "so the sum of the two numbers is 42 " * 3},
                **{"trajectory": f"eval-{index:06d}-{attempt}", "offset": offset},
                "bytes": len(line),
            }
            samples.write(to_json(row) + "\n")
            offset += len(line)
    share = solved / num
    facts: dict[str, Any] = {
        **{"env": "math", "split": "test", "policy": {"model": "starter"}, "agent": "chat"},
        **{"sampling": {"temperature": 1.0}, "seed": 0, "num_samples": ATTEMPTS},
        **{"num_tasks": -(-num // ATTEMPTS), "duration_s": 1.0},
        "scores": {"pass@1": share, "pass@1_low": share - 0.01, "pass@1_high": share + 0.01},
    }
    (path / "evaluation.json").write_text(to_json(facts))


def measure(root: Path, chromium: str, repeats: int) -> list[dict[str, Any]]:
    """Open each page in a fresh server and browser page; return the medians."""
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (place, selector) in PAGES.items():
            times = sorted(_open(browser, root, place, selector) for _ in range(repeats))
            first_s, all_s = times[len(times) // 2]
            rows.append({"page": name, "first_s": round(first_s, 2), "all_s": round(all_s, 2)})
        browser.close()
    return rows


def _open(browser: Any, root: Path, place: str, selector: str) -> tuple[float, float]:
    command = [sys.executable, "-m", "areal_gym", "view", str(root), "--no-browser", "--json"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        page = browser.new_page()
        try:
            start_s = time.perf_counter()
            page.goto(json.loads(text)["url"] + place)
            page.wait_for_selector(selector)
            first_s = time.perf_counter() - start_s
            still = "!/reading|…/.test(document.querySelector('.count').textContent)"
            while not page.evaluate(still):
                page.wait_for_timeout(10)
            return first_s, time.perf_counter() - start_s
        finally:
            page.close()
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    chromium = os.environ.get("AREAL_GYM_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.exit("no chromium here: apt-get install chromium, or AREAL_GYM_CHROMIUM")
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder), arguments.runs)
        make_evaluation(Path(folder) / "large", arguments.samples)
        rows = measure(Path(folder), chromium, arguments.repeats)
    if arguments.json:
        sizes = {"runs": arguments.runs, "samples": arguments.samples}
        print(json.dumps({**sizes, "pages": rows}))
        return
    print(
        f"{arguments.runs:,} runs of {STEPS} steps, an evaluation of {arguments.samples:,} samples"
    )
    print(f"{'page':<12}{'first rows':>12}{'all of it':>12}")
    for row in rows:
        print(f"{row['page']:<12}{row['first_s']:>10.2f} s{row['all_s']:>10.2f} s")


if __name__ == "__main__":
    main()
