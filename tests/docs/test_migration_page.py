"""Our side of docs/migration.md keeps the contracts; settings that pages name exist."""

import asyncio
import re
from types import SimpleNamespace
from typing import get_args

import pytest
from pydantic import BaseModel

from areal_gym.config import RunConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.checker import check_env
from areal_gym.rollout.episode import play_episode
from tests._support.paths import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def ours():
    page = (ROOT / "docs" / "migration.md").read_text()
    namespace = {"__name__": "__main__"}
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.S | re.M):
        exec(code, namespace)
    return SimpleNamespace(**namespace)


@pytest.mark.parametrize("name", ["Rows", "Guess"])
def test_migrated_environments_keep_the_contract(ours, name):
    found = check_env(getattr(ours, name), num_tasks=4, num_concurrent=64)
    assert [(rule.rule, rule.reason) for rule in found if not rule.is_ok] == []


def test_migrated_agent_retries(ours):
    played = asyncio.run(
        play_episode(
            ours.Rows(),
            ours.SecondThought(),
            ScriptedEngine(["1", "2"]),
            byte_renderer(),
            trajectory_id="t",
            group_id="g",
            seed=0,
        )
    )
    said = [message["content"] for message in played.messages]
    assert said[1:] == ["1", "Are you sure?", "2"]


def test_migrated_function_agent_answers(ours):
    async def create(*, messages, model):
        message = SimpleNamespace(content=f"{model}: {messages[0]['content']}")
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = SimpleNamespace(messages=[{"role": "user", "content": "hello"}])
    assert asyncio.run(ours.solve(client, task)) == "default: hello"


def is_setting(path):
    """Whether `trainer.kl.coefficient` and the like is a setting, or lies below `kwargs`."""
    model = RunConfig
    for name in path.split("."):
        if name == "kwargs" or name.endswith("_kwargs"):
            return True
        if model is None or name not in model.model_fields:
            return False
        kinds = [model.model_fields[name].annotation]
        kinds += get_args(kinds[0])
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        model = models[0] if models else None
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_named_on_the_page_exist(page):
    sections = "trainer|rollout|engine|eval|cluster|teacher|data"
    named = re.findall(rf"`({sections})\.([a-z_.]+[a-z])(?=[`=\[])", page.read_text())
    files = {("trainer", "json")}
    wrong = [f"{a}.{b}" for a, b in {*named} - files if not is_setting(f"{a}.{b}")]
    assert wrong == []
