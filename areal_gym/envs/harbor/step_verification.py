"""Verifies one step of a task: in a fresh place that no process of the agent has been in.

    collect hooks -> freeze the agent's place -> changed files and artifacts
                                                     |  (filtered: `archives`)
    fresh place: image, carried files, /tests -> test.sh -> freeze -> one read of the reward file

The agent never sees /tests, /solution or /logs/verifier. What it may have left running has ended
before anything is taken, and what its code leaves running in the fresh place before the reward is
read. Only `test.sh` gives a reward: without one that can be read, the episode has failed.
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_gym.envs.harbor.agent_files import LOGS, run_collect_hooks, take_from_agent
from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.archives import (
    MOST_CARRIED_MB,
    NEVER_CARRIED,
    CarriedFiles,
    is_within,
    pack_folders,
)
from areal_gym.envs.harbor.phases import START_S, TRANSFER_S, phase
from areal_gym.envs.harbor.reward_files import MOST_BYTES as MOST_REWARD_BYTES
from areal_gym.envs.harbor.reward_files import (
    REWARD_FILES,
    main_reward,
    parse_rewards,
    read_reward_file,
)
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep, resolved_env
from areal_gym.envs.harbor.task_images import place_image, place_limits, verifier_environment
from areal_gym.errors import SandboxError, TaskError
from areal_gym.places import CommandResult, Place, Places

Mode = Literal["fresh", "task", "shared"]
"""Where `test.sh` runs: in a fresh place; as the task says; in the agent's own place."""

_MOST_DIFFS = 12
_LOG_CHARS = 8_000
# Prints originals of files and removes paths, with nothing but what a place must have: a shell,
# and rm or python3.
_PREPARE = """\
count=$1; mark=$2; shift 2
while [ "$count" -gt 0 ]; do
  if [ -f "$1" ]; then cat -- "$1" 2>/dev/null; fi
  printf %s "$mark"; shift; count=$((count - 1))
done
[ $# = 0 ] && exit 0
if command -v rm >/dev/null 2>&1; then exec rm -rf -- "$@"; fi
exec python3 -I -c 'import os, shutil, sys
for path in sys.argv[1:]:
    if os.path.islink(path) or os.path.isfile(path):
        os.remove(path)
    elif os.path.isdir(path):
        shutil.rmtree(path)' "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one step's verification."""

    rewards: Mapping[str, float]
    log: str
    """The output of `test.sh`, cut in the middle."""
    diff: str = ""
    """The files that the agent changed, as a unified diff."""
    left_out: tuple[str, ...] = ()
    """Files of the agent that the verifier did not get, and why."""
    outside: tuple[str, ...] = ()
    """Paths that the agent changed and that are not carried, where that is known."""

    @property
    def reward(self) -> float:
        """The step's reward."""
        return main_reward(self.rewards)


def is_separate(step: TaskStep, mode: Mode) -> bool:
    """Return whether a step is verified in a place of the verifier's own."""
    return mode == "fresh" or (mode == "task" and step.verifier.is_separate)


async def verify(
    task: HarborTask,
    step: TaskStep,
    agent: AgentPlace | None,
    places: Places,
    *,
    mode: Mode = "fresh",
) -> Verdict:
    """Verify what the agent has left in its place; None: it has done nothing.

    The agent's place is frozen afterwards, and may be used for the next step.

    Raises:
        SandboxError: a place failed.
        TaskError: `test.sh` wrote no reward that can be read, or did not end in time.
    """
    if agent is not None:
        await run_collect_hooks(task, step, agent.place)
    if not is_separate(step, mode):
        place = None if agent is None else agent.place
        return await _verify_in_place(task, step, place, places)
    environment, folder, has_tests = verifier_environment(task, step)
    image = place_image(task, environment, folder)
    async with phase(task.id, "verifier start", limit_s=image.build_timeout_s + START_S):
        limits = place_limits(environment, received_mb=MOST_CARRIED_MB)
        starting = asyncio.ensure_future(places.start(image, limits))
        try:
            carried = None
            if agent is not None:
                carried = await take_from_agent(task, step, agent, is_same_image=not has_tests)
            fresh = await starting
        except BaseException:
            starting.cancel()
            starting.add_done_callback(_close_late)
            raise
    try:
        diff = "" if carried is None else await _hand_over(task, fresh, carried[0])
        verdict = await _run_tests(task, step, fresh, has_tests=has_tests)
    finally:
        await fresh.aclose()
    if carried is None:
        return verdict
    files, outside = carried
    return Verdict(
        rewards=verdict.rewards,
        log=verdict.log,
        diff=diff,
        left_out=tuple(files.left_out),
        outside=outside,
    )


def _close_late(starting: asyncio.Future[Place]) -> None:
    """Remove a place whose start could not be cancelled."""
    if not starting.cancelled() and starting.exception() is None:
        task = asyncio.ensure_future(starting.result().aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[None]] = set()


async def _verify_in_place(
    task: HarborTask, step: TaskStep, place: Place | None, places: Places
) -> Verdict:
    """Verify in the agent's own place, which the agent may have prepared for it."""
    own = None
    if place is None:
        image = place_image(task, task.environment, task.image_folder)
        async with phase(task.id, "start", limit_s=image.build_timeout_s + START_S):
            place = own = await places.start(image, place_limits(task.environment))
    try:
        verdict = await _run_tests(task, step, place, has_tests=False)
        if own is None:
            await _prepare(task, place, removed=("/tests", "/logs/verifier"))
        return verdict
    finally:
        if own is not None:
            await own.aclose()


