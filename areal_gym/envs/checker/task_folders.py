"""Checks task folders: what `areal-gym check harbor:PATH` proves of each task, with real places.

The oracle earns 1 and doing nothing 0; the task's own cheat, and ours, earn what doing nothing
earns. A task that fails here would teach a policy to cheat, or nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_gym.envs.checker.env_under_test import RuleResult, RuleViolation, Skipped
from areal_gym.envs.checker.task_cheats import CHEATS, forging_archive
from areal_gym.envs.checker.task_walls import require_hidden, require_walls
from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.archives import pack_folders
from areal_gym.envs.harbor.number_tasks import generated_tasks
from areal_gym.envs.harbor.phases import TRANSFER_S, phase
from areal_gym.envs.harbor.reward_files import combined, passes
from areal_gym.envs.harbor.step_verification import Mode, Verdict, verify
from areal_gym.envs.harbor.task_datasets import find_tasks
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep, resolved_env
from areal_gym.envs.harbor.task_images import place_image
from areal_gym.envs.loops import run_on_kept_loop
from areal_gym.errors import EpisodeError, GymError, NothingToDoError
from areal_gym.places import Places
from areal_gym.places.shared_places import shared_places
from areal_gym.plugins import EnvSpec, Spec

Report = dict[str, list[RuleResult]]
_SOLVE_S = 900.0
_AT_ONCE = 64


@dataclass
class _TaskUnderTest:
    """One task, the backend that plays it, and what earlier rules measured."""

    task: HarborTask
    places: Places
    mode: Mode
    nothing: float | None = None
    """What doing nothing earns in the first step."""
    is_solved: bool = False
    """Whether the oracle earned the full reward."""
    outside: set[str] = field(default_factory=set)
    """Paths that the solution changed and that no verifier gets."""


def is_of_task_folders(spec: Spec) -> bool:
    """Return whether an environment plays task folders, which are checked one by one."""
    return isinstance(spec, EnvSpec) and spec.entry_point.endswith(":HarborEnv")


def check_task_folders(
    spec: Spec,
    settings: Mapping[str, Any],
    *,
    num_tasks: int,
    num_concurrent: int,
    started: Callable[[str], None] | None = None,
) -> Report:
    """Return the rules of each task of a data set, by task; a folder's problems are a rule, too.

    Args:
        spec: the environment `harbor:PATH`; `settings` override its arguments.
        num_tasks: how many tasks are played, the first by name.
        num_concurrent: how many solutions are verified at once at the end; 64 at most.
        started: told the name of each task before it is checked.
    """
    assert isinstance(spec, EnvSpec)
    kwargs = {**spec.kwargs, **settings}
    path = str(kwargs.get("path", ""))
    folders = find_tasks(generated_tasks(path) or path, dataset=kwargs.get("dataset"))
    report: Report = {
        folder: [_result(_parses, False, f"{error.message}; {'; '.join(error.hints)}".strip("; "))]
        for folder, error in folders.problems
    }
    tasks = folders.tasks[:num_tasks]
    if not tasks and not report:
        raise NothingToDoError(f"{path} has no task that can be checked")
    if tasks:
        report |= run_on_kept_loop(
            _check_all(spec.id, tasks, kwargs, min(num_concurrent, _AT_ONCE), started)
        )
    return report


async def _check_all(
    env_id: str,
    tasks: tuple[HarborTask, ...],
    kwargs: Mapping[str, Any],
    num_concurrent: int,
    started: Callable[[str], None] | None,
) -> Report:
    given = kwargs.get("places", "local")
    if isinstance(given, str):
        given = shared_places(given, **kwargs.get("places_kwargs") or {})
    report: Report = {}
    subjects = []
    for task in tasks:
        if started is not None:
            started(task.id)
        subject = _TaskUnderTest(task, given, kwargs.get("verifier", "fresh"))
        report[task.id] = [await _checked(rule, subject) for rule in _RULES]
        subjects.append(subject)
    solved = [subject for subject in subjects if subject.is_solved]
    if solved and num_concurrent > 1:
        report[env_id] = [await _together(solved, num_concurrent)]
    return report


_Rule = Callable[[_TaskUnderTest], Awaitable[str | None]]


async def _checked(rule: _Rule, subject: _TaskUnderTest) -> RuleResult:
    try:
        measured = await rule(subject)
    except Skipped as skipped:
        return _result(rule, True, f"skipped: {skipped}")
    except RuleViolation as broken:
        return _result(rule, False, str(broken))
    except GymError as error:
        return _result(rule, False, str(error))
    return _result(rule, True, measured=measured or "")


def _result(rule: Any, is_ok: bool, reason: str = "", measured: str = "") -> RuleResult:
    return RuleResult(
        rule=rule.__name__.strip("_"),
        summary=(rule.__doc__ or "").strip().removesuffix("."),
        is_ok=is_ok,
        reason=reason,
        measured=measured,
    )


# ---- rules ---------------------------------------------------------------------------------------


async def _parses(subject: _TaskUnderTest) -> str:
    """The folder is complete, and asks for nothing that is not done."""
    return "; ".join(subject.task.notes)


async def _image(subject: _TaskUnderTest) -> str:
    """The image builds, and the same files have the same key."""
    task = subject.task
    image = place_image(task, task.environment, task.image_folder)
    async with phase(task.id, "build"):
        key = await subject.places.build(image)
        if image.folder is None:
            return key
        with tempfile.TemporaryDirectory() as copy:
            folder = Path(copy) / "environment"
            await asyncio.to_thread(shutil.copytree, image.folder, folder, symlinks=True)
            again = await subject.places.build(place_image(task, task.environment, folder))
    if again != key:
        raise RuleViolation(f"a copy of the folder has the key {again}, not {key}")
    return key[:32]


async def _oracle(subject: _TaskUnderTest) -> str:
    """The solution earns the full reward, 1, in every step."""
    if all(step.solution is None for step in subject.task.steps):
        raise Skipped("there is no solution/solve.sh")
    verdicts = await _solve(subject)
    task = subject.task
    for step, verdict in zip(task.steps, verdicts, strict=False):
        where = f"step {step.name}: " if step.name else ""
        outside = ", ".join(sorted(subject.outside)[:3])
        why = f"; it changes what no verifier gets: {outside}" if outside else ""
        if verdict.reward < 1.0:
            raise RuleViolation(
                f"{where}the solution earns {verdict.reward:g}{why}; test.sh: {verdict.log[-300:]}"
            )
        if not passes(verdict.rewards, step.min_reward):
            raise RuleViolation(f"{where}the solution is below min_reward")
    subject.is_solved = len(verdicts) == len(task.steps)
    total = combined(
        [verdict.rewards for verdict in verdicts], task.toml.multi_step_reward_strategy
    )
    return f"reward {total:g}"


async def _nothing(subject: _TaskUnderTest) -> str:
    """Doing nothing earns 0."""
    verdict = await verify(
        subject.task, subject.task.steps[0], None, subject.places, mode=subject.mode
    )
    subject.nothing = verdict.reward
    if verdict.reward != 0:
        raise RuleViolation(f"doing nothing earns {verdict.reward:g}")
    return "reward 0"


async def _repeatable(subject: _TaskUnderTest) -> str:
    """A second verification of the same files gives the same rewards."""
    _require_solved(subject)
    step = subject.task.steps[0]
    async with _AgentAt(subject, step) as agent:
        await solve_step(subject.task, step, agent)
        first, second = [
            await verify(subject.task, step, agent, subject.places, mode=subject.mode)
            for _ in range(2)
        ]
    if first.rewards != second.rewards:
        raise RuleViolation(f"{dict(first.rewards)}, and then {dict(second.rewards)}")
    return ""


async def _hidden(subject: _TaskUnderTest) -> str:
    """Tests, solution and verdicts are not in the agent's container."""
    async with _AgentAt(subject, subject.task.steps[0]) as agent:
        return await require_hidden(subject.task, agent)


