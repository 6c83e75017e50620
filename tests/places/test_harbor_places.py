"""Places on environments of Harbor: a class of its kind on a Docker engine; skipped without."""

import asyncio
import io
import tarfile
import time
from contextlib import closing

import pytest

from areal_gym.errors import SandboxError, UsageError
from areal_gym.places import Place, PlaceImage, PlaceLimits, Places
from areal_gym.places.harbor_places import HarborPlaces
from areal_gym.sandbox.containers import connect
from tests._support.harbor_play import BASE, GOLD, bash, play
from tests._support.harbor_tasks import write_files, write_task
from tests._support.place_commands import archive, sh

pytest.importorskip("harbor.environments.base", reason="needs the extra harbor and Python 3.12")

ENGINE = "tests._support.harbor_engine_env:EngineEnv"
LIMITS = PlaceLimits(memory_mb=256)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """The folder of an image with what Harbor wants; nothing of it is left at the end."""
    from areal_gym.places.host_root import write_host_root

    try:
        client = connect()
    except SandboxError as error:
        pytest.skip(str(error))
    with closing(client):
        if not client.images.list("areal-gym-harbor-tools:latest"):
            with io.BytesIO() as file:
                with tarfile.open(fileobj=file, mode="w") as tar:
                    write_host_root(tar, ())
                file.seek(0)
                client.api.import_image_from_data(file, repository="areal-gym-harbor-tools")
        yield "areal-gym-harbor-tools"
        left = client.containers.list(all=True, filters={"label": "harbor-tests"})
    assert left == []


def use(episode, image, limits=LIMITS, **options):
    """Return what `episode(place)` returns of a fresh place, which is removed."""

    async def main():
        places = HarborPlaces(ENGINE, **options)
        assert isinstance(places, Places)
        try:
            return await asyncio.wait_for(episode(await places.start(image, limits)), 120)
        finally:
            await places.aclose()

    return asyncio.run(main())


def test_commands_get_their_directory_environment_and_user_and_are_bounded(tools):
    async def episode(place):
        assert isinstance(place, Place)
        shown = await sh(place, "pwd; echo $A; id -u; echo err >&2; exit 3", cwd="/tmp", user=65534,
                         env={"A": "a b"})  # fmt: skip
        absent = await place.run(["no-such-program"], timeout_s=20)
        long = await sh(place, "head -c 3000000 /dev/zero | tr '\\0' x")
        start_s = time.monotonic()
        late = await sh(place, "echo early; sleep 77 & sleep 78; echo never", timeout_s=1)
        took_s = time.monotonic() - start_s
        left = await sh(place, "sleep 79 & echo started")
        sleeping = "grep -l -a '^sleep' /proc/[0-9]*/cmdline | wc -l"
        before = (await sh(place, sleeping)).stdout
        await place.freeze()
        return shown, absent, long, late, took_s, left, before, (await sh(place, sleeping)).stdout

    shown, absent, long, late, took_s, left, before, after = use(
        episode, PlaceImage(reference=tools)
    )
    assert (shown.exit_code, shown.stdout, shown.stderr) == (3, b"/tmp\na b\n65534\n", b"err\n")
    assert absent.exit_code == 127
    assert len(long.stdout) == 1 << 20
    assert (late.exit_code, late.stdout, late.is_timed_out) == (137, b"early\n", True)
    assert took_s < 60  # the group was killed, and not waited for
    assert left.stdout == b"started\n"
    assert int(before) == int(after) + 1  # the backend's own sleep stays


def test_files_go_in_and_come_out_and_links_are_not_followed(tools):
    async def episode(place):
        await place.put(archive(**{"sub/file": "in"}), "/app/new")
        made = await sh(
            place,
            "cd /app; ln -s /etc link; ln -s /etc/passwd names; echo more > new/more; "
            "mkdir old; rm -r /opt; echo again >> /etc/passwd",
        )
        assert made.exit_code == 0, made
        with pytest.raises(SandboxError, match="link in the place"):
            await place.put(archive(file="out"), "/app/link")
        with pytest.raises(SandboxError, match="frozen"):
            await place.take(["/app"], max_bytes=1 << 20)
        await place.freeze()
        taken = await place.take(["/app", "/app/link/passwd", "/absent"], max_bytes=1 << 20)
        return await place.changes(), taken, await place.take(["/app"], max_bytes=1000)

    changes, taken, cut = use(episode, PlaceImage(reference=tools))
    assert set(changes.written) == {"/app", "/etc/passwd"}
    assert changes.removed == ("/opt",)
    with tarfile.open(fileobj=io.BytesIO(taken)) as tar:
        members = {member.name: member for member in tar}
        assert tar.extractfile("app/new/sub/file").read() == b"in"
    assert members["app/link"].issym()
    assert not [name for name in members if name.startswith(("app/link/", "absent"))]
    assert len(cut) <= 1000


def test_tasks_are_played_and_verified_on_an_environment_of_harbor(tools, tmp_path):
    options = {
        "places": "harbor",
        "places_kwargs": {"type": ENGINE, "kwargs": {"build_args": {"BASE_IMAGE": tools}}},
    }
    task = write_task(tmp_path / "task")
    played = play(task, GOLD, "done", **options)
    assert played.reward == 1.0
    assert "+42" in played.texts[-1]
    assert play(task, "done", **options).reward == 0.0
    forged = bash("mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")
    assert play(task, forged, "done", **options).reward == 0.0


def test_what_runs_beside_a_command_cannot_write_where_its_results_go(tools):
    beside = (
        "import glob, os, time\n"
        "for _ in range(60):\n"
        "    for folder in glob.glob('/tmp/areal-gym.*'):\n"
        "        for name in (folder, folder + '/run', folder + '/own'):\n"
        "            names = [name, *(f'{name}/{number}' for number in range(40))]\n"
        "            try: names += [f'{name}/{each}' for each in os.listdir(name)]\n"
        "            except OSError: pass\n"
        "            for each in names:\n"
        "                for end in ('code', 'out'):\n"
        "                    try: os.symlink('/root/forged', each + '/' + end)\n"
        "                    except OSError: pass\n"
        "    time.sleep(0.01)\n"
    )

    async def episode(place):
        attack = f'setpriv --reuid 65534 --clear-groups python3 -c "{beside}"; exit 1'
        result = await sh(place, attack, timeout_s=60)
        return result, (await sh(place, "ls /root")).stdout

    result, listed = use(episode, PlaceImage(reference=tools))
    assert (result.exit_code, result.stderr) == (1, b"")
    assert b"forged" not in listed


def test_failures_are_named(tools, tmp_path):
    with pytest.raises(UsageError, match="no environment 'cloudy'"):
        HarborPlaces("cloudy")
    with pytest.raises(UsageError, match="no-network or public"):
        HarborPlaces("docker", network="some")

    async def nothing(place):
        with pytest.raises(SandboxError, match="cannot reach the gateway"):
            await place.listen(8900)

    use(nothing, PlaceImage(reference=tools))
    with pytest.raises(SandboxError, match=r"missing:.*'tar'"):
        use(nothing, PlaceImage(reference=BASE))
    folder = write_files(tmp_path / "broken", {"Dockerfile": f"FROM {tools}\nRUN exit 7\n"})
    with pytest.raises(SandboxError, match="returned a non-zero code: 7"):
        use(nothing, PlaceImage(folder=folder))
    with pytest.raises(SandboxError, match="no Dockerfile"):
        use(nothing, PlaceImage(folder=tmp_path))
