"""Files that an agent leaves behind: read from its frozen place, and filtered."""

from __future__ import annotations

import posixpath

from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.archives import MOST_BYTES, CarriedFiles, is_within
from areal_gym.envs.harbor.phases import TRANSFER_S, phase
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep
from areal_gym.envs.harbor.task_toml import Artifact
from areal_gym.errors import TaskError
from areal_gym.places import Place

LOGS = "/logs/artifacts"
"""The folder whose contents are artifacts of every task."""
_MOST_TAKES = 64


async def run_collect_hooks(task: HarborTask, step: TaskStep, place: Place) -> None:
    """Run the hooks that write state into files; one that fails has written nothing."""
    for hook in step.verifier.collect:
        async with phase(task.id, "collect"):
            await place.run(
                ["/bin/sh", "-c", hook.command], user=hook.user, timeout_s=hook.timeout_sec
            )


async def take_from_agent(
    task: HarborTask, step: TaskStep, agent: AgentPlace, *, is_same_image: bool
) -> tuple[CarriedFiles, tuple[str, ...]]:
    """End all processes of the agent's place; return what is carried, and what else changed."""
    artifacts = [*step.artifacts, Artifact(source=LOGS)]
    roots = [posixpath.normpath(artifact.source) for artifact in artifacts]
    if not step.verifier.is_separate:
        roots.append(require_own_folder(task, agent.workdir))
    place = agent.place
    async with phase(task.id, "artifacts", limit_s=TRANSFER_S):
        await place.freeze()
        changes = await place.changes()
        written = [p for p in changes.written if any(_touches(p, root) for root in roots)]
        removed = [p for p in changes.removed if any(is_within(p, root) for root in roots)]
        files = CarriedFiles(artifacts, written=frozenset(written))
        if is_same_image:
            # A root below a written folder is taken by itself, and not the whole folder.
            sources = [
                (p if is_within(p, root) else root, root)
                for p in written
                for root in roots
                if _touches(p, root)
            ]
            sources = list({source: (source, root) for source, root in sources}.values())
            if len(sources) > _MOST_TAKES:
                sources = [(root, root) for root in roots]
        else:
            files.written = None
            sources = [(root, root) for root in roots]
            removed += roots
        files.removed = tuple(removed)
        for source, root in sources:
            files.add(await place.take([source], max_bytes=MOST_BYTES + (1 << 20)), root)
    outside = [
        path
        for path in (*changes.written, *changes.removed)
        if not any(_touches(path, root) for root in (*roots, *_UNTOLD))
    ]
    return files, tuple(outside)


_UNTOLD = ("/logs", "/tmp", "/proc", "/dev", "/root", "/run", "/solution")


def _touches(path: str, root: str) -> bool:
    return is_within(path, root) or is_within(root, path)


def require_own_folder(task: HarborTask, workdir: str) -> str:
    """Return the working directory, whose changes are carried; raise TaskError for the root."""
    if workdir == "/":
        raise TaskError(
            f"{task.id}, artifacts: the working directory is /, and what the agent changes is "
            "carried to the verifier from a folder",
            hints=[
                'name it in task.toml: environment.workdir = "/app", or WORKDIR in the Dockerfile',
                "or declare artifacts, with verifier.environment_mode = 'separate'",
            ],
        )
    return workdir
