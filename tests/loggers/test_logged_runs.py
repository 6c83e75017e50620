"""Runs with loggers: what they are told, and that none of them can stop a run."""

import dataclasses
import json
import tomllib
from threading import Event

import pytest

from areal_gym.config import load_config
from areal_gym.errors import ConfigError
from areal_gym.plugins import Entry, PluginManager, Registry, registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.logger_threads import Loggers
from areal_gym.runs.run_display import Display
from areal_gym.runs.train import train
from tests._support.paths import ROOT

SMALL = [
    "env.id=shaped",
    "rollout.group_size=2",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=4",
    "rollout.max_new_tokens=8",
    "engine.num_slots=4",
    "engine.max_context=256",
    "eval.num_tasks=2",
]


class Talk(Display):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def about(self, id):
        return [line for line in self.lines if line.startswith(f"logger {id}")]


@pytest.fixture
def plugins():
    set_registry(
        Registry(
            PluginManager.installed(
                modules=["tests._support.shaped_env", "tests._support.loggers_plugin"]
            )
        )
    )
    yield
    set_registry(None)


def play(policy, out, *overrides, steps=2, **kwargs):
    talk = Talk()
    config = load_config(overrides=[f"engine.model={policy}", *SMALL, f"steps={steps}", *overrides])
    train(config, run_dir=out, display=talk, **kwargs)
    return talk


def rows_of(out, id="file"):
    file = out / "loggers" / id / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_logger_gets_every_metric_of_every_step(plugins, tiny_policy, tmp_path):
    talk = play(tiny_policy, tmp_path / "run", "loggers=[file]", "eval.every=1")
    opened, *rows, closed = rows_of(tmp_path / "run")
    assert opened == {"open": "run", "steps": 2, "first_step": 1}
    assert closed == {"closed": True}
    assert talk.about("file") == [
        f"logger file: see {tmp_path / 'run' / 'loggers' / 'file' / 'rows.jsonl'}"
    ]
    steps = {row.pop("at"): row for row in rows if "reward/mean" in row}
    for written in RunDir(tmp_path / "run").read_metrics():
        step = written.pop("step")
        assert written.pop("limited_by")  # a word, not a number
        assert steps.pop(step) == written
        assert written["loggers/failures/file"] == 0
    assert not steps
    found = [row for row in rows if "eval/sampled" in row]
    assert [row["at"] for row in found] == [0, 1, 2]
    evaluations = RunDir(tmp_path / "run").read_evaluations()
    assert [row["eval/greedy"] for row in found] == [r["greedy"]["pass@1"] for r in evaluations]


def test_resumed_run_tells_the_logger_its_first_step(plugins, tiny_policy, tmp_path):
    out = tmp_path / "run"
    play(tiny_policy, out, "loggers=[{id: file, kwargs: {indent: 2}}]", steps=1)
    play(tiny_policy, out, "loggers=[file]", steps=2, mode="resume")
    rows = rows_of(out)
    assert [row["first_step"] for row in rows if "open" in row] == [1, 2]
    assert [row["at"] for row in rows if "reward/mean" in row] == [1, 2]
    play(tiny_policy, out, "loggers=[file]", steps=1, mode="clean")
    assert [row["first_step"] for row in rows_of(out) if "open" in row] == [1]


@pytest.mark.parametrize(("where", "num_failed"), [("open", [0, 1]), ("log", [1, 2])])
def test_failing_logger_is_reported_once_and_counted(
    plugins, tiny_policy, tmp_path, where, num_failed
):
    out = tmp_path / "run"
    loggers = f"loggers=[{{id: failing, kwargs: {{where: {where}}}}}, file]"
    talk = play(tiny_policy, out, loggers, steps=2)
    complaints = [line for line in talk.about("failing") if "nobody there" in line]
    assert complaints == [
        "logger failing failed (OSError: nobody there); the run continues, and metrics.jsonl has "
        "everything"
    ]
    assert talk.lines[-1] != complaints[0]
    assert "calls failed" in talk.about("failing")[-1]
    rows = RunDir(out).read_metrics()
    assert [row["step"] for row in rows] == [1, 2]
    counted = [row["loggers/failures/failing"] for row in rows]
    # A row tells of what failed before it; how soon the other thread gets there is its affair.
    assert counted[0] <= counted[1]
    assert counted[1] >= num_failed[0]
    assert [row["at"] for row in rows_of(out) if "reward/mean" in row] == [1, 2]


def test_logger_with_missing_package_is_refused_at_the_start(plugins, tiny_policy, tmp_path):
    with pytest.raises(ConfigError, match="needs no_such_package") as caught:
        play(tiny_policy, tmp_path / "run", "loggers=[absent]")
    (hint,) = caught.value.hints
    assert hint == "install it: pip install no_such_package"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("id", ["tensorboard", "wandb", "trackio"])
def test_missing_package_hint_names_the_extra(id):
    entry = registry().get("loggers", id)
    assert entry.spec.requires == (id,)
    absent = Entry(dataclasses.replace(entry.spec, requires=("no_such_package",)), entry.plugin)
    with pytest.raises(ConfigError, match=f"{id!r} needs no_such_package") as caught:
        absent.load()
    assert caught.value.hints == (f"install it: pip install 'areal-gym[{id}]'",)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"][id]
    assert requirement.startswith(f"{id}>=")


def test_wrong_logger_arguments_and_duplicates_are_refused(plugins, tiny_policy, tmp_path):
    with pytest.raises(ConfigError, match="colour"):
        play(tiny_policy, tmp_path / "run", "loggers=[{id: file, kwargs: {colour: red}}]")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="names a logger twice"):
        load_config(overrides=["loggers=[file, file]"])


def test_hanging_logger_does_not_delay_the_run(tmp_path):
    never = Event()

    class Hanging:
        def open(self, directory, *, name, config, first_step):
            return "here"

        def log(self, step, metrics):
            never.wait()

        def close(self):
            raise AssertionError("it never came that far")

    talk = Talk()
    loggers = Loggers({"hanging": Hanging()}, talk.say)
    loggers.open(tmp_path / "run" / "loggers", load_config(), first_step=1)
    for step in range(1, 100):
        loggers.log(step, {"step": step, "train/loss": 0.5, "limited_by": "generation"})
    loggers.close(patience_s=0.01)
    assert "were not logged in time" in talk.about("hanging")[-1]
    never.set()
