"""Containment: what a snippet cannot do, and the attack suite that shows it."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from areal_gym.sandbox import SandboxStatus
from areal_gym.sandbox.suite.__main__ import main
from areal_gym.sandbox.suite.bait import Bait
from areal_gym.sandbox.suite.programs import builtin_files, read_programs
from tests._support.paths import ROOT

SNIPPETS = ROOT.parent / "shared/golden/hostile_snippets.json"
NOBODY = 65534


def test_snippet_environment_is_empty(execute, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert execute("import os; dict(os.environ)").value == "{}"


def test_snippet_inherits_no_descriptors(execute, tmp_path):
    (tmp_path / "open").write_text("secret")
    fd = os.open(tmp_path / "open", os.O_RDONLY)
    os.set_inheritable(fd, True)
    code = "import os\nfds = []\nfor fd in range(1024):\n    try: os.fstat(fd)\n"
    code += "    except OSError: continue\n    fds.append(fd)\nfds"
    assert execute(code).value == "[0, 1, 2, 3]"
    os.close(fd)


def test_snippet_has_no_network(execute):
    result = execute("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert result.status is SandboxStatus.ERROR
    assert result.stderr.splitlines()[-1].startswith(("PermissionError", "OSError"))


def test_outside_files_cannot_be_read_or_written(execute, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "file").write_text("secret")
    assert execute(f"open({str(tmp_path / 'file')!r}).read()").status is SandboxStatus.ERROR
    assert execute(f"open({str(tmp_path / 'new')!r}, 'w')").status is SandboxStatus.ERROR
    assert execute(f"open({json.__file__!r}, 'a')").status is SandboxStatus.ERROR
    assert not (tmp_path / "new").exists()


def test_private_directory_does_not_persist(execute):
    assert execute("open('a', 'w').write('x'); import os; os.listdir()").value == "['a']"
    assert execute("import os; os.listdir()").value == "[]"


def test_file_size_is_limited(execute):
    result = execute("f = open('big', 'wb')\nf.write(b'x' * (3 << 20))", file_mb=2)
    assert result.stderr.splitlines()[-1] == "OSError: [Errno 27] File too large"


def test_number_of_processes_is_limited(execute, runner, sandbox):
    code = "import os, time\nn = 0\ntry:\n    while True:\n"
    code += "        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
    code += "except OSError: pass\nn"
    assert int(execute(code, num_processes=5).value) <= 5


def test_daemon_does_not_outlive_its_snippet(execute):
    marker = f"areal-gym-daemon-{os.getpid()}"
    code = "import os, time, ctypes\ntry:\n    if os.fork() == 0:\n        os.setsid()\n"
    code += "        if os.fork() == 0:\n"
    code += f"            ctypes.CDLL(None).prctl(15, b'{marker[-15:]}', 0, 0, 0)\n"
    code += "            time.sleep(60)\n        os._exit(0)\n"
    code += "except OSError: pass\ntime.sleep(0.1)\nprint('done')"
    assert execute(code).stdout == "done\n"
    names = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                names.append(Path(f"/proc/{entry}/comm").read_text().strip())
            except OSError:
                continue
    assert marker[-15:] not in names


def attack(*arguments: str, uid: int = 0) -> dict[str, Any]:
    """Run the suite in a separate process, as this one has other children; return its report."""
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    process = subprocess.run(
        [sys.executable, "-m", "tests._support.ordinary_user", str(uid), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert process.returncode in (0, 1), process.stderr
    return json.loads(process.stdout)


def snippets(suite: str) -> list[str]:
    """Return the arguments that choose the shared file or the built-in suite."""
    if suite == "shared" and not SNIPPETS.exists():
        pytest.skip(f"no {SNIPPETS.name}")
    return [str(SNIPPETS)] if suite == "shared" else []


def assert_contained(report: dict[str, Any], num_least: int) -> None:
    """Check that every snippet was contained."""
    if report["level"] == "none":
        pytest.skip("this kernel has neither Landlock nor seccomp")
    assert report["failures"] == {}
    assert report["host"] == []
    assert report["contained"] == report["of"] >= num_least


BUILT_IN = pytest.mark.parametrize(
    ("suite", "least"),
    [pytest.param("shared", 91, marks=pytest.mark.long), ("built-in", 170)],
)


@pytest.mark.slow
@BUILT_IN
def test_attack_suite_is_contained(suite, least):
    assert_contained(attack(*snippets(suite), "--json"), least)


@pytest.mark.slow
@BUILT_IN
def test_attack_suite_is_contained_without_namespaces(suite, least):
    report = attack(*snippets(suite), "--json", "--without", "namespaces")
    assert report["level"] != "isolated"
    assert_contained(report, least)


@pytest.mark.slow
@BUILT_IN
def test_attack_suite_is_contained_as_ordinary_user(suite, least):
    assert_contained(attack(*snippets(suite), "--json", uid=NOBODY), least)


@pytest.mark.long
def test_attack_suite_is_contained_as_ordinary_user_without_namespaces():
    report = attack(*snippets("built-in"), "--json", "--without", "namespaces", uid=NOBODY)
    assert report["level"] != "isolated"
    assert_contained(report, 170)


@pytest.mark.slow
@BUILT_IN
def test_attack_suite_is_contained_in_containers(docker_image, suite, least):
    report = attack(*snippets(suite), "--json", "--backend", "docker", "--image", docker_image)
    assert report["level"] == "isolated"
    assert_contained(report, least)


def test_attack_suite_reports_failures(tmp_path, capsys):
    rows = [
        {"name": "held", "code": "1/0", "safe_expected": "", "checks": ["status:error"]},
        {"name": "loose", "code": "print('OUT')", "safe_expected": "", "checks": ["status:error"]},
        {"name": "talks", "code": "print('OUT')", "safe_expected": "", "checks": CHECKS},
    ]
    (tmp_path / "file.json").write_text(json.dumps({"snippets": rows}))
    report = attack(str(tmp_path / "file.json"), "--json")
    assert (report["contained"], report["of"]) == (1, 3)
    assert report["failures"] == {
        "loose": ["ended with ok, expected error"],
        "talks": [
            "'OUT' is in the output",
            "characters of output: 4, at most 2",
            f"{tmp_path} was made".replace(str(tmp_path), "/usr"),
        ],
    }


CHECKS = ["not_in_output:OUT", "output_cap:2", "host_absent:/usr", "returns_within:5"]


def test_attack_suite_detects_changed_metadata():
    with ExitStack() as stack:
        bait = Bait(stack)
        for change in (
            lambda path: path.chmod(0o777),
            lambda path: os.utime(path, (0, 0)),
            lambda path: os.setxattr(path, "user.x", b"x"),
            lambda path: os.link(path, bait.root / "linked"),
        ):
            assert list(bait.taken()) == []
            change(bait.canary / "keep.txt")
            (problem,) = bait.taken()
            assert problem.startswith("metadata of keep.txt changed")


def test_attack_suite_detects_escapes_without_sandbox(tmp_path):
    """The suite itself is tested with harmless snippets that only a sandbox would stop."""
    rows = [
        {
            "name": "reads",
            "code": "print(open('{{SECRET_FILE}}').read())",
            "checks": ["not_in_output:{{SECRET}}"],
        },
        {"name": "writes", "code": "open('{{CANARY_DIR}}/new', 'w')", "checks": []},
        {
            "name": "connects",
            "code": "import socket; socket.create_connection(('127.0.0.1', {{PORT}}))",
            "checks": [],
        },
        {"name": "leaves", "code": "open('{{LEAK}}', 'w').write('x')", "checks": []},
    ]
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"snippets": [{**row, "safe_expected": ""} for row in rows]}))
    assert main([str(file), "--backend", "none"]) == 2
    report = attack(str(file), "--json", "--backend", "none", "--unsafe")
    assert report["level"] == "none"
    problems = {name: problems[0] for name, problems in report["failures"].items()}
    assert problems == {
        "reads": report["failures"]["reads"][0],
        "writes": "canary directory changed",
        "connects": "connected to tcp",
        "leaves": "wrote leak",
    }
    assert problems["reads"].endswith("is in the output")
    assert report["categories"]["file"] == {"contained": 0, "of": len(rows)}


def test_unknown_check_is_refused(tmp_path, capsys):
    row = {"name": "a", "code": "1", "safe_expected": "", "checks": ["no_such:1"]}
    (tmp_path / "file.json").write_text(json.dumps({"snippets": [row]}))
    assert main([str(tmp_path / "file.json")]) == 2
    assert "'no_such'" in capsys.readouterr().err
    (tmp_path / "file.json").write_text("[]")
    assert main([str(tmp_path / "file.json")]) == 2


TOML = """
[[program]]
name = "gone"
checks = ["status:ok"]
code = "x = 1"
then = "x"
then_checks = ["status:error"]

