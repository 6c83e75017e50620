"""The program as people use it: in process where it is quick, as a process where it matters."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from areal_gym.cli.app import COMMANDS
from areal_gym.cli.output import render_error
from areal_gym.errors import (
    DuplicateIdError,
    GymError,
    NothingToDoError,
    TrainError,
    UsageError,
)
from areal_gym.plugins import KINDS
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.version import __version__
from tests._support.paths import ROOT

HEAVY = {"torch", "transformers", "datasets", "gymnasium", "pydantic", "numpy", "rich", "sympy"}


def process(*argv, stdin="", python=(), **env):
    return subprocess.run(
        [sys.executable, *python, "-m", "areal_gym", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **env},
    )


# ---- start-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], ["list", "envs"], ["plugins"], ["list", "--json"]])
def test_reading_commands_import_no_heavy_package(argv):
    done = process(*argv, python=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "areal_gym.cli.app" in imported
    assert not HEAVY & {name.partition(".")[0] for name in imported}


def test_help_is_quick():
    before = os.times()
    assert process("--help").returncode == 0
    after = os.times()
    cpu_s = (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )
    # The aim is 0.3; other work on the machine makes even CPU time a bit longer.
    assert cpu_s < 1.0


def test_help_names_every_command(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for section, commands in COMMANDS.items():
        assert f"{section}:" in out
        for name, (_, summary) in commands.items():
            assert name in out
            assert summary in out


@pytest.mark.parametrize("name", [name for section in COMMANDS.values() for name in section])
def test_every_command_has_help(cli, name):
    code, out, _ = cli(name, "--help")
    assert code == 0
    assert out.startswith(f"Usage: areal-gym {name}")


def test_version(cli):
    assert cli("--version")[:2] == (0, "areal-gym, version 0.1.0\n")


def test_installed_program_prints_its_version():
    program = Path(sys.executable).with_name("areal-gym")
    if not program.exists():
        pytest.skip("not installed")
    done = subprocess.run([program, "list", "envs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "tir" in done.stdout


def test_source_tree_runs_without_installation(tmp_path):
    code = (
        "import importlib.metadata as m, sys\n"
        "m.entry_points = lambda **_: []\n"
        "def none(name): raise m.PackageNotFoundError(name)\n"
        "m.distribution = none\n"
        "from areal_gym.cli import main; main(['list', 'envs'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "tir" in done.stdout
    assert done.stderr.count("is not installed") == 1


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["lst"], 2, ["no command 'lst'", "did you mean 'list'?"]),
        (["list", "env"], 2, ["'env'", "did you mean 'envs'?"]),
        (["list", "envs", "--jsn"], 2, ["no option '--jsn'", "'--json'", "list --help"]),
        (["list", "runs"], 5, ["no runs in runs", "areal-gym train"]),
        (["list", "envs", "extra"], 2, ["unexpected extra argument"]),
        (["show", "ti"], 2, ["'ti'", "did you mean 'tir'?"]),
        (["show", "tir", "--kind", "losses"], 2, ["no policy loss 'tir'"]),
        (["show"], 2, ["missing argument 'ID'"]),
        (["play", "coundown"], 2, ["did you mean 'countdown'?"]),
        (["play", "tir", "levl=2"], 2, ["levl", "did you mean 'level'?"]),
        (["play", "tir", "--seed", "x"], 2, ["'x'"]),
        (["check", "nothing"], 2, ["no environment 'nothing'"]),
        (["check", "aral-gym"], 2, ["no environment 'aral-gym'", "did you mean 'areal-gym'?"]),
        (["data", "show", "search", "--split", "tset"], 2, ["did you mean 'test'?"]),
        (["train"], 2, ["which environment?", "--env tir"]),
        (["train", "--env", "tri"], 2, ["no environment 'tri'", "did you mean 'tir'?"]),
        (["train", "--env", "tir", "trainer.lrr=1"], 2, ["trainer.lrr", "'trainer.lr'"]),
        (["train", "--env", "tir", "trainer.loss=ppo_clap"], 2, ["did you mean 'ppo_clip'"]),
        (["train", "--env", "tir", "rollout.group_size=0"], 2, ["rollout.group_size"]),
        (["train", "--env", "tir", "what"], 2, ["key=value"]),
        (["train", "--env", "tir", "--steps", "-1"], 2, ["steps"]),
        (["train", "-c", "none.yaml"], 2, ["cannot read none.yaml"]),
        (["train", "--env", "tir", "--resume", "--clean"], 2, ["exclude each other"]),
        (["train", "--env", "tir", "--resume"], 2, ["needs the run directory"]),
        (["train", "--env", "tir", "--from-step", "3"], 2, ["--from-step needs --resume"]),
        (["train", "--resume", "--out", "gone"], 2, ["gone is not a run directory"]),
        (["eval"], 2, ["which environment?"]),
        (["eval", "--run", "gone"], 2, ["gone is not a run directory", "list runs"]),
        (["eval", "--env", "tir", "--checkpoint", "gone"], 2, ["gone is not a checkpoint"]),
        (["eval", "--run", "a", "--model", "b"], 2, ["exclude each other"]),
        (["eval", "--env", "tir", "--fail-under", "x"], 2, ["is not a number"]),
        (["eval", "--env", "tir", "-n", "0"], 2, ["'-n'", "0 is not in the range"]),
    ],
)
def test_usage_errors_are_explained(cli, tmp_path, argv, code, says):
    exit_code, out, err = cli(*argv)
    assert exit_code == code
    assert out == ""
    assert "areal-gym: error: " in err
    assert "Traceback" not in err
    for text in says:
        assert text.lower() in err.lower()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("no", hints=["one\ntwo"]), 2, "areal-gym: error: no\n  one\n  two\n"),
        (TrainError("full"), 3, "areal-gym: error: full\n"),
        (DuplicateIdError("twice"), 4, "areal-gym: error: twice\n"),
        (NothingToDoError("none"), 5, "areal-gym: error: none\n"),
        (GymError("no"), 1, "areal-gym: error: no\n"),
        (KeyboardInterrupt(), 130, "areal-gym: interrupted\n"),
        (click.Abort(), 130, "areal-gym: interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 3, "the disk is full"),
        (MemoryError(), 3, "out of memory"),
        (ZeroDivisionError("oh"), 70, "ZeroDivisionError: oh"),
        (SystemExit(7), 7, ""),
    ],
)
def test_every_error_is_printed_by_one_function(capsys, error, code, says):
    assert render_error(error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_verbose_prints_the_traceback(cli):
    for argv in (["-v", "show", "ti"], ["show", "ti", "-v"]):
        code, _, err = cli(*argv)
        assert code == 2
        assert "Traceback" in err


def test_closed_stdout_is_not_an_error():
    done = subprocess.run(
        f"{sys.executable} -m areal_gym list --json | head -c 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout == "{"
    assert "areal-gym: error" not in done.stderr


def test_broken_pipe_other_than_stdout_is_an_error():
    code = (
        "import sys\n"
        "from areal_gym.cli import app\n"
        "def list_command(): raise BrokenPipeError(32, 'Broken pipe')\n"
        "app.GymGroup.get_command = lambda *_: app.click.Command('list', callback=list_command)\n"
        "sys.exit(app.run(['list']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "a process at the other end has exited" in done.stderr


def test_ctrl_c_exits_with_130():
    playing = subprocess.Popen(
        [sys.executable, "-m", "areal_gym", "play", "countdown"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # It reads lines when the task is on the screen.
    while not playing.stderr.readline().startswith("your turn"):
        pass
    playing.send_signal(signal.SIGINT)
    _, err = playing.communicate(timeout=30)
    assert playing.returncode == 130
    assert err.endswith("areal-gym: interrupted\n")


# ---- look ---------------------------------------------------------------------------------------


def test_list_as_json_and_as_text(cli):
    code, out, err = cli("list", "envs", "--json")
    assert code == 0
    rows = {row["id"]: row for row in json.loads(out)}
    assert {"countdown", "math", "tir"} <= set(rows)
    assert rows["tir"]["distribution"] == "areal-gym"
    code, out, err = cli("list", "envs")
    assert code == 0
    assert "tir" in out
    assert "environments from" in err
    assert "policy losses from" in cli("list", "losses")[2]


def test_list_algorithms(cli):
    code, out, _ = cli("list", "algorithms")
    assert code == 0
    assert "dapo" in out
    code, out, _ = cli("list", "algorithms", "--json")
    found = {row["id"]: row for row in json.loads(out)}
    assert found["dapo"]["filters"] == ["success-rate"]
    assert found["ppo"]["advantage"] == "gae"


@pytest.mark.parametrize("kind", KINDS)
def test_list_shows_every_kind(cli, kind):
    code, out, _ = cli("list", kind, "--json")
    assert code == 0
    assert isinstance(json.loads(out), list)


def test_list_without_arguments_shows_everything(cli):
    code, out, _ = cli("list", "--json")
    assert code == 0
    assert set(json.loads(out)) == set(KINDS)
    assert "losses:" in cli("list")[1]


def test_list_runs(cli, tmp_path):
    with RunDir.open(tmp_path / "runs" / "a") as made:
        made.save_config("env: {id: tir}\n")
        made.append_metrics({"step": 3, "reward/mean": 0.5})
    code, out, _ = cli("list", "runs", "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert (row["path"], row["env"], row["steps"], row["reward"]) == ("runs/a", "tir", 3, 0.5)
    assert "stopped" in cli("list", "runs")[1]
    assert json.loads(cli("show", "runs/a", "--json")[1])["steps"] == 3


def test_list_runs_with_graded_rewards(cli, tmp_path):
    with RunDir.open(tmp_path / "runs" / "a") as made:
        made.save_config("env: {id: math}\n")
        for step, reward in ((0, 0.25), (8, 1.5)):
            scores = {"pass@1": 0.0, "pass@1_low": 0.0, "pass@1_high": 0.1, "reward": reward}
            ends = {"reward_low": reward - 0.125, "reward_high": reward + 0.125}
            made.append_evaluation({"step": step, "sampled": scores | ends, "greedy": scores})
    (row,) = json.loads(cli("list", "runs", "--json")[1])
    assert (row["heldout_before"], row["heldout_after"]) == (0.0, 0.0)
    assert (row["heldout_reward_before"], row["heldout_reward_after"]) == (0.25, 1.5)
    assert "held-out reward 0.250 -> 1.500 (1.375 to 1.625)" in cli("list", "runs")[1]


def test_list_runs_without_an_evaluation_at_the_start(cli, tmp_path):
    with RunDir.open(tmp_path / "runs" / "a") as made:
        made.save_config("env: {id: tir}\n")
        made.append_evaluation({"step": 8, "sampled": {"pass@1": 0.5}, "greedy": {"pass@1": 0.5}})
    (row,) = json.loads(cli("list", "runs", "--json")[1])
    assert (row["heldout_before"], row["heldout_after"]) == (None, 0.5)
    assert "held out 0.500" in cli("list", "runs")[1]


def test_show_environment(cli):
    code, out, _ = cli("show", "tir", "--json")
    assert code == 0
    card = json.loads(out)
    assert card["gymnasium_id"] == "areal_gym/tir-v0"
    assert card["tools"][0]["name"] == "python"
    assert {"name": "level", "type": "int", "default": 2, "is_required": False} in card["arguments"]
    assert card["sample_task"]["id"]
    code, out, _ = cli("show", "tir")
    for text in ("Reward:", "level", "python(code)", "areal-gym 0.1.0", "areal-gym play tir"):
        assert text in out


def test_show_loss_prints_an_algorithm_card(cli):
    code, out, _ = cli("show", "ppo_clip")
    assert code == 0
    assert "clip_low" in out
    assert "policy loss" in out


@pytest.mark.parametrize(("engine", "other"), [("sglang", "retract"), ("vllm", "keep")])
def test_show_describes_arguments_that_a_class_inherits(cli, engine, other):
    code, out, _ = cli("show", engine)
    assert code == 0
    assert f'`interrupt` is "abort" or "{other}".' in out
    assert "num_servers: the number of servers to start." in out


def test_plugins_command_lists_distributions(cli):
    code, out, _ = cli("plugins", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert {"kind": "environment", "id": "tir"} in rows["envs"]["offers"]
    assert "areal-gym 0.1.0" in cli("plugins")[1]
    assert "policy loss" in cli("plugins", "--all")[1]


def test_without_plugin_leaves_it_out(cli):
    assert "tir" not in cli("-p", "no:envs", "list", "envs", "--json")[1]
    code, _, err = cli("-p", "no:envs", "show", "tir", "--kind", "envs")
    assert code == 2
    assert "plugin envs (areal-gym 0.1.0) is blocked" in err
    assert "blocked" in cli("-p", "no:envs", "plugins", "--all")[1]
    # The next call starts afresh.
    assert "tir" in cli("list", "envs", "--json")[1]


def test_mistyped_plugin_name_is_refused(cli):
    _, _, err = cli("-p", "no:enfs", "list", "envs")
    assert "did you mean 'envs'" in err


def test_plugins_environment_variable_restricts_plugins():
    done = process("list", "--json", AREAL_GYM_PLUGINS="agents")
    assert json.loads(done.stdout)["envs"] == []
    assert json.loads(done.stdout)["agents"]


PLUGIN = """
from areal_gym.plugins import CommandSpec, EnvSpec, hookimpl

