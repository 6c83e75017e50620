"""Does an environment keep the contract? `areal-gym check ENV`, and the test of every built-in.

    results = check_env("tir")                  # or a TextEnv class, or a function that makes one
    assert all(result.is_ok for result in results), results

A gold policy must earn the full reward, 1; a policy that does nothing must not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from areal_gym.envs.base import StepResult, TextEnv, run_on_kept_loop
from areal_gym.plugins import EnvSpec, registry
from areal_gym.types import content_hash

__all__ = ["HOSTILE_ACTIONS", "RuleResult", "check_env", "play"]

_MAX_STEPS = 1_000
_NUM_CONCURRENT = 64

HOSTILE_ACTIONS: Mapping[str, str] = {
    "empty": "",
    "blank": " \n\t",
    "one megabyte": "x" * 2**20,
    "one megabyte of boxes": "\\boxed{" * (2**20 // 7),
    "NUL": "a\0b",
    "a lone surrogate": "\ud800 \\boxed{\udfff}",
    "Unicode": "\u202e\U0001f600\u0301 \\boxed{\u0661\u0662} \uff15",
    "broken JSON": '<tool_call>\n{"name": "python", "arguments": {"code": \n</tool_call>',
    "an unclosed call": '<tool_call>{"name": "python", "arguments": {}}',
    "nested tags": "<tool_call>" * 100 + "{}" + "</tool_call>" * 100,
    "deep JSON": "<tool_call>" + "[" * 100_000 + "</tool_call>",
    "a call of nothing": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "an unknown tool": '<tool_call>{"name": "rm", "arguments": {"path": "/"}}</tool_call>',
    "a wrong type": '<tool_call>{"name": "python", "arguments": {"code": 5}}</tool_call>',
    "arguments that are a list": '<tool_call>{"name": "python", "arguments": [1]}</tool_call>',
    "NUL in a call": '<tool_call>{"name": "python", "arguments": {"code": "\\u0000"}}</tool_call>',
    "a surrogate in a call": (
        '<tool_call>{"name": "python", "arguments": {"code": "print(\'\\ud800\')"}}</tool_call>'
    ),
    "a flood of calls": '<tool_call>{"name": "x", "arguments": {}}</tool_call>' * 2_000,
    "a number without end": "\\boxed{" + "9" * 100_000 + "}",
    "a tower of powers": "\\boxed{9^{9^{9^{9^{9}}}}}",
    "a huge exponent": "\\boxed{1e999999999}",
    "special tokens": "<|im_end|>\n<|im_start|>user\n\\boxed{1}",
}  # fmt: skip
"""What a policy may write at its worst, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleResult:
    """One rule of the contract, and whether the environment keeps it."""

    rule: str
    summary: str
    """What the rule asks, for people."""
    is_ok: bool
    reason: str = ""
    """Why not; or why the rule was skipped."""


class _Broken(Exception):
    """A rule is broken; the text says how."""


class _Skipped(Exception):
    """A rule cannot be checked here; the text says why."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is being checked."""

    make: Callable[[], TextEnv]
    num_tasks: int
    entry_point: str | None
    """Where another process imports it from; None when it cannot."""
    kwargs: Mapping[str, Any]

    def splits(self, split: str) -> range:
        known = self.make().num_tasks(split)
        return range(self.num_tasks if known is None else min(self.num_tasks, known))


def check_env(
    env: str | type[TextEnv] | Callable[[], TextEnv],
    *,
    num_tasks: int = 16,
    kwargs: Mapping[str, Any] | None = None,
) -> list[RuleResult]:
    """Check every rule; one that breaks does not keep the others from being checked.

    Args:
        env: a registered id, a class, or a function without arguments that makes one.
        num_tasks: how many tasks each rule plays.
        kwargs: arguments of the class.

    Raises:
        UnknownIdError: there is no such environment; besides what making it raises.
    """
    subject = _subject(env, num_tasks, kwargs or {})
    subject.make().close()
    results = []
    for name, rule in _RULES.items():
        summary = (rule.__doc__ or "").strip().removesuffix(".")
        is_ok, reason = True, ""
        try:
            rule(subject)
        except _Skipped as skipped:
            reason = f"skipped: {skipped}"
        except _Broken as broken:
            is_ok, reason = False, str(broken)
        except Exception as error:  # whatever it raises, it is the environment's
            is_ok, reason = False, f"{type(error).__name__}: {error}"
        results.append(RuleResult(rule=name, summary=summary, is_ok=is_ok, reason=reason))
    return results


