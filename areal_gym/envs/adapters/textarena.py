"""`textarena:GAME`: the single-player games of TextArena."""

from __future__ import annotations

import contextlib
import io
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import ConfigError, UnknownIdError, UsageError, did_you_mean
from areal_gym.tasks import SeedTasks, choose_task
from areal_gym.types import Message, Task, text_of

# Games draw from the process's global generators, which are everybody's.
_generators = threading.Lock()


class TextArenaEnv(TextEnv):
    """A game of TextArena for one player.

    Task: the game, reset with a seed.
    Tools: none.
    Observation: the rules, then what the game says after each move.
    Action: an assistant message; the rules say how a move is written, mostly as [move].
    Reward: the game's own, at its end: 1 when it is won, a share of that in some, less for moves
        that are not allowed. Part: `game`. No gold policy is known.
    Episode end: the game's own; truncated after `max_turns`.
    Splits: `train` and `test`, endless, of different seeds.
    Metrics: `invalid_moves`, 1 for a game that ended by such a move.

    Args:
        game: TextArena's id, such as TowerOfHanoi-v0.
        options: keyword arguments for `textarena.make`.
        max_turns: assistant messages after which the episode is truncated.
    """

    has_gold = False
    judges_all_output = True

    def __init__(
        self,
        game: str,
        *,
        options: Mapping[str, Any] | None = None,
        max_turns: int = 50,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.max_turns = max_turns
        self._states: tuple[Any, Any] | None = None
        with self._own_generators():
            self._game = _make(game, dict(options or {}))

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Draw a seed."""
        return choose_task(SeedTasks(), rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the rules and the first observation."""
        seed = task.data["seed"]
        self._states = None
        with self._own_generators():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._game.reset(num_players=1, seed=seed)
            return [{"role": "user", "content": self._observe()}]

    async def respond(self, message: Message) -> Response:
        """Make the move."""
        with self._own_generators():
            is_done, _ = self._game.step(action=text_of(message["content"]))
            if not is_done:
                return Response(messages=[{"role": "user", "content": self._observe()}])
            rewards, info = self._game.close()
        reward = float(rewards[0])
        return Response(
            reward=reward,
            reward_parts={"game": reward},
            is_terminated=True,
            metrics={"invalid_moves": int(bool(info[0].get("invalid_move")))},
        )

    def _observe(self) -> str:
        """Return the game's messages since the player's last turn."""
        _, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation.strip()
        return "\n".join(text.strip() for sender, text, _ in observation if sender != 0).strip()

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Lend the global generators the game's state while the block runs."""
        with _generators:
            before = random.getstate(), np.random.get_state()
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])


def _make(game: str, options: dict[str, Any]) -> Any:
    # Games of words look for word lists on the network when they are imported, and say so aloud.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            games = sorted({re.sub(r"-v\d.*", "", name) for name in ENV_REGISTRY})
            hints = [did_you_mean(game, ENV_REGISTRY), f"available: {', '.join(games)} (with -v0)"]
            raise UnknownIdError(f"TextArena has no game {game!r}", hints=hints)
        # The raw form tells what is new; the other one repeats the whole game every time.
        raw = f"{game}-raw"
        try:
            made = textarena.make(raw if raw in ENV_REGISTRY else game, **options)
            made.reset(num_players=1, seed=0)
        except AssertionError as error:
            raise UsageError(
                f"{game} is not a game for one player: {error}",
                hints=["such as TowerOfHanoi-v0, GuessTheNumber-v0, Sudoku-v0, FrozenLake-v0"],
            ) from None
        except TypeError as error:
            raise UsageError(f"TextArena cannot make {game!r}: {error}") from error
        except LookupError as error:
            raise ConfigError(
                f"{game} needs word lists of NLTK, which are not installed",
                hints=["get them: python -m nltk.downloader words averaged_perceptron_tagger_eng"],
            ) from error
    return made
