"""Checks that engine and trainer run the same model.

A few turns are sampled by the engine and scored by the trainer. When they disagree, the ratio of
every token is wrong, and training fails silently: another model, dtype or temperature, or an
adapter that was never loaded, shows here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.errors import ConfigError, EnvError, EpisodeError
from areal_gym.plugins import registry
from areal_gym.recording import derive_seed
from areal_gym.runs.components import Components
from areal_gym.runs.open_engine import plugin_error
from areal_gym.types import Message
from areal_gym.utils.markup import counted

_NUM_PROMPTS = 8
_NUM_TOKENS = 32
_NUM_RESETS = 3
"""A reset that fails is tried so often."""
_PROBE = 4
"""A stream of seeds of its own; training and evaluation have 0 to 3."""
_SHARE_OF_CLIP = 0.2
"""A gap above this share of the clip is too much. The probe sees some hundred tokens, a run sees
millions: the largest gap of a run is a few times that of its probe."""

if TYPE_CHECKING:
    from torch import Tensor

    from areal_gym.trainer.base import GroupTrainer
    from areal_gym.trainer.batch.sequences import Sequence as TokenSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobGap:
    """|log-probability(engine) - log-probability(trainer)| over the probe's sampled tokens."""

    mean: float
    max: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.mean:.2g} in the mean, {self.max:.2g} at most, over {self.num_tokens} tokens"


async def probe_engine(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    trainer: GroupTrainer,
    say: Callable[[str], None],
    before_scoring: Callable[[], Awaitable[None]],
) -> LogprobGap:
    """Raise ConfigError unless engine and trainer are the same model, before the first step.

    `before_scoring` gives the trainer the GPUs that it shares with the engine's servers.
    """
    gap = await measure_gap(config, components, engine, renderer, trainer, say, before_scoring)
    require_agreement(gap, config)
    say(f"engine and trainer agree: log-probabilities differ by {gap}")
    if line := keep_rounding_from_clips(gap.max, config, trainer):
        say(f"  {line}")
    first = await first_messages(components, config.seed, [])
    for warning in () if first is None else renderer.warnings(*first):
        say(warning)
    return gap


async def measure_gap(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    trainer: GroupTrainer,
    say: Callable[[str], None] | None = None,
    before_scoring: Callable[[], Awaitable[None]] | None = None,
) -> LogprobGap:
    """Sample some turns at the run's temperature, score them with the trainer's weights.

    Raises:
        ConfigError: none of the prompts fits into the context, or experts are to be replayed that
            the engine does not tell.
        EnvError: the environment gives no task at all; some failed resets are only said.
        EngineError: the engine cannot sample.
    """
    from areal_gym.trainer.batch.sequences import Sequence as TokenSequence

    lengths: list[int] = []
    failures: list[EpisodeError] = []
    settings = SamplingParams(
        max_new_tokens=min(_NUM_TOKENS, config.rollout.max_new_tokens),
        temperature=config.rollout.temperature,
        stop_token_ids=renderer.stop_token_ids,
    )

    async def sample(index: int) -> TokenSequence | None:
        seed = derive_seed(config.seed, _PROBE, index)
        first = await first_messages(components, seed, failures)
        if first is None:
            return None
        prompt = renderer.first_ids(*first)
        lengths.append(len(prompt))
        if len(prompt) >= engine.max_context:
            return None
        try:
            generation = await engine.generate(prompt, replace(settings, seed=seed))
            if not isinstance(generation, Generation):
                raise TypeError(f"generate gave {generation!r}")
        except Exception as error:
            raise plugin_error(config.engine.id, "sample", error) from error
        num_prompt, num_new = len(prompt), len(generation.token_ids)
        return TokenSequence(
            token_ids=(*prompt, *generation.token_ids),
            loss_mask=(False,) * num_prompt + (True,) * num_new,
            old_logprobs=(*[0.0] * num_prompt, *generation.logprobs),
            versions=(*[-1] * num_prompt, *generation.versions),
            routed_experts=generation.routed_experts,
        )

    sampled = await asyncio.gather(*(sample(index) for index in range(_NUM_PROMPTS)))
    rows = [row for row in sampled if row is not None and row.num_trainable]
    if failures and say is not None and lengths:
        say(
            f"warning: {counted(len(failures), 'reset')} of {config.env.id} failed at the start, "
            f"the first one with: {failures[0]}"
        )
    if not lengths:
        raise EnvError(
            f"no task of {config.env.id} could be had: all of {len(failures)} resets failed, the "
            f"first one with: {failures[0]}",
            hints=["look for the cause with: areal-gym check ENV"],
        ) from failures[0]
    if not rows:
        raise _no_room(config, lengths, engine)
    _require_experts(rows, config)
    if before_scoring is not None:
        await before_scoring()
    return _gap(rows, await asyncio.to_thread(trainer.score, rows))


