"""`harbor:numbers-LEVEL`: a family of small task folders, generated into the cache.

Level 1 names the number that belongs in a file, level 2 an expression, and in level 3 a file has
one of the operands. Every task needs a shell only, so that any place can run it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from areal_gym.errors import UsageError
from areal_gym.utils.cache import cache_directory, readable_cache_errors

NUM_TASKS = 80
NUM_TEST_TASKS = 16
_VERSION = 1  # raised when the same name stands for other tasks
_NAME = re.compile(r"numbers-(\d+)")
_LEVELS = (1, 2, 3)
_TOML = """\
schema_version = "1.4"
artifacts = ["/app/answer"]

[task]
name = "areal-gym/{name}"
description = "Put a number into a file."

[environment]
network_mode = "no-network"
workdir = "/app"
memory_mb = 128

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0
environment_mode = "separate"
"""
_DOCKERFILE = """\
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
WORKDIR /app
COPY given /app/given
"""
_TEST = """\
#!/bin/sh
read -r answer < /app/answer
if [ "$answer" = {answer} ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def generated_tasks(name: str) -> Path | None:
    """Return the folder of the family `numbers-LEVEL`, made on first use; None for other names.

    Raises:
        UsageError: there is no such level.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).exists():
        return None
    level = int(match[1])
    if level not in _LEVELS:
        raise UsageError(f"{name}: levels are {', '.join(map(str, _LEVELS))}")
    folder = cache_directory() / "harbor" / f"{name}.{_VERSION}"
    if folder.is_dir():
        return folder
    with readable_cache_errors():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
        try:
            write_number_tasks(draft, level)
            draft.chmod(0o755)
            if not folder.is_dir():  # of another process, which was first
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_number_tasks(folder: Path, level: int, *, num_tasks: int = NUM_TASKS) -> None:
    """Write task folders with distinct questions, and the split that holds some of them out."""
    names: list[str] = []
    for question, command, answer, given in _questions(level, num_tasks):
        names.append(f"number-{level}-{len(names):03d}")
        files = {
            "task.toml": _TOML.format(name=names[-1]),
            "instruction.md": question + "\n",
            "environment/Dockerfile": _DOCKERFILE,
            "environment/given": given + "\n",
            "tests/test.sh": _TEST.format(answer=answer),
            "solution/solve.sh": f"#!/bin/sh\n{command}\n",
        }
        for name, text in files.items():
            file = folder / names[-1] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    num_test = min(NUM_TEST_TASKS, num_tasks // 5)
    splits = {"train": names[num_test:], "test": names[:num_test]}
    (folder / "splits.json").write_text(json.dumps(splits))


def _questions(level: int, num_tasks: int) -> Iterator[tuple[str, str, int, str]]:
    """Yield questions, commands that answer them, answers, and the text of the file `given`."""
    rng = random.Random(level)
    asked: set[str] = set()
    while len(asked) < num_tasks:
        a, b = rng.randrange(10, 100), rng.randrange(1, 10)
        question, command, answer, given = {
            1: (f"Put {a} into the file answer.", f"echo {a} > answer", a, ""),
            2: (f"Put {a}+{b} into the file answer.", f"echo $(({a}+{b})) > answer", a + b, ""),
            3: (
                f"Add {b} to the number in the file given; put the sum into the file answer.",
                f"read n < given; echo $((n+{b})) > answer",
                a + b,
                str(a),
            ),
        }[level]
        key = f"{question} {given}"
        if key not in asked:
            asked.add(key)
            yield question, command, answer, given
