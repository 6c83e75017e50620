"""Checks that the environments of a run and those of its teachers are the same."""

from __future__ import annotations

from areal_gym.config import RunConfig
from areal_gym.errors import ConfigError, choices


def require_taught_envs(config: RunConfig) -> None:
    """Raise ConfigError if a teacher's environment is not in the run, or one has no teacher."""
    if config.objective != "distill":
        return
    mixed = config.env.kwargs["envs"] if config.env.id == "mix" else [{"id": config.env.id}]
    names = [str(given.get("name", given["id"])) for given in mixed]
    taught: set[str | None] = set()
    teacher = config.teacher
    keys = ("teacher.env", *(f"teacher.further[{i}].env" for i in range(len(teacher.further))))
    for key, settings in zip(keys, (teacher, *teacher.further), strict=True):
        if settings.env is not None and settings.env not in names:
            raise ConfigError(
                f"{key} = {settings.env!r} is no environment of this run",
                hints=[*choices(settings.env, names), "without env, a teacher teaches all of them"],
            )
        taught.add(settings.env)
    if None not in taught and (untaught := [name for name in names if name not in taught]):
        raise ConfigError(
            f"no teacher teaches the tasks of {', '.join(map(repr, untaught))}",
            hints=["a teacher without env teaches all of them", "or add one: teacher.further"],
        )