@hookimpl
def register_envs():
    yield EnvSpec(id="{id}", entry_point="areal_gym.envs.countdown:CountdownEnv", summary="mine")

@hookimpl
def register_commands():
    yield CommandSpec(id="greet", entry_point="{module}:greet", summary="say hello")

def __getattr__(name):
    import click

    if name != "greet":
        raise AttributeError(name)
    return click.Command("greet", callback=lambda: click.echo("hello"))
"""


@pytest.fixture
def plugin_module(tmp_path, monkeypatch):
    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    yield write
    for name in [n for n in sys.modules if n.startswith("plugin_for_cli")]:
        del sys.modules[name]


def test_plugin_module_is_loaded_without_installation(cli, plugin_module):
    name = plugin_module(
        "plugin_for_cli_a", PLUGIN.format(id="mine/dice", module="plugin_for_cli_a")
    )
    assert "mine/dice" in cli("-p", name, "list", "envs")[1]
    assert cli("-p", name, "greet")[:2] == (0, "hello\n")
    assert "say hello" in cli("-p", name, "--help")[1]


@pytest.mark.parametrize("is_installed", [True, False])
def test_help_loads_plugins_only_where_some_are_installed(is_installed, plugin_module, tmp_path):
    """Commands of an installed plugin are in the help, which otherwise needs no metadata."""
    name = plugin_module(
        "plugin_for_cli_h", PLUGIN.format(id="mine/dice", module="plugin_for_cli_h")
    )
    metadata = tmp_path / "plugin_for_cli_h-0.1.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    group = "areal_gym" if is_installed else "console_scripts"
    metadata.joinpath("entry_points.txt").write_text(f"[{group}]\nmine = {name}\n")
    code = (
        "import atexit, sys\n"
        "slow = {'areal_gym.plugins', 'importlib.metadata', 'pluggy'}\n"
        "atexit.register(lambda: print('loaded', sorted(slow & set(sys.modules))))\n"
        "from areal_gym.cli import main; main(['--help'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ("say hello" in done.stdout) == is_installed
    if not is_installed:
        assert done.stdout.endswith("loaded []\n")


def test_duplicate_id_is_shown_and_exits_with_4(cli, plugin_module):
    name = plugin_module("plugin_for_cli_b", PLUGIN.format(id="tir", module="plugin_for_cli_b"))
    for argv in (["list", "envs"], ["play", "tir"], ["train", "--env", "tir", "--dry-run"]):
        code, _, err = cli("-p", name, *argv)
        assert code == 4
        assert "registered twice" in err
        assert "areal-gym 0.1.0" in err
        assert name in err


def test_broken_plugin_is_reported_and_others_work(cli, plugin_module):
    name = plugin_module("plugin_for_cli_c", "import nowhere_to_be_found\n")
    code, out, err = cli("-p", name, "list", "envs")
    assert code == 0
    assert "tir" in out
    assert f"warning: plugin {name}" in err
    assert "No module named 'nowhere_to_be_found'" in err
    code, out, _ = cli("-p", name, "plugins")
    assert code == 0
    assert "No module named 'nowhere_to_be_found'" in out
    assert cli("-p", name, "plugins", "--strict")[0] == 4


# ---- try ----------------------------------------------------------------------------------------


def test_play_reads_actions_from_a_pipe():
    lines = "/help\n/tools\n\n/call python print(6*7)\n/nonsense\n/call pyton 1\n/gold\n"
    done = process("play", "tir", "--seed", "3", stdin=lines)
    assert done.returncode == 0
    assert "[tool] 42" in done.stdout
    assert "over after" in done.stdout
    assert "no command '/nonsense'" in done.stderr
    assert "did you mean 'python'?" in done.stderr


def test_play_gold_earns_full_reward():
    done = process("play", "countdown", "--task", "5", "--split", "test", stdin="/gold\n")
    assert done.returncode == 0
    assert "reward 1" in done.stdout
    assert (
        done.stdout
        == process("play", "countdown", "--task", "5", "--split", "test", stdin="/gold\n").stdout
    )


def test_play_ends_on_quit():
    for stdin in ("", "/quit\n"):
        done = process("play", "math", stdin=stdin)
        assert done.returncode == 0
        assert "left after 0 turns" in done.stdout


def test_check_passes_a_good_environment(cli):
    code, out, _ = cli("check", "countdown", "-n", "2", "--json")
    assert code == 0
    (report,) = json.loads(out).values()
    assert {"gold", "noop", "deterministic"} <= {row["rule"] for row in report}
    assert all(row["is_ok"] for row in report)


BROKEN_ENV = """
from areal_gym.plugins import EnvSpec, hookimpl
import itertools

