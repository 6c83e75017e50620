"""What is in the wheel, and what it says of itself; what works where torch is not installed."""

import email
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from areal_gym.version import __version__
from tests._support.paths import ROOT, TESTS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    leftovers = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "areal_gym", source / "areal_gym", ignore=leftovers)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", home, source],
        check=True,
        capture_output=True,
    )
    (built,) = home.glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def extra_of(requirement):
    found = re.search(r"extra == ['\"]([^'\"]+)['\"]", requirement)
    return found and found[1]


def test_wheel_contains_every_package_file(wheel):
    """Code, templates, the viewer's front end, schemas, the Dockerfile: whatever is not cached."""
    ours = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "areal_gym").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {suffix for suffix in (".jinja", ".tmpl", ".js", ".css", ".html", ".json", "")} <= {
        Path(name).suffix for name in ours
    }
    assert ours <= set(wheel.namelist())
    assert "areal_gym/py.typed" in ours


def test_version_is_defined_once(metadata):
    assert metadata["Version"] == __version__
    places = [
        file
        for file in [ROOT / "pyproject.toml", *(ROOT / "areal_gym").rglob("*.py")]
        if f'"{__version__}"' in file.read_text()
    ]
    assert places == [ROOT / "areal_gym" / "version.py"]


def test_core_dependencies_exclude_torch(metadata):
    core = [line for line in metadata.get_all("Requires-Dist") if extra_of(line) is None]
    names = {re.match(r"[\w.-]+", line)[0] for line in core}
    assert "aiohttp" in names
    assert not names & {"torch", "transformers", "safetensors", "matplotlib", "datasets", "ray"}


def test_extra_all_is_the_union_of_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (union,) = extras["all"]
    named = set(re.fullmatch(r"areal-gym\[(.+)\]", union)[1].split(","))
    # Those who work on areal-gym, a server that wants an environment of its own, and clouds.
    assert named == set(extras) - {"all", "dev", "docs", "sglang", "harbor"}
    assert {"train", "ray", "docker", "agents", "search", "viewer"} <= named
    explained = (ROOT / "docs" / "installation.md").read_text()
    assert [
        name for name in {*named, "all", "sglang", "harbor"} if f"`{name}`" not in explained
    ] == []


# ---- without torch ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def said(tiny_policy, tmp_path_factory):
    """What the program said without torch, by the words that were typed."""
    home = tmp_path_factory.mktemp("core")
    served = home / "served"
    served.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_policy / name).exists():
            shutil.copy(tiny_policy / name, served)
    done = subprocess.run(
        [sys.executable, str(TESTS / "_support" / "core_commands.py"), str(served)],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = {tuple(line["argv"]): line for line in map(json.loads, done.stdout.splitlines())}
    asked = (home / "asked/trajectories/eval.jsonl").read_text().splitlines()
    return {**lines, "asked": [json.loads(line) for line in asked]}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("list",), "needs: pip install 'areal-gym[train]'"),
        (("show", "tir"), "python(code)"),
        (("show", "ppo_clip"), "needs: pip install 'areal-gym[train]'"),
        (("play", "math"), "over after 1 turn:"),
        (("check", "math", "--tasks", "1"), "gold"),
        (("data", "show", "math", "-n", "2"), "Calculate 29-26."),
        (("train", "--env", "math", "--dry-run"), "# per step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_core_commands_work_without_torch(said, argv, expected):
    assert said[argv]["code"] == 0, said[argv]["err"]
    assert expected in said[argv]["out"]


def test_served_policy_is_evaluated_without_torch(said):
    (measured,) = [line for argv, line in said.items() if "eval" in argv and "sglang" in argv]
    assert measured["code"] == 0, measured["err"]
    assert re.search(r"pass@1 +0\.000 .*\n", measured["out"])
    assert re.search(r"completed +2 +100\.0%", measured["out"])


def test_chat_server_is_evaluated_without_torch(said):
    (measured,) = [line for argv, line in said.items() if "engine.kwargs.model=Ada" in argv]
    assert measured["code"] == 0, measured["err"]
    assert re.search(r"completed +3 +100\.0%", measured["out"])
    answers = [row["messages"][-1]["content"] for row in said["asked"]]
    assert answers == ["Ada has no idea"] * 3
    (refused,) = [line for argv, line in said.items() if "--agent" in argv]
    assert refused["code"] == 2
    assert "messages of the environment only" in refused["err"]


def test_doctor_says_what_to_install(said):
    assert "pip install 'areal-gym[train]'" in said["doctor",]["out"]


def test_commands_that_need_torch_fail_early(said):
    refused = [
        line
        for argv, line in said.items()
        if argv[0] in ("train", "eval") and not {"--dry-run", "sglang", "-n"} & {*argv}
    ]
    assert len(refused) == 4
    for line in refused:
        assert line["code"] == 2, line
        assert "pip install 'areal-gym[train]'" in line["err"]
