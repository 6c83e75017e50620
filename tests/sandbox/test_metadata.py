"""Snippets cannot change metadata of host files at any level, and never run as uid 0."""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_gym.errors import SandboxError
from areal_gym.sandbox import ProcessSandbox, SandboxLimits
from areal_gym.sandbox.worker import seccomp, syscalls
from tests._support.paths import ROOT

NOBODY = 65534
LIMITS = SandboxLimits(wall_s=60, cpu_s=60)

# System calls by number, without Python's wrappers: PATH is a file that the sandbox's user owns,
# FD a descriptor of it (or -1 where it cannot be opened).
CALLS = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
PATH, NEW = {path!r}.encode(), b"own-{number}"
try: FD = os.open(PATH, os.O_RDONLY)
except OSError: FD = -1
open(NEW, "w").close()
times = struct.pack("4q", 1, 0, 1, 0)
acl, value = b"user.mark", b"1"
attributes = struct.pack("QII", 0, 0, 0)
flags = struct.pack("q", 0x40)
calls = {{
    "chmod": (90, PATH, 0o777), "fchmod": (91, FD, 0o777), "fchmodat": (268, -100, PATH, 0o777),
    "fchmodat2": (452, -100, PATH, 0o777, 0), "fchmodat2 of fd": (452, FD, b"", 0o777, 0x1000),
    "chown": (92, PATH, -1, -1), "fchown": (93, FD, -1, -1), "lchown": (94, PATH, -1, -1),
    "fchownat": (260, -100, PATH, -1, -1, 0),
    "utime": (132, PATH, times), "utimes": (235, PATH, times),
    "futimesat": (261, -100, PATH, times), "utimensat": (280, -100, PATH, times, 0),
    "utimensat now": (280, -100, PATH, None, 0), "futimens": (280, FD, None, times, 0),
    "setxattr": (188, PATH, acl, value, 1, 0), "lsetxattr": (189, PATH, acl, value, 1, 0),
    "fsetxattr": (190, FD, acl, value, 1, 0), "removexattr": (197, PATH, b"user.kept"),
    "lremovexattr": (198, PATH, b"user.kept"), "fremovexattr": (199, FD, b"user.kept"),
    "setxattrat": (463, -100, PATH, 0, acl, attributes, 16),
    "removexattrat": (466, -100, PATH, 0, b"user.kept"),
    "flags": (16, FD, 0x40086602, flags), "attributes": (16, FD, 0x401C5820, bytes(28)),
    "file_setattr": (469, -100, PATH, bytes(32), 32, 0),
    "link": (86, PATH, b"linked"), "linkat": (265, -100, PATH, -100, b"linked", 0),
    "linkat of fd": (265, FD, b"", -100, b"linked", 0x1000),
    "rename onto": (82, NEW, PATH), "renameat2": (316, -100, NEW, -100, PATH, 0),
    "exchange": (316, -100, NEW, -100, PATH, 2), "rename away": (82, PATH, b"moved"),
    "unlink": (87, PATH), "truncate": (76, PATH, 0), "cut": (2, PATH, 0o1000),
    "cut at": (257, -100, PATH, 0o1000),
    "cut by openat2": (437, -100, PATH, struct.pack("3Q", 512, 0, 0), 24),
    "handle": (303, -100, PATH, struct.pack("Ii", 120, 0) + bytes(120), bytes(8), 0),
    "inotify": (294, 0), "fanotify": (300, 0, 0), "memfd": (319, b"m", 0), "bpf": (321, 0, b"", 0),
    "watch": (254, FD, PATH, 2), "mount": (165, b"none", b"/", b"tmpfs", 0, None),
    "lease": (72, FD, 1024, 0), "owner of signals": (72, FD, 8, 1), "signal": (72, FD, 10, 9),
}}
done = []
for name, (number, *arguments) in calls.items():
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(number), *wide) >= 0:
        done.append(name)
