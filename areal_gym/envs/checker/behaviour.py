"""Rules on an environment's behaviour: its tasks, tools, rewards and answers to any action."""

from __future__ import annotations

import json
import math
import pickle
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.checker.adversarial import HOSTILE_ACTIONS, hostile_calls
from areal_gym.envs.checker.env_under_test import (
    EnvUnderTest,
    RuleViolation,
    Skipped,
    best,
    describe_error,
    noop,
    play,
)
from areal_gym.errors import UsageError
from areal_gym.message_types import is_content
from areal_gym.types import Message, content_hash, readable

_PATIENCE_S = 60.0
"""Longest time for one answer; a longer one counts as a hang, even on a busy machine."""


def check_gymnasium(subject: EnvUnderTest) -> None:
    """Gymnasium's own checker passes."""
    from gymnasium.utils.env_checker import check_env as check_gymnasium

    env = subject.make()
    env.action_space.seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Its render check makes the environment anew by its Gymnasium id, which a class has not.
        check_gymnasium(env, skip_render_check=True)
    if not isinstance(env.render(), str):
        raise RuleViolation("render() gives no text")
    if caught:
        raise RuleViolation("; ".join(str(warning.message) for warning in caught))


def check_documented(subject: EnvUnderTest) -> None:
    """The class describes itself in its docstring."""
    env = subject.make()
    if not (type(env).__doc__ or "").strip():
        raise RuleViolation(f"{type(env).__name__} has no docstring")


def check_tools(subject: EnvUnderTest) -> str | None:
    """Tools have distinct names, descriptions and schemas of their arguments that are JSON."""
    env = subject.make()
    env.reset(seed=0)
    names = [tool.name for tool in env.tools]
    if len(set(names)) < len(names):
        raise RuleViolation(f"two tools have one name: {', '.join(names)}")
    for tool in env.tools:
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", tool.name):
            raise RuleViolation(f"{tool.name!r} is no name for APIs: letters, digits, _ and -")
        if not tool.description.strip():
            raise RuleViolation(f"{tool.name} has no description; the policy reads it")
        try:
            schema = json.loads(json.dumps(tool.schema()))["function"]["parameters"]
        except (TypeError, ValueError) as error:
            raise RuleViolation(f"the schema of {tool.name} is no JSON: {error}") from error
        properties = schema.get("properties", {})
        if schema.get("type") != "object" or not isinstance(properties, dict):
            raise RuleViolation(f"the schema of {tool.name} describes no object with properties")
        unknown = set(schema.get("required", ())) - set(properties)
        if unknown:
            raise RuleViolation(
                f"{tool.name} requires what it has no property for: {', '.join(unknown)}"
            )
    return f"{len(names)} tools" if names else None


def check_gold(subject: EnvUnderTest) -> None:
    """The gold policy earns the full reward, 1."""
    if not subject.make().has_gold:
        raise Skipped("no perfect policy is known (has_gold = False)")
    for env, options in subject.episodes():
        total = sum(step.reward for step in play(env, best, options=options))
        if not math.isclose(total, 1.0):
            raise RuleViolation(f"task {env.task.id}: gold earns {total:g}")


def check_noop(subject: EnvUnderTest) -> None:
    """The noop policy does not earn the full reward."""
    for env, options in subject.episodes():
        total = sum(step.reward for step in play(env, noop, options=options))
        if total >= 1.0:
            raise RuleViolation(f"task {env.task.id}: doing nothing earns {total:g}")


def check_hostile(subject: EnvUnderTest) -> str:
    """Hostile actions are answered, not rewarded, and crash nothing."""
    env = subject.make()
    env.reset(seed=0)
    actions: list[tuple[str, str | Message]] = [*HOSTILE_ACTIONS.items(), *hostile_calls(env.tools)]
    slowest = (0.0, "")
    for name, action in actions:
        env.reset(seed=0)
        slowest = max(slowest, (_answer_s(env, name, action), name))
    # Some are read by other code once the episode is under way.
    for name, action in actions:
        env.reset(seed=0)
        step = env.step(best(env))
        if step.terminated or step.truncated:
            break
        slowest = max(slowest, (_answer_s(env, f"{name}, as the second turn", action), name))
    env.close()
    return f"{len(actions)} actions, the slowest {slowest[0]:.2g} s ({slowest[1]})"