def _no_room(config: RunConfig, lengths: Sequence[int], engine: Engine) -> ConfigError:
    more = f"give them room: engine.max_context={2 * max(lengths)}, if the model has as much"
    if isinstance(engine, ServerEngine) and engine.max_context < config.engine.max_context:
        more = engine.context_hint
    return ConfigError(
        f"the first prompts in {config.env.id} have {min(lengths)} to {max(lengths)} tokens, "
        f"and a sequence may have {engine.max_context}, what is sampled included",
        hints=[
            more,
            "or take an environment, or arguments of it, with shorter prompts",
        ],
    )


def _require_experts(rows: Sequence[TokenSequence], config: RunConfig) -> None:
    if not config.trainer.routing_replay or all(row.routed_experts for row in rows):
        return
    flags = getattr(registry().load("engines", config.engine.id), "experts_flags", ())
    raise ConfigError(
        f"trainer.routing_replay = true, but the engine {config.engine.id!r} does not tell which "
        "experts it chooses",
        hints=[
            f"start the servers of engine.url with {' '.join(flags)}"
            if flags
            else "the engines embedded and sglang tell those of mixtures of experts",
            "or let the trainer's router choose: trainer.routing_replay=false",
        ],
    )


def _gap(rows: list[TokenSequence], scores: list[Tensor]) -> LogprobGap:
    gaps = [
        abs(theirs - ours)
        for row, score in zip(rows, scores, strict=True)
        for theirs, ours in zip(row.old_logprobs[-row.num_trainable :], score.tolist(), strict=True)
    ]
    return LogprobGap(mean=sum(gaps) / len(gaps), max=max(gaps), num_tokens=len(gaps))


async def first_messages(
    components: Components, seed: int, failures: list[EpisodeError]
) -> tuple[Sequence[Message], list[dict[str, Any]]] | None:
    """Return the first messages and tools of a task of the split "train".

    A reset that fails is tried again, a few times, and is added to `failures`; None if all fail.

    Raises:
        UsageError: the environment has no such split.
    """
    for attempt in range(_NUM_RESETS):
        env = components.make_env()
        try:
            _, info = await env.areset(
                seed=derive_seed(seed, attempt) if attempt else seed, options={"split": "train"}
            )
            return info["messages"], [tool.schema() for tool in env.tools]
        except EpisodeError as error:
            failures.append(error)
        finally:
            with suppress(Exception):
                await env.aclose()
    return None


def keep_rounding_from_clips(
    max_gap: float, config: RunConfig, trainer: GroupTrainer
) -> str | None:
    """Let the trainer recompute log-probabilities where the engine's rounding nears the clip.

    Ratios against the engine's log-probabilities would be clipped although nothing has changed: a
    clip of a token's ratio is 0.2 as a rule, that of GSPO's sequences is 3e-4, and an engine in
    bfloat16 is off by 0.01. Only `trainer.correction.proximal = "auto"` leaves it open. Returns a
    line for people; None where nothing changes.
    """
    from areal_gym.plugins import registry
    from areal_gym.trainer.algorithms.token_loss import narrowest_clip

    settings = config.trainer
    clip = narrowest_clip(registry().load("losses", settings.loss), settings)
    if settings.correction.proximal != "auto" or clip is None or max_gap <= _SHARE_OF_CLIP * clip:
        return None
    trainer.recompute_proximal()
    return (
        f"that is more than a fifth of the clip of the loss {settings.loss!r} ({clip:g}), so "
        "ratios are taken against log-probabilities that the trainer computes "
        "(trainer.correction.proximal=recorded takes the engine's)"
    )


def require_agreement(gap: LogprobGap, config: RunConfig) -> None:
    """Raise ConfigError for a gap above `engine.max_logprob_gap`: they are not the same model."""
    if gap.mean <= config.engine.max_logprob_gap:
        return
    hints = [
        "the usual causes: another model or adapter, another temperature, another dtype",
        f"if this much is expected of the dtype: engine.max_logprob_gap={gap.mean * 1.5:.2g}",
    ]
    if config.engine.url:
        hints[:0] = [
            f"start the servers with the model of engine.model: {config.engine.model}",
            "or, when they hold what an earlier run has published, let this one replace it: "
            "engine.kwargs.take_over=true",
        ]
    raise ConfigError(
        f"engine and trainer are not the same model: the log-probabilities of what the engine "
        f"samples differ by {gap} (allowed: {config.engine.max_logprob_gap:g} in the mean)",
        hints=hints,
    )