def _subject(
    env: str | type[TextEnv] | Callable[[], TextEnv], num_tasks: int, kwargs: Mapping[str, Any]
) -> _Subject:
    if isinstance(env, str):
        spec = registry().get("envs", env).spec
        assert isinstance(spec, EnvSpec)
        entry_point: str | None = spec.entry_point
        kwargs = {**spec.kwargs, **kwargs}
        return _Subject(
            lambda: registry().make("envs", env, **kwargs), num_tasks, entry_point, kwargs
        )
    entry_point = None
    if (
        isinstance(env, type)
        and "<locals>" not in env.__qualname__
        and env.__module__ != "__main__"
    ):
        entry_point = f"{env.__module__}:{env.__qualname__}"
    return _Subject(lambda: env(**kwargs), num_tasks, entry_point, kwargs)


# ---- playing ------------------------------------------------------------------------------------


def play(
    env: TextEnv,
    policy: Callable[[TextEnv], str],
    *,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[StepResult]:
    """Play one episode with a policy that sees the environment itself; its steps."""
    env.reset(seed=seed, options=options)
    steps: list[StepResult] = []
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step(policy(env)))
        _check_length(steps)
    return steps


async def _play_async(
    env: TextEnv, policy: Callable[[TextEnv], str], seed: int
) -> list[StepResult]:
    env.reset(seed=seed)
    steps: list[StepResult] = []
    while not steps or not (steps[-1].terminated or steps[-1].truncated):
        steps.append(await env.astep(policy(env)))
        _check_length(steps)
    await env.aclose()
    return steps


def _check_length(steps: Sequence[StepResult]) -> None:
    if len(steps) > _MAX_STEPS:
        raise _Broken(f"an episode does not end within {_MAX_STEPS} steps")


def _gold(env: TextEnv) -> str:
    return env.gold_action()


def _noop(env: TextEnv) -> str:
    return env.noop_action()


def _total(steps: Sequence[StepResult]) -> float:
    return sum(step.reward for step in steps)


def _digest(make: Callable[[], TextEnv], seeds: range) -> str:
    """A hash of all that gold and noop policies see."""
    env = make()
    seen: list[Any] = []
    for seed in seeds:
        for policy in (_gold, _noop):
            observation, info = env.reset(seed=seed)
            seen.append([observation, info, *play(env, policy, seed=seed)])
    env.close()
    return content_hash(json.loads(json.dumps(seen, default=repr)))


# ---- the rules ----------------------------------------------------------------------------------


def _check_gymnasium(subject: _Subject) -> None:
    """Gymnasium's own checker passes."""
    from gymnasium.utils.env_checker import check_env as check_gymnasium

    env = subject.make()
    env.action_space.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Its render check makes the environment anew by its Gymnasium id, which a class has not.
        check_gymnasium(env, skip_render_check=True)
    if not isinstance(env.render(), str):
        raise _Broken("render() gives no text")
    if caught:
        raise _Broken("; ".join(str(warning.message) for warning in caught))


def _check_documented(subject: _Subject) -> None:
    """The class says in its docstring what it is about."""
    env = subject.make()
    if not (type(env).__doc__ or "").strip():
        raise _Broken(f"{type(env).__name__} has no docstring")


def _check_deterministic(subject: _Subject) -> None:
    """The same seed and actions give the same episode."""
    seeds = range(min(subject.num_tasks, 8))
    if _digest(subject.make, seeds) != _digest(subject.make, seeds):
        raise _Broken("two instances differ; draw from self.np_random and nowhere else")


def _check_processes(subject: _Subject) -> None:
    """Other processes, with other hash seeds, play the same episodes."""
    if subject.entry_point is None:
        raise _Skipped("no other process can import it")
    seeds = range(min(subject.num_tasks, 4))
    argument = json.dumps([subject.entry_point, dict(subject.kwargs), len(seeds)])
    code = "import sys; from areal_gym.envs.checker import _main; _main(sys.argv[1])"
    here = _digest(subject.make, seeds)
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", code, argument],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if process.returncode != 0:
            raise _Broken(f"another process fails: {process.stderr.strip()[-300:]}")
        if process.stdout.strip() != here:
            raise _Broken("another process plays other episodes; is a set or hash() involved?")


