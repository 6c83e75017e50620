"""The demonstrations that the starter policy imitates, and their demonstrators.

They are imperfect on purpose, and the accuracy of each demonstrator is measured and written into
the run: imitation gives the average of the demonstrators, reinforcement must beat the best.

For the expressions of `tir` there are three of them, below. Anything else, also a file's questions,
is demonstrated by the environment's own gold policy, which is right half of the time, and by its
noop policy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from areal_gym.envs.arithmetic import evaluate
from areal_gym.envs.base import TextEnv
from areal_gym.envs.grading import extract_answer, is_same_number
from areal_gym.envs.mcp_tools.env_with_servers import EnvWithServers
from areal_gym.envs.mix import MixedEnv
from areal_gym.envs.nim import NimEnv
from areal_gym.envs.tir import TirEnv, python_call
from areal_gym.envs.tools import Tool
from areal_gym.errors import TaskError, UsageError
from areal_gym.types import Message

_MAX_TASKS = 100
_MAX_BROKEN = 8
"""The limit of tasks in a row that are passed over, because their verifiers give no reward."""
_MAX_ATTEMPTS = 8
"""The limit of demonstrations tried per task to find one with another reward."""

Turns = list[tuple[str, str | None]]
"""Turns: the demonstrator's text, and the tool's reply to it (None after the last)."""


class Demonstrator(NamedTuple):
    """A demonstrator to imitate."""

    id: str
    share: float
    """Its share of the demonstrations."""
    summary: str
    play: Callable[[TextEnv, random.Random], Demonstration]
    """Plays the task that the environment was just reset to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One demonstrated episode."""

    first_messages: Sequence[Message]
    texts: Sequence[str]
    """The demonstrator's texts, turn by turn."""
    replies: Sequence[Sequence[Message]]
    """The environment's replies in between: one fewer than `texts`."""
    demonstrator_id: str
    reward: float
    tools: Sequence[Tool] = ()


def demonstrators_for(env: TextEnv) -> tuple[Demonstrator, ...]:
    """Return the demonstrators; an environment without a gold policy is a UsageError."""
    if _asks_for_python(env):
        return TIR
    if isinstance(env, NimEnv):
        return NIM
    if type(env).gold_action is TextEnv.gold_action:
        raise UsageError(
            f"{type(env).__name__} has no gold_action(), so the starter policy cannot learn it",
            hints=["bring a policy: engine.model=DIR (a Hugging Face checkpoint directory)"],
        )
    return GENERIC


def obstacle_to_imitation(env: TextEnv) -> str:
    """Return why no small policy can be made for the environment; "" if it can.

    It is found by asking for the gold action of one task.
    """
    try:
        demonstrators_for(env)
        perfect_demonstration(env, random.Random(0))
    except UsageError as error:
        return error.message
    return ""


def perfect_demonstration(env: TextEnv, rng: random.Random) -> Demonstration:
    """Play a task without faults: for measuring skill, never imitated in `tir`."""
    return _of_sound_task(lambda: _perfect_demonstration(env, rng))


def _perfect_demonstration(env: TextEnv, rng: random.Random) -> Demonstration:
    env = _reset(env, rng, "train")
    if _asks_for_python(env):
        expression = env.task.data["expression"]
        result = str(evaluate(expression))
        call = python_call(f"print({expression})")
        return _tir_demonstration(env, [(call, result), (f"\\boxed{{{result}}}", None)], "perfect")
    return _played(env, env.gold_action, "gold", rng)


def demonstrate(env: TextEnv, rng: random.Random, *, split: str = "train") -> Demonstration:
    """Demonstrate a task, by a demonstrator drawn by share."""

    def play() -> Demonstration:
        played = _reset(env, rng, split)
        return _draw(played, rng).play(played, rng)

    return _of_sound_task(play)


def _of_sound_task(play: Callable[[], Demonstration]) -> Demonstration:
    """Return a demonstration; a task whose own verifier gives no reward is passed over."""
    for _ in range(_MAX_BROKEN):
        try:
            return play()
        except TaskError:
            continue
    return play()