async def _network(subject: _TaskUnderTest) -> str:
    """The gateway's port is reached from inside, and nothing else."""
    async with _AgentAt(subject, subject.task.steps[0]) as agent:
        return await require_walls(agent.place)


async def _own_cheat(subject: _TaskUnderTest) -> str:
    """The task's cheat/solve.sh earns what doing nothing earns."""
    folder = subject.task.cheat
    if folder is None:
        raise Skipped("there is no cheat/solve.sh")

    async def cheat(agent: AgentPlace) -> None:
        await run_script(subject.task, subject.task.steps[0], agent, folder, "/cheat")

    return await _require_worthless(subject, {"cheat/solve.sh": cheat})


async def _forged_rewards(subject: _TaskUnderTest) -> str:
    """Rewards written at once, a background writer and planted files earn what nothing earns."""

    def run(script: str) -> Callable[[AgentPlace], Awaitable[None]]:
        async def cheat(agent: AgentPlace) -> None:
            step = subject.task.steps[0]
            await agent.place.run(["/bin/sh", "-c", script], user=step.agent.user, timeout_s=60.0)

        return cheat

    return await _require_worthless(subject, {name: run(text) for name, text in CHEATS.items()})


async def _forging_code(subject: _TaskUnderTest) -> str:
    """Code of the agent that tests run cannot write the reward, nor end them well by exiting."""
    _require_solved(subject)
    step = subject.task.steps[0]
    async with _AgentAt(subject, step) as agent:
        await solve_step(subject.task, step, agent)
        archive, names = await forging_archive(subject.task, step, agent)
        if not names:
            raise Skipped("the solution leaves no code behind")
        await agent.place.put(archive, "/")
        try:
            verdict = await verify(subject.task, step, agent, subject.places, mode=subject.mode)
        except EpisodeError:
            return "no reward"  # such an episode is not trained on
    _require_no_more(subject, f"code in {', '.join(names[:3])} that forges the reward", verdict)
    return f"{len(names)} files"


