"""Checks that engine and trainer run the same model.

The engine samples a few turns, and the trainer scores them. If they disagree, the ratio of every
token is wrong and training fails silently. The causes that show here are another model, dtype or
temperature, or an adapter that was not loaded.
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
"""How often a failing reset is tried."""
_PROBE = 4
"""A stream of seeds; training and evaluation use 0 to 3."""
_SHARE_OF_CLIP = 0.2
"""A gap above this share of the clip is too large. The probe sees some hundred tokens and a run
millions, so the largest gap of a run is a few times that of its probe."""

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
        return f"{self.mean:.2g} on average, {self.max:.2g} at most, over {self.num_tokens} tokens"


async def probe_engine(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    trainer: GroupTrainer,
    say: Callable[[str], None],
    before_scoring: Callable[[], Awaitable[None]],
) -> LogprobGap:
    """Check before the first step that engine and trainer run the same model.

    `before_scoring` gives the trainer the GPUs that it shares with the engine's servers.

    Raises:
        ConfigError: they do not.
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
    """Sample some turns at the run's temperature, and score them with the trainer's weights.

    Raises:
        ConfigError: no prompt fits into the context, or experts are to be replayed that the engine
            does not report.
        EnvError: the environment gives no task at all; a few failed resets only give a warning.
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
            f"{config.env.id} gave no task: all of {len(failures)} resets failed, the "
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
    hint = f"give them room: engine.max_context={2 * max(lengths)}, if the model has as much"
    if isinstance(engine, ServerEngine) and engine.max_context < config.engine.max_context:
        hint = engine.context_hint
    return ConfigError(
        f"the first prompts in {config.env.id} have {min(lengths)} to {max(lengths)} tokens, "
        f"and a sequence may have {engine.max_context}, including sampled tokens",
        hints=[
            hint,
            "or use an environment, or arguments of it, with shorter prompts",
        ],
    )


def _require_experts(rows: Sequence[TokenSequence], config: RunConfig) -> None:
    if not config.trainer.routing_replay or all(row.routed_experts for row in rows):
        return
    flags = getattr(registry().load("engines", config.engine.id), "experts_flags", ())
    raise ConfigError(
        f"trainer.routing_replay = true, but the engine {config.engine.id!r} does not report the "
        "experts that it chooses",
        hints=[
            f"start the servers of engine.url with {' '.join(flags)}"
            if flags
            else "the engines embedded and sglang report those of mixtures of experts",
            "or let the trainer's router choose: trainer.routing_replay=false",
        ],
    )


def _gap(rows: list[TokenSequence], scores: list[Tensor]) -> LogprobGap:
    gaps = [
        abs(engine_logprob - trainer_logprob)
        for row, score in zip(rows, scores, strict=True)
        for engine_logprob, trainer_logprob in zip(
            row.old_logprobs[-row.num_trainable :], score.tolist(), strict=True
        )
    ]
    return LogprobGap(mean=sum(gaps) / len(gaps), max=max(gaps), num_tokens=len(gaps))


async def first_messages(
    components: Components, seed: int, failures: list[EpisodeError]
) -> tuple[Sequence[Message], list[dict[str, Any]]] | None:
    """Return the first messages and the tools of a task of the split "train"; None if it fails.

    A failing reset is tried a few times, and its errors are added to `failures`.

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
    """Let the trainer recompute log-probabilities if the engine's rounding is close to the clip.

    Otherwise ratios would be clipped although the policy has not changed: the clip of a token's
    ratio is usually 0.2, that of GSPO's sequences is 3e-4, and an engine in bfloat16 is off by
    0.01. Changes nothing unless `trainer.correction.proximal = "auto"`. Returns a line for people,
    or None if nothing changes.
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
    """Raise ConfigError for a gap above `engine.max_logprob_gap`: the models are not the same."""
    if gap.mean <= config.engine.max_logprob_gap:
        return
    hints = [
        "the usual causes: another model or adapter, another temperature, another dtype",
        f"if this much is expected of the dtype: engine.max_logprob_gap={gap.mean * 1.5:.2g}",
    ]
    if config.engine.url:
        hints[:0] = [
            f"start the servers with the model of engine.model: {config.engine.model}",
            "or, if they hold what an earlier run has published, let this run replace it: "
            "engine.kwargs.take_over=true",
        ]
    raise ConfigError(
        f"engine and trainer are not the same model: the log-probabilities of the tokens that the "
        f"engine samples differ by {gap} (allowed: {config.engine.max_logprob_gap:g} on average)",
        hints=hints,
    )
