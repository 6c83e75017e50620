"""What a snippet cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_gym.sandbox import SandboxStatus

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT.parent / "shared/golden/hostile_snippets.json"
NOBODY = 65534


def test_the_environment_is_empty(execute, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    assert execute("import os; dict(os.environ)").value == "{}"


def test_no_descriptors_but_its_own(execute, tmp_path):
    (tmp_path / "open").write_text("secret")
    fd = os.open(tmp_path / "open", os.O_RDONLY)
    os.set_inheritable(fd, True)
    code = "import os\nfds = []\nfor fd in range(1024):\n    try: os.fstat(fd)\n"
    code += "    except OSError: continue\n    fds.append(fd)\nfds"
    assert execute(code).value == "[0, 1, 2, 3]"
    os.close(fd)


def test_no_network(execute):
    result = execute("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert result.status is SandboxStatus.ERROR
    assert result.stderr.splitlines()[-1].startswith(("PermissionError", "OSError"))


def test_files_outside_are_neither_read_nor_written(execute, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "file").write_text("secret")
    assert execute(f"open({str(tmp_path / 'file')!r}).read()").status is SandboxStatus.ERROR
    assert execute(f"open({str(tmp_path / 'new')!r}, 'w')").status is SandboxStatus.ERROR
    assert execute(f"open({json.__file__!r}, 'a')").status is SandboxStatus.ERROR
    assert not (tmp_path / "new").exists()


def test_a_private_directory_that_does_not_stay(execute):
    assert execute("open('a', 'w').write('x'); import os; os.listdir()").value == "['a']"
    assert execute("import os; os.listdir()").value == "[]"


def test_files_have_a_size_limit(execute):
    result = execute("f = open('big', 'wb')\nf.write(b'x' * (3 << 20))", file_mb=2)
    assert result.stderr.splitlines()[-1] == "OSError: [Errno 27] File too large"


def test_processes_are_counted(execute, runner, sandbox):
    code = "import os, time\nn = 0\ntry:\n    while True:\n"
    code += "        if os.fork() == 0: time.sleep(60)\n        n += 1\n"
    code += "except OSError: pass\nn"
    assert int(execute(code, num_processes=5).value) <= 5


def test_no_daemon_stays(execute):
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


def attack(uid: int, *without: str) -> tuple[set[str], dict[str, list[str]]]:
    """The active protections and what got through, told by a process of its own."""
    if not SNIPPETS.exists():
        pytest.skip(f"no {SNIPPETS.name}")
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("hostile.py")), SNIPPETS, str(uid), *without],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    return set(report["protections"]), report["failures"]


def hold_without_forks(protections: set[str], failures: dict[str, list[str]]) -> None:
    """Nothing gets through, but a snippet that forks is told that it may not."""
    if not {"landlock", "private root"} & protections or "seccomp" not in protections:
        pytest.skip("this kernel has neither Landlock nor seccomp")
    if "no fork" in protections:
        failures.pop("daemon_holds_stdout", None)
    assert failures == {}


@pytest.mark.slow
def test_hostile_snippets():
    hold_without_forks(*attack(0))


@pytest.mark.slow
def test_hostile_snippets_without_namespaces():
    hold_without_forks(*attack(0, "namespaces"))


@pytest.mark.slow
def test_hostile_snippets_as_an_ordinary_user():
    hold_without_forks(*attack(NOBODY))


@pytest.mark.slow
def test_hostile_snippets_as_an_ordinary_user_without_namespaces():
    hold_without_forks(*attack(NOBODY, "namespaces"))
