"""`areal-gym new`: packages that install, pass their own tests and keep the contract at once."""

import json
import os
import subprocess
import sys
import sysconfig
import venv

import pytest

from areal_gym.cli.app import run
from areal_gym.errors import UsageError
from areal_gym.scaffold import KINDS, plan


def names_of(kind):
    return f"fresh-{kind}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """One package of each kind, written by the command."""
    home = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        assert run(["new", kind, names_of(kind), "--path", str(home)]) == 0
    return home


@pytest.fixture(scope="module")
def call(packages, tmp_path_factory):
    """Run a module in a fresh venv where all of them are installed, without any network."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    (site_packages,) = (home / "venv" / "lib").glob("python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")

    def call(*argv, python=python):
        done = subprocess.run(
            [str(python), "-m", *map(str, argv)],
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(
        *("pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--disable-pip-version-check", *sorted(packages.iterdir())),
        python=sys.executable,
    )
    return call


@pytest.mark.slow
def test_scaffolded_packages_install_and_pass_their_tests(call, packages):
    told = call("pytest", "-q", "-p", "no:cacheprovider", "-W", "error", packages)
    assert "failed" not in told
    assert "passed" in told


@pytest.mark.long
@pytest.mark.slow
def test_scaffolded_plugins_are_listed_and_keep_the_contract(call):
    for kind, made in KINDS.items():
        rows = {
            row["id"]: row for row in json.loads(call("areal_gym", "list", made.listed, "--json"))
        }
        assert rows[names_of(kind)]["distribution"] == f"areal-gym-fresh-{kind}"
        report = json.loads(call("areal_gym", "check", f"areal-gym-fresh-{kind}", "--json"))
        results = [result for rules in report.values() for result in rules]
        assert results
        assert all(result["is_ok"] for result in results), results


def test_new_command_prints_next_steps(tmp_path, capsys):
    assert run(["new", "env", "letter-count", "--path", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert all(os.path.isfile(line) for line in out.splitlines())
    assert len(out.splitlines()) == 6
    assert "areal-gym check areal-gym-letter-count" in err
    assert "areal-gym train --env letter-count" in err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["env", "tir"], "environment 'tir' exists already, from areal-gym"),
        (["env", "Letter_Count"], "did you mean 'letter-count'?"),
        (["env", "../up"], "'../up' is not a valid package name"),
        (["env", "class"], "'class' is not a valid package name"),
        (["envs", "dice"], "did you mean 'env'?"),
    ],
)
def test_invalid_names_are_refused(argv, told, tmp_path, capsys):
    assert run(["new", *argv, "--path", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_existing_files_are_never_overwritten(tmp_path):
    package = plan("logger", "csv", tmp_path)
    package.write()
    with pytest.raises(UsageError, match="exists already"):
        package.write()
