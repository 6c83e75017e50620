"""Environments of verifiers, played in a Python of their own behind the gateway.

Skipped without AREAL_GYM_VERIFIERS_PYTHONS: interpreters that have verifiers, separated by colons.
AREAL_GYM_VERIFIERS_IDS names published environments of verifiers 0.4 that they have, separated by
commas; two that need no download are `glossary` and `scratchpad`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import areal_gym
from areal_gym.agents.chat import ChatAgent
from areal_gym.config import load_config
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.verifiers.verifiers_env import VerifiersEnv
from areal_gym.envs.verifiers.verifiers_worker import close_workers
from areal_gym.errors import EngineError, UsageError
from areal_gym.rollout.episode import play_episode
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.types import StopReason
from tests import _support

PYTHONS = [p for p in os.environ.get("AREAL_GYM_VERIFIERS_PYTHONS", "").split(":") if p]
ENVS = Path(_support.__file__).parent / "verifiers_envs"
needs_python = pytest.mark.skipif(
    not PYTHONS, reason="AREAL_GYM_VERIFIERS_PYTHONS names no interpreter with verifiers"
)


@pytest.fixture(autouse=True)
def envs_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENVS))


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left():
    yield
    close_workers()


def make(python, **options):
    id = "small-sums" if "0.4" in python else "small_sums_legacy"
    return VerifiersEnv(id, python=python, **options)


def play(env, replies, *, index=0, engine=None, agent_id="chat", timeout_s=90):
    engine = engine or ScriptedEngine(replies)
    return asyncio.run(
        play_episode(
            env,
            ChatAgent(),
            engine,
            byte_renderer(),
            options={"split": "train", "index": index},
            params=SamplingParams(max_new_tokens=300),
            agent_id=agent_id,
            timeout_s=timeout_s,
        )
    )


@needs_python
@pytest.mark.parametrize("python", PYTHONS)
def test_rollouts_are_played_rewarded_and_recorded(python):
    env = make(python)
    answer = {"0.4": "2"}.get(next(v for v in ("0.3", "0.4") if v in python), "1")
    trajectory = play(env, [f"It is {answer}."])
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)
    (sampled,) = [span for span in trajectory.spans if span.logprobs is not None]
    assert len(sampled.logprobs) == len(sampled.token_ids) == 9
    assert play(make(python), ["I do not know."]).reward == 0.0
    # The task whose reward raises: the environment's failure, never a reward.
    index = next(
        i for i in range(15) if "12 + 1" in env.tasks.at(i, "train").data["messages"][-1]["content"]
    )
    failed = play(make(python), ["It is 13."], index=index)
    assert failed.stop_reason is StopReason.ENV_ERROR or failed.reward == 0.0


@needs_python
@pytest.mark.parametrize("python", PYTHONS)
def test_many_rollouts_at_once_keep_their_keys(python):
    async def main():
        return await asyncio.gather(
            *(
                play_episode(
                    make(python),
                    ChatAgent(),
                    ScriptedEngine([f"It is {index}, says {index}."]),
                    byte_renderer(),
                    options={"split": "train", "index": index},
                    params=SamplingParams(max_new_tokens=300),
                    timeout_s=90,
                )
                for index in range(8)
            )
        )

    for index, trajectory in enumerate(asyncio.run(main())):
        assert trajectory.error is None
        assert f"says {index}." in json.dumps(trajectory.messages)


@needs_python
@pytest.mark.parametrize("python", PYTHONS)
def test_failures_of_the_policy_are_the_engines(python):
    class Failing(ScriptedEngine):
        async def generate(self, *arguments, **options):
            raise EngineError("no server")

    trajectory = play(make(python), [], engine=Failing([]))
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR


@needs_python
def test_worker_that_ends_is_an_error_of_the_environment():
    env = make(PYTHONS[0])
    env.worker.close()
    assert play(env, ["It is 1."]).error is None  # another one was started


def test_what_cannot_be_loaded_is_named(monkeypatch):
    monkeypatch.delenv("AREAL_GYM_VERIFIERS_PYTHON", raising=False)
    with pytest.raises(UsageError, match="which Python has verifiers"):
        areal_gym.make("verifiers:some-env")
    with pytest.raises(UsageError, match="does not start"):
        areal_gym.make("verifiers:some-env", python="/no/such/python")
    with pytest.raises(UsageError, match="cannot load 'some-env'"):
        areal_gym.make("verifiers:some-env", python=sys.executable)


PUBLISHED = [id for id in os.environ.get("AREAL_GYM_VERIFIERS_IDS", "").split(",") if id]


@needs_python
@pytest.mark.parametrize(
    ("python", "id"),
    [(python, None) for python in PYTHONS]
    + [(python, id) for python in PYTHONS if "0.4" in python for id in PUBLISHED],
)
def test_a_step_is_trained(python, id, tiny_policy, tmp_path):
    """An untrained policy earns nothing anywhere: the entropy alone has a gradient here."""
    policy = shutil.copytree(tiny_policy, tmp_path / "policy")
    settings = json.loads((policy / "config.json").read_text())
    settings["max_position_embeddings"] = 4096
    (policy / "config.json").write_text(json.dumps(settings))
    config = load_config(
        overrides=[
            f"engine.model={policy}",
            f"env.id=verifiers:{id or make(python).id}",
            f"env.kwargs.python={python}",
            *("steps=1", "rollout.group_size=2", "rollout.batch_groups=1", "eval.every=0"),
            *("rollout.max_new_tokens=16", "engine.max_context=4096", "engine.num_slots=4"),
            *("trainer.advantage=reinforce", "trainer.entropy_bonus=0.01"),
        ]
    )
    train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    (row,) = run.read_metrics()
    assert row["train/grad_norm"] > 0
    trajectories = list(run.read_trajectories(1))
    assert len(trajectories) == 2
    assert all(trajectory.error is None for trajectory in trajectories)


@needs_python
def test_other_agents_and_steps_are_refused():
    env = make(PYTHONS[0])
    with pytest.raises(UsageError, match="plays its episodes itself"):
        play(env, ["x"], agent_id="program")