os.getuid() != 0 and os.geteuid() != 0 and done
"""


def state_of(path):
    """Return all metadata and the content of a file, without changing them."""
    about = os.stat(path)
    names = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    kept = ("st_mode", "st_uid", "st_gid", "st_size", "st_nlink", "st_ino", "st_mtime_ns")
    return [getattr(about, name) for name in (*kept, "st_ctime_ns")], names, Path(path).read_text()


async def attack_files(paths, without):
    """Attack each file; return the snippet's report and whether the file is unchanged."""
    seen = {}
    async with ProcessSandbox(num_workers=1, without=without, limits=LIMITS) as sandbox:
        for number, path in enumerate(paths):
            before = state_of(path)
            result = await sandbox.run(CALLS.format(path=str(path), number=number))
            seen[path] = (result.value or result.stderr, state_of(path) == before)
        level = (await sandbox.report()).level
    return {"level": str(level), "seen": seen}


def main(directory, *without):
    """Make the files and attack them as an ordinary user; print JSON."""
    with contextlib.suppress(OSError):
        os.umask(0o022)
    path = make_file(Path(directory))
    package = make_package(Path(directory))
    sys.path.insert(0, directory)
    print(json.dumps(asyncio.run(attack_files([str(path), str(package)], without))))


def make_file(directory):
    """Make a host file that a snippet may not open."""
    path = directory / "precious"
    path.write_text("precious")
    with contextlib.suppress(OSError):  # not every file system has extended attributes
        os.setxattr(path, "user.kept", b"1")
    return path


def make_package(directory):
    """Make a host file that a snippet may read."""
    path = directory / "site-packages" / "readable_by_snippets.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("x = 1\n")
    return path


@pytest.fixture
def open_directory():
    """A directory that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_snippets_cannot_change_metadata_of_host_files(open_directory, monkeypatch, without):
    path, package = make_file(open_directory), make_package(open_directory)
    monkeypatch.syspath_prepend(str(package.parent))
    report = asyncio.run(attack_files([str(path), str(package)], without))
    assert_unchanged(report, isolated=not without)


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_snippets_cannot_change_metadata_as_ordinary_user(open_directory, without):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.chown(open_directory, NOBODY, NOBODY)
    (open_directory / "site-packages").mkdir()
    os.chown(open_directory / "site-packages", NOBODY, NOBODY)
    code = (
        f"import sys; from tests._support.ordinary_user import become; become({NOBODY}); "
        f"sys.path.insert(0, {str(open_directory / 'site-packages')!r}); "
        "import tests.sandbox.test_metadata as t; t.main(*sys.argv[1:])"
    )
    report = subprocess.run(
        [sys.executable, "-c", code, str(open_directory), *without],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert report.returncode == 0, report.stderr
    assert_unchanged(json.loads(report.stdout), isolated=not without)


def assert_unchanged(report, *, isolated):
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    if report["level"] == "none":
        pytest.skip("this kernel has neither Landlock nor seccomp")
    if not isolated:
        assert report["level"] == "filtered"
    assert len(report["seen"]) == 2
    for path, (value, is_same) in report["seen"].items():
        assert value == "[]", f"{path}: {value}"
        assert is_same, f"{path} was changed"


@pytest.fixture
def closed_interpreter():
    """An interpreter in a directory that only root may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root has a home that is closed to the others")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o700)
        base = Path(home, "python")
        libraries = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"
        source = Path(sys.base_prefix)
        (base / "bin").mkdir(parents=True)
        skipped = shutil.ignore_patterns("test", "site-packages", "__pycache__", "idlelib", "*.a")
        shutil.copytree(source / libraries, base / libraries, symlinks=True, ignore=skipped)
        shutil.copy(os.path.realpath(sys.executable), base / "bin/python")
        for library in (source / "lib").glob("libpython*.so*"):
            shutil.copy(library, base / "lib", follow_symlinks=False)
        yield base / "bin/python"