[[program]]
name = "kept"
is_session = true
checks = ["status:ok"]
code = "x = 1"
then = "x"
then_checks = ["value:1"]
beside_checks = []

[[program]]
name = "claimed"
category = "neighbours"
checks = ["status:ok"]
code = "1"
beside = "print('undisturbed')"
beside_checks = ["in_output:disturbed!"]

[[program]]
name = "elsewhere"
levels = ["none"]
checks = []
code = "1"
"""


def test_toml_programs_make_several_calls(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    report = attack(str(tmp_path / "mine.toml"), "--json")
    assert report["failures"] == {"claimed": ["'disturbed!' is not in the output"]}
    assert report["not_promised"] == ["elsewhere"]
    assert report["categories"] == {
        "mine": {"contained": 2, "of": 2},
        "neighbours": {"contained": 0, "of": 1},
    }


def test_attack_suite_runs_against_a_plugin_sandbox(tmp_path, monkeypatch):
    (tmp_path / "own_sandbox_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text(TOML)
    own = ("-p", "own_sandbox_plugin", "--sandbox", "fails", "--set", "text=no way")
    report = attack(str(tmp_path / "mine.toml"), "--json", *own)
    assert report["backend"] == "process"
    assert report["failures"]["gone"][0] == "the sandbox failed: RuntimeError: no way"


PLUGIN = """
from areal_gym.plugins import SandboxSpec, hookimpl
from areal_gym.sandbox import ProcessSandbox

