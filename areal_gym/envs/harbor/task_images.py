"""The images and limits of a task's places: the agent's and the verifier's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path

from areal_gym.envs.harbor.phases import START_S, phase
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep, resolved_env
from areal_gym.envs.harbor.task_toml import Environment
from areal_gym.errors import SandboxError
from areal_gym.places import PlaceImage, PlaceLimits, Places

_NUM_AT_ONCE = 8
"""Tasks whose images are looked for at once; how many are built at once is the backend's."""


def place_image(task: HarborTask, environment: Environment, folder: Path) -> PlaceImage:
    """Return the image of a table `[environment]`, whose Dockerfile is in `folder`."""
    reference = environment.docker_image
    return PlaceImage(
        reference=reference,
        folder=None if reference else folder,
        build_timeout_s=environment.build_timeout_sec,
        workdir=environment.workdir,
        env=resolved_env(environment.env, f"{task.id}, environment.env"),
    )


def place_limits(environment: Environment, *, received_mb: int = 0) -> PlaceLimits:
    """Return the limits of a table `[environment]`.

    `received_mb` is room for files that are put there from another place. Without `storage_mb`,
    the backend's own limit has that room.
    """
    storage_mb = environment.storage_mb
    return PlaceLimits(
        cpus=environment.cpus,
        memory_mb=environment.memory_mb,
        storage_mb=None if storage_mb is None else storage_mb + received_mb,
    )


def verifier_environment(task: HarborTask, step: TaskStep) -> tuple[Environment, Path, bool]:
    """Return the verifier's environment, the folder of its image, and if that has the tests."""
    own = step.verifier.environment
    if step.verifier.is_separate:
        if own is not None and own.docker_image is not None:
            return own, task.image_folder, True
        for folder in reversed(step.tests):
            if (folder / "Dockerfile").is_file():
                return (
                    own or task.environment.model_copy(update={"docker_image": None}),
                    folder,
                    True,
                )
    if own is None:
        return task.environment, task.image_folder, False
    image = task.environment.docker_image
    return own.model_copy(update={"docker_image": image}), task.image_folder, False


def images_of(task: HarborTask) -> list[PlaceImage]:
    """Return the different images of a task: the agent's, and those of verifiers."""
    own = place_image(task, task.environment, task.image_folder)
    images = {repr(own): own}
    for step in task.steps:
        environment, folder, _ = verifier_environment(task, step)
        image = place_image(task, environment, folder)
        images[repr(image)] = image
    return list(images.values())


async def build_images(
    tasks: Collection[HarborTask], places: Places, on_progress: Callable[[int, int], None]
) -> dict[str, SandboxError]:
    """Build the images of all tasks, outside of episodes; return the failures by task.

    `on_progress` is called with the number of tasks whose images are there, and of all.
    """
    failures: dict[str, SandboxError] = {}
    slots = asyncio.Semaphore(_NUM_AT_ONCE)
    num_done = 0

    async def build(task: HarborTask) -> None:
        nonlocal num_done
        async with slots:
            try:
                for image in images_of(task):
                    async with phase(task.id, "image", limit_s=image.build_timeout_s + START_S):
                        await places.build(image)
            except SandboxError as error:
                failures[task.id] = error
        num_done += 1
        on_progress(num_done, len(tasks))

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(build(task))
    return failures
