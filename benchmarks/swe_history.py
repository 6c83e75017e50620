"""Tasks from this project's own history: imported, solved by their commits, and left undone.

    python benchmarks/swe_history.py [--to DIR] [--only COMMIT]

Prints a row for each task: the reward of its commit's change (1), and of doing nothing (0).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_gym.envs.harbor.swe_import import SweImport, import_swe
from areal_gym.plugins import registry

ROOT = Path(__file__).parent.parent
COMMITS = (
    ("6432b17", "tests/config/test_config.py"),
    ("8ab6edb", "tests/envs/search/test_search_env.py"),
    ("623e682", "tests/utils/test_neighbour_modules.py"),
    ("ee28062", "tests/utils/test_garbage.py"),
    ("6bc06c8", "tests/envs/harbor/test_task_folder.py"),
    ("c9993a6", "tests/utils/test_code_references.py"),
    ("719b591", "tests/rollout/test_journal.py"),
    ("3f72283", "tests/rewards/test_reward_set.py"),
    ("048dcaf", "tests/utils/test_changed_elements.py"),
    ("a7d1aed", "tests/chat/test_templates.py"),
)
PACKAGES = (
    *("pytest", "hypothesis", "gymnasium", "pydantic", "pluggy", "platformdirs", "click", "rich"),
    *("PyYAML", "jinja2", "aiohttp", "tantivy", "fastjsonschema"),
)


async def reward_of(env: Any, index: int, *, is_solved: bool) -> float:
    """Play a task by its solution, or by saying at once that it is done; return the reward."""
    await env.areset(seed=0, options={"split": "train", "index": index})
    try:
        while True:
            action = env.gold_action() if is_solved else "Done."
            _, reward, terminated, truncated, _ = await env.astep(action)
            if terminated or truncated:
                return float(reward)
    finally:
        await env.aclose()


async def measure(folder: Path) -> tuple[float, float]:
    """Return the rewards of the task's solution and of nothing."""
    env = registry().make("envs", f"harbor:{folder}")
    return await reward_of(env, 0, is_solved=True), await reward_of(env, 0, is_solved=False)


async def main() -> int:
    """Import and play the tasks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, help="where the folders are kept")
    parser.add_argument("--only", default="", help="a commit")
    options = parser.parse_args()
    is_right = True
    with tempfile.TemporaryDirectory() as scratch:
        target = options.to or Path(scratch)
        print(f"{'commit':9} {'change':>6} {'nothing':>7} {'s':>5}  test")
        for commit, test in COMMITS:
            if not commit.startswith(options.only):
                continue
            wanted = SweImport(
                repository=ROOT,
                commit=commit,
                tests=(test,),
                packages=PACKAGES,
                name=f"own/{commit}-{Path(test.partition('::')[0]).stem}",
            )
            folder = import_swe(wanted, target)
            start = time.perf_counter()
            solved, nothing = await measure(folder)
            is_right &= (solved, nothing) == (1.0, 0.0)
            seconds = time.perf_counter() - start
            print(f"{commit:9} {solved:6g} {nothing:7g} {seconds:5.1f}  {test}", flush=True)
    return int(not is_right)


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
