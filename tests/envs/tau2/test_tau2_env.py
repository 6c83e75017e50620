"""The tau2 environments through the public API."""

import asyncio
import json
import shutil

import pytest

import areal_gym
from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.checker import HOSTILE_ACTIONS, check_env, play
from areal_gym.envs.tau2.benchmark_data import load_domain
from areal_gym.envs.tau2.mock import library_closing, library_domain, library_tasks
from areal_gym.errors import DataError, UsageError
from tests._support.evaluation import evaluate
from tests._support.tau2_data import DATA, needs_data


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def gold(env):
    return env.gold_action()


# ---- the built-in domain ------------------------------------------------------------------------


def test_library_conversation_from_question_to_reward():
    env = areal_gym.make("tau2/mock")
    env.reset(options={"split": "test", "index": 0})
    data = env.task.data
    card, item = data["card"], data["item"]
    assert env.step("What is your card number?").observation == f"It is {card}."
    assert env.step(call("look_up", card=card, item=item)).observation.startswith(f"{item}: ")
    assert env.step(call(data["wish"], card=card, item=item)).info["metrics"]["tool_errors"] == 0
    step = env.step(library_closing(data))
    assert (step.reward, step.terminated, step.observation) == (1.0, True, "")
    assert step.info["reward_parts"] == {"db": 1.0, "communicate": 1.0}
    assert step.info["metrics"]["db_match"] == 1.0


def test_every_library_request_occurs_and_is_solvable():
    env = areal_gym.make("tau2")
    seen = set()
    for index in range(60):
        steps = play(env, gold, options={"split": "train", "index": index})
        assert steps[-1].reward == 1.0
        data = env.task.data
        seen.add((data["wish"], data["loans"][data["card"]][data["item"]] == "overdue"))
    assert seen == {(wish, late) for wish in ("renew", "take_back") for late in (True, False)}


def test_reward_needs_both_action_and_message():
    env = areal_gym.make("tau2")
    tasks = (library_tasks().at(index, "train") for index in range(50))
    task = next(t for t in tasks if t.data["wish"] == "take_back")
    card, item = task.data["card"], task.data["item"]
    env.reset(options={"task": task})
    assert env.step(library_closing(task.data)).reward == 0.0
    env.reset(options={"task": task})
    env.step(call("take_back", card=card, item=item))
    assert env.step("Done.").reward == 0.0


def test_solo_mode_offers_the_users_tools():
    env = areal_gym.make("tau2", solo=True)
    assert [tool.name for tool in env.tools][-2:] == ["read_card", "done"]
    steps = play(env, gold, seed=3)
    assert steps[-1].reward == 1.0
    observation, _ = env.reset(seed=3)
    assert observation.startswith("The customer wants to")
    step = env.step("Hello?")
    assert (step.reward, step.terminated) == (0.0, True)
    results = check_env(lambda: areal_gym.make("tau2", solo=True), num_tasks=4)
    assert [result for result in results if not result.is_ok] == []


def test_each_library_task_has_its_own_domain():
    task = library_tasks().at(1, "test")
    domain, case = library_domain(task.data)
    world = domain.make_world()
    assert world.texts() == (domain.make_world().texts()[0], None)
    assert domain.gold_state(case) == domain.gold_world(case).state()


# ---- mistakes ---------------------------------------------------------------------------------


def test_tool_call_errors_are_explained_and_counted():
    env = areal_gym.make("tau2", max_errors=4)
    env.reset(seed=0)
    step = env.step("<tool_call>{broken</tool_call>")
    assert step.observation.startswith("Error: the tool call is no JSON")
    step = env.step(call("look_up", card="x", item="saw") + call("fly"))
    assert [message["content"] for message in step.info["messages"]] == [
        "Error: no card x",
        "Error: Tool 'fly' not found.",
    ]
    assert step.info["metrics"] == {"tool_calls": 2, "tool_errors": 2}
    step = env.step(call("fly"))
    assert (step.terminated, step.reward) == (True, 0.0)


def test_calls_beyond_the_limit_are_not_run():
    env = areal_gym.make("tau2", max_errors=100)
    env.reset(seed=0)
    step = env.step(call("look_up", card="1", item="saw") * 20)
    assert len(step.info["messages"]) == 17
    assert "4 more calls were not run" in step.observation


