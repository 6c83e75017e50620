"""An environment in which even a random policy earns something, and its plugin: for whole runs."""

from collections.abc import Iterable

from areal_gym.envs.base import Response, TextEnv
from areal_gym.plugins import EnvSpec, hookimpl
from areal_gym.types import Task


class Shaped(TextEnv):
    """Two turns; each pays a seventh for every character, up to six."""

    def sample_task(self, rng, options):
        number = int(rng.integers(1000))
        return Task(id=str(number), data={"number": number}, split=options.get("split", "train"))

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say something about {task.data['number']}."}]

    async def respond(self, message):
        reward = len(message["content"]) % 7 / 7
        if self.num_turns == 2:
            return Response(reward=reward, is_terminated=True)
        return Response(messages=[{"role": "user", "content": "And now?"}], reward=reward)

    def gold_action(self):
        return "123456"


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    yield EnvSpec(
        id="shaped", entry_point="tests._support.shaped_env:Shaped", summary="pays for length"
    )