def _check_gold(subject: _Subject) -> None:
    """The gold policy earns the full reward, 1."""
    for env, split, index in _episodes(subject):
        total = _total(play(env, _gold, options={"split": split, "index": index}))
        if not math.isclose(total, 1.0):
            raise _Broken(f"task {env.task.id}: gold earns {total:g}")


def _check_noop(subject: _Subject) -> None:
    """The noop policy does not earn the full reward."""
    for env, split, index in _episodes(subject):
        total = _total(play(env, _noop, options={"split": split, "index": index}))
        if total >= 1.0:
            raise _Broken(f"task {env.task.id}: doing nothing earns {total:g}")


def _check_hostile(subject: _Subject) -> None:
    """Hostile actions are answered, not rewarded, and crash nothing."""
    env = subject.make()
    for name, action in HOSTILE_ACTIONS.items():
        env.reset(seed=0)
        try:
            step = env.step(action)
        except Exception as error:
            raise _Broken(f"{name}: {type(error).__name__}: {error}") from error
        if not math.isfinite(step.reward) or step.reward >= 1.0:
            raise _Broken(f"{name}: the reward is {step.reward}")
        if not all(isinstance(message["content"], str) for message in step.info["messages"]):
            raise _Broken(f"{name}: a message's content is no text")
    env.close()


def _check_splits(subject: _Subject) -> None:
    """Indexes name distinct tasks, and no test task occurs in training."""
    env = subject.make()
    seen: dict[str, dict[str, str]] = {}
    for split in ("train", "test"):
        seen[split] = {}
        indexes = subject.splits(split)
        for index in indexes:
            _, info = env.reset(options={"split": split, "index": index})
            seen[split][_question(info)] = info["task_id"]
            if info["task"]["split"] != split:
                raise _Broken(f"task {info['task_id']} says split {info['task']['split']!r}")
        if len(seen[split]) < len(indexes) or len(set(seen[split].values())) < len(indexes):
            raise _Broken(f"split {split!r}: two indexes name the same task")
    drawn = set(seen["train"])
    for seed in range(4 * subject.num_tasks):
        drawn.add(_question(env.reset(seed=seed, options={"split": "train"})[1]))
    shared = drawn & set(seen["test"])
    if shared:
        raise _Broken(f"{len(shared)} tasks are in both splits, such as {min(shared)!r}")


def _check_tasks(subject: _Subject) -> None:
    """Tasks are handed around and played without being changed."""
    env = subject.make()
    _, info = env.reset(seed=0)
    given = info["task"]
    before = content_hash(given)
    play(env, _gold, options={"task": given})
    if content_hash(given) != before or content_hash(env.task.to_dict()) != before:
        raise _Broken("the task is another one after it was played")
    _, again = env.reset(options={"task": given})
    if again["messages"] != info["messages"]:
        raise _Broken("the same task opens with other messages")


def _check_concurrent(subject: _Subject) -> None:
    """Many episodes at once play as each of them alone."""
    seeds = range(_NUM_CONCURRENT)

    async def play_all() -> list[list[StepResult]]:
        return await asyncio.gather(*(_play_async(subject.make(), _gold, s) for s in seeds))

    together = run_on_kept_loop(play_all())
    env = subject.make()
    for seed in range(min(subject.num_tasks, 8)):
        if play(env, _gold, seed=seed) != together[seed]:
            raise _Broken(f"seed {seed} plays differently; is state shared between instances?")


_RULES: Mapping[str, Callable[[_Subject], None]] = {
    "gymnasium": _check_gymnasium,
    "documented": _check_documented,
    "deterministic": _check_deterministic,
    "processes": _check_processes,
    "gold": _check_gold,
    "noop": _check_noop,
    "hostile": _check_hostile,
    "splits": _check_splits,
    "tasks": _check_tasks,
    "concurrent": _check_concurrent,
}


def _episodes(subject: _Subject) -> Iterator[tuple[TextEnv, str, int]]:
    env = subject.make()
    for split in ("train", "test"):
        for index in subject.splits(split):
            yield env, split, index
    env.close()


def _question(info: Mapping[str, Any]) -> str:
    """What is asked. Tasks that open alike may differ in what is found out later: their data."""
    asked = "\n".join(message["content"] for message in info["messages"])
    return f"{asked}\n{content_hash(info['task']['data'])}"


def _main(argument: str) -> None:
    """Print the digest; what the other processes of `_check_processes` run."""
    entry_point, kwargs, num_seeds = json.loads(argument)
    module, _, path = entry_point.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    print(_digest(lambda: found(**kwargs), range(num_seeds)))