class Fails(ProcessSandbox):
    def __init__(self, *, text: str) -> None:
        super().__init__(num_workers=1)
        self.text = text

    async def run(self, code, *, limits=None):
        if code == "x = 1":
            raise RuntimeError(self.text)
        return await super().run(code, limits=limits)

@hookimpl
def register_sandboxes():
    yield SandboxSpec(id="fails", entry_point="own_sandbox_plugin:Fails", summary="fails")
"""


def test_program_with_levels_needs_that_level(tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(TOML)
    assert main([str(tmp_path / "mine.toml"), "--sandbox", "docker", "--level", "filtered"]) == 2
    assert "--level filtered" in capsys.readouterr().err
    (tmp_path / "mine.toml").write_text(TOML + "odd = 1\n")
    assert main([str(tmp_path / "mine.toml")]) == 2
    assert "unknown field 'odd'" in capsys.readouterr().err


def test_attack_programs_have_unique_names():
    programs = read_programs(builtin_files())
    assert len({program.name for program in programs}) == len(programs) >= 170
    assert all(program.checks for program in programs)


def test_threads_start_beside_many_processes_of_the_user(tmp_path):
    code = (
        "import threading\nthreads = [threading.Thread(target=print, args=(i,)) for i in range(7)]"
    )
    code += "\nfor thread in threads: thread.start()\nfor thread in threads: thread.join()\n"
    row = {"name": "threads", "code": code, "safe_expected": "", "checks": ["in_output:6"]}
    (tmp_path / "file.json").write_text(json.dumps({"snippets": [row]}))
    for directory in (tmp_path, *tmp_path.parents[:3]):
        directory.chmod(0o755)
    others = []
    try:
        if os.geteuid() == 0:
            others = [subprocess.Popen(["sleep", "60"], user=NOBODY) for _ in range(30)]
        for options in ((), ("--without", "namespaces")):
            report = attack(str(tmp_path / "file.json"), "--json", *options, uid=NOBODY)
            assert_contained(report, 1)
    finally:
        for other in others:
            other.kill()
            other.wait()
