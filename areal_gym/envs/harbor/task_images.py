"""The images and limits of a task's places: the agent's and the verifier's."""

from __future__ import annotations

from pathlib import Path

from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep, resolved_env
from areal_gym.envs.harbor.task_toml import Environment
from areal_gym.places import PlaceImage, PlaceLimits


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


def place_limits(environment: Environment) -> PlaceLimits:
    """Return the limits of a table `[environment]`."""
    return PlaceLimits(
        cpus=environment.cpus, memory_mb=environment.memory_mb, storage_mb=environment.storage_mb
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
