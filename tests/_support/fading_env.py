"""An environment that stops paying: to a run this looks as if its policy were lost."""

from collections.abc import Iterable

from areal_gym.envs.base import Response, TextEnv
from areal_gym.plugins import EnvSpec, hookimpl
from areal_gym.types import Task


class Fading(TextEnv):
    """One turn. Of this process's episodes in split train, the first `num_paid` earn 1."""

    num_played = 0

    def __init__(self, num_paid: int = 0) -> None:
        super().__init__()
        self._num_paid = num_paid

    def sample_task(self, rng, options):
        number = int(rng.integers(1000))
        return Task(id=str(number), data={"number": number}, split=options.get("split", "train"))

    def first_messages(self, task):
        return [{"role": "user", "content": f"Say something about {task.data['number']}."}]

    async def respond(self, message):
        if self.task.split != "train":
            return Response(reward=0.0, is_terminated=True)
        Fading.num_played += 1
        is_paid = Fading.num_played <= self._num_paid
        return Response(reward=float(is_paid), is_terminated=True)

    def gold_action(self):
        return "anything"


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    yield EnvSpec(
        id="fading", entry_point="tests._support.fading_env:Fading", summary="stops paying"
    )
