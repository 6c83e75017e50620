"""How fast environments step: `python benchmarks/envs.py [--json]`.

Five-turn tool episodes with a scripted policy, everything in one process and one thread:

    bare       TextEnv.astep alone: calls parsed, tool run, messages kept
    recorded   through play_episode: bytes rendered and bridged, spans, a whole Trajectory each

and `tir` with its real sandbox, a fresh interpreter per call or one per episode. CPU time is that
of this process; the sandbox's processes are its children and show in the wall time only.

With `--gold`: every built-in environment, played by its own gold policy, with 1, 64 and 1,024
episodes in flight, and the resident memory that this adds.

With `--venv`: next to other gyms, each in a venv of its own, in turns:

    python -m venv /tmp/gem && /tmp/gem/bin/pip install gem-llm==0.1.0 datasets
    python -m venv /tmp/skyrl && /tmp/skyrl/bin/pip install skyrl-gym==0.4.0
    python -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install verifiers==0.3.1
    python benchmarks/envs.py --venv gem=/tmp/gem --venv skyrl=/tmp/skyrl \\
        --venv verifiers=/tmp/verifiers

A question that is answered at once, and one that takes four calls of a tool that does next to
nothing. What they keep differs: gem's vector environment steps and keeps nothing, skyrl-gym's
loop the messages, verifiers a state with messages; `recorded` here a trajectory of messages and of
tokens with log-probabilities and versions, fit for training. The policy of `recorded` and of
verifiers gives up the event loop once a turn, and has its answers ready. Garbage is collected as in
each package's own runs: a run here and verifiers' workers relax that, the others do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import shlex
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import areal_gym
from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tir import TirEnv, python_call, tir_tasks
from areal_gym.envs.tools import Tool, tool
from areal_gym.rollout.episode import play_episode
from areal_gym.types import FinishReason, Message, Task, text_of
from areal_gym.utils.garbage import relax_garbage_collection
from areal_gym.utils.statistics import rss_mb

NUM_TURNS = 5
RENDERER = byte_renderer()  # compiles a template: made once, as verifiers' environments are
REPLIES = [python_call("37*48+12")] * (NUM_TURNS - 1) + [r"The result is \boxed{1788}"]


@tool
def python(code: str) -> str:
    """Do next to nothing: the path to a tool and back is what is measured."""
    return str(len(code))


class ToolEnv(TextEnv):
    """Four tool calls, then an answer; the tool is a function of this process."""

    tools: Sequence[Tool] = (python,)
    max_turns = NUM_TURNS

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        return tir_tasks(2).draw(rng, "train")

    def first_messages(self, task: Task) -> Sequence[Message]:
        return [{"role": "user", "content": task.data["question"]}]

    async def respond(self, message: Message) -> Response:
        if message.get("tool_calls"):
            results = await self.call_tools(message)
            return Response(messages=results.messages, metrics={"tool_calls": results.num_calls})
        return Response(reward=1.0, is_terminated=True)


async def bare(num_episodes: int, num_in_flight: int) -> None:
    for first in range(0, num_episodes, num_in_flight):
        envs = [ToolEnv() for _ in range(min(num_in_flight, num_episodes - first))]
        for seed, env in enumerate(envs, first):
            env.reset(seed=seed)
        for reply in REPLIES:
            results = [await env.astep(reply) for env in envs]
        assert all(result.terminated for result in results)
        assert all(len(env.messages) == 2 * NUM_TURNS for env in envs)


async def recorded(num_episodes: int, num_in_flight: int) -> None:
    engine, agent = ScriptedEngine(REPLIES), ChatAgent()
    params = SamplingParams(max_new_tokens=256)
    seeds = iter(range(num_episodes))

    async def play_on() -> None:
        env = ToolEnv()
        for seed in seeds:
            trajectory = await play_episode(
                env, agent, engine, RENDERER, seed=seed, params=params, env_id="tool"
            )
            assert trajectory.reward == 1.0
            assert len(trajectory.turns) == NUM_TURNS

    await asyncio.gather(*(play_on() for _ in range(num_in_flight)))


async def tir(num_episodes: int, num_in_flight: int, *, stateful: bool) -> None:
    seeds = iter(range(num_episodes))

    async def play_on() -> None:
        env = TirEnv(stateful=stateful)
        for seed in seeds:
            env.reset(seed=seed)
            await env.astep(env.gold_action())
            result = await env.astep(env.gold_action())
            assert result.reward == 1.0

    await asyncio.gather(*(play_on() for _ in range(num_in_flight)))


async def gold(num_episodes: int, num_in_flight: int, *, env_id: str) -> None:
    seeds = iter(range(num_episodes))
    envs = [areal_gym.make(env_id) for _ in range(num_in_flight)]

    async def play_on(env: TextEnv) -> None:
        for seed in seeds:
            env.reset(seed=seed)
            is_over = False
            while not is_over:
                result = await env.astep(env.gold_action())
                is_over = result.terminated or result.truncated
        await env.aclose()

    await asyncio.gather(*map(play_on, envs))


# ---- next to other gyms --------------------------------------------------------------------------

CALL = python_call("37*48+12")
ANSWER = r"The result is \boxed{1788}"
SCRIPTS = {"single": [ANSWER], "tools": [CALL] * (NUM_TURNS - 1) + [ANSWER]}
QUESTION = Task(id="one", data={"question": "What is 37*48+12?", "answer": "1788"})
BOX = re.compile(r"\\boxed\{([^{}]*)\}")


class Plain(ToolEnv):
    """The question that the other gyms are given, graded as there."""

    async def respond(self, message: Message) -> Response:
        if message.get("tool_calls"):
            return Response(messages=(await self.call_tools(message)).messages)
        boxes = BOX.findall(text_of(message["content"]))
        is_right = bool(boxes) and boxes[-1] == self.task.data["answer"]
        return Response(reward=float(is_right), is_terminated=True)


class PlainSingle(Plain):
    """The same without a tool."""

    tools = ()
    max_turns = 1


async def plain_steps(case: str, num_episodes: int, num_in_flight: int) -> None:
    envs = [Plain() if case == "tools" else PlainSingle() for _ in range(num_in_flight)]
    for _ in range(num_episodes // num_in_flight):
        for env in envs:
            env.reset(seed=0, options={"task": QUESTION})
        for reply in SCRIPTS[case]:
            results = [await env.astep(reply) for env in envs]
        assert all(result.terminated and result.reward == 1.0 for result in results)


class Ready:
    """A policy whose answers are there already, like that of verifiers' side: next to no cost."""

    policy_version = 0
    max_context = 32768

    def __init__(self, replies: Sequence[str]) -> None:
        self._turns: dict[str | None, int] = {}
        self._answers = []
        for reply in replies:
            ids = (*RENDERER.encode(reply), RENDERER.end_of_turn_id)
            self._answers.append(
                Generation(
                    token_ids=ids,
                    logprobs=(-1.0,) * len(ids),
                    versions=(0,) * len(ids),
                    finish_reason=FinishReason.STOP,
                )
            )

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        await asyncio.sleep(0)
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        return self._answers[turn]

    def release(self, session: str) -> None:
        del self._turns[session]

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


