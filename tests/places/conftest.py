"""Local places share one cache of images; they are skipped where this machine has none."""

import asyncio

import pytest

from areal_gym.errors import SandboxError
from areal_gym.places.local_places import LocalPlaces


@pytest.fixture(scope="session")
def local_cache(tmp_path_factory):
    """Return a folder of images that holds the host's root."""
    folder = tmp_path_factory.mktemp("places")

    async def probe():
        places = LocalPlaces(cache=folder)
        try:
            await places.report()
        finally:
            await places.aclose()

    try:
        asyncio.run(probe())
    except SandboxError as error:
        pytest.skip(str(error))
    return folder
