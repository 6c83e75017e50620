"""An environment that is mastered after a while, whatever the policy does."""

from collections import Counter
from collections.abc import Iterable

from areal_gym.envs.base import Response
from areal_gym.plugins import EnvSpec, hookimpl
from tests._support.fading_env import Fading


class Mastered(Fading):
    """One turn. In split train, every other episode of the first `num_mixed` tasks earns 1.

    Those of all later tasks earn `then`.
    """

    num_played: Counter[str] = Counter()
    """Episodes by task."""

    def __init__(self, num_mixed: int = 0, then: float = 1.0) -> None:
        super().__init__()
        self._num_mixed, self._then = num_mixed, then

    async def respond(self, message):
        if self.task.split != "train":
            return Response(reward=1.0, is_terminated=True)
        self.num_played[self.task.id] += 1
        is_mixed = list(self.num_played).index(self.task.id) < self._num_mixed
        reward = float(self.num_played[self.task.id] % 2) if is_mixed else self._then
        return Response(reward=reward, is_terminated=True)


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    yield EnvSpec(
        id="mastered", entry_point="tests._support.mastered_env:Mastered", summary="gets easy"
    )
