"""Tasks from commits: imported, solved by the change, not by nothing and not by cheats."""

import asyncio
import subprocess

import pytest

from areal_gym.cli import app
from areal_gym.envs.harbor.swe_import import SweImport, import_swe
from areal_gym.envs.harbor.task_folder import load_task
from areal_gym.errors import DataError, SandboxError, UsageError
from areal_gym.places.local_places import LocalPlaces
from areal_gym.plugins import registry

WRONG, RIGHT = "def double(x):\n    return x + x + 1\n", "def double(x):\n    return 2 * x\n"
TEST = "from numbers_of import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "numbers"
    (folder / "tests").mkdir(parents=True)
    git(tmp_path, "init", "-q", folder)
    (folder / "numbers_of.py").write_text(WRONG)
    (folder / "old.py").write_text("")
    (folder / "tests" / "test_old.py").write_text("def test_old():\n    assert True\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "begin")
    (folder / "numbers_of.py").write_text(RIGHT)
    (folder / "old.py").unlink()
    (folder / "tests" / "test_double.py").write_text(TEST)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "fix: double doubles\n\nIt added one.")
    return folder


def rewards(folder, *actions):
    """Return the reward of each way to play the task; None is its solution."""

    async def play():
        env = registry().make("envs", f"harbor:{folder}")
        values = []
        for action in actions:
            await env.areset(seed=0, options={"split": "train", "index": 0})
            ended = False
            if action:
                await env.areset(seed=0, options={"split": "train", "index": 0})
                await env.bash({"command": action})
            while not ended:
                said = env.gold_action() if action is None else "Done."
                _, reward, *ends, _ = await env.astep(said)
                ended = any(ends)
            values.append(reward)
            await env.aclose()
        return values

    return asyncio.run(play())


def test_a_commit_becomes_a_task_without_what_the_agent_must_not_see(repository, tmp_path, capsys):
    command = ["data", "import-swe", str(repository), "HEAD", "--to", str(tmp_path / "tasks")]
    assert app.run([*command, "--test", "tests/test_double.py::test_double"]) == 0
    task = load_task(capsys.readouterr().out.strip())
    given = sorted(str(p.relative_to(task.image_folder)) for p in task.image_folder.rglob("*.py"))
    assert given == ["repo/numbers_of.py", "repo/old.py", "repo/tests/test_old.py"]
    assert (task.image_folder / "repo" / "numbers_of.py").read_text() == WRONG
    assert "It added one." in task.steps[0].instruction
    assert "rm -f '/app/old.py'" in (task.folder / "solution" / "solve.sh").read_text()
    assert not (task.image_folder / "repo" / ".git").exists()


def test_a_patch_is_the_change_upon_the_commit(repository, tmp_path):
    patch = tmp_path / "fix.patch"
    patch.write_text(git(repository, "diff", "HEAD^", "HEAD") + "\n")
    wanted = SweImport(
        repository=repository, commit="HEAD^", tests=("tests/test_double.py",), patch=patch
    )
    folder = import_swe(wanted, tmp_path / "tasks")
    assert (folder / "solution" / "files" / "numbers_of.py").read_text() == RIGHT
    assert (folder / "tests" / "files" / "tests" / "test_double.py").read_text() == TEST


@pytest.mark.parametrize(
    ("commit", "tests", "error", "message"),
    [
        ("nope", ("tests/test_double.py",), DataError, "nope"),
        ("HEAD", (), UsageError, "a test that fails"),
        ("HEAD", ("tests/test_absent.py",), UsageError, "no file tests/test_absent.py"),
    ],
)
def test_what_cannot_be_imported_is_named(repository, tmp_path, commit, tests, error, message):
    with pytest.raises(error, match=message):
        import_swe(SweImport(repository=repository, commit=commit, tests=tests), tmp_path / "t")


def test_a_change_of_tests_alone_is_no_task(repository, tmp_path):
    (repository / "tests" / "test_more.py").write_text(TEST)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "test: more")
    with pytest.raises(DataError, match="nothing but tests"):
        import_swe(
            SweImport(repository=repository, commit="HEAD", tests=("tests/test_more.py",)),
            tmp_path / "tasks",
        )


def test_the_change_earns_1_and_nothing_and_cheats_earn_0(repository, tmp_path):
    async def probe():
        places = LocalPlaces()
        try:
            await places.report()
        finally:
            await places.aclose()

    try:
        asyncio.run(probe())
    except SandboxError as error:
        pytest.skip(str(error))
    folder = import_swe(
        SweImport(repository=repository, commit="HEAD", tests=("tests/test_double.py",)),
        tmp_path / "tasks",
    )
    cheats = (
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "echo 'collect_ignore = []' | tee conftest.py; mkdir tests/double; touch pytest.ini",
        "echo 'import os; os._exit(0)' | tee sitecustomize.py numbers_of.py",
        "mkdir -p tests; echo 'def test_double(): pass' > tests/test_double.py",
    )
    solved, nothing, *cheated = rewards(folder, None, "", *cheats)
    assert (solved, nothing) == (1, 0)
    assert cheated == [0] * len(cheats)
