"""An environment that pays for short answers, and tells a test of each that ends; its plugin."""

from collections.abc import Callable, Iterable

from areal_gym.envs.base import Response, TextEnv
from areal_gym.plugins import EnvSpec, hookimpl
from areal_gym.types import Task

on_end: list[Callable[[], None]] = []
"""Called at the end of each episode, in the process that plays it."""


class Ending(TextEnv):
    """One turn."""

    def sample_task(self, rng, options):
        number = int(rng.integers(1000))
        return Task(id=str(number), data={"number": number}, split=options.get("split", "train"))

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say something about {task.data['number']}."}]

    async def respond(self, message):
        for tell in on_end:
            tell()
        return Response(reward=1 / (1 + len(message["content"])), is_terminated=True)


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    yield EnvSpec(
        id="ending",
        entry_point="tests._support.ending_env:Ending",
        summary="pays for short answers",
    )
