"""Places on a Docker engine: skipped where none answers."""

import asyncio
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time

import pytest

from areal_gym.errors import SandboxError
from areal_gym.places import PlaceImage, PlaceLimits, images
from areal_gym.places.docker_places import LABEL, DockerPlaces
from areal_gym.places.images import ImageUses
from areal_gym.places.keeper_commands import Commands
from areal_gym.places.owners import is_gone
from areal_gym.sandbox.containers import connect
from areal_gym.sandbox.image import import_host
from tests._support.place_commands import archive, sh

BASE = "areal-gym-places-tests"
LIMITS = PlaceLimits(memory_mb=128, num_processes=32)


@pytest.fixture(scope="module")
def client():
    try:
        client = connect()
    except SandboxError as error:
        pytest.skip(str(error))
    if not client.images.list(f"{BASE}:latest"):
        import_host(client, BASE)
    yield client
    client.close()


def play(episode, image=None, limits=LIMITS, **options):
    """Return what `episode(place)` returns of a fresh place, which is removed."""

    async def use():
        places = DockerPlaces(**options)
        try:
            place = await places.start(image or PlaceImage(reference=BASE), limits)
            return await asyncio.wait_for(episode(place), 60)
        finally:
            await places.aclose()

    return asyncio.run(use())


def test_commands_get_their_directory_environment_and_user_and_are_bounded(client):
    async def episode(place):
        shown = await sh(
            place, "echo $PWD $A $B; echo low >&2; exit 3", cwd="/tmp", env={"B": "two"}
        )
        user = await place.run(
            ["python3", "-c", "import os; print(os.getuid())"], user=65534, timeout_s=20
        )
        flood = await place.run(["python3", "-c", "print('x' * (8 << 20))"], timeout_s=20)
        return shown, user, flood

    image = PlaceImage(reference=BASE, env={"A": "one"})
    shown, user, flood = play(episode, image)
    assert (shown.exit_code, shown.stdout, shown.stderr) == (3, b"/tmp one two\n", b"low\n")
    assert user.stdout == b"65534\n"
    assert len(flood.stdout) == 1 << 20


def test_a_command_at_its_deadline_is_killed_with_its_children_and_the_place_goes_on(client):
    async def episode(place):
        start = time.monotonic()
        late = await sh(place, "sleep 77 & sleep 78; echo never", timeout_s=1)
        elapsed = time.monotonic() - start
        names = "\n".join(row[-1] for row in place._container.top()["Processes"])
        return late, elapsed, names, await sh(place, "echo still")

    late, elapsed, names, still = play(episode)
    assert late.is_timed_out
    assert elapsed < 10
    assert "sleep 77" not in names
    assert "sleep 78" not in names
    assert still.stdout == b"still\n"


def test_files_go_in_and_come_out_of_a_frozen_place_and_links_are_not_followed(client):
    async def episode(place):
        await place.put(archive(note="hello"), "/made/deep")
        with pytest.raises(SandboxError, match="frozen"):
            await place.take(["/made"], max_bytes=1 << 20)
        prepare = "cd /made; python3 -c \"import os; os.symlink('/etc', 'etc')\""
        made = await sh(place, prepare)
        with pytest.raises(SandboxError, match="link"):
            await place.put(archive(passwd="mine"), "/made/etc")
        await place.freeze()
        whole = await place.take(["/made", "/absent", "/made/etc/passwd"], max_bytes=1 << 20)
        cut = await place.take(["/usr"], max_bytes=100_000)
        again = await sh(place, "cat /made/deep/note")
        return made, whole, cut, again

    made, whole, cut, again = play(episode)
    assert made.exit_code == 0
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        members = {member.name: member for member in tar}
        assert tar.extractfile("made/deep/note").read() == b"hello"
    assert set(members) == {"made", "made/deep", "made/deep/note", "made/etc"}
    assert members["made/etc"].issym()
    assert len(cut) <= 100_000
    assert again.stdout == b"hello"