_RULES: tuple[_Rule, ...] = (
    *(_parses, _image, _hidden, _network, _oracle, _nothing, _repeatable),
    *(_own_cheat, _forged_rewards, _forging_code),
)


async def _together(subjects: list[_TaskUnderTest], num_concurrent: int) -> RuleResult:
    """Solutions that are verified at once earn what each earns alone."""

    async def solve(subject: _TaskUnderTest) -> str:
        try:
            verdicts = await _solve(subject)
        except EpisodeError as error:
            return str(error)
        is_right = all(verdict.reward >= 1.0 for verdict in verdicts)
        return "" if is_right else f"{subject.task.id} earns less"

    many = [subjects[number % len(subjects)] for number in range(num_concurrent)]
    start_s = asyncio.get_running_loop().time()
    failures = [text for text in await asyncio.gather(*map(solve, many)) if text]
    elapsed_s = asyncio.get_running_loop().time() - start_s
    measured = f"{num_concurrent} at once, {num_concurrent / elapsed_s:.1f} a second"
    reason = f"{len(failures)} of {num_concurrent} fail: {failures[0]}" if failures else ""
    return _result(_together, not failures, reason, measured)


# ---- playing -------------------------------------------------------------------------------------


class _AgentAt:
    """An agent's place at the beginning of a step, which is removed at the end."""

    def __init__(self, subject: _TaskUnderTest, step: TaskStep) -> None:
        self._subject = subject
        self._number = subject.task.steps.index(step)
        self._agent = AgentPlace(subject.task)

    async def __aenter__(self) -> AgentPlace:
        try:
            await self._agent.start(self._subject.places, self._number)
        except BaseException:
            await self._agent.aclose()
            raise
        return self._agent

    async def __aexit__(self, *error: object) -> None:
        await self._agent.aclose()


async def _solve(subject: _TaskUnderTest) -> list[Verdict]:
    """Play the solution of all steps; stop at one that is not passed."""
    task = subject.task
    verdicts: list[Verdict] = []
    async with _AgentAt(subject, task.steps[0]) as agent:
        for step in task.steps:
            if verdicts:
                await agent.begin(step)
            await solve_step(task, step, agent)
            verdicts.append(await verify(task, step, agent, subject.places, mode=subject.mode))
            subject.outside.update(verdicts[-1].outside)
            if verdicts[-1].reward < 1.0 or not passes(verdicts[-1].rewards, step.min_reward):
                break
    return verdicts


async def solve_step(task: HarborTask, step: TaskStep, agent: AgentPlace) -> None:
    """Run a step's solution in the agent's place, as its user."""
    if step.solution is not None:
        await run_script(task, step, agent, step.solution, "/solution")


async def run_script(
    task: HarborTask, step: TaskStep, agent: AgentPlace, folder: Path, target: str
) -> None:
    """Copy a folder into the agent's place and run its `solve.sh`."""
    async with phase(task.id, folder.name, limit_s=_SOLVE_S + TRANSFER_S):
        await agent.place.put(pack_folders([folder]), target)
        await agent.place.run(
            ["/bin/sh", "-c", f"{target}/solve.sh"],
            env=resolved_env(task.toml.solution.env, f"{task.id}, solution.env"),
            user=step.agent.user,
            timeout_s=step.agent.timeout_sec or _SOLVE_S,
        )


async def _require_worthless(
    subject: _TaskUnderTest, cheats: Mapping[str, Callable[[AgentPlace], Awaitable[None]]]
) -> str:
    task, step = subject.task, subject.task.steps[0]
    for name, cheat in cheats.items():
        async with _AgentAt(subject, step) as agent:
            await cheat(agent)
            try:
                verdict = await verify(task, step, agent, subject.places, mode=subject.mode)
            except EpisodeError:
                continue  # no reward at all: such an episode is not trained on
        _require_no_more(subject, name, verdict)
    return ", ".join(cheats)


def _require_no_more(subject: _TaskUnderTest, name: str, verdict: Verdict) -> None:
    nothing = subject.nothing or 0.0
    if verdict.reward > nothing:
        raise RuleViolation(f"{name} earns {verdict.reward:g}, and doing nothing {nothing:g}")


def _require_solved(subject: _TaskUnderTest) -> None:
    if not subject.is_solved:
        raise Skipped("the solution does not earn 1")
