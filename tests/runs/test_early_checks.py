"""Settings that cannot work here are refused before anything is waited for."""

from __future__ import annotations

import pytest

from areal_gym.config import load_config
from areal_gym.config.absolute_paths import with_absolute_paths
from areal_gym.errors import ConfigError
from areal_gym.models.device import accelerator
from areal_gym.runs.early_checks import require_startable
from areal_gym.runs.run_summary import _unlearned


def test_url_for_an_engine_without_servers_is_refused():
    config = load_config(overrides=["engine.url=http://127.0.0.1:9"])
    with pytest.raises(ConfigError, match="'embedded' samples in this process") as caught:
        require_startable(config)
    assert "--engine sglang" in caught.value.hints[0]
    require_startable(load_config(overrides=["engine.id=sglang", "engine.url=http://127.0.0.1:9"]))


@pytest.mark.skipif(accelerator() == "cuda", reason="there is one")
@pytest.mark.parametrize("setting", ["trainer.device", "engine.device"])
def test_device_that_is_not_here_is_refused_before_the_start(setting):
    with pytest.raises(ConfigError, match=f"{setting} = 'cuda'"):
        require_startable(load_config(overrides=[f"{setting}=cuda"]))
    # Ranks and servers on a cluster have devices of their own.
    require_startable(load_config(overrides=[f"{setting}=cuda", "cluster.address=auto"]))


def test_paths_that_exist_are_recorded_as_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "reward.py").touch()
    (tmp_path / "train").mkdir()
    kwargs = {
        "path": "rows.jsonl",
        "reward": "reward.py:exact",
        "split": "train",
        "level": 3,
        "files": ["./train", "gone.jsonl"],
        "prompt": "Answer: 3/4.",
        "envs": [{"id": "./train"}],
    }
    config = load_config(flags={"env.kwargs": kwargs, "engine.model": "./train"})
    found = with_absolute_paths(config)
    assert found.engine.model == str(tmp_path / "train")
    assert found.env.kwargs == kwargs | {
        "path": str(tmp_path / "rows.jsonl"),
        "reward": f"{tmp_path / 'reward.py'}:exact",
        "files": [str(tmp_path / "train"), "gone.jsonl"],
    }
    assert with_absolute_paths(found) == found
    for given, wanted in (
        ("harbor:train", f"harbor:{tmp_path / 'train'}"),
        ("harbor:numbers-1", "harbor:numbers-1"),
        ("textarena:train", "textarena:train"),
    ):
        named = load_config(overrides=[f"env.id={given}"])
        assert with_absolute_paths(named).env.id == wanted


def test_paths_of_a_recipe_are_looked_for_here_and_then_beside_it(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for file in ("rows.jsonl", "recipes/rows.jsonl", "recipes/more.jsonl", "recipes/mine.py"):
        (tmp_path / file).touch()
    kwargs = "{tasks: {data: more.jsonl, test: rows.jsonl}, reward: mine.py:exact, x: gone.jsonl}"
    (folder / "a.yaml").write_text(f"env: {{id: prompts, kwargs: {kwargs}}}\n")
    assert load_config(folder / "a.yaml").env.kwargs == {
        "tasks": {"data": str(folder / "more.jsonl"), "test": "rows.jsonl"},
        "reward": f"{folder / 'mine.py'}:exact",
        "x": "gone.jsonl",
    }


@pytest.mark.parametrize(
    ("before", "after", "step", "words"),
    [
        (0.0, 0.0, {"reward/solve_none": 1.0}, "hardly any group earned a reward"),
        (0.9, 0.8, {"reward/solve_all": 1.0}, "hardly any group failed"),
        (0.5, 0.5, {"reward/solve_none": 0.2}, "another learning rate"),
        (0.2, 0.3, {}, None),
        (1.0, 1.0, {"reward/solve_all": 1.0}, None),
        (None, None, {}, None),
    ],
)
def test_run_that_learned_nothing_says_so(before, after, step, words):
    summary = {"objective": "rl", "env": "tir", "heldout_before": before, "heldout_after": after}
    lines = "\n".join(_unlearned([step, step], summary))
    if words is None:
        assert not lines
    else:
        assert f"nothing was learned: held-out {before:.3f} before, {after:.3f} after" in lines
        assert words in lines