def _answer_s(env: TextEnv, name: str, action: str | Message) -> float:
    start_s = time.perf_counter()
    try:
        step = env.step(action)
    except Exception as error:
        raise RuleViolation(f"{name}: {describe_error(error)}") from error
    elapsed_s = time.perf_counter() - start_s
    if not math.isfinite(step.reward) or step.reward >= 1.0:
        raise RuleViolation(f"{name}: the reward is {step.reward}")
    if not all(is_content(message["content"]) for message in step.info["messages"]):
        raise RuleViolation(f"{name}: a message's content is neither text nor texts and pictures")
    if elapsed_s > _PATIENCE_S:
        raise RuleViolation(f"{name}: the answer took {elapsed_s:.0f} s")
    return elapsed_s


def check_ends(subject: EnvUnderTest) -> str:
    """Episodes end, and stay at their end; invalid actions are usage errors."""
    env = subject.make()
    lengths = []
    for seed in range(min(subject.num_tasks, 4)):
        for policy in (best, noop):
            steps = play(env, policy, seed=seed)
            lengths.append(len(steps))
            last = steps[-1]
            if last.terminated and last.truncated:
                raise RuleViolation("an episode is both terminated and truncated")
            _require_usage_error(lambda: env.step("again"), "a step after the end")
    env.reset(seed=0)
    for action in (None, 5, b"text", ["text"]):
        _require_usage_error(lambda action=action: env.step(action), f"the action {action!r}")
    env.close()
    return f"{min(lengths)} to {max(lengths)} turns"


def check_options(subject: EnvUnderTest) -> None:
    """Splits and indexes that do not exist are usage errors, and harm nothing."""
    env = subject.make()
    for options in (
        {"split": "no such split"},
        {"index": -1},
        {"index": "first"},
        {"split": "test", "index": True},
        {"task": {"no": "task"}},
    ):
        _require_usage_error(lambda options=options: env.reset(options=options), f"{options}")
    num_tasks = env.num_tasks("train")
    if num_tasks is not None:
        beyond = {"split": "train", "index": num_tasks}
        _require_usage_error(lambda: env.reset(options=beyond), f"{beyond}")
    play(env, noop, seed=0)
    env.close()


def _require_usage_error(call: Any, what: str) -> None:
    try:
        call()
    except UsageError:
        return
    except Exception as error:
        raise RuleViolation(f"{what} raises {describe_error(error)}") from error
    raise RuleViolation(f"{what} is accepted; a UsageError should say what exists")


def check_splits(subject: EnvUnderTest) -> None:
    """Indexes name distinct tasks, and no test task occurs in training."""
    env = subject.make()
    texts: dict[str, set[str]] = {}
    for split in ("train", "test"):
        infos = []
        for index in subject.indexes(split):
            _, info = env.reset(options={"split": split, "index": index})
            infos.append(info)
            if info["task"]["split"] != split:
                raise RuleViolation(f"task {info['task_id']} says split {info['task']['split']!r}")
        texts[split] = {_asked_text(info) for info in infos}
        if min(len(texts[split]), len({info["task_id"] for info in infos})) < len(infos):
            raise RuleViolation(f"split {split!r}: two indexes name the same task")
    for seed in range(4 * subject.num_tasks):
        _, info = env.reset(seed=seed, options={"split": "train"})
        texts["train"].add(_asked_text(info))
    env.close()
    shared = texts["train"] & texts["test"]
    if shared:
        raise RuleViolation(f"{len(shared)} tasks are in both splits, such as {min(shared)!r}")


def _asked_text(info: Mapping[str, Any]) -> str:
    """Return the opening messages, and a hash of the data, which they may not show."""
    asked = "\n".join(readable(message["content"]) for message in info["messages"])
    return f"{asked}\n{content_hash(info['task']['data'])}"


def check_tasks(subject: EnvUnderTest) -> None:
    """Tasks are played without being changed, and play the same after a trip as JSON or pickle."""
    env = subject.make()
    for seed in range(min(subject.num_tasks, 4)):
        _, info = env.reset(seed=seed)
        given = info["task"]
        before = content_hash(given)
        steps = play(env, best, options={"task": given})
        if content_hash(given) != before or content_hash(env.task.to_dict()) != before:
            raise RuleViolation("the task is another one after it was played")
        for how, task in (
            ("JSON", json.loads(json.dumps(given))),
            ("pickle", pickle.loads(pickle.dumps(env.task))),
        ):
            _, again = env.reset(options={"task": task})
            if again["messages"] != info["messages"]:
                raise RuleViolation(f"the same task, sent as {how}, opens with other messages")
        _require_portable([info, *steps])
    env.close()


def _require_portable(seen: list[dict[str, Any] | StepResult]) -> None:
    # Workers hand them over as pickle, records keep them as JSON.
    if pickle.loads(pickle.dumps(seen)) != seen:
        raise RuleViolation("an observation is another one after pickling")
    try:
        json.dumps(seen, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RuleViolation(f"an info is no JSON: {error}") from error