def test_changes_of_files_are_told_apart_from_those_of_the_image(client, tmp_path):
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
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nWORKDIR /app\nCOPY files .\n")

    async def episode(place):
        with pytest.raises(SandboxError, match="frozen"):
            await place.changes()
        made = await place.run(["python3", "-c", program], timeout_s=20)
        await place.freeze()
        return made, await place.changes(), place._container.image.id

    made, changes, image = play(episode, PlaceImage(folder=tmp_path))
    client.images.remove(image, force=True)
    assert made.exit_code == 0, made.stderr
    written = {path for path in changes.written if path.startswith("/app")}
    removed = {path for path in changes.removed if path.startswith("/app")}
    assert "/app/kept" in written
    assert "/app/new" in written
    assert written & {"/app/again", "/app/again/other"}
    assert not written & {"/app", "/app/still", "/app/new/deep"}
    assert "/app/gone" in removed
    assert removed & {"/app/again", "/app/again/one"}


def write_bare(folder):
    """Write the folder of an image in which no keeper finds its python3."""
    bare = folder / "bare"
    bare.mkdir()
    (bare / "Dockerfile").write_text(
        f'FROM {BASE}\nRUN python3 -c \'import shutil, os; os.rename(shutil.which("python3"), '
        '"/python-kept")\'\nUSER 1000:1000\n'
    )
    return bare


def test_the_gateway_is_reached_inside_and_nothing_else(client):
    program = (
        "import socket\n"
        "s = socket.create_connection(('127.0.0.1', 8900), 5); print(s.recv(9).decode())\n"
        "try: socket.create_connection(('10.0.0.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)\n"
    )

    async def episode(place):
        listener = await place.listen(8900)

        async def answer(reader, writer):
            writer.write(b"gateway")
            writer.close()

        server = await asyncio.start_server(answer, sock=listener)
        try:
            return await place.run(["python3", "-c", program], timeout_s=20)
        finally:
            server.close()

    result = play(episode)
    assert result.stdout.splitlines() == [b"gateway", b"Network is unreachable"]


LISTENER = """
import asyncio, json, sys
from pathlib import Path
from areal_gym.places import PlaceImage, PlaceLimits
from areal_gym.places.docker_places import DockerPlaces
from areal_gym.places.listening import listen_inside

CLIENT = '''
import socket
for port in (8900, 8901):
    try:
        print(socket.create_connection(("127.0.0.1", port), 5).recv(9).decode())
    except OSError as error:
        print(error.strerror)
'''

async def answered(places, image, python):
    place = await places.start(image, PlaceLimits(memory_mb=128, num_processes=32))
    for _ in range(2):  # the second one after all processes have ended, as with each step
        listener = await place.listen(8900)
        def answer(reader, writer):
            writer.write(b"gateway")
            writer.close()
        server = await asyncio.start_server(answer, sock=listener)
        result = await place.run([python, "-c", CLIENT], timeout_s=20)
        server.close()
        await place.freeze()
    return place.has_keeper, result.stdout.decode().splitlines()

async def main():
    places = DockerPlaces(build_network="none")
    try:
        with_python = await answered(places, PlaceImage(reference=sys.argv[1]), "python3")
        without = await answered(places, PlaceImage(folder=Path(sys.argv[2])), "/python-kept")
        try:
            listen_inside(1, 8900)
        except Exception as error:
            print(json.dumps([with_python, without, str(error)]))
    finally:
        await places.aclose()

asyncio.run(main())
"""


