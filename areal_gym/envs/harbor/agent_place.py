"""The place in which an agent plays a task: its start, its health and its steps."""

from __future__ import annotations

import asyncio
import posixpath
import time

from areal_gym.envs.harbor.archives import pack_directories, pack_folders
from areal_gym.envs.harbor.phases import START_S, TRANSFER_S, phase
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep
from areal_gym.envs.harbor.task_images import place_image, place_limits
from areal_gym.envs.harbor.task_toml import Healthcheck
from areal_gym.errors import SandboxError
from areal_gym.places import Place, Places

_SETUP_S = 600.0
_SETUP = "if command -v bash >/dev/null 2>&1; then exec bash ./setup.sh; fi\nexec sh ./setup.sh\n"


class AgentPlace:
    """The place of one episode; holds neither tests nor solution."""

    def __init__(self, task: HarborTask) -> None:
        self._task = task
        self._place: Place | None = None
        self.workdir = posixpath.normpath(task.environment.workdir or "/")
        """The directory in which commands begin; asked for before the agent can lie about it."""

    @property
    def place(self) -> Place:
        """The started place."""
        if self._place is None:
            raise SandboxError(f"{self._task.id}: the place has not started")
        return self._place

    async def start(self, places: Places, step: int) -> None:
        """Start the place and wait until it is healthy; prepare it for a step."""
        task, environment = self._task, self._task.environment
        image = place_image(task, environment, task.image_folder)
        async with phase(task.id, "start", limit_s=image.build_timeout_s + START_S):
            self._place = await places.start(image, place_limits(environment))
        async with phase(task.id, "start", limit_s=TRANSFER_S):
            logs = [("/logs", 0o755, 0), ("/logs/agent", 0o777, 0), ("/logs/artifacts", 0o777, 0)]
            await self.place.put(pack_directories(logs), "/")
            if environment.workdir is None:
                result = await self.place.run(["/bin/sh", "-c", "pwd"], timeout_s=30.0)
                answer = result.stdout.decode("utf-8", "replace").strip()
                self.workdir = posixpath.normpath(answer or "/")
        if environment.healthcheck is not None:
            await self._require_health(environment.healthcheck)
        await self.begin(task.steps[step])

    async def begin(self, step: TaskStep) -> None:
        """Copy the step's files to the working directory, run its setup and check its health."""
        if step.workdir is not None:
            async with phase(self._task.id, f"setup of {step.name}"):
                await self.place.put(pack_folders([step.workdir]), self.workdir)
                if (step.workdir / "setup.sh").is_file():
                    await self._run_setup(step)
        if step.healthcheck is not None:
            await self._require_health(step.healthcheck)

    async def aclose(self) -> None:
        """Remove the place. May be called twice."""
        place, self._place = self._place, None
        if place is not None:
            await place.aclose()

    async def _run_setup(self, step: TaskStep) -> None:
        result = await self.place.run(
            ["/bin/sh", "-c", _SETUP], cwd=self.workdir, user=step.agent.user, timeout_s=_SETUP_S
        )
        if result.exit_code != 0:
            end = "took too long" if result.is_timed_out else f"ended with {result.exit_code}"
            text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
            raise SandboxError(f"setup.sh {end}: {text[-400:]}")

    async def _require_health(self, check: Healthcheck) -> None:
        """Run the check until it succeeds; failures count only after the start period."""
        start_s = time.monotonic()
        num_failed = 0
        async with phase(self._task.id, "healthcheck"):
            while True:
                result = await self.place.run(
                    ["/bin/sh", "-c", check.command], timeout_s=check.timeout_sec
                )
                if result.exit_code == 0 and not result.is_timed_out:
                    return
                is_starting = time.monotonic() - start_s < check.start_period_sec
                num_failed += not is_starting
                if num_failed >= check.retries:
                    text = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
                    raise SandboxError(
                        f"{check.command!r} failed {num_failed} times, at last with code "
                        f"{result.exit_code}: {text[-400:]}"
                    )
                pause_s = check.start_interval_sec if is_starting else check.interval_sec
                await asyncio.sleep(pause_s)