def test_empty_message_ends_the_episode():
    env = areal_gym.make("tau2")
    env.reset(seed=0)
    step = env.step("  ")
    assert (step.terminated, step.reward) == (True, 0.0)


def test_max_steps_truncates():
    env = areal_gym.make("tau2", max_steps=6)
    env.reset(seed=0)
    while not (step := env.step("What is your card number?")).truncated:
        assert not step.terminated
    assert step.reward == 0.0
    assert step.info["truncated_by"] == "env"


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"domain": "banking"}, "no tau2 domain 'banking'"),
        ({"policy": "short"}, "no policy 'short'"),
        ({"user": "missing"}, "no user 'missing'"),
        ({"user": "no_such_module:User"}, "cannot be imported"),
        ({"judge": "missing"}, "no judge 'missing'"),
    ],
)
def test_wrong_tau2_settings_are_refused(kwargs, complaint):
    with pytest.raises(UsageError, match=complaint):
        areal_gym.make("tau2", **kwargs)


class UnsureJudge:
    """A judge that cannot tell."""

    async def judge(self, transcript, assertions):
        return None


def test_custom_user_and_judge():
    env = areal_gym.make(
        "tau2", user="areal_gym.envs.tau2.mock:Borrower", judge=f"{__name__}:UnsureJudge"
    )
    assert play(env, gold, seed=1)[-1].reward == 1.0
    env.close()


# ---- action strings -----------------------------------------------------------------------------


def test_action_strings_of_tau2_gym():
    env = areal_gym.make("tau2", action_strings=True)
    env.reset(seed=0)
    loan = {name: env.task.data[name] for name in ("card", "item")}
    card, item = loan.values()
    observation = env.step(f"look_up(card={card!r}, item={item})").observation
    assert observation.startswith(f"{item}: ")
    again = env.step(json.dumps({"name": "look_up", "arguments": loan}))
    assert again.observation == observation
    assert env.step("What is your card number?").observation == f"It is {card}."


def test_action_cannot_choose_its_requestor():
    env = areal_gym.make("tau2", action_strings=True)
    smuggled = {"name": "read_card", "arguments": {}, "requestor": "user"}
    for action in (json.dumps(smuggled), f"<tool_call>{json.dumps(smuggled)}</tool_call>"):
        env.reset(seed=0)
        assert env.step(action).observation == "Error: Tool 'read_card' not found."


@needs_data
def test_agent_cannot_call_user_tools():
    env = areal_gym.make("tau2/telecom", data_dir=str(DATA), action_strings=True, max_errors=99)
    env.reset(options={"split": "base", "index": 0})
    for action in env._simulation.case.gold_actions:
        smuggled = {**action._asdict(), "requestor": "user"}
        smuggled = {key: smuggled[key] for key in ("name", "arguments", "requestor")}
        if action.requestor == "user":
            assert "not found" in env.step(json.dumps(smuggled)).observation
    assert asyncio.run(env._simulation.verdict(None)).reward == 0.0


# ---- the benchmark's domains --------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    "domain",
    [
        "airline",
        pytest.param("retail", marks=pytest.mark.slow),
        pytest.param("telecom", marks=pytest.mark.long),
    ],
)
def test_tau2_domains_pass_the_checker(domain):
    make = lambda: areal_gym.make(f"tau2/{domain}", data_dir=str(DATA))  # noqa: E731
    assert [result for result in check_env(make, num_tasks=8) if not result.is_ok] == []


@needs_data
def test_evaluation_report_names_the_task_version():
    async def run_evaluation():
        return await evaluate(
            lambda: areal_gym.make("tau2/airline", data_dir=str(DATA)),
            ChatAgent(),
            ScriptedEngine(["I do not know."] * 9),
            byte_renderer(),
            num_tasks=3,
        )

    report = asyncio.run(run_evaluation())
    assert report.to_dict()["task_versions"] == ["1.0.1"]
    assert report.to_text().startswith("Tau2Env test: 3 tasks of version 1.0.1 x 1")
    assert report.reward == 0.0
    assert report.metrics["solved_by_inaction"] > 0
    assert report.metrics["own_tool_texts"] == 1.0


