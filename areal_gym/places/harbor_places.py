"""Places on the environments of the package `harbor`: its clouds, or a class of your own.

    HarborPlaces("daytona")  ->  harbor's environment of that type  ->  HarborPlace

Harbor gives a command and copies of files, so the rest of a place is made of these
(`harbor_place.py`). Needs the extra `harbor` (Python 3.12 or later).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from areal_gym.errors import SandboxError, UsageError
from areal_gym.places.base import Place, PlaceImage, PlaceLimits
from areal_gym.places.harbor_place import HarborPlace, harbor_errors, stop_environment
from areal_gym.places.images import content_key
from areal_gym.places.pool import PlacePool, StartedAnew

_NUM_STARTS = 8
_START_S = 300.0


class HarborPlaces:
    """Starts places on one of Harbor's backends; keys and limits of a cloud are the backend's own.

    Args:
        type: Harbor's name of a backend, such as `daytona`, `e2b` or `modal`, or the path of a
            class, `package.module:Class`, a `harbor.environments.base.BaseEnvironment`.
        kwargs: further arguments of the backend's class.
        network: `no-network`, or `public` for backends that cannot forbid it.
        spare: how many places wait, started ahead.

    Raises:
        UsageError: Harbor has no such backend, or its packages are not installed.
    """

    def __init__(
        self,
        type: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        network: Literal["no-network", "public"] = "no-network",
        spare: int = 0,
    ) -> None:
        os.environ.setdefault("HARBOR_TELEMETRY", "0")
        self._type = type
        self._backend = f"harbor {type} {json.dumps(kwargs or {}, sort_keys=True, default=repr)}"
        self._config = _config(type, kwargs or {})
        if network not in ("no-network", "public"):
            raise UsageError(f"network is {network!r}; it is no-network or public")
        self._network = network
        self._pool = PlacePool(StartedAnew(self), spare=spare)
        self._starts = asyncio.Semaphore(_NUM_STARTS)
        self._folder: Path | None = None
        self._places: set[HarborPlace] = set()
        self._built: dict[str, asyncio.Lock] = {}
        self._keys: set[str] = set()

    async def start(self, image: PlaceImage, limits: PlaceLimits) -> Place:
        """Return a started place that was never used, or raise SandboxError."""
        place = await self._pool.start(image, limits)
        self._pool.expect(image, limits)
        return place

    async def start_anew(self, image: PlaceImage, limits: PlaceLimits) -> HarborPlace:
        """Start a place now, whatever waits; or raise SandboxError."""
        key = await asyncio.to_thread(_key, image, self._backend)
        environment = await self._start(image, limits, key)
        place = HarborPlace(environment, image, self._places.discard)
        self._places.add(place)
        try:
            await place.prepare()
        except BaseException:
            await asyncio.shield(place.aclose())
            raise
        return place

    async def build(self, image: PlaceImage) -> str:
        """Start and stop an environment of a new image, for which the backend builds it.

        Return the image's key, the same for the same files; or raise SandboxError.
        """
        key = await asyncio.to_thread(_key, image, self._backend)
        async with self._built.setdefault(key, asyncio.Lock()):
            if key not in self._keys:
                environment = await self._start(image, PlaceLimits(), key)
                await stop_environment(environment)
                self._keys.add(key)
        return key

    async def aclose(self) -> None:
        """Remove all places of this object. May be called twice."""
        await self._pool.aclose()
        closing = [place.aclose() for place in list(self._places)]
        results = await asyncio.gather(*closing, return_exceptions=True)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _start(self, image: PlaceImage, limits: PlaceLimits, key: str) -> Any:
        """Return one of Harbor's environments, started."""
        async with self._starts:
            with harbor_errors(f"a place of {self._type}"):
                environment = self._environment(image, limits, key)
                try:
                    async with asyncio.timeout(image.build_timeout_s + _START_S):
                        await environment.start(force_build=False)
                except BaseException:
                    with suppress(Exception):  # the start's failure is the one to tell
                        await asyncio.shield(stop_environment(environment))
                    raise
        return environment

    def _environment(self, image: PlaceImage, limits: PlaceLimits, key: str) -> Any:
        from harbor.environments.factory import EnvironmentFactory
        from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
        from harbor.models.trial.paths import TrialPaths

        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="areal-gym-harbor-"))
            (self._folder / "empty").mkdir()
        session = f"areal-gym-{secrets.token_hex(8)}"
        paths = TrialPaths(trial_dir=self._folder / session)
        paths.mkdir()
        mode = NetworkMode(self._network)
        return EnvironmentFactory.create_environment_from_config(
            self._config,
            environment_dir=image.folder or self._folder / "empty",
            environment_name=f"areal-gym-{key}",
            session_id=session,
            trial_paths=paths,
            task_env_config=EnvironmentConfig(
                docker_image=image.reference,
                build_timeout_sec=image.build_timeout_s,
                cpus=limits.cpus,
                memory_mb=limits.memory_mb,
                storage_mb=limits.storage_mb,
                workdir=image.workdir,
                network_mode=mode,
            ),
            network_policy=NetworkPolicy(network_mode=mode),
        )


def _config(type: str, kwargs: Mapping[str, Any]) -> Any:
    """Return Harbor's configuration of a backend, or raise UsageError."""
    try:
        from harbor.models.environment_type import EnvironmentType
        from harbor.models.trial.config import EnvironmentConfig
    except ImportError as error:
        raise UsageError(
            f"places of Harbor need the package harbor: {error}",
            hints=["pip install 'areal-gym[harbor]'", "with Python 3.12 or later"],
        ) from error
    if ":" in type:
        return EnvironmentConfig(import_path=type, kwargs=dict(kwargs))
    if type not in {each.value for each in EnvironmentType}:
        raise UsageError(
            f"harbor has no environment {type!r}",
            hints=[", ".join(each.value for each in EnvironmentType), "or package.module:Class"],
        )
    return EnvironmentConfig(type=EnvironmentType(type), kwargs=dict(kwargs))


def _key(image: PlaceImage, backend: str) -> str:
    if image.folder is None:
        return hashlib.sha256(f"{backend} {image.reference}".encode()).hexdigest()[:32]
    if not (image.folder / "Dockerfile").is_file():
        raise SandboxError(f"{image.folder} has no Dockerfile")
    return content_key(image.folder, {}, {}, backend)