def test_a_run_without_rights_over_networks_listens_inside_all_the_same(client, tmp_path):
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("root and setpriv take the right away")

    rights = ["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    result = subprocess.run(
        [setpriv, *rights, sys.executable, "-c", LISTENER, BASE, str(write_bare(tmp_path))],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    with_python, without, refused = json.loads(result.stdout)
    reached = ["gateway", "Connection refused"]
    assert with_python == [True, reached]  # the keeper handed a socket over
    assert without == [False, reached]  # a container beside the place did
    assert "no socket on port 8900" in refused
    left = client.containers.list(all=True, sparse=True, filters={"label": LABEL})
    owners = [row.attrs["Labels"][LABEL] for row in left]
    assert not [owner for owner in owners if is_gone(owner)]


def test_what_a_broken_keeper_sends_instead_of_a_listener_is_refused():
    async def ask(sent):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        commands = Commands(ours)
        asking = asyncio.ensure_future(commands.listen(8900))
        await asyncio.sleep(0)
        with theirs, sent:
            number = json.loads(theirs.recv(4096))["number"]
            event = json.dumps({"event": "listening", "number": number}).encode()
            socket.send_fds(theirs, [event], [sent.fileno()])
            try:
                (await asking).close()
            finally:
                commands.close("over")

    asked = "another thing than port 8900"
    for sent in (socket.socket(), socket.create_server(("127.0.0.1", 0))):
        with pytest.raises(SandboxError, match=asked):
            asyncio.run(ask(sent))
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(SandboxError, match="the place has ended"),
    ):
        asyncio.run(ask(file))