async def plain_recorded(case: str, num_episodes: int, num_in_flight: int) -> None:
    engine, agent = Ready(SCRIPTS[case]), ChatAgent()
    params = SamplingParams(max_new_tokens=256)
    seeds = iter(range(num_episodes))

    async def play_on() -> None:
        env = Plain() if case == "tools" else PlainSingle()
        for seed in seeds:
            trajectory = await play_episode(
                env, agent, engine, RENDERER, seed=seed, params=params, options={"task": QUESTION}
            )
            assert trajectory.reward == 1.0
            assert len(trajectory.turns) == len(SCRIPTS[case])

    await asyncio.gather(*(play_on() for _ in range(num_in_flight)))


class Ours:
    """This package, in this process."""

    def __init__(self, run: Callable[[str, int, int], Coroutine[Any, Any, None]]) -> None:
        self._run = run

    def play(self, **asked: Any) -> dict[str, Any]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        asyncio.run(self._run(*asked.values()))
        return {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "version": f"areal-gym {areal_gym.__version__}",
        }


class Theirs:
    """Another gym, in a process of its own."""

    def __init__(self, name: str, venv: Path) -> None:
        script = Path(__file__).with_name("gyms_side.py")
        self._command = [str(venv / "bin/python"), str(script), name]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def play(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            by_hand = f"echo '{json.dumps(asked)}' | {shlex.join(self._command)}"
            raise SystemExit(f"{self._command[-1]} has died; to see why:\n    {by_hand}")
        found: dict[str, Any] = json.loads(answer)
        return found


def measure_gyms(venvs: dict[str, Path], num_repeats: int) -> list[Any]:
    """What an episode costs undisturbed; the gyms take turns, about as long each."""
    relax_garbage_collection()  # as a run does
    gyms: dict[str, Ours | Theirs] = {
        "ours, steps": Ours(plain_steps),
        "ours, recorded": Ours(plain_recorded),
        **{name: Theirs(name, venv) for name, venv in venvs.items()},
    }
    rows = []
    for case in SCRIPTS:
        for num_in_flight in (1, 64, 1024):
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in gyms}
            for _ in range(num_repeats):
                for name, gym in gyms.items():
                    runs[name].append(play_for(0.4, gym, case, num_in_flight))
            for name, found in runs.items():
                cpu_s = undisturbed(run["cpu_s"] for run in found)
                rows.append(
                    {
                        "name": name,
                        "case": case,
                        "num_in_flight": num_in_flight,
                        "episodes_per_s": 1 / undisturbed(run["wall_s"] for run in found),
                        "cpu_ms_per_episode": 1e3 * cpu_s,
                        "peak_mb": found[-1]["peak_mb"],
                        "version": found[-1]["version"],
                    }
                )
    return rows


