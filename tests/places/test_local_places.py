"""Places on this machine without an engine: commands, files, walls, limits."""

import asyncio
import glob
import io
import os
import tarfile
import time

import pytest

from areal_gym.errors import SandboxError
from areal_gym.places import Place, PlaceImage, PlaceLimits, Places
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.places.local_places import LocalPlaces
from areal_gym.sandbox.suite.watch import descendants
from areal_gym.sandbox.worker import kernel
from tests._support.place_commands import archive, sh

LIMITS = PlaceLimits(memory_mb=128, storage_mb=32, num_processes=32)
HOST = PlaceImage(reference=HOST_ROOT)


def play(cache, episode, image=HOST, limits=LIMITS, **options):
    """Return what `episode(place)` returns of a fresh place, which is removed."""

    async def use():
        places = LocalPlaces(cache=cache, **options)
        try:
            place = await places.start(image, limits)
            return await asyncio.wait_for(episode(place), 60)
        finally:
            await places.aclose()

    return asyncio.run(use())


def python(place, program, **options):
    return place.run(["python3", "-I", "-c", program], **{"timeout_s": 20, **options})


def test_local_places_keep_the_protocol(local_cache):
    async def episode(place):
        return isinstance(place, Place)

    assert isinstance(LocalPlaces(cache=local_cache), Places)
    assert play(local_cache, episode)


def test_commands_get_their_directory_environment_and_user_and_are_bounded(local_cache):
    async def episode(place):
        shown = await sh(
            place, "echo $PWD $A $B $HOME; echo low >&2; exit 3", cwd="/tmp", env={"B": "two"}
        )
        absent = await place.run(["no-such-program"], timeout_s=20)
        with pytest.raises(SandboxError, match="/nowhere"):
            await sh(place, "true", cwd="/nowhere")
        with pytest.raises(SandboxError, match="no user 'ghost'"):
            await sh(place, "true", user="ghost")
        flood = await python(place, "print('x' * (4 << 20))")
        left = await sh(place, "sleep 50 & echo back")
        return shown, absent, flood, left

    image = PlaceImage(reference=HOST_ROOT, env={"A": "one"})
    shown, absent, flood, left = play(local_cache, episode, image)
    assert (shown.exit_code, shown.stdout, shown.stderr) == (3, b"/tmp one two /root\n", b"low\n")
    assert (absent.exit_code, absent.stderr) == (127, b"no-such-program: not found\n")
    assert len(flood.stdout) == 1 << 20
    assert left.stdout == b"back\n"