UID = """
import asyncio
from areal_gym.errors import SandboxError
from areal_gym.sandbox import ProcessSandbox
from areal_gym.sandbox.worker import kernel
import sys
for number in range(41 if sys.argv[1:] else 0):
    if str(number) not in sys.argv[1:]:
        kernel.prctl(24, number)  # PR_CAPBSET_DROP: the fork server begins without it
async def main():
    try:
        async with ProcessSandbox(num_workers=1, modules=(), without=("namespaces",)) as sandbox:
            # shelve is not loaded yet: it is read under the other uid.
            result = await sandbox.run("import os, shelve; os.getresuid() + os.getresgid()")
            print("uids", 0 in eval(result.value or "[0]"), result.stderr)
    except SandboxError as error:
        print("refused", error)
asyncio.run(main())
"""


def test_no_cell_is_root_with_a_root_only_interpreter(closed_interpreter):
    def run(*arguments):
        process = subprocess.run(
            [closed_interpreter, "-s", "-c", UID, *arguments],
            env={
                "PYTHONPATH": str(ROOT),
                "LD_LIBRARY_PATH": str(closed_interpreter.parents[1] / "lib"),
            },
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert run().startswith(("uids False", "refused"))
    refusal = run("6", "7")  # CAP_SETGID and CAP_SETUID
    assert refusal.startswith("refused")
    assert "chmod o+x" in refusal


def test_root_without_setuid_capability_is_refused():
    if os.geteuid() != 0:
        pytest.skip("only root")
    process = subprocess.run(
        [sys.executable, "-c", UID, "0"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.stdout.startswith("refused"), process.stderr
    assert "ordinary user" in process.stdout


def test_snippet_may_change_metadata_of_its_own_files(runner, sandbox):
    code = (
        "import os, shutil\nopen('a', 'w').close()\nos.chmod('a', 0o600)\nos.utime('a', (5, 5))\n"
        "shutil.copy2('a', 'b')\nos.stat('b').st_mtime, oct(os.stat('b').st_mode)"
    )
    if runner.run(sandbox.report()).level != "isolated":
        pytest.skip("only namespaces tell a snippet's own files from others")
    assert runner.run(sandbox.run(code, limits=LIMITS)).value == "(5.0, '0o100600')"


def test_metadata_calls_fail_without_namespaces(runner):
    async def go():
        async with ProcessSandbox(num_workers=1, without=("namespaces",), limits=LIMITS) as sandbox:
            return await sandbox.run("import os; open('a', 'w').close(); os.chmod('a', 0o600)")

    try:
        result = runner.run(go())
    except SandboxError as error:
        pytest.skip(str(error))
    assert result.stderr.splitlines()[-1].startswith("PermissionError")


def decide(program, number):
    """Interpret the filter for a call whose arguments are all 0, as the kernel does."""
    steps = [struct.unpack_from("=HBBI", program, offset) for offset in range(0, len(program), 8)]
    position = value = 0
    while True:
        code, if_true, if_false, operand = steps[position]
        position += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
            value = {0: number, 4: architecture}.get(operand, 0)
        elif code == 0x54:
            value &= operand
        else:
            is_true = {
                0x15: value == operand,
                0x25: value > operand,
                0x35: value >= operand,
                0x45: bool(value & operand),
            }[code]
            position += if_true if is_true else if_false


@pytest.mark.parametrize("allow_metadata", [False, True])
def test_seccomp_filter_allows_exactly_its_list(allow_metadata):
    if platform.machine() not in syscalls.COLUMNS:
        pytest.skip("no filter for this machine")
    column = syscalls.COLUMNS[platform.machine()]
    program = seccomp.build_filter(
        allow_fork=True, allow_metadata=allow_metadata, allow_truncate=True, own_pid=None
    )
    listed = {**syscalls.FREE, **(syscalls.METADATA if allow_metadata else {})}
    allowed = {numbers[column] for numbers in listed.values()}
    guarded = {numbers[column] for numbers in syscalls.GUARDED.values()}
    answers = {n: decide(program, n) for n in range(syscalls.LAST + 1) if n not in guarded}
    assert {n for n, answer in answers.items() if answer == 0x7FFF0000} == allowed - {-1}
    assert set(answers.values()) == {0x7FFF0000, 0x00050001}
    assert decide(program, syscalls.LAST + 1) == decide(program, 0x40000001) == 0x00050026