# ---- in the fresh place --------------------------------------------------------------------------


async def _hand_over(task: HarborTask, fresh: Place, files: CarriedFiles) -> str:
    """Put what is carried into the fresh place; return the differences from what was there."""
    archive = files.finish()
    shown = sorted(files.texts)[:_MOST_DIFFS]
    gone = [path for path in files.removed if not any(is_within(path, p) for p in NEVER_CARRIED)]
    originals = await _prepare(task, fresh, shown=shown, removed=gone)
    async with phase(task.id, "artifacts", limit_s=TRANSFER_S):
        if files.num_files:
            await fresh.put(archive, "/")
    diffs = [
        _diff(path, original, files.texts[path])
        for path, original in zip(shown, originals, strict=True)
    ]
    more = len(files.texts) - len(shown)
    return "".join(diffs) + (f"... and {more} more files\n" if more else "")


def _diff(path: str, before: str, after: str) -> str:
    if "\0" in before + after or before == after:
        return ""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        after.splitlines(keepends=True),
        fromfile=path if before else "/dev/null",
        tofile=path,
    )
    return cut_middle(
        "".join(line if line.endswith("\n") else line + "\n" for line in lines), 4_000
    )


async def _prepare(
    task: HarborTask, place: Place, *, shown: Sequence[str] = (), removed: Sequence[str] = ()
) -> list[str]:
    """Return the texts of files in a place, and remove paths there."""
    if not shown and not removed:
        return []
    mark = f"--{secrets.token_hex(16)}--"
    argv = ["/bin/sh", "-c", _PREPARE, "sh", str(len(shown)), mark, *shown, *removed]
    async with phase(task.id, "verifier setup", limit_s=TRANSFER_S):
        result = await place.run(argv, user=0, cwd="/", timeout_s=TRANSFER_S)
        if result.exit_code != 0:
            raise SandboxError(f"the fresh place was not prepared: {_last_line(result)}")
    texts = result.stdout.decode("utf-8", "replace").split(mark)[:-1]
    return [*texts, *[""] * (len(shown) - len(texts))]


async def _run_tests(task: HarborTask, step: TaskStep, place: Place, *, has_tests: bool) -> Verdict:
    """Run `test.sh` and read the reward file after all processes have ended."""
    verifier = step.verifier
    async with phase(task.id, "tests upload", limit_s=TRANSFER_S):
        owner = await _user_id(place, verifier.user)
        stale = list(REWARD_FILES) if has_tests else ["/tests", *REWARD_FILES]
        await _prepare(task, place, removed=stale)
        folders = [("/logs", 0o755, 0), (LOGS, 0o777, 0), ("/logs/verifier", 0o700, owner)]
        if not has_tests:
            folders.append(("/tests", 0o755, 0))
        tests = () if has_tests else step.tests
        await place.put(pack_folders(tests, prefix="tests", directories=folders), "/")
    async with phase(task.id, "verifier"):
        result = await place.run(
            ["/bin/sh", "-c", "/tests/test.sh"],
            env=resolved_env(verifier.env, f"{task.id}, verifier.env"),
            user=verifier.user,
            timeout_s=verifier.timeout_sec,
        )
        if result.is_timed_out:
            raise TaskError(
                f"test.sh took more than {verifier.timeout_sec:g} s (verifier.timeout_sec)"
            )
    async with phase(task.id, "reward", limit_s=TRANSFER_S):
        await place.freeze()
        rewards = await _rewards(place, result)
    log = (result.stdout + result.stderr).decode("utf-8", "replace")
    return Verdict(rewards=rewards, log=cut_middle(log.strip(), _LOG_CHARS))


async def _rewards(place: Place, result: CommandResult) -> dict[str, float]:
    for path in REWARD_FILES:
        raw = await place.take([path], max_bytes=MOST_REWARD_BYTES + (1 << 14))
        text = read_reward_file(raw, path)
        if text is not None:
            return parse_rewards(text, path)
    raise TaskError(
        f"test.sh wrote neither reward.json nor reward.txt to /logs/verifier; it ended with code "
        f"{result.exit_code}: {_last_line(result)}"
    )


async def _user_id(place: Place, user: str | int | None) -> int:
    """Return the number of a user of the place."""
    if user is None or user in ("root", "0", 0):
        return 0
    if isinstance(user, int) or user.partition(":")[0].isdigit():
        return int(str(user).partition(":")[0])
    name = user.partition(":")[0]
    result = await place.run(["/bin/sh", "-c", "cat /etc/passwd"], user=0, timeout_s=30.0)
    for line in result.stdout.decode("utf-8", "replace").splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[0] == name and fields[2].isdigit():
            return int(fields[2])
    raise SandboxError(f"the image has no user {name!r} (verifier.user)")


def _last_line(result: CommandResult) -> str:
    lines = (result.stdout + b"\n" + result.stderr).decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:400] if lines else "no output"


def cut_middle(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters: its head and its tail."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 2], text[-(limit - limit // 2) :]
    return f"{head}\n... ({len(text) - limit:,} characters left out) ...\n{tail}"