def demonstrate_pair(
    env: TextEnv, rng: random.Random, *, split: str = "train"
) -> tuple[Demonstration, Demonstration]:
    """Demonstrate a task better and worse; demonstrators that are all alike are a UsageError."""
    for _ in range(_MAX_TASKS):
        played = _reset(env, rng, split)
        task = played.task
        first = _draw(played, rng).play(played, rng)
        for _ in range(_MAX_ATTEMPTS):
            played.reset(options={"task": task})
            other = _draw(played, rng).play(played, rng)
            if other.reward != first.reward:
                return (first, other) if first.reward > other.reward else (other, first)
    raise UsageError(
        f"the demonstrators of {type(env).__name__} are all alike: {_MAX_TASKS} tasks gave no two "
        "demonstrations with different rewards",
        hints=["bring pairs: data.file=FILE"],
    )


def _reset(env: TextEnv, rng: random.Random, split: str) -> TextEnv:
    """Begin an episode; return the environment that plays it, which in a mix is the task's own."""
    env.reset(seed=rng.getrandbits(32), options={"split": split})
    while isinstance(env, MixedEnv | EnvWithServers):
        env = env.playing
    return env


def _asks_for_python(env: TextEnv) -> bool:
    has_python = any(tool.name == "python" for tool in env.tools)
    return type(env) is TirEnv and bool(env.difficulties) and has_python


def _draw(env: TextEnv, rng: random.Random) -> Demonstrator:
    demonstrators = demonstrators_for(env)
    (chosen,) = rng.choices(demonstrators, weights=[d.share for d in demonstrators])
    return chosen


# ---- tir: who uses the tool, and how well ----------------------------------------------------

SLIP_CALL = 0.16
"""The probability that the careful demonstrator types a wrong expression."""
SLIP_READ = 0.14
"""The probability that the careful demonstrator rounds the tool's result."""
RETRY = 0.35
"""The probability that the clumsy demonstrator retries carefully after an error."""


def _careful(env: TextEnv, rng: random.Random) -> Demonstration:
    return _tir_demonstration(env, _call_and_answer(env.task.data["expression"], rng), "careful")


def _hasty(env: TextEnv, rng: random.Random) -> Demonstration:
    return _tir_demonstration(env, _guess(env.task.data, rng), "hasty")


def _clumsy(env: TextEnv, rng: random.Random) -> Demonstration:
    expression = env.task.data["expression"]
    if rng.random() < 0.5 or "*" not in expression:
        code = f"print({expression}"
    else:
        code = f"print({expression.replace('*', 'x')})"
    turns: Turns = [(python_call(code), _syntax_error(code))]
    is_retried = rng.random() < RETRY
    turns += _call_and_answer(expression, rng) if is_retried else _guess(env.task.data, rng)
    return _tir_demonstration(env, turns, "clumsy")


TIR = (
    Demonstrator("careful", 0.25, "calls the tool, with slips of the pen", _careful),
    Demonstrator("hasty", 0.60, "guesses in the head", _hasty),
    Demonstrator("clumsy", 0.15, "breaks the call, then mostly guesses", _clumsy),
)


def _call_and_answer(expression: str, rng: random.Random) -> Turns:
    typed = _slip(expression, rng) if rng.random() < SLIP_CALL else expression
    result = str(evaluate(typed))
    rounds = rng.random() < SLIP_READ
    answer = f"about \\boxed{{{_leading_digit(result)}}}" if rounds else f"\\boxed{{{result}}}"
    return [(python_call(f"print({typed})"), result), (answer, None)]


def _guess(data: Mapping[str, str], rng: random.Random) -> Turns:
    expression, value = data["expression"], int(data["answer"])
    size = abs(value)
    if size < 10:
        guess = max(0, size + rng.choice((-2, -1, 0, 1, 2)))
    else:
        power = 10 ** (len(str(size)) - 1)
        guess = max(1, min(9, round(size / power + rng.choice((-1, 0, 0, 1))))) * power
    return [(f"{expression} is about \\boxed{{{-guess if value < 0 else guess}}}", None)]


