"""`areal_gym.train`: runs from scripts and notebooks, with callbacks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

import areal_gym
from areal_gym.errors import ConfigError, NothingToDoError, UnknownIdError, UsageError
from areal_gym.runs.interactive import _resolve
from areal_gym.runs.interactive.notebook_display import NotebookDisplay

SMALL = {
    "rollout": {
        "group_size": 2,
        "batch_groups": 2,
        "max_in_flight": 4,
        "max_new_tokens": 8,
    },
    "engine": {"num_slots": 4, "max_context": 256},
    "eval": {"num_tasks": 2},
}


class Diary(areal_gym.Callback):
    def __init__(self, stop_at=None):
        self.entries = []
        self.stop_at = stop_at

    def note(self, *entry):
        self.entries.append(entry)
        if entry == self.stop_at:
            raise areal_gym.StopTraining("enough")

    def on_start(self, run):
        self.run = run
        self.note("start")

    def on_step(self, step, metrics, groups):
        assert metrics["step"] == step
        assert sum(map(len, groups)) == 4 or not groups
        self.note("step", step)

    def on_evaluation(self, step, metrics):
        assert all(name.startswith("eval/") for name in metrics)
        self.note("evaluation", step)

    def on_checkpoint(self, step, directory):
        assert (directory / "config.json").exists()
        self.note("checkpoint", step)

    def on_end(self, summary):
        self.note("end", summary["num_steps"])


@pytest.fixture
def settings(tiny_policy, shaped_env):
    return {**SMALL, "env": shaped_env, "engine": {**SMALL["engine"], "model": str(tiny_policy)}}


def test_callbacks_get_events_in_order_and_train_returns_a_policy(settings, tmp_path):
    diary = Diary()
    result = areal_gym.train(**settings, steps=2, out=tmp_path / "run", callbacks=[diary])
    assert diary.entries == [
        ("start",),
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("checkpoint", 2),
        ("evaluation", 2),
        ("end", 2),
    ]
    assert diary.run.path == result.run.path == tmp_path / "run"
    assert result.stopped is None
    assert result.metrics["step"] == 2
    assert result.summary == result.run.read_summary()
    assert result.policy == result.best_checkpoint == result.checkpoint
    assert "2 steps, held out" in repr(result)
    assert "<svg" in result._repr_html_()
    report = areal_gym.evaluate(
        result.policy, settings["env"], n=2, max_new_tokens=4, max_context=256
    )
    assert report.num_episodes == 2
    # There is no step left: the summary stays what it was.
    with pytest.raises(NothingToDoError, match="all of its 2 steps"):
        areal_gym.train(out=tmp_path / "run", mode="resume")
    assert result.summary == result.run.read_summary()


@pytest.mark.parametrize(
    ("stop_at", "num_steps"),
    [(("start",), 0), (("evaluation", 0), 0), (("step", 1), 1), (("checkpoint", 1), 2)],
)
def test_callback_can_stop_training(settings, tmp_path, stop_at, num_steps):
    diary = Diary(stop_at)
    out = tmp_path / "run"
    result = areal_gym.train(
        **settings, steps=9, trainer={"save_every": 1}, out=out, callbacks=[diary]
    )
    # A checkpoint is noticed at the end of a step, which may be a later one than its own.
    assert result.summary["num_steps"] >= num_steps
    assert result.summary["num_steps"] < 9
    assert result.stopped == "enough"
    assert result.run.is_finished
    assert (result.checkpoint / "config.json").exists()
    assert result.run.read_evaluations()[-1]["step"] == result.summary["num_steps"]
    assert diary.entries[-1] == ("end", result.summary["num_steps"])
    if stop_at == ("step", 1):
        assert result.summary["num_steps"] == 1
        diary = Diary()
        more = areal_gym.train(out=out, mode="resume", steps=2, callbacks=[diary])
        assert [entry for entry in diary.entries if entry[0] == "step"] == [("step", 2)]
        assert more.stopped is None


def test_callbacks_of_a_supervised_run(settings, tmp_path):
    file = tmp_path / "rows.jsonl"
    line = (
        '{"messages": [{"role": "user", "content": "17"}, {"role": "assistant", "content": "3"}]}'
    )
    file.write_text(f"{line}\n" * 8)
    diary = Diary(("step", 2))
    data = {"file": str(file), "heldout_file": str(file), "batch_size": 2}
    result = areal_gym.train(
        **settings, objective="sft", data=data, steps=5, out=tmp_path / "run", callbacks=[diary]
    )
    assert diary.entries == [
        ("start",),
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
        ("checkpoint", 2),
        ("evaluation", 2),
        ("end", 2),
    ]
    assert (result.stopped, result.summary["num_steps"]) == ("enough", 2)
    assert (result.policy / "config.json").exists()


def test_train_in_a_running_loop_can_be_interrupted(settings, tmp_path):
    class Interrupting(areal_gym.Callback):
        def on_step(self, step, metrics, groups):
            if step == 2:
                assert threading.current_thread() is not threading.main_thread()
                os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        areal_gym.train(
            **settings, steps=50, out=tmp_path / "run", callbacks=[Interrupting()], progress=False
        )

    # As in a kernel: the signal belongs to the cell, not to the loop around it.
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    run = areal_gym.RunDir(tmp_path / "run")
    num_steps = len(run.read_metrics())
    assert 2 <= num_steps < 50
    assert (run.checkpoint(num_steps) / "config.json").exists()
    assert "areal-gym-run" not in [thread.name for thread in threading.enumerate()]
    result = areal_gym.train(out=run.path, mode="resume", steps=num_steps)
    assert result.summary["num_steps"] == num_steps


def test_failing_callback_fails_the_run_after_saving(settings, tmp_path):
    class Failing(areal_gym.Callback):
        def on_step(self, step, metrics, groups):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        areal_gym.train(**settings, steps=3, out=tmp_path / "run", callbacks=[Failing()])
    assert (areal_gym.RunDir(tmp_path / "run").checkpoint(1) / "config.json").exists()


def test_train_accepts_settings_in_every_form(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env: {id: math, kwargs: {level: 2}}\nsteps: 7\n")
    resolved = _resolve(recipe, {"steps": 8, "rollout": {"group_size": 4}, "trainer": {"lr": 1e-5}})
    assert (resolved.env.id, resolved.env.kwargs) == ("math", {"level": 2})
    assert (resolved.steps, resolved.rollout.group_size, resolved.trainer.lr) == (8, 4, 1e-5)
    assert _resolve(resolved, {}) is resolved
    other = _resolve(resolved, {"trainer": {"algorithm": "dapo"}, "env": "tir", "seed": 3})
    assert other == _resolve(other.model_dump(mode="json"), {})
    assert (other.trainer.algorithm, other.env.id, other.steps, other.seed) == ("dapo", "tir", 8, 3)
    assert _resolve(None, {"engine": {"model": "naïve-😀"}}).engine.model == "naïve-😀"


def test_wrong_arguments_are_refused_before_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="max_stalness") as caught:
        areal_gym.train(env="tir", rollout={"max_stalness": 1})
    assert "max_staleness" in caught.value.hints[0]
    with pytest.raises(UnknownIdError, match="tirr"):
        areal_gym.train(env="tirr")
    with pytest.raises(ConfigError, match="needs the run's directory"):
        areal_gym.train(env="tir", mode="resume")
    with pytest.raises(UsageError, match="is not a run directory"):
        areal_gym.train(out="nowhere", mode="resume")
    with pytest.raises(UsageError, match="is not a callback"):
        areal_gym.train(env="tir", callbacks=[print])
    with pytest.raises(ConfigError, match="mode='again'"):
        areal_gym.train(env="tir", out="x", mode="again")
    assert list(tmp_path.glob("runs/*")) == []


def test_notebook_display_shows_curves_and_messages():
    pages = []
    display = NotebookDisplay(lambda page, is_last=False: pages.append(page()))
    display.phase("train", 3)
    display.say("<script>alert(1)</script> \u202e")
    for step in (1, 2):
        display.step(step, 3, {"step": step, "reward/mean": 0.5 * step, "train/entropy": 1.0})
    display.close()
    assert "<script>" not in pages[-1]
    assert "&lt;script&gt;alert(1)&lt;/script&gt; [U+202E]" in pages[-1]
    assert pages[-1].count("<svg") == 2
    assert 'value="2" max="3"' in pages[-1]