@hookimpl
def register_envs():
    yield EnvSpec(id="mine/broken", entry_point="plugin_for_cli_d:make", summary="random")

def __getattr__(name):
    if name != "make":
        raise AttributeError(name)
    from areal_gym.envs.countdown import CountdownEnv

    class Generous(CountdownEnv):
        def noop_action(self):
            return self.gold_action()

    return Generous
"""


def test_check_names_the_broken_rule(cli, plugin_module):
    name = plugin_module("plugin_for_cli_d", BROKEN_ENV)
    for what in ("mine/broken", name):
        code, out, _ = cli("-p", name, "check", what, "-n", "2")
        assert code == 1
        (line,) = (line for line in out.splitlines() if line.strip().startswith("noop"))
        assert "BROKEN" in line


# ---- run ----------------------------------------------------------------------------------------


def test_dry_run_prints_a_recipe_with_the_same_settings(cli, tmp_path):
    argv = ["train", "--env", "math", "--steps", "3", "trainer.lr=1e-5", "--dry-run"]
    code, out, _ = cli(*argv)
    assert code == 0
    assert "# per step: 16 groups x 8 = 128 trajectories" in out
    assert "# environment: math, from areal-gym 0.1.0" in out
    (tmp_path / "recipe.yaml").write_text(out)
    assert cli("train", "-c", "recipe.yaml", "--dry-run")[1] == out
    assert not (tmp_path / "runs").exists()


def test_dry_run_refuses_what_a_run_refuses(cli):
    code, out, err = cli("train", "--env", "math", "rollout.top_p=0.9", "--dry-run")
    assert (code, out) == (2, "")
    assert "rollout.top_p = 0.9 cannot be trained with" in err
    supervised = "train", "--env", "math", "--objective", "sft", "rollout.top_p=0.9", "--dry-run"
    assert cli(*supervised)[0] == 0  # only evaluations sample


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.loss_kwargs.tea=1"], "the loss 'ppo_clip' takes no argument 'tea'"),
        (["trainer.advantage_kwargs.bta=1"], "takes no setting 'bta'"),
        (["trainer.loss=gspo", "trainer.advantage=gigpo"], "one advantage, their mean"),
        (["trainer.critic.lr_scale=2"], "trainer.advantage = 'grpo' has no critic"),
    ],
)
def test_dry_run_and_run_try_the_algorithm_out_first(cli, overrides, words):
    """A run refuses it, too, before a warm start."""
    for last in (["--dry-run"], ["--out", "run"]):
        code, out, err = cli("train", "--env", "tir", *overrides, *last)
        assert (code, out) == (2, "")
        assert words in err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.fixed_roles.secnd=gold"], "did you mean 'second'?"),
        (["env.fixed_roles.second=gld"], "env.fixed_roles.second = 'gld' is not a policy"),
        (["env.fixed_roles={first: gold, second: gold}"], "none is left for the policy"),
        (["eval.fixed_roles.third=gold"], "eval.fixed_roles: nim has no role 'third'"),
    ],
)
def test_dry_run_refuses_wrong_fixed_roles(cli, overrides, words):
    code, out, err = cli("train", "--env", "nim", *overrides, "--dry-run")
    assert (code, out) == (2, "")
    assert words in err
    assert cli("train", "--env", "nim", "env.fixed_roles.second=gold", "--dry-run")[0] == 0


def test_list_points_from_presets_to_algorithms(cli):
    code, _, err = cli("list", "presets")
    assert code == 2
    assert "areal-gym list algorithms" in err


def test_dry_run_without_an_environment_shows_all_settings(cli):
    code, out, _ = cli("train", "--dry-run")
    assert code == 0
    assert "max_staleness: 0" in out


def test_overrides_win_over_flags_and_flags_over_recipe(cli, tmp_path):
    (tmp_path / "r.yaml").write_text("env: {id: math}\nsteps: 1\nseed: 1\n")
    _, out, _ = cli("train", "-c", "r.yaml", "--steps", "2", "--seed", "2", "seed=3", "--dry-run")
    assert "\nsteps: 2\n" in out
    assert "\nseed: 3\n" in out
    assert "id: math" in out


RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_every_recipe_resolves(cli, recipe):
    assert cli("train", "-c", str(recipe), "--dry-run")[0] == 0


def test_train_refuses_an_existing_run_directory(cli, tmp_path):
    with RunDir.open(tmp_path / "mine") as made:
        made.save_config("env: {id: tir}\n")
    code, _, err = cli("train", "--env", "tir", "--out", "mine")
    assert code == 2
    for text in ("mine already holds a run", "--resume", "--clean", "--out"):
        assert text in err
    assert (tmp_path / "mine" / "config.yaml").read_text() == "env: {id: tir}\n"


def test_train_with_missing_model_leaves_no_files(cli, tmp_path):
    code, _, err = cli("train", "--env", "tir", "engine.model=gone")
    assert code == 2
    assert "'gone' is not a checkpoint directory" in err
    assert not (tmp_path / "runs").exists()


def test_eval_of_a_run_without_checkpoint_is_refused(cli, tmp_path):
    with RunDir.open(tmp_path / "mine") as made:
        made.save_config("env: {id: tir}\n")
    code, _, err = cli("eval", "--run", "mine")
    assert code == 5
    assert "areal-gym train --resume --out mine" in err


def test_several_env_flags_make_a_mix(cli):
    flags = ["--env", "tir:0.7", "--env", "math:0.3"]
    code, out, _ = cli("train", *flags, "--dry-run")
    assert code == 0
    settings = yaml.safe_load(out)
    assert settings["env"] == {
        "id": "mix",
        "kwargs": {"envs": [{"id": "tir", "weight": 0.7}, {"id": "math", "weight": 0.3}]},
        "fixed_roles": {},
    }
    assert {line for line in out.splitlines() if line.startswith("# environment:")} == {
        f"# environment: {name}, from areal-gym {__version__}" for name in ("mix", "tir", "math")
    }
    code, _, err = cli("train", "--env", "tir:0.7", "--dry-run")
    assert code == 2
    assert "gives a weight to a single environment" in err
    code, _, err = cli("train", "--env", "tir", "--env", "mtah", "--dry-run")
    assert code == 2
    assert "did you mean 'math'?" in err