def test_folders_are_built_once_and_errors_name_the_line(client, tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("ARG BASE_IMAGE=absent\nFROM $BASE_IMAGE\nWORKDIR /app\nCOPY note .\n")
    (tmp_path / "note").write_text("built")

    async def two():
        places = DockerPlaces(build_args={"BASE_IMAGE": BASE}, build_network="none")
        try:
            image = PlaceImage(folder=tmp_path)
            both = await asyncio.gather(*(places.start(image, LIMITS) for _ in range(2)))
            texts = [(await sh(place, "cat note")).stdout for place in both]
            names = {place._container.image.id for place in both}
            dockerfile.write_text(f"FROM {BASE}\nCOPY nothing-of-the-name .\n")
            with pytest.raises(SandboxError, match="nothing-of-the-name"):
                await places.start(image, LIMITS)
            with pytest.raises(SandboxError, match=r"999 processors"):
                await places.start(PlaceImage(reference=BASE), PlaceLimits(cpus=999))
            with pytest.raises(SandboxError, match="no image"):
                await places.start(PlaceImage(reference="areal-gym-absent"), LIMITS)
            return texts, names
        finally:
            await places.aclose()

    texts, names = asyncio.run(two())
    assert texts == [b"built", b"built"]
    assert len(names) == 1
    client.images.remove(names.pop(), force=True)


def test_places_of_a_killed_owner_are_removed_by_the_next_and_others_stay(client):
    program = (
        "import asyncio, os\n"
        "from areal_gym.places import PlaceImage, PlaceLimits\n"
        "from areal_gym.places.docker_places import DockerPlaces\n"
        "async def main():\n"
        "    places = DockerPlaces()\n"
        f"    await places.start(PlaceImage(reference={BASE!r}), PlaceLimits(memory_mb=64))\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )

    def ids():
        found = client.containers.list(all=True, sparse=True, filters={"label": LABEL})
        return {container.id for container in found}

    before = ids()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    left = ids() - before
    assert len(left) == 1

    async def episode(place):
        return ids()

    during = play(episode)
    assert not left & during
    assert not left & ids()


def test_a_keeper_executes_commands_where_the_image_has_python_and_the_engine_elsewhere(
    client, tmp_path
):
    bare = write_bare(tmp_path)

    async def both():
        places = DockerPlaces(build_network="none")
        try:
            with_python = await places.start(PlaceImage(reference=BASE), LIMITS)
            without = await places.start(PlaceImage(folder=bare), LIMITS)
            again = await places.start(PlaceImage(folder=bare), LIMITS)
            shown = []
            for place in (with_python, without, again):
                # Root of a place cannot kill its first process, and orphans are reaped.
                await sh(place, "kill -9 1; sleep 0.1 & exit 3", user=0)
                result = await sh(place, "sleep 0.2; echo here; exit 4", user=0)
                shown.append((place.has_keeper, result.exit_code, result.stdout))
            default = await python_free(without, "echo > /root-only || echo refused")
            await with_python.freeze()
            return shown, default, (await sh(with_python, "echo back")).stdout
        finally:
            await places.aclose()

    async def python_free(place, command):
        return (await sh(place, command)).stdout

    shown, default, back = asyncio.run(asyncio.wait_for(both(), 120))
    assert shown == [(has_keeper, 4, b"here\n") for has_keeper in (True, False, False)]
    assert default == b"refused\n"  # the image's own user
    assert back == b"back\n"


def test_a_place_whose_keeper_dies_is_an_error_and_leaves_nothing(client):
    async def episode(place):
        pid = (await asyncio.to_thread(client.api.inspect_container, place.id))["State"]["Pid"]
        running = asyncio.ensure_future(sh(place, "sleep 30"))
        await asyncio.sleep(0.3)
        os.kill(pid, 9)  # as the machine does when memory runs out
        with pytest.raises(SandboxError, match="the place has ended"):
            await running
        with pytest.raises(SandboxError, match="the place is gone"):
            await sh(place, "true")

    play(episode)


def test_spare_places_are_started_ahead_and_removed(client):
    async def use():
        places = DockerPlaces(spare=1)
        mine = {"label": f"{LABEL}={places._owner}"}

        def running():
            return client.containers.list(sparse=True, filters=mine)

        try:
            first = await places.start(PlaceImage(reference=BASE), LIMITS)
            async with asyncio.timeout(30):
                while len(await asyncio.to_thread(running)) < 2:
                    await asyncio.sleep(0.05)
            waiting = {each.id for each in await asyncio.to_thread(running)} - {first.id}
            second = await places.start(PlaceImage(reference=BASE), LIMITS)
            assert {second.id} == waiting
        finally:
            await places.aclose()
        return client.containers.list(all=True, sparse=True, filters=mine)

    assert asyncio.run(use()) == []


def test_the_least_recently_used_images_are_removed_beyond_the_budget(
    client, tmp_path, monkeypatch
):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "LABEL", "areal-gym.place-image-of-a-test")
    folders = []
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "Dockerfile").write_text(f"FROM {BASE}\nCOPY random /random\n")
        (tmp_path / name / "random").write_bytes(os.urandom(3_000_000))
        folders.append(PlaceImage(folder=tmp_path / name))

    async def build():
        places = DockerPlaces(build_network="none", images_mb=7)
        try:
            a, b = [await places.build(folder) for folder in folders[:2]]
            in_use = await places.start(folders[1], LIMITS)
            await places.build(folders[0])  # used again: `b` is the oldest now, and in use
            await places.start(folders[0], LIMITS)
            os.utime(tmp_path / "cache" / "places" / "docker" / b.partition(":")[2], (1, 1))
            c = await places.build(folders[2])
            kept = await asyncio.to_thread(tags)
            await in_use.aclose()
            os.utime(tmp_path / "cache" / "places" / "docker" / a.partition(":")[2], (2, 2))
            await asyncio.to_thread(ImageUses(7 << 20).trim, client)
            return {a, b, c}, kept, await asyncio.to_thread(tags), b
        finally:
            await places.aclose()

    def tags():
        filters = {"label": "areal-gym.place-image-of-a-test"}
        return {tag for image in client.images.list(filters=filters) for tag in image.tags}

    try:
        built, kept, left, oldest = asyncio.run(asyncio.wait_for(build(), 120))
        assert kept == built  # all are in use
        assert left == built - {oldest}
    finally:
        for tag in tags():
            client.images.remove(tag)
