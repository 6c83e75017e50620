"""Adapters for environments of other libraries, with the real packages if installed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from contextlib import contextmanager

import gymnasium
import numpy as np
import pytest

import areal_gym
from areal_gym.cli.app import run
from areal_gym.envs.checker import check_env, play
from areal_gym.errors import EnvError, UnknownIdError, UsageError
from areal_gym.plugins import registry


def broken_rules(env_id, **settings):
    results = check_env(env_id, num_tasks=4, num_concurrent=64, **settings)
    return [result for result in results if not result.is_ok]


def require(package):
    return pytest.importorskip(package, reason=f"require {package}, which is not installed")


# ---- ids with a colon ----------------------------------------------------------------------------


def test_id_suffix_after_a_colon_is_an_argument():
    entry = registry().get("envs", "gymnasium:FrozenLake-v1")
    assert entry.id == "gymnasium:FrozenLake-v1"
    assert dict(entry.spec.kwargs) == {"name": "FrozenLake-v1"}
    assert registry().get("envs", "remote:http://host:80").spec.kwargs["url"] == "http://host:80"
    for wrong in ("gymnasium:", "tir:x", "gymnasia:FrozenLake-v1"):
        with pytest.raises(UnknownIdError) as caught:
            registry().get("envs", wrong)
        assert any("did you mean" in hint for hint in caught.value.hints)


def test_list_and_show_of_adapter_ids(capsys):
    assert run(["list", "envs"]) == 0
    out = capsys.readouterr().out
    for shown_id in ("gymnasium:<name>", "reasoning_gym:<dataset>", "remote:<url>"):
        assert shown_id in out
    assert run(["show", "gymnasium:FrozenLake-v1"]) == 0
    out = capsys.readouterr().out
    assert "[S]FFF" in out
    assert run(["show", "gymnasium"]) == 0
    assert "A Gymnasium environment in words." in capsys.readouterr().out


# ---- gymnasium -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1"])
def test_gymnasium_environments_keep_the_contract(name):
    assert broken_rules(f"gymnasium:{name}") == []


def test_frozen_lake_takes_text_actions():
    env = areal_gym.make("gymnasium:FrozenLake-v1", make={"is_slippery": False})
    observation, info = env.reset(seed=0)
    assert observation == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert "one of: left, down, right, up" in info["messages"][0]["content"]
    steps = [env.step(text) for text in ("down", "I go down, not up: 1", "Right!", "right", "DOWN")]
    assert steps[0].observation.endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [step.info["metrics"]["invalid_actions"] for step in steps] == [0] * 5
    last = env.step("right")
    assert (last.reward, last.terminated) == (1.0, True)
    env.reset(seed=0)
    step = env.step("I do not know.")
    assert step.observation.startswith(
        "There is no action in that. Choose one of: 0, 1, 2, 3, left"
    )
    assert step.info["metrics"] == {"invalid_actions": 1}


def test_adapter_reward_equals_gymnasiums():
    ours = areal_gym.make("gymnasium:FrozenLake-v1")
    theirs = gymnasium.make("FrozenLake-v1")
    rng = random.Random(3)
    for seed in range(20):
        _, info = ours.reset(seed=seed, options={"index": seed})
        theirs.reset(seed=info["task"]["data"]["seed"])
        while True:
            action = rng.randrange(4)
            _, reward, *ends, _ = theirs.step(action)
            step = ours.step(str(action))
            assert (step.reward, step.terminated) == (reward, ends[0])
            if any(ends) or step.truncated:
                break


def test_areal_gym_env_through_gymnasium_is_unwrapped():
    env = areal_gym.make("gymnasium:areal_gym/countdown-v0")
    env.reset(seed=1)
    assert env.step("5").terminated


def test_gymnasium_make_errors_are_explained():
    with pytest.raises(UnknownIdError) as caught:
        areal_gym.make("gymnasium:FrozenLak-v1")
    assert "FrozenLake-v1" in caught.value.hints[0]
    with pytest.raises(UsageError, match="cannot make 'FrozenLake-v1'"):
        areal_gym.make("gymnasium:FrozenLake-v1", make={"size": 3})
    with pytest.raises(UsageError, match="neither texts nor a choice"):
        areal_gym.make("gymnasium:Pendulum-v1")
    with pytest.raises(UsageError, match="has 4 actions, not 1"):
        areal_gym.make("gymnasium:FrozenLake-v1", actions=["up"])


# ---- reasoning_gym -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        "leg_counting",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("chain_sum", "graph_color")),
    ],
)
def test_reasoning_gym_keeps_the_contract(dataset):
    require("reasoning_gym")
    assert broken_rules(f"reasoning_gym:{dataset}") == []


def test_reasoning_gym_scores_equal_the_librarys():
    reasoning_gym = require("reasoning_gym")
    env = areal_gym.make("reasoning_gym:leg_counting", config={"max_animals": 4})
    _, info = env.reset(seed=3)
    data = info["task"]["data"]
    theirs = reasoning_gym.create_dataset("leg_counting", size=2**30, seed=0, max_animals=4)
    entry = theirs[data["index"]]
    assert (entry["question"], entry["answer"]) == (data["question"], data["answer"])
    for text in (data["answer"], f"about {data['answer']}", "five", ""):
        env.reset(options={"task": info["task"]})
        step = env.step(f"Hm. <answer>1</answer> No: <answer> {text} </answer>")
        assert step.reward == theirs.score_answer(text, entry)
        assert step.info["reward_parts"]["format"] == 1.0


def test_reasoning_gym_custom_grader_errors_are_counted():
    require("reasoning_gym")
    env = areal_gym.make("reasoning_gym:prime_factorization")
    (step,) = play(env, lambda e: e.gold_action(), seed=1)
    assert step.reward == 1.0
    (step,) = play(env, lambda e: "I do not know.", seed=1)
    assert (step.reward, step.info["metrics"]) == (0.0, {"grader_errors": 1})
    task = {**env.task.to_dict(), "data": {**env.task.to_dict()["data"], "question": "Else?"}}
    env.reset(options={"task": task})
    with pytest.raises(EnvError, match="another one in this version"):
        env.step("5")


def test_unknown_reasoning_gym_datasets_are_named():
    require("reasoning_gym")
    with pytest.raises(UnknownIdError) as caught:
        areal_gym.make("reasoning_gym:leg_counter")
    assert "'leg_counting'" in caught.value.hints[0]
    with pytest.raises(UsageError, match="cannot make 'leg_counting'"):
        areal_gym.make("reasoning_gym:leg_counting", config={"legs": 3})
    with pytest.raises(UsageError, match="cannot make 'composite'") as caught:
        areal_gym.make("reasoning_gym:composite", config={"datasets": ["leg_counting"]})
    assert "{name: leg_counting" in caught.value.hints[0]


def test_composite_reasoning_gym_dataset():
    require("reasoning_gym")
    datasets = [{"name": "leg_counting", "weight": 2}, {"name": "chain_sum", "config": {}}]
    env = areal_gym.make("reasoning_gym:composite", config={"datasets": datasets})
    is_leg_question = set()
    for index in range(20):
        env.reset(seed=0, options={"split": "train", "index": index})
        is_leg_question.add("legs" in env.task.data["question"])
        assert env.step(env.gold_action()).reward == 1
        env.reset(seed=0, options={"split": "train", "index": index})
        assert env.step("<answer>none</answer>").reward < 1
    assert is_leg_question == {True, False}
    env.close()


@pytest.mark.slow
def test_reasoning_gym_trains_on_the_embedded_engine(tiny_policy, tmp_path, capsys):
    require("reasoning_gym")
    # The problems exceed the tiny policy's context.
    policy = shutil.copytree(tiny_policy, tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    small = ("rollout.batch_groups=2", "rollout.group_size=2", "rollout.max_new_tokens=8")
    exit_code = run(
        [
            *("train", "--env", "reasoning_gym:leg_counting", "--steps", "1", "--plain"),
            *("--out", str(tmp_path / "run"), f"engine.model={policy}", "eval.num_tasks=4"),
            *("engine.max_context=2048", *small),
        ]
    )
    assert exit_code == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_steps"] == 1


# ---- textarena -----------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["TowerOfHanoi-v0", "GuessTheNumber-v0"])
def test_textarena_keeps_the_contract(game):
    require("textarena")
    assert broken_rules(f"textarena:{game}") == []


def test_textarena_tower_of_hanoi_is_won():
    require("textarena")
    env = areal_gym.make("textarena:TowerOfHanoi-v0")
    observation, _ = env.reset(seed=0)
    assert "Tower of Hanoi with 3 disks" in observation
    moves = ("A C", "A B", "C B", "A C", "B A", "B C", "A C")
    steps = [env.step(f"I move [{move}].") for move in moves]
    assert [step.terminated for step in steps] == [False] * 6 + [True]
    assert steps[-1].reward == 1.0
    assert "Tower of Hanoi with 3 disks" not in steps[0].observation, "only new text is sent"


def test_textarena_guess_the_number_by_bisection():
    require("textarena")
    env = areal_gym.make("textarena:GuessTheNumber-v0")
    for seed in range(5):
        env.reset(seed=seed)
        low, high, step = 1, 20, None
        while step is None or not (step.terminated or step.truncated):
            guess = (low + high) // 2
            step = env.step(f"[{guess}]")
            if "higher" in step.observation:
                low = guess + 1
            else:
                high = guess - 1
        assert step.reward == 1.0


def test_textarena_keeps_global_random_state():
    require("textarena")
    areal_gym.make("textarena:GuessTheNumber-v0").reset(seed=1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    play(areal_gym.make("textarena:GuessTheNumber-v0"), lambda e: "[7]", seed=1)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_multiplayer_textarena_games_are_refused():
    require("textarena")
    with pytest.raises(UsageError, match="not a game for one player"):
        areal_gym.make("textarena:TicTacToe-v0")
    with pytest.raises(UnknownIdError):
        areal_gym.make("textarena:Tower")


# ---- openenv -------------------------------------------------------------------------------------


@contextmanager
def openenv_server():
    """A real OpenEnv server on a thread: guess a number between 0 and 99."""
    import socket

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        text: str

    class Hint(Observation):
        hint: str

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self._state = State()

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.number = random.Random(seed).randrange(100)
            return Hint(hint="Guess a number from 0 to 99.")

        def step(self, action, timeout_s=None, **kwargs):
            if action.text == "fail":
                raise RuntimeError("over there")
            if not action.text.isdecimal():
                return Hint(hint="A number!", reward=0.0)
            guess = int(action.text)
            if guess == self.number:
                return Hint(hint="Yes.", reward=1.0, done=True)
            return Hint(hint="higher" if guess < self.number else "lower", reward=0.0)

        @property
        def state(self):
            return self._state

    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=128)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.mark.filterwarnings("ignore")
def test_openenv_server_is_played():
    require("openenv")
    with openenv_server() as url:
        env = areal_gym.make(f"openenv:{url}", action_field="text")
        rewards = []
        for seed in range(3):
            observation, info = env.reset(seed=seed)
            assert observation == "Guess a number from 0 to 99."
            number = random.Random(info["task"]["data"]["seed"]).randrange(100)
            assert env.step("x").observation == "A number!"
            assert env.step("0" if number else "1").observation in ("higher", "lower")
            step = env.step(str(number))
            rewards.append((step.reward, step.terminated))
        assert rewards == [(1.0, True)] * 3
        env.reset(seed=0)
        failed = env.step("fail")
        assert (failed.reward, failed.terminated) == (0.0, True)
        assert failed.info["metrics"]["judge_errors"] == 1
        env.close()

        plain = areal_gym.make(f"openenv:{url}")
        plain.reset(seed=0)
        assert plain.step("5").observation.startswith("An action is a JSON object")
        assert plain.step('{"text": "x"}').observation == "A number!"
        for action in ('{"text": [1]}', '{"other": 1}', "{}"):
            refused = plain.step(action)
            assert refused.observation == "The environment takes no such action."
            assert refused.info["metrics"]["invalid_actions"] == 1
        plain.close()


def test_unreachable_openenv_server_is_an_env_error():
    require("openenv")
    with pytest.raises(EnvError, match="the OpenEnv server at http://127"):
        areal_gym.make("openenv:http://127.0.0.1:1").reset(seed=0)
    with pytest.raises(UsageError, match="not the address of a server"):
        areal_gym.make("openenv:nowhere")
