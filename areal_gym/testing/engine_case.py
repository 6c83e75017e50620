"""Shared parts of the engine rules: abilities, one open engine, requests and comparisons."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.errors import ConfigError, EngineError
from areal_gym.message_types import ImageRef
from areal_gym.testing.engine_policies import (
    FIRST_PROMPT,
    EnginePolicies,
    ReferencePolicy,
    log_distributions,
    reference_policy,
)
from areal_gym.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

    from areal_gym.trainer.base import WeightSync

OpenEngine = Callable[[Path], AbstractAsyncContextManager[Engine]]
"""Starts the engine with a checkpoint's weights, yields it, and closes it."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAbilities:
    """The abilities that an engine declares; it must refuse all others, or not have them."""

    has_model: bool = True
    """It samples the checkpoint. False: a script answers, and only the forms are checked."""
    max_logprob_gap: float = 1e-4
    """How far a log-probability may lie from transformers' one in float32."""
    truncation: Literal["exact", "unscaled", "none"] = "exact"
    """`top_p` and `top_k`. "exact": log-probabilities are those of the truncated distribution;
    "unscaled": tokens obey, log-probabilities are of the whole one; "none": they are refused."""
    has_seeds: bool = True
    """The same seed, prompt and weights give the same tokens, whatever else is sampled."""
    num_concurrent: int = 64
    """Requests that the contract sends at the same time."""
    streams: bool = False
    """`StreamingEngine`."""
    takes_grammars: bool = False
    """`GrammarEngine`, and the engine that is opened can use JSON schemas."""
    takes_images: bool = False
    """`ImageEngine`, and the engine that is opened has a policy that sees."""
    scores_prompts: bool = False
    """`ScoringEngine`: `score` gives the log-probabilities of all tokens but the first."""
    lists_top_tokens: bool = False
    """`TopScoringEngine`: `score_top` lists the likeliest tokens of each place."""
    snapshots: bool = False
    """`SnapshotEngine`."""
    sleeps: bool = False
    """`SleepingEngine`."""
    routes_experts: bool = False
    """It tells the experts of each token of a mixture."""
    weight_syncs: tuple[str, ...] = ()
    """Ids of the weight syncs that bring it weights, such as "in-process", "disk" or "lora"."""
    partial_adapters: bool = True
    """A LoRA adapter may have one of the matrices that are computed together, such as `q_proj`
    without `v_proj`; otherwise it is refused."""
    updates_in_flight: bool = True
    """Requests go on with new weights, and their tokens carry both versions."""
    recomputes_caches: bool = True
    """Such a request goes on as if the new weights had read its prompt, too."""
    refuses_weights: bool = True
    """Weights of another shape raise an EngineError, and it goes on with the ones that it has."""

    @property
    def full_syncs(self) -> tuple[str, ...]:
        """The weight syncs that bring all weights, not an adapter."""
        return tuple(id for id in self.weight_syncs if id != "lora")


def require(condition: bool, rule: str) -> None:
    """Raise AssertionError, naming the rule, unless the condition holds."""
    if not condition:
        raise AssertionError(rule)


@contextmanager
def must_refuse(what: str) -> Iterator[None]:
    """Require that the body raises EngineError or ConfigError, with a text."""
    try:
        yield
    except (EngineError, ConfigError) as error:
        require(bool(error.message.strip()), f"{what} is refused without a word")
    except Exception as error:
        raise AssertionError(
            f"{what} raises {type(error).__name__}, not an EngineError: {error}"
        ) from error
    else:
        raise AssertionError(f"{what} is not refused")