def play_for(seconds: float, gym: Ours | Theirs, case: str, num_in_flight: int) -> dict[str, Any]:
    """What an episode costs, in a run of about so many seconds.

    A process that others have kept waiting is slow at first (cold caches, a resting processor): a
    cheap gym would seem dear if all played as many episodes.
    """
    tried = gym.play(case=case, num_episodes=64, num_in_flight=min(64, num_in_flight))
    rounds = max(1, round(64 * seconds / tried["wall_s"] / num_in_flight))
    num = rounds * num_in_flight
    run = gym.play(case=case, num_episodes=num, num_in_flight=num_in_flight)
    return {**run, "wall_s": run["wall_s"] / num, "cpu_s": run["cpu_s"] / num}


def undisturbed(seconds: Iterable[float]) -> float:
    """The lowest tenth's end: whatever else a machine does adds time, and takes away none."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 10]


def measure_gold(num_episodes: int) -> list[dict[str, Any]]:
    rows = []
    for env_id in ("math", "countdown", "code", "search", "tir", "tau2/mock", "mix"):
        for num_in_flight in (1, 64, 1024):
            before_mb = rss_mb() or 0.0
            num = max(num_episodes, num_in_flight)
            run = partial(gold, env_id=env_id)
            rows.append(measure(env_id, run, num, num_in_flight, num_runs=1))
            rows[-1]["added_mb"] = (rss_mb() or 0.0) - before_mb
    return rows


def measure(
    name: str,
    run: Callable[[int, int], Awaitable[None]],
    num_episodes: int,
    num_in_flight: int,
    num_runs: int = 3,
) -> dict[str, Any]:
    """The best of the runs, each after a short one to warm up."""

    async def timed() -> tuple[float, float]:
        await run(min(64, num_episodes), min(64, num_in_flight))
        wall, cpu = time.perf_counter(), time.process_time()
        await run(num_episodes, num_in_flight)
        return time.perf_counter() - wall, time.process_time() - cpu

    runs = [asyncio.run(timed()) for _ in range(num_runs)]
    wall_s, cpu_s = min(run[0] for run in runs), min(run[1] for run in runs)
    return {
        "name": name,
        "num_in_flight": num_in_flight,
        "num_episodes": num_episodes,
        "episodes_per_s": num_episodes / wall_s,
        "cpu_ms_per_episode": 1e3 * cpu_s / num_episodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=4096, help="of the in-memory environment")
    parser.add_argument("--gold", action="store_true", help="every environment's gold policy")
    parser.add_argument("--venv", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--repeats", type=int, default=12, help="with --venv")
    arguments = parser.parse_args()
    if arguments.venv:
        pairs = (text.partition("=") for text in arguments.venv)
        venvs = {name: Path(path) for name, _, path in pairs}
        rows = measure_gyms(venvs, arguments.repeats)
        if arguments.json:
            print(json.dumps({"benchmark": "envs, gyms", "rows": rows}))
            return
        print(
            f"{'':8}{'in flight':>10}  {'':16}{'rollouts/s':>12}{'CPU ms each':>13}{'peak MB':>9}"
        )
        for row in rows:
            print(
                f"{row['case']:8}{row['num_in_flight']:10}  {row['name']:16}"
                f"{row['episodes_per_s']:12,.0f}{row['cpu_ms_per_episode']:13.4f}"
                f"{row['peak_mb']:9.0f}  {row['version']}"
            )
        return
    if arguments.gold:
        rows = measure_gold(min(arguments.episodes, 512))
        if arguments.json:
            print(json.dumps({"benchmark": "envs, gold", "rows": rows}))
            return
        print(f"{'':12}{'in flight':>10}{'episodes/s':>12}{'CPU ms each':>13}{'added MB':>10}")
        for row in rows:
            print(
                f"{row['name']:12}{row['num_in_flight']:10}{row['episodes_per_s']:12,.0f}"
                f"{row['cpu_ms_per_episode']:13.3f}{row['added_mb']:10.1f}"
            )
        return
    num = arguments.episodes
    rows = [measure("bare", bare, num, k) for k in (64, 1024)]
    rows += [measure("recorded", recorded, num, k) for k in (64, 1024)]
    for name, stateful in (("tir, fresh interpreters", False), ("tir, one per episode", True)):
        rows.append(measure(name, partial(tir, stateful=stateful), 512, 64))
    aim = {"episodes_per_s": 3000, "cpu_ms_per_episode": 0.3}
    if arguments.json:
        print(json.dumps({"benchmark": "envs", "rows": rows, "aim_in_memory": aim}))
        return
    print(f"{'':26}{'in flight':>10}{'episodes/s':>12}{'CPU ms each':>13}")
    for row in rows:
        print(
            f"{row['name']:26}{row['num_in_flight']:10}{row['episodes_per_s']:12,.0f}"
            f"{row['cpu_ms_per_episode']:13.3f}"
        )
    print("aim, in memory: at least 3,000 episodes/s, at most 0.3 CPU ms each")


if __name__ == "__main__":
    main()
