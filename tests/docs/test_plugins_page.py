"""The plugin of docs/plugins.md, written into files, loaded as a plugin, and used."""

import asyncio
import os
import random
import re
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import areal_gym
from areal_gym.config import EngineConfig, RunConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.envs.checker import check_env
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.plugins import KINDS, HookSpecs, PluginManager, Registry, registry, set_registry
from areal_gym.testing import check_advantage_estimator, check_policy_loss
from areal_gym.types import Group
from tests._support.paths import ROOT

PAGE = ROOT / "docs" / "plugins.md"
BLOCK = re.compile(r"^```python\n# (my_plugin/\w+\.py)\n(.*?)^```$", re.S | re.M)
HOOKS = sorted(name for name in vars(HookSpecs) if name.startswith("register_"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("plugin")
    (home / "my_plugin").mkdir()
    (home / "my_plugin" / "__init__.py").touch()
    for name, code in BLOCK.findall(PAGE.read_text()):
        with (home / name).open("a") as file:
            file.write(code)
    return home


@pytest.fixture(autouse=True)
def found(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    set_registry(Registry(PluginManager.installed(modules=["my_plugin.plugin"])))
    yield registry()
    set_registry(None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_plugin"]:
        del sys.modules[name]


def mine(kind):
    (entry,) = [e for e in registry().entries(kind) if e.spec.entry_point.startswith("my_plugin.")]
    return entry


def test_every_hook_has_a_section():
    assert sorted(re.findall(r"^### (\w+)$", PAGE.read_text(), re.M)) == HOOKS


@pytest.mark.parametrize("kind", KINDS)
def test_example_plugin_offers_every_kind(kind):
    entry = mine(kind)
    assert f"### {entry.spec.hook}" in PAGE.read_text()
    assert entry.load() is not None


def test_example_environment_keeps_the_contract():
    found = check_env(mine("envs").load(), num_tasks=4, num_concurrent=64)
    assert [(rule.rule, rule.reason) for rule in found if not rule.is_ok] == []


def test_example_agent_filter_and_curriculum():
    from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
    from areal_gym.rollout.episode import play_episode

    env, agent = mine("envs").load()(), mine("agents").load()(patience=1)
    engine = ScriptedEngine(["no"])
    played = asyncio.run(
        play_episode(env, agent, engine, byte_renderer(), trajectory_id="t", group_id="g", seed=0)
    )
    assert "Be brief." in [m["content"] for m in played.messages]
    group = Group(id="g", task=played.task, trajectories=(played,))
    assert mine("filters").load()(most=1).reject(group) == "too-long"
    assert mine("filters").load()().reject(group) is None
    curriculum = mine("curricula").load()()
    curriculum.prepare(env, "train")
    curriculum.observe(curriculum.choose(random.Random(0)), [1.0, 1.0])
    assert curriculum.state() == {"index": 1}


def test_example_tool():
    tool = mine("tools").load()
    assert tool.schema()["function"]["name"] == "count_letters"


def test_example_retriever():
    env = areal_gym.make("search", retriever="newest")
    env.reset(seed=0)
    hits = asyncio.run(mine("retrievers").load()(None).search(["a town"], 3))[0]
    ids = [hit.passage.id for hit in hits]
    assert ids == sorted(ids, reverse=True)
    assert len(ids) == 3


def test_example_sandbox():
    async def run():
        async with mine("sandboxes").load()() as sandbox:
            return await sandbox.run("Fraction(1, 2) + Fraction(1, 3)")

    assert asyncio.run(run()).value == "Fraction(5, 6)"


def test_example_places():
    from areal_gym.places import Places

    places = mine("places").load()()
    assert isinstance(places, Places)
    asyncio.run(places.aclose())


def test_example_engine_samples_and_loads_weights(tiny_policy, tmp_path):
    engine_class, sync_class = mine("engines").load(), mine("weight-syncs").load()
    engine = engine_class.from_settings(tiny_policy, EngineConfig(model=str(tiny_policy)))

    async def use():
        await engine.start()
        await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=5))
        sync = sync_class(engine, directory=tmp_path / "notes")
        await sync.publish(load_checkpoint(tiny_policy).state_dict().items(), 1)
        await engine.aclose()

    asyncio.run(use())
    assert engine.num_sampled > 0
    assert (tmp_path / "notes" / "versions.txt").read_text() == "1\n"


def test_example_estimator_and_loss_keep_their_contracts():
    check_advantage_estimator(mine("advantages").load())
    check_policy_loss(mine("losses").load(), cap=1.5)


def test_example_trainer_is_built_from_settings(tiny_policy):
    from areal_gym.runs.make_trainer import make_trainer

    config = RunConfig.model_validate({"trainer": {"id": "patient", "advantage": "half"}})
    learner = make_trainer(config, tiny_policy)
    assert type(learner).__name__ == "Patient"
    assert all(p.dtype == torch.float32 for p in learner.decoder.parameters())


def test_example_logger_resumes(tmp_path):
    for first_step, rewards in ((1, [0.1, 0.2, 0.3]), (3, [0.4])):
        logger = mine("loggers").load()()
        logger.open(tmp_path, name="run", config={}, first_step=first_step)
        for step, reward in enumerate(rewards, first_step):
            logger.log(step, {"reward/mean": reward})
        logger.close()
    assert (tmp_path / "rewards.txt").read_text() == "1 0.100\n2 0.200\n3 0.400\n"


def test_command_line_loads_the_example_plugin(folder):
    """As the page says: in a process of its own, whose path does not name the directory."""
    script = "import sys; sys.path.remove(''); from areal_gym.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "-p", "my_plugin.plugin", "shout", "hello"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
    )
    assert (done.returncode, done.stdout) == (0, "HELLO\n"), done.stderr


def test_example_command_runs():
    done = CliRunner().invoke(mine("commands").load(), ["hello"])
    assert (done.exit_code, done.output) == (0, "HELLO\n")