class EngineCase:
    """One rule's engine, open, and the policies that it was opened with."""

    def __init__(
        self,
        open_engine: OpenEngine,
        policies: EnginePolicies,
        abilities: EngineAbilities,
        *,
        directory: Path,
        patience_s: float,
    ) -> None:
        self.policies = policies
        self.abilities = abilities
        self.directory = directory
        self._open_engine = open_engine
        self._patience_s = patience_s

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """Open the engine with the first policy."""
        async with self._open_engine(self.policies.first) as engine:
            yield engine

    async def wait(self, awaitable: Awaitable[_T], what: str) -> _T:
        """Wait for as long as the contract's patience lasts."""
        try:
            async with asyncio.timeout(self._patience_s):
                return await awaitable
        except TimeoutError:
            raise AssertionError(f"{what}: no answer within {self._patience_s:g} s") from None

    # ---- requests -----------------------------------------------------------------------------

    def prompt(self, number: int, num_tokens: int = 24) -> list[int]:
        """Return random token ids, the same for each number; none stands for a picture."""
        rng = random.Random(number)
        ids = [rng.randrange(3, self.policies.vocab_size) for _ in range(num_tokens)]
        banned_ids = self.policies.banned_ids
        return [FIRST_PROMPT[0] if id in banned_ids else id for id in ids]

    async def ask(
        self,
        engine: Engine,
        prompt: Sequence[int],
        num_tokens: int = 16,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
        **params: Any,
    ) -> Generation:
        """Sample one turn and check its form."""
        sampling = SamplingParams(max_new_tokens=num_tokens, **params)
        before = list(prompt)
        given: dict[str, Any] = {"images": images} if images else {}
        call = engine.generate(prompt, sampling, session=session, **given)
        turn = await self.wait(call, "generate")
        require(list(prompt) == before, "generate changes the prompt that it was given")
        self.check_form(turn, sampling)
        return turn

    def check_form(self, turn: Generation, params: SamplingParams) -> None:
        """Check what holds for every turn: lengths, types, the reason why it ended."""
        ids, stops = list(turn.token_ids), params.stop_token_ids
        counts = (len(ids), len(turn.logprobs), len(turn.versions))
        require(len(set(counts)) == 1, f"tokens, log-probabilities and versions: {counts} of each")
        require(0 < len(ids) <= params.max_new_tokens, f"{len(ids)} of {params.max_new_tokens}")
        vocabulary = range(self.policies.vocab_size)
        require(all(type(i) is int and i in vocabulary for i in ids), f"no token ids: {ids}")
        banned = set(ids) & set(self.policies.banned_ids)
        require(not banned, f"it samples placeholders of pictures: {banned}")
        require(all(type(v) is int for v in turn.versions), f"versions {set(turn.versions)}")
        require(list(turn.versions) == sorted(turn.versions), "the versions of a turn go back")
        require(all(p <= 0 for p in turn.logprobs), "a log-probability is above 0, or not a number")
        is_stopped = turn.finish_reason is FinishReason.STOP
        if params.grammar is None:
            require(is_stopped == (ids[-1] in stops), f"{turn.finish_reason} at token {ids[-1]}")
        require(
            not any(i in stops for i in ids[:-1]),
            f"it goes on after a stop token of {stops}: {ids}",
        )
        is_aborted = turn.finish_reason is FinishReason.ABORT
        require(not is_aborted, "a turn that was not cancelled ends as aborted")

    # ---- comparisons --------------------------------------------------------------------------

    def reference(self, policy: Path) -> ReferencePolicy:
        """Return transformers' model of a checkpoint."""
        return reference_policy(policy)

    def check_logprobs(
        self,
        policy: ReferencePolicy,
        prompt: Sequence[int],
        turn: Generation,
        *,
        where: str,
        temperature: float = 1.0,
        places: range | None = None,
        images: Sequence[ImageRef] = (),
    ) -> None:
        """Compare log-probabilities with the model's own; a script has none to compare."""
        if not self.abilities.has_model:
            return
        logits_TV = policy.logits(prompt, turn.token_ids, images)
        logprobs_TV = log_distributions(logits_TV, temperature)
        gap, place = self.worst_gap(logprobs_TV, turn, places or range(len(turn.token_ids)))
        limit = self.abilities.max_logprob_gap
        require(
            gap <= limit,
            f"{where}: the log-probability of token {place} is {gap:.2g} off the model's own at "
            f"temperature {temperature:g}; {limit:g} is allowed",
        )

    def worst_gap(
        self, logprobs_TV: Tensor, turn: Generation, places: range
    ) -> tuple[float, int | None]:
        """Return the largest difference of log-probabilities, and the token's place."""
        gaps = [
            (abs(float(logprobs_TV[place, turn.token_ids[place]]) - turn.logprobs[place]), place)
            for place in places
        ]
        return max(gaps, default=(0.0, None))

    # ---- weights ------------------------------------------------------------------------------

    @asynccontextmanager
    async def weight_sync(self, engine: Engine, id: str) -> AsyncIterator[WeightSync]:
        """Open the weight sync with this id."""
        from areal_gym.config import LoraConfig, PluginConfig
        from areal_gym.trainer.weight_sync.base import make_weight_sync

        sync = make_weight_sync(
            engine, PluginConfig(id=id), directory=self.directory / id, lora=LoraConfig()
        )
        try:
            yield sync
        finally:
            await sync.aclose()

    def weights(self, policy: Path) -> list[tuple[str, Tensor]]:
        """Return a checkpoint's tensors as the trainer publishes them."""
        from areal_gym.models.backend import ModelLoader

        return [(name, tensor.detach()) for name, tensor in ModelLoader().load(policy).published()]
