"""The command that does in a place what a task's solution does."""

from __future__ import annotations

import base64

from areal_gym.envs.harbor.archives import pack_folders
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep, resolved_env


def solution_command(task: HarborTask, step: TaskStep) -> str:
    """Return a shell command that does what the step's solution does."""
    assert step.solution is not None
    variables = resolved_env(task.toml.solution.env, f"{task.id}, solution.env")
    script = step.solution / "solve.sh"
    files = [path for path in step.solution.rglob("*") if path.is_file()]
    text = script.read_text("utf-8", "replace")
    first, _, rest = text.partition("\n")
    if files == [script] and not variables and first in ("#!/bin/sh", "#!/bin/bash"):
        return rest.strip()
    archive = base64.b64encode(pack_folders([step.solution])).decode()
    settings = " ".join(f"{name}={_quoted(value)}" for name, value in variables.items())
    return (
        f"mkdir -p /solution && printf %s {archive} | base64 -d | tar -xf - -C /solution && "
        f"{settings} /solution/solve.sh".strip()
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
