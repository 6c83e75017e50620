"""A real package outside of the tree: built, installed into a fresh venv, used, then broken."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

from tests._support.paths import ROOT

EXAMPLE = ROOT / "examples" / "areal-gym-countdown"

pytestmark = pytest.mark.slow


def call(*command, cwd, check=True, **env):
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **env},
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory outside of the source tree."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def python(home):
    """A fresh venv with the example in it; all else it borrows from ours, for it has no network."""
    source = home / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    call(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", home, source),
        cwd=home,
    )
    (wheel,) = home.glob("areal_gym_countdown-0.1.0-*.whl")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    fresh = home / "venv" / "bin" / "python"
    (site_packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    call(
        *(sys.executable, "-m", "pip", "--python", fresh, "install"),
        *("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", wheel),
        cwd=home,
    )
    return fresh


@pytest.fixture(scope="module")
def areal_gym(python, home):
    def run(*argv, check=True, **env):
        return call(python, "-m", "areal_gym", *argv, cwd=home, check=check, **env)

    return run


def test_external_plugin_is_listed(areal_gym):
    rows = {row["id"]: row for row in json.loads(areal_gym("list", "envs", "--json").stdout)}
    assert rows["countdown/numbers"]["distribution"] == "areal-gym-countdown"
    assert rows["countdown"]["distribution"] == "areal-gym"
    plugins = {row["name"]: row for row in json.loads(areal_gym("plugins", "--json").stdout)}
    assert plugins["countdown"]["status"] == "loaded"
    assert len(plugins["countdown"]["offers"]) == 3
    assert "from areal-gym-countdown 0.1.0" in areal_gym("show", "countdown/numbers").stdout


def test_external_environment_keeps_the_contract(areal_gym, python, home):
    assert "the contract is kept" in areal_gym("check", "countdown", "-n", "4").stdout
    tests = home / "source" / "tests"
    call(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=home)


def test_gymnasium_makes_the_external_environment(python, home):
    code = (
        "import gymnasium; "
        "env = gymnasium.make('areal_gym:areal_gym/countdown-numbers-v0'); "
        "print(env.reset(seed=1)[0])"
    )
    assert call(python, "-c", code, cwd=home).stdout.startswith("Make ")


def test_external_environment_trains_a_step(areal_gym, tiny_policy, home):
    areal_gym(
        *("train", "--env", "countdown/numbers", "--steps", "1", "--out", "run", "--plain"),
        *("agent.id=countdown/reminder", "trainer.loss=countdown/vanilla"),
        *(f"engine.model={tiny_policy}", "engine.max_context=256", "rollout.max_new_tokens=8"),
        *("rollout.batch_groups=2", "rollout.group_size=2", "eval.num_tasks=4"),
    )
    run = home / "run"
    used = {row["id"]: row for row in json.loads((run / "plugins.json").read_text())["used"]}
    for id in ("countdown/numbers", "countdown/reminder", "countdown/vanilla"):
        assert used[id]["distribution"] == "areal-gym-countdown"
        assert used[id]["version"] == "0.1.0"
    assert used["grpo"]["distribution"] == "areal-gym"
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 1
    (row,) = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1
    (listed,) = json.loads(areal_gym("list", "runs", "--root", ".", "--json").stdout)
    assert listed["is_finished"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("def register_envs(:\n", "SyntaxError"),
        ("import nowhere_to_be_found\n", "No module named 'nowhere_to_be_found'"),
        ("raise SystemExit(1)\n", "SystemExit"),
    ],
)
def test_broken_external_plugin_is_reported_and_others_work(areal_gym, home, damage, reason):
    (module,) = (home / "venv" / "lib").glob("python*/site-packages/areal_gym_countdown/plugin.py")
    healthy = module.read_text()
    module.write_text(damage)
    try:
        listed = areal_gym("list", "envs")
        assert "tir" in listed.stdout
        assert "countdown/numbers" not in listed.stdout
        assert "countdown (areal-gym-countdown 0.1.0) failed" in listed.stderr
        shown = areal_gym("plugins").stdout
        assert reason in shown
        asked = areal_gym("play", "countdown/numbers", check=False)
        assert asked.returncode == 2
        assert "plugin countdown (areal-gym-countdown 0.1.0) failed to load" in asked.stderr
        assert reason in asked.stderr
        assert "Traceback" not in asked.stderr
        # Left out on purpose, there is nothing to warn of.
        assert "areal-gym-countdown" not in areal_gym("-p", "no:countdown", "list").stderr
    finally:
        module.write_text(healthy)
    assert "countdown/numbers" in areal_gym("list", "envs").stdout
