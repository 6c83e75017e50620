"""The pool of places: made ahead, used once, never more than asked for."""

import asyncio
import os

import pytest

from areal_gym.errors import SandboxError
from areal_gym.places import PlaceImage, PlaceLimits
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.places.local_places import LocalPlaces
from areal_gym.places.pool import PlacePool

LIMITS = PlaceLimits(memory_mb=128, storage_mb=32)
HOST = PlaceImage(reference=HOST_ROOT)
OTHER = PlaceImage(reference=HOST_ROOT, workdir="/tmp")


def play(cache, scene, spare):
    async def use():
        pool = PlacePool(LocalPlaces(cache=cache), spare=spare)
        try:
            return await asyncio.wait_for(scene(pool), 60)
        finally:
            await pool.aclose()

    return asyncio.run(use())


async def started(pool):
    """Wait until the places that are made ahead have started; return their numbers."""
    spares = [task for tasks in pool._spares.values() for task in tasks]
    return {place._number for place in await asyncio.gather(*spares)}


async def echo(place):
    return (await place.run(["sh", "-c", "touch mark; ls; pwd"], timeout_s=20)).stdout


def test_an_expected_place_is_used_once_and_another_key_gets_its_own(local_cache):
    async def scene(pool):
        pool.expect(HOST, LIMITS)
        waiting = await started(pool)
        places = [await pool.start(image, LIMITS) for image in (OTHER, HOST, HOST)]
        numbers = [place._number for place in places]
        assert [number in waiting for number in numbers] == [False, True, False]
        return [await echo(place) for place in places]

    other, first, second = play(local_cache, scene, spare=1)
    assert other == b"mark\n/tmp\n"
    assert first == second  # no mark of the other place


def test_a_full_pool_drops_what_was_expected_first_and_an_empty_one_keeps_nothing(local_cache):
    async def scene(pool):
        pool.expect(OTHER, LIMITS)
        first = await started(pool)
        pool.expect(HOST, LIMITS)
        second = await started(pool)
        place = await pool.start(OTHER, LIMITS)
        assert place._number not in first | second
        return len(second)

    async def nothing(pool):
        pool.expect(HOST, LIMITS)
        return len(pool._spares)

    assert play(local_cache, scene, spare=1) == 1
    assert play(local_cache, nothing, spare=0) == 0


def test_images_are_built_ahead_and_a_broken_one_fails_where_it_is_needed(local_cache, tmp_path):
    folders = {}
    for name, text in (("good", "FROM python:3\nRUN echo ahead > /made\n"), ("bad", "FROM no:1\n")):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "Dockerfile").write_text(text)
    good, bad = (PlaceImage(folder=folders[name]) for name in ("good", "bad"))

    async def scene(pool):
        pool.build_ahead([bad, good, good])
        await asyncio.wait(pool._builds.values())
        key = await pool.build(good)
        assert (local_cache / f"local-{os.geteuid()}" / f"{key}.json").is_file()
        with pytest.raises(SandboxError, match="no image 'no:1'"):
            await pool.start(bad, LIMITS)
        return await (await pool.start(good, LIMITS)).run(["cat", "/made"], timeout_s=20)

    assert play(local_cache, scene, spare=0).stdout == b"ahead\n"


def test_a_cancelled_start_leaves_no_place(local_cache):
    async def scene(pool):
        pool.expect(HOST, LIMITS)
        waiting = asyncio.ensure_future(pool.start(HOST, LIMITS))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while pool._tasks:
            await asyncio.sleep(0.01)
        place = await pool.start(HOST, LIMITS)
        return (await place.run(["ls", "/proc/self/root"], timeout_s=20)).exit_code

    assert play(local_cache, scene, spare=1) == 0


def test_local_places_with_spares_start_the_next_of_the_same_image_ahead(local_cache):
    async def use():
        places = LocalPlaces(cache=local_cache, spare=1)
        try:
            first = await places.start(HOST, LIMITS)
            waiting = await started(places._pool)
            second = await places.start(HOST, LIMITS)
            return first._number, second._number, waiting, await echo(first), await echo(second)
        finally:
            await places.aclose()

    first, second, waiting, *texts = asyncio.run(use())
    assert first != second
    assert waiting == {second}
    assert texts[0] == texts[1]
