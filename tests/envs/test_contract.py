"""Every built-in environment passes the checker, and works through Gymnasium."""

from __future__ import annotations

import gymnasium
import pytest

import areal_gym
from areal_gym.envs.checker import check_env
from areal_gym.errors import ConfigError, DataError
from areal_gym.plugins import registry

IDS = ("countdown", "math", "tau2", "tir")
ACTIONS = ("I do not know.", r"\boxed{5}", "é \ud800")


BUILT_IN = [
    entry.id
    for entry in registry().entries("envs")
    if entry.plugin.distribution == "areal-gym"
    and entry.spec.shown_id == entry.id
    # its tasks come from outside programs, or are the user's: tests/envs/test_prompts.py
    and entry.id not in ("online", "prompts")
]


@pytest.mark.parametrize("env_id", BUILT_IN)
def test_built_in_environments_pass_the_checker(env_id):
    try:
        areal_gym.make(env_id).close()
    except (ConfigError, DataError) as error:
        pytest.skip(str(error))
    broken = [result for result in check_env(env_id, num_tasks=8) if not result.is_ok]
    assert broken == []


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("prefix", ["", "areal_gym:"])
def test_gymnasium_make(env_id, prefix):
    env = gymnasium.make(f"{prefix}areal_gym/{env_id}-v0")
    observation, _ = env.reset(seed=3)
    ours = areal_gym.make(env_id)
    assert observation == ours.reset(seed=3)[0]
    *_, terminated, truncated, _ = env.step("I do not know.")
    assert (terminated, truncated) == (True, False)
    env.close()


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize(("mode", "kwargs"), [("sync", {}), ("async", {"shared_memory": False})])
def test_gymnasium_make_vec(env_id, mode, kwargs):
    vector = gymnasium.make_vec(
        f"areal_gym/{env_id}-v0", num_envs=3, vectorization_mode=mode, vector_kwargs=kwargs
    )
    observations, infos = vector.reset(seed=3)
    assert observations[0] == areal_gym.make(env_id).reset(seed=3)[0]
    assert len(set(infos["task_id"])) == 3
    observations, rewards, terminated, truncated, _ = vector.step(ACTIONS)
    assert observations == ("", "", "")
    assert rewards.max() < 1
    assert terminated.all()
    assert not truncated.any()
    vector.close()
