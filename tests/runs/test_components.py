"""What is wrong with the parts of a run is said before anything has been waited for, by name."""

import asyncio
import json
import shutil
from collections.abc import Iterable, Sequence

import pytest

from areal_gym.chat import Renderer
from areal_gym.config import load_config
from areal_gym.engines.base import Generation
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import ConfigError, EnvError, PluginError, UsageError
from areal_gym.plugins import EngineSpec, EnvSpec, PluginManager, Registry, hookimpl, set_registry
from areal_gym.runs.components import Components, check_arguments, make_with
from areal_gym.runs.open_engine import open_engine, open_renderer
from areal_gym.runs.probe import first_messages, measure_gap
from areal_gym.types import Task


class Moody(TextEnv):
    """Every third reset works, or none does."""

    num_resets = 0
    works = True

    def __init__(self, patience: int = 3, mood: str = "good"):
        super().__init__()
        if mood == "awful":
            raise ValueError("no such mood")

    def sample_task(self, rng, options):
        Moody.num_resets += 1
        if not Moody.works or Moody.num_resets % 3:
            raise RuntimeError(f"not now ({Moody.num_resets})")
        return Task(id="1", data={"n": 1}, split=options["split"])

    def first_messages(self, task):
        return [{"role": "user", "content": "Well?"}]

    async def respond(self, message):
        return Response(reward=1.0, is_terminated=True)


class Failing(ScriptedEngine):
    """Fails where `engine.kwargs.where` says, with an error of its own code."""

    def __init__(self, where):
        super().__init__(["10"])
        self.where = where

    @classmethod
    def from_settings(cls, policy, settings):
        where = settings.kwargs["where"]
        if where == "made":
            return len(None)
        return cls(where)

    async def start(self):
        if self.where == "start":
            raise TypeError("unsupported operand")

    async def generate(self, prompt_ids, params, *, session=None):
        if self.where == "sample":
            raise TypeError("unsupported operand")
        return None if self.where == "gives nothing" else Generation


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    yield EnvSpec(id="moody", entry_point="test_components:Moody", summary="fails now and then")


@hookimpl
def register_engines() -> Iterable[EngineSpec]:
    yield EngineSpec(id="failing", entry_point="test_components:Failing", summary="fails")


@pytest.fixture
def plugin():
    set_registry(Registry(PluginManager.installed(modules=["test_components"])))
    Moody.num_resets, Moody.works = 0, True
    yield
    set_registry(None)


class Lines(list):
    def __call__(self, text):
        self.append(text)


class EvenLearner:
    """Scores every token alike."""

    def score(self, rows):
        import torch

        return [torch.full((row.num_trainable,), -1.0) for row in rows]


def probe(policy, *overrides, say=None):
    config = load_config(overrides=[f"engine.model={policy}", "env.id=moody", *overrides])

    async def measure():
        parts = Components.of(config)
        if config.engine.id == "failing":
            async with open_engine(config, policy) as (engine, renderer):
                return await measure_gap(config, parts, engine, renderer, EvenLearner(), say)
        engine = ScriptedEngine(lambda question: "10")
        renderer = Renderer.from_checkpoint(policy)
        return await measure_gap(config, parts, engine, renderer, EvenLearner(), say)

    return asyncio.run(measure())


def test_probe_survives_some_failing_resets(plugin, tiny_policy):
    lines = Lines()
    assert probe(tiny_policy, say=lines).num_tokens > 0
    (line,) = lines
    assert "resets of moody failed at the start" in line
    assert "not now (1)" in line


def test_probe_without_any_task_quotes_the_first_failure(plugin, tiny_policy):
    Moody.works = False
    with pytest.raises(EnvError, match=r"all of 24 resets failed.*not now \(1\)") as caught:
        probe(tiny_policy)
    assert any("areal-gym check" in hint for hint in caught.value.hints)


def test_missing_split_is_not_counted_as_failed_reset(plugin):
    class Splitless(Moody):
        def sample_task(self, rng, options):
            raise UsageError("no split")

    parts = Components(env_class=Splitless, env_kwargs={}, agent=None)
    with pytest.raises(UsageError, match="no split"):
        asyncio.run(first_messages(parts, 0, []))


@pytest.mark.parametrize("where", ["made", "start", "sample", "gives nothing"])
def test_failing_engine_of_a_plugin_is_named_with_its_cause(plugin, tiny_policy, where):
    overrides = ["engine.id=failing", f"engine.kwargs.where={where}"]
    with pytest.raises(
        PluginError, match=r"the engine 'failing' of plugin .*test_components"
    ) as caught:
        probe(tiny_policy, *overrides)
    assert "TypeError" in str(caught.value)


def test_tokenizer_larger_than_the_model_is_refused(tiny_policy, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(tiny_policy, policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    settings = load_config(overrides=[f"engine.model={policy}"])
    with pytest.raises(
        ConfigError, match=r"tokens up to \d+, and its model has a vocabulary of 100"
    ):
        open_renderer(settings, policy)
    # A larger model is padded, as most are.
    (policy / "config.json").write_text(json.dumps({**config, "vocab_size": 10**6}))
    assert open_renderer(settings, policy).stop_token_ids


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.id=moody", "env.kwargs.patience=long"], "patience = 'long'.*a whole number"),
        (["env.id=moody", "env.kwargs.patiense=2"], "patiense"),
        (["env.id=moody", "env.kwargs.mood=awful"], "no such mood"),
        (["env.id=moody", "agent.kwargs.colour=red"], "colour"),
    ],
)
def test_invalid_arguments_name_their_setting(plugin, overrides, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Components.of(load_config(overrides=overrides))
    assert ".kwargs" in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (["engine.id=sglang", "engine.kwargs.grace_s=soon"], "grace_s = 'soon'.*takes a number"),
        (["engine.id=sglang", "engine.kwargs.num_servers=[1]"], "num_servers"),
        (["engine.id=sglang", "engine.kwargs.grace=1"], "grace"),
        (["engine.id=embedded", "engine.kwargs.grace_s=1"], "takes no engine.kwargs: grace_s"),
    ],
)
def test_invalid_engine_arguments_are_named(tiny_policy, engine, message):
    config = load_config(overrides=[f"engine.model={tiny_policy}", *engine])

    async def scenario():
        async with open_engine(config, tiny_policy):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match=message):
        asyncio.run(scenario())


def test_uncheckable_annotations_are_ignored():
    def takes(anything: "NotHere", number: int | None = None):  # noqa: F821
        return number

    assert make_with(takes, {"anything": object(), "number": 3}, key="x.kwargs", id="takes") == 3

    def typed(number: int | None = None, names: Sequence[str] = ()):
        return number

    check_arguments(typed, {"number": None, "names": ["a"]}, key="x.kwargs", id="typed")
    with pytest.raises(ConfigError, match=r"x\.kwargs: .*names = 3"):
        check_arguments(typed, {"names": 3}, key="x.kwargs", id="typed")


def test_log_directory_is_created_or_named_in_the_error(tmp_path):
    async def start(log):
        server = LaunchedServer(
            tmp_path, recipe=SGLangEngine.recipe, command=["true"], log=log, start_timeout_s=30
        )
        try:
            await server.start()
        finally:
            await server.aclose()

    with pytest.raises(Exception, match="ended while it was starting"):
        asyncio.run(start(tmp_path / "new" / "logs" / "server.log"))
    assert (tmp_path / "new" / "logs" / "server.log").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        asyncio.run(start(tmp_path / "file" / "server.log"))