def _slip(expression: str, rng: random.Random) -> str:
    """Make a mistake: forget the last operand, or swap one operator."""
    parts = re.findall(r"\d+|[+\-*]", expression)
    if rng.random() < 0.6:
        return "".join(parts[:-2])
    i = 1 + 2 * rng.randrange(len(parts) // 2)
    parts[i] = rng.choice([sign for sign in "+-*" if sign != parts[i]])
    return "".join(parts)


def _leading_digit(number: str) -> str:
    value = int(number)
    power: int = 10 ** (len(str(abs(value))) - 1)
    return ("-" if value < 0 else "") + str(abs(value) // power * power)


def _syntax_error(code: str) -> str:
    """Return the last line of the sandbox's traceback for this code.

    Computed by compiling, not by running it there: thousands of forks would take minutes. A test
    plays a sample of the demonstrations in the real environment and compares.
    """
    try:
        compile(code, "<snippet>", "exec")
    except SyntaxError as error:
        return f"SyntaxError: {error.msg}"
    raise ValueError(f"{code!r} is not a syntax error")


def _tir_demonstration(env: TextEnv, turns: Turns, demonstrator_id: str) -> Demonstration:
    results = [result for _, result in turns if result is not None]
    return Demonstration(
        first_messages=tuple(env.messages),
        texts=[text for text, _ in turns],
        replies=[[{"role": "tool", "name": "python", "content": result}] for result in results],
        demonstrator_id=demonstrator_id,
        tools=env.tools,
        reward=float(is_same_number(extract_answer(turns[-1][0]) or "", env.task.data["answer"])),
    )


# ---- any other environment: its gold and its noop policy -------------------------------------


_kept: WeakKeyDictionary[TextEnv, dict[tuple[str, str, str | None], Demonstration]] = (
    WeakKeyDictionary()
)
"""Demonstrations of environments with few tasks whose steps wait, by task and demonstrator."""


def _played(
    env: TextEnv, action: Callable[[], str], demonstrator_id: str, rng: random.Random
) -> Demonstration:
    """Play the task, or return how it was played before: a container per episode takes its time.

    Of an environment with roles, one role's dialogue is shown, drawn by `rng`.
    """
    role = rng.choice(env.roles) if env.roles else None
    if not env.suspends or env.num_tasks(env.task.split) is None:
        return _play(env, action, demonstrator_id, role)
    kept = _kept.setdefault(env, {})
    key = (env.task.id, demonstrator_id, role)
    if key not in kept:
        kept[key] = _play(env, action, demonstrator_id, role)
    return kept[key]


def _play(
    env: TextEnv, action: Callable[[], str], demonstrator_id: str, role: str | None
) -> Demonstration:
    first_role = env.role
    texts: dict[str | None, list[str]] = {}
    read: dict[str | None, list[Sequence[Message]]] = {first_role: [tuple(env.messages)]}
    rewards: dict[str | None, float] = {}
    is_over = False
    while not is_over:
        writer = env.role
        texts.setdefault(writer, []).append(action())
        step = env.step(texts[writer][-1])
        rewards[writer] = rewards.get(writer, 0.0) + step.reward
        for other, reward in step.info.get("role_rewards", {}).items():
            rewards[other] = rewards.get(other, 0.0) + reward
        is_over = step.terminated or step.truncated
        if not is_over:
            read.setdefault(env.role, []).append(step.info["messages"])
    shown = role if role in texts else first_role  # a role may never have had its turn
    first_messages, *replies = read[shown]
    return Demonstration(
        first_messages=first_messages,
        texts=texts[shown],
        replies=replies,
        demonstrator_id=demonstrator_id,
        tools=env.tools,
        reward=rewards[shown],
    )


# ---- nim: legal moves, and no plan ------------------------------------------------------------


def _random_moves(env: TextEnv, rng: random.Random) -> Demonstration:
    assert isinstance(env, NimEnv)

    def move() -> str:
        return env.move(rng.randint(1, min(env.stones, env.most_taken)))

    return _played(env, move, "random", rng)


NIM = (Demonstrator("random", 1.0, "takes any legal number of stones", _random_moves),)


GENERIC = (
    Demonstrator(
        *("gold", 0.5, "the environment's own gold policy"),
        lambda env, rng: _played(env, env.gold_action, "gold", rng),
    ),
    Demonstrator(
        "noop", 0.5, "gives up", lambda env, rng: _played(env, env.noop_action, "noop", rng)
    ),
)