@needs_data
def test_task_ids_name_version_and_flag_solved_by_inaction():
    env = areal_gym.make("tau2/airline", data_dir=str(DATA))
    assert env.version == "1.0.1"
    _, info = env.reset(options={"split": "test", "index": 0})
    assert info["task_id"] == "airline@1.0.1/2"
    assert info["task"]["split"] == "test"
    flags = [
        env.reset(options={"split": "base", "index": index})[1]["task"]["data"][
            "solved_by_inaction"
        ]
        for index in range(env.num_tasks("base"))
    ]
    assert (len(flags), sum(flags)) == (50, 23)


@needs_data
def test_changed_task_files_use_their_hash_as_version(tmp_path):
    folder = tmp_path / "tau2"
    shutil.copytree(DATA / "tau2" / "domains" / "airline", folder / "domains" / "airline")
    shutil.copytree(DATA / "tau2" / "user_simulator", folder / "user_simulator")
    file = folder / "domains" / "airline" / "tasks.json"
    file.chmod(0o644)
    file.write_text(file.read_text() + "\n")
    env = areal_gym.make("tau2/airline", data_dir=str(tmp_path))
    _, info = env.reset(options={"split": "test", "index": 0})
    assert info["task_id"] == f"airline@{env.version}/2"
    assert env.version.startswith("sha256-")
    theirs = areal_gym.make("tau2/airline", data_dir=str(DATA))
    with pytest.raises(DataError, match="is not one of tau2/airline"):
        theirs.reset(options={"task": info["task"]})


@needs_data
def test_broken_tau2_data_is_named(tmp_path):
    (tmp_path / "tau2" / "domains" / "airline").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot read .*tasks.json"):
        areal_gym.make("tau2/airline", data_dir=str(tmp_path))
    (tmp_path / "tau2" / "domains" / "airline" / "tasks.json").write_text('[{"id": 5')
    with pytest.raises(DataError, match=r"tasks\.json"):
        areal_gym.make("tau2/airline", data_dir=str(tmp_path))
    (tmp_path / "tau2" / "domains" / "airline" / "tasks.json").write_text('[{"no": "id"}]')
    with pytest.raises(DataError, match="task 0"):
        areal_gym.make("tau2/airline", data_dir=str(tmp_path))


@needs_data
def test_telecom_policies_solo_mode_and_splits():
    manual = areal_gym.make("tau2/telecom", data_dir=str(DATA))
    workflow = areal_gym.make("tau2/telecom", data_dir=str(DATA), policy="workflow")
    solo = areal_gym.make("tau2/telecom", data_dir=str(DATA), solo=True)
    options = {"split": "base", "index": 0}
    envs = (manual, workflow, solo)
    policies = {env.reset(options=options)[1]["messages"][0]["content"] for env in envs}
    assert len(policies) == 3
    assert [len(env.tools) for env in envs] == [13, 13, 44]
    assert manual.num_tasks("small") == 20
    assert manual.num_tasks("full") == 2285
    assert play(solo, gold, options=options)[-1].reward == 1.0
    with pytest.raises(UsageError, match="no split 'tiny'"):
        manual.reset(options={"split": "tiny"})
    with pytest.raises(UsageError, match="has 114 tasks"):
        manual.reset(options={"split": "base", "index": 114})
    with pytest.raises(UsageError, match="no solo mode"):
        areal_gym.make("tau2/retail", data_dir=str(DATA), solo=True)


@needs_data
@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_concurrent_episodes_do_not_share_state(domain):
    benchmark = load_domain(domain, DATA)

    async def episode(index):
        env = areal_gym.make(f"tau2/{domain}", data_dir=str(DATA))
        env.reset(options={"split": "train", "index": index % env.num_tasks("train")})
        total = 0.0
        while True:
            step = await env.astep(env.gold_action())
            total += step.reward
            await asyncio.sleep(0)  # let another episode go on in between
            if step.terminated or step.truncated:
                return total

    async def all_episodes():
        return await asyncio.gather(*(episode(index) for index in range(1000)))

    before = benchmark.make_world().texts()
    assert asyncio.run(all_episodes()) == [1.0] * 1000
    assert benchmark.make_world().texts() == before


def test_adversarial_actions_do_not_affect_later_episodes():
    env = areal_gym.make("tau2")
    for action in HOSTILE_ACTIONS.values():
        env.reset(seed=0)
        env.step(action)
        assert play(env, gold, seed=5)[-1].reward == 1.0