def test_a_command_at_its_deadline_is_killed_with_its_children_and_the_place_goes_on(local_cache):
    async def episode(place):
        start = time.monotonic()
        late = await sh(place, "echo early; sleep 77 & sleep 78; echo never", timeout_s=1)
        elapsed = time.monotonic() - start
        names = await sh(place, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; echo still")
        return late, elapsed, names.stdout.decode()

    late, elapsed, names = play(local_cache, episode)
    assert late.is_timed_out
    assert late.stdout == b"early\n"
    assert elapsed < 10
    assert "sleep" not in names
    assert "still" in names


def test_files_go_in_and_come_out_of_a_frozen_place_and_links_are_not_followed(local_cache):
    async def episode(place):
        await place.put(archive(note="hello"), "/made/deep")
        with pytest.raises(SandboxError, match="frozen"):
            await place.take(["/made"], max_bytes=1 << 20)
        made = await sh(place, "cd /made; ln -s /etc etc; ln -s /proc/self/root/etc host; mkfifo f")
        for name in ("etc", "host"):
            with pytest.raises(SandboxError, match="link"):
                await place.put(archive(passwd="mine"), f"/made/{name}")
        with pytest.raises(SandboxError, match="neither a file"):
            await place.put(device(), "/made")
        await place.freeze()
        paths = ["/made", "/absent", "/made/etc/passwd", "/made/../../../../etc/hostname"]
        whole = await place.take(paths, max_bytes=1 << 20)
        cut = await place.take(["/usr"], max_bytes=100_000)
        again = await sh(place, "cat /made/deep/note")
        return made, whole, cut, again

    def device():
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            entry = tarfile.TarInfo("disk")
            entry.type, entry.devmajor, entry.devminor = tarfile.BLKTYPE, 8, 0
            tar.addfile(entry)
        return buffer.getvalue()

    made, whole, cut, again = play(local_cache, episode)
    assert made.exit_code == 0
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        members = {member.name: member for member in tar}
        assert tar.extractfile("made/deep/note").read() == b"hello"
    expected = {"made", "made/deep", "made/deep/note", "made/etc", "made/host", "made/f"}
    assert set(members) == expected
    assert members["made/etc"].issym()
    assert len(cut) <= 100_000
    assert again.stdout == b"hello"


def test_the_gateway_is_reached_inside_and_nothing_else(local_cache):
    program = (
        "import socket\n"
        "s = socket.create_connection(('127.0.0.1', 8900), 5); print(s.recv(9).decode())\n"
        "try: socket.create_connection(('10.0.0.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)\n"
        "for family in (38, 40, 17):\n"
        "    try: socket.socket(family, socket.SOCK_DGRAM)\n"
        "    except OSError as error: print(error.strerror)\n"
    )

    async def episode(place):
        listener = await place.listen(8900)

        async def answer(reader, writer):
            writer.write(b"gateway")
            writer.close()

        server = await asyncio.start_server(answer, sock=listener)
        try:
            return await python(place, program)
        finally:
            server.close()

    result = play(local_cache, episode)
    refused = [b"Operation not permitted"] * 3
    assert result.stdout.splitlines() == [b"gateway", b"Network is unreachable", *refused]


def test_root_of_a_place_has_no_rights_outside_of_it(local_cache):
    program = (
        "import os, ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "tries = {\n"
        "  'mount': lambda: libc.mount(b'none', b'/mnt', b'tmpfs', 0, None),\n"
        "  'unshare': lambda: libc.unshare(0x10000000),\n"
        "  'ptrace': lambda: libc.ptrace(16, 1, 0, 0),\n"
        "  'mknod': lambda: libc.mknod(b'/tmp/disk', 0o60600, 0x800),\n"
        "  'chroot': lambda: libc.chroot(b'/tmp'),\n"
        "  'sethostname': lambda: libc.sethostname(b'x', 1),\n"
        "}\n"
        "print(*[name for name, call in tries.items() if call() != -1])\n"
        "for path in ('/proc/1/mem', '/proc/1/environ', '/proc/sys/kernel/core_pattern',\n"
        "             '/proc/sysrq-trigger', '/dev/mem', '/proc/1/root/etc/passwd'):\n"
        "    try: os.open(path, os.O_RDWR); print('opened', path)\n"
        "    except OSError: pass\n"
        "try: os.kill(1, 9)\n"
        "except PermissionError: pass\n"
        "print(len(open('/proc/1/cmdline').read()) > 0)\n"
    )

    async def episode(place):
        tried = await python(place, program)
        seen = await sh(place, "cat /proc/1/cmdline /proc/self/mountinfo; ls -d /work /home/*")
        scores = await sh(place, "cat /proc/self/oom_score_adj")
        return tried, seen.stdout.decode(), scores.stdout

    tried, seen, score = play(local_cache, episode)
    assert score == b"0\n"
    assert tried.stdout == b"\nTrue\n"
    assert str(os.path.dirname(os.path.dirname(__file__))) not in seen
    assert str(local_cache) not in seen


def test_memory_processes_and_files_are_bounded_together(local_cache):
    memory = "import time\nheld = []\nfor _ in range(400): held.append(bytearray(b'x' * (1 << 20)))"
    forks = (
        "import os, time\nn = 0\n"
        "try:\n"
        "    while n < 500:\n"
        "        if not os.fork(): time.sleep(60); os._exit(0)\n"
        "        n += 1\n"
        "except OSError: pass\n"
        "print(n)"
    )

    async def episode(place):
        held = await python(place, memory)
        disk = await sh(place, "dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; wc -c < /big")
        await sh(place, "rm /big")
        forked = await python(place, forks)
        full = await sh(place, "true")
        await place.freeze()
        return held, disk, forked, full, await sh(place, "echo alive")

    held, disk, forked, full, after = play(local_cache, episode)
    assert held.exit_code == 137
    assert int(disk.stdout) < 33 << 20
    assert 16 <= int(forked.stdout) < 40
    assert full.exit_code in (0, 126, 2)  # a full place refuses commands, and stays
    assert after.stdout == b"alive\n"


def test_a_place_leaves_no_process_mount_or_group(local_cache):
    def groups():
        folders = glob.glob(f"/sys/fs/cgroup/**/areal-gym-{os.getpid()}-*", recursive=True)
        return {path for path in folders if os.path.isdir(path)}

    def mounts():
        with open("/proc/self/mountinfo") as rows:
            return len(rows.readlines())

    # Sandboxes of other tests in this process may still have groups of their own.
    before, running, grouped = mounts(), descendants(os.getpid()), groups()
    fds = len(os.listdir("/proc/self/fd"))

    async def episode(place):
        await sh(place, "setsid sleep 99 & sleep 98 &")
        return mounts()

    assert play(local_cache, episode) == before
    assert not descendants(os.getpid()) - running
    assert groups() <= grouped
    assert len(os.listdir("/proc/self/fd")) == fds


def test_more_than_the_machine_has_is_refused(local_cache):
    async def episode(place):
        raise AssertionError("it must not start")

    for limits, text in (
        (PlaceLimits(cpus=999), "999 processors"),
        (PlaceLimits(memory_mb=10**9), "MB of memory"),
    ):
        with pytest.raises(SandboxError, match=text):
            play(local_cache, episode, limits=limits)
    with pytest.raises(SandboxError, match="no image 'debian:12'"):
        play(local_cache, episode, PlaceImage(reference="debian:12"))


def test_folders_are_built_once_by_the_instructions_of_their_dockerfile(local_cache, tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE_IMAGE=python:3.12-slim\nFROM ${BASE_IMAGE}\n"
        "ARG WHO=nobody\nENV GREETING=hello PLACE=/srv\nWORKDIR $PLACE\n"
        "COPY data/ /srv/data/\nCOPY *.txt notes/\nCOPY --chmod=755 --chown=65534:65534 tool run\n"
        'RUN echo "$GREETING $WHO" > made && rm /usr/bin/xargs && \\\n    mkdir -p deep/er\n'
        'RUN ["touch", "listed"]\nUSER nobody\nCMD ["sh"]\n'
    )
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "data" / "in" / "a").write_text("a")
    (tmp_path / "one.txt").write_text("1")
    (tmp_path / "two.txt").write_text("2")
    (tmp_path / "skip.txt").write_text("3")
    (tmp_path / ".dockerignore").write_text("skip*\n")
    (tmp_path / "tool").write_text("#!/bin/sh\nid -un\n")

    async def two():
        places = LocalPlaces(cache=local_cache, build_args={"WHO": "world"})
        try:
            image = PlaceImage(folder=tmp_path)
            both = await asyncio.gather(*(places.start(image, LIMITS) for _ in range(2)))
            command = (
                "pwd; cat made; ./run; ls -A . notes data/in; ls /usr/bin/xargs; stat -c %u run"
            )
            shown = [await sh(place, command) for place in both]
            return shown, {tuple(place._layers) for place in both}
        finally:
            await places.aclose()

    (first, second), layers = asyncio.run(two())
    assert first.stdout == second.stdout
    expected = (
        "/srv hello world nobody .: data deep listed made notes run data/in: a notes: one.txt"
    )
    assert first.stdout.decode().split() == [*expected.split(), "two.txt", "65534"]
    assert b"No such file" in first.stderr
    assert len(layers) == 1


def test_a_full_disk_is_named_and_no_layer_is_left(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a small disk is mounted as root")
    small = tmp_path / "small"
    small.mkdir()
    kernel.mount("none", str(small), "tmpfs", 0, "size=4m")
    try:
        with pytest.raises(SandboxError, match="No space left on device"):
            play(str(small), None)
        assert list(small.glob("*/*")) == []
    finally:
        kernel.umount(str(small), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM ubuntu:24.04\n", "no image 'ubuntu:24.04'"),
        ("FROM python:3\nRUN echo no >&2; exit 4\n", "line 2, RUN: exit code 4 .*no"),
        ("FROM python:3\nCOPY gone .\n", "line 2, COPY: gone is not in"),
        ("FROM python:3\nCOPY ../other .\n", "line 2, COPY: "),
        ("FROM python:3\nCOPY link .\n", "link leads out of"),
        ("FROM python:3\nADD https://example.org/x .\n", "line 2, ADD: https"),
        ("FROM python:3\nCOPY --from=other a .\n", "--from is not supported"),
        ("FROM python:3\nVOLUME /data\n", "line 2, VOLUME: not supported"),
        ("FROM python:3\nRUN <<EOF\nls\nEOF\n", "line 2: here-documents"),
        ("FROM python:3 AS a\nFROM python:3.12\n", "one FROM is supported"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_line(local_cache, tmp_path, text, message):
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "link").symlink_to("/etc/passwd")

    async def episode(place):
        raise AssertionError("it must not start")

    with pytest.raises(SandboxError, match=message):
        play(local_cache, episode, PlaceImage(folder=tmp_path))
    assert not list(local_cache.glob("*/new-*"))


def test_changes_of_files_are_told_apart_from_those_of_the_image(local_cache, tmp_path):
    program = (
        "import os, shutil\n"
        "open('kept', 'a').write('more'); os.remove('gone'); os.makedirs('new/deep')\n"
        "open('new/deep/file', 'w').close(); shutil.rmtree('again'); os.mkdir('again')\n"
        "open('again/other', 'w').close(); open('still/x', 'w').close(); os.remove('still/x')\n"
    )
    for name in ("kept", "gone", "again/one", "still/y"):
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("text")
    (tmp_path / "Dockerfile").write_text(f"FROM {HOST_ROOT}\nWORKDIR /app\nCOPY files .\n")

    async def episode(place):
        with pytest.raises(SandboxError, match="frozen"):
            await place.changes()
        made = await python(place, program)
        await place.freeze()
        return made, await place.changes()

    made, changes = play(local_cache, episode, PlaceImage(folder=tmp_path))
    assert made.exit_code == 0, made.stderr
    assert changes.written == ("/app/again", "/app/kept", "/app/new")
    assert changes.removed == ("/app/again", "/app/gone")
