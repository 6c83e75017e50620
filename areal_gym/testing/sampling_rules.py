"""Rules for one engine with one set of weights: what it samples, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_gym.engines.base import (
    Engine,
    Generation,
    SamplingParams,
)
from areal_gym.errors import EngineError
from areal_gym.testing.engine_case import EngineCase, must_refuse, require
from areal_gym.testing.engine_policies import (
    FIRST_PROMPT,
    log_distributions,
    truncated_distributions,
)
from areal_gym.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

_SIGMAS = 5.0
"""A mean further from its expectation is a failure: once in two million honest runs."""


async def check_greedy(case: EngineCase) -> None:
    """Check that temperature 0 takes the likeliest token, and reports temperature 1."""
    async with case.engine() as engine:
        turns = [await case.ask(engine, FIRST_PROMPT, temperature=0.0) for _ in range(2)]
        first, again = (list(turn.token_ids) for turn in turns)
        require(first == again, f"greedy answers differ: {first} and {again}")
        if not case.abilities.has_model:
            return
        policy = case.reference(case.policies.first)
        logprobs_TV = log_distributions(policy.logits(FIRST_PROMPT, first))
        for place, token in enumerate(first):
            best = float(logprobs_TV[place].max())
            lead = best - float(logprobs_TV[place, token])
            rule = f"greedy token {place} is not the likeliest one: {lead:.2g} below it"
            require(lead <= 2 * case.abilities.max_logprob_gap, rule)
        case.check_logprobs(policy, FIRST_PROMPT, turns[0], where="greedy sampling")


async def check_logprobs(case: EngineCase) -> None:
    """Check log-probabilities against transformers, and that samples follow them."""
    if not case.abilities.has_model:
        return
    policy = case.reference(case.policies.first)
    async with case.engine() as engine:
        for temperature in (1.0, 0.7):
            prompts = [case.prompt(i) for i in range(32)]
            turns = await _together(case, engine, prompts, 12, temperature=temperature)
            surprise, variance = 0.0, 0.0
            for prompt, turn in zip(prompts, turns, strict=True):
                case.check_logprobs(policy, prompt, turn, where="sampling", temperature=temperature)
                excess, spread = _surprise(policy.logits(prompt, turn.token_ids), turn, temperature)
                surprise, variance = surprise + excess, variance + spread
            require(
                abs(surprise) <= _SIGMAS * variance**0.5,
                f"samples do not follow the distribution of temperature {temperature:g}: they are "
                f"{'less' if surprise > 0 else 'more'} likely than its own, by "
                f"{abs(surprise) / variance**0.5:.0f} standard deviations",
            )


def _surprise(logits_TV: Tensor, turn: Generation, temperature: float) -> tuple[float, float]:
    """Return how much less likely the tokens are than expected, in nats, and its variance."""
    logprobs_TV = log_distributions(logits_TV, temperature)
    probs_TV = logprobs_TV.exp()
    entropy_T = -(probs_TV * logprobs_TV).sum(-1)
    variance_T = (probs_TV * logprobs_TV**2).sum(-1) - entropy_T**2
    sampled_T = [-float(logprobs_TV[i, token]) for i, token in enumerate(turn.token_ids)]
    return sum(sampled_T) - float(entropy_T.sum()), float(variance_T.sum())


async def check_truncation(case: EngineCase) -> None:
    """Check `top_p` and `top_k`: obeyed, or refused where they are not declared."""
    able = case.abilities
    if not able.has_model:
        return
    async with case.engine() as engine:
        for params in ({"top_k": 3}, {"top_p": 0.6}):
            name = " ".join(params)
            prompts = [case.prompt(i) for i in range(16)]
            if able.truncation == "none":
                with must_refuse(f"{name}, which is not declared,"):
                    await case.ask(engine, prompts[0], **params)
                continue
            turns = await _together(case, engine, prompts, 6, temperature=0.9, **params)
            for prompt, turn in zip(prompts, turns, strict=True):
                _check_truncated(case, prompt, turn, params)


def _check_truncated(
    case: EngineCase, prompt: Sequence[int], turn: Generation, params: dict[str, Any]
) -> None:
    logits_TV = case.reference(case.policies.first).logits(prompt, turn.token_ids)
    if "top_k" in params:
        expected = [log_distributions(logits_TV, 0.9, top_k=params["top_k"])]
    else:
        expected = truncated_distributions(logits_TV, 0.9, params["top_p"])
    whole_TV = log_distributions(logits_TV, 0.9)
    for place, token in enumerate(turn.token_ids):
        inside = [float(logprobs_TV[place, token]) for logprobs_TV in expected]
        require(max(inside) > float("-inf"), f"token {place} lies outside of {params}")
        if case.abilities.truncation == "unscaled":
            inside = [float(whole_TV[place, token])]
        gap = min(abs(logprob - turn.logprobs[place]) for logprob in inside)
        rule = f"with {params}, a log-probability is {gap:.2g} off the sampling distribution's"
        require(gap <= case.abilities.max_logprob_gap, rule)


async def check_stops(case: EngineCase) -> None:
    """Check that a turn ends at, and with, the first of its stop tokens, and at nothing else."""
    async with case.engine() as engine:
        whole = await case.ask(engine, FIRST_PROMPT, 24, temperature=0.0)
        ids = list(whole.token_ids)
        rule = f"without stop tokens a turn has {len(ids)} of 24 tokens"
        require(len(ids) == 24 and whole.finish_reason is FinishReason.LENGTH, rule)
        firsts = [place for place, token in enumerate(ids) if token not in ids[:place]]
        for place in {0, firsts[len(firsts) // 2], firsts[-1]}:
            stop, end = ids[place], place + 1
            absent = next(i for i in range(3, case.policies.vocab_size) if i not in ids)
            turn = await case.ask(
                engine, FIRST_PROMPT, 24, temperature=0.0, stop_token_ids=(absent, stop)
            )
            rule = f"with the stop token {stop}, {ids} becomes {list(turn.token_ids)}"
            require(list(turn.token_ids) == ids[:end], rule)
        if case.abilities.has_model and case.policies.eos_ids:
            turn = await case.ask(
                engine, FIRST_PROMPT, 24, temperature=0.0, stop_token_ids=(absent,)
            )
            rule = "the model's end of text ends a turn, and is none of its stop tokens"
            require(list(turn.token_ids) == ids, rule)


async def check_limits(case: EngineCase) -> None:
    """Check `max_new_tokens` and `max_context`; prompts that do not fit are refused."""
    async with case.engine() as engine:
        for num_tokens in (1, 2, 7):
            turn = await case.ask(engine, FIRST_PROMPT, num_tokens, temperature=0.0)
            rule = f"{len(turn.token_ids)} tokens for max_new_tokens={num_tokens}"
            require(len(turn.token_ids) == num_tokens, rule)
        limit = engine.max_context
        for room in (5, 1):
            prompt = case.prompt(0, limit - room)
            turn = await case.ask(engine, prompt, 64, temperature=0.0)
            rule = f"{len(turn.token_ids)} tokens where max_context leaves {room}"
            require(len(turn.token_ids) == room, rule)
            if case.abilities.has_model:
                policy = case.reference(case.policies.first)
                case.check_logprobs(policy, prompt, turn, where="at the end of the context")
        for num_tokens in (0, limit, limit + 100):
            with must_refuse(f"a prompt of {num_tokens} tokens, max_context being {limit},"):
                await case.ask(engine, case.prompt(0, num_tokens))
        await case.ask(engine, FIRST_PROMPT)


async def check_sessions(case: EngineCase) -> None:
    """Check turns of one session that extend, rewrite and leave its context."""
    policy = case.reference(case.policies.first) if case.abilities.has_model else None
    async with case.engine() as engine:

        async def episode(number: int) -> None:
            ids, name = case.prompt(number % 2), f"session-{number}"  # some are siblings
            for turn_number in range(3):
                turn = await case.ask(engine, ids, 5 + number, session=name)
                if policy is not None:
                    where = f"turn {turn_number} of a session"
                    case.check_logprobs(policy, ids, turn, where=where)
                ids = [*ids, *turn.token_ids, *case.prompt(turn_number, 3)]
                if turn_number == 1:
                    ids = [*ids[:20], *case.prompt(number, 9)]
            engine.release(name)
            engine.release(name)

        await asyncio.gather(*(episode(i) for i in range(4)))
        engine.release("never seen")


async def check_concurrency(case: EngineCase) -> None:
    """Check many requests at the same time: each gets the answer to its own prompt."""
    async with case.engine() as engine:
        prompts = [case.prompt(i, 10 + i % 7) for i in range(case.abilities.num_concurrent)]
        turns = await _together(case, engine, prompts, 8)
        if case.abilities.has_model:
            policy = case.reference(case.policies.first)
            for prompt, turn in zip(prompts, turns, strict=True):
                case.check_logprobs(policy, prompt, turn, where="among many requests")
        alone = await case.ask(engine, prompts[0], temperature=0.0)
        crowd = await _together(case, engine, prompts[:8], 16, temperature=0.0)
        if not case.abilities.has_model:
            require(crowd[0].token_ids == alone.token_ids, "a crowd changes the answer")


async def check_seeds(case: EngineCase) -> None:
    """Check that a seed fixes the tokens, in a crowd too, where seeds are declared."""
    if not (case.abilities.has_seeds and case.abilities.has_model):
        return
    async with case.engine() as engine:
        alone = await case.ask(engine, FIRST_PROMPT, seed=11)
        others = [case.ask(engine, case.prompt(i), 20) for i in range(6)]
        crowded, *_ = await asyncio.gather(case.ask(engine, FIRST_PROMPT, seed=11), *others)
        rule = "the same seed gives other tokens beside other requests"
        require(list(alone.token_ids) == list(crowded.token_ids), rule)
        further = [await case.ask(engine, FIRST_PROMPT, seed=seed) for seed in (12, 13)]
        rule = "other seeds give the same tokens"
        require(any(list(turn.token_ids) != list(alone.token_ids) for turn in further), rule)


async def check_cancelling(case: EngineCase) -> None:
    """Check that cancelled calls end at once, and that their places are free again."""
    async with case.engine() as engine:
        params = SamplingParams(max_new_tokens=engine.max_context)
        for round_number in range(2):
            turns = [
                asyncio.create_task(engine.generate(case.prompt(i), params, session=f"gone-{i}"))
                for i in range(case.abilities.num_concurrent)
            ]
            await asyncio.sleep(0.01 + 0.05 * round_number)  # some have begun
            for i, turn in enumerate(turns):
                turn.cancel()
                engine.release(f"gone-{i}")
            ends = await case.wait(asyncio.gather(*turns, return_exceptions=True), "cancelling")
            for end in ends:
                is_expected = isinstance(end, asyncio.CancelledError | Generation)
                require(is_expected, f"a cancelled call ends with {end!r}")
        after = await case.ask(engine, FIRST_PROMPT)
        if case.abilities.has_model:
            policy = case.reference(case.policies.first)
            case.check_logprobs(policy, FIRST_PROMPT, after, where="after cancelled calls")


async def check_closing(case: EngineCase) -> None:
    """Check that calls end with the engine, and that it leaves no task behind."""
    before = asyncio.all_tasks()
    async with case.engine() as engine:
        await case.ask(engine, FIRST_PROMPT)
        params = SamplingParams(max_new_tokens=engine.max_context)
        turns = [asyncio.create_task(engine.generate(case.prompt(i), params)) for i in range(4)]
        await asyncio.sleep(0.01)
        await case.wait(engine.aclose(), "aclose")
        ends = await case.wait(
            asyncio.gather(*turns, return_exceptions=True), "calls when the engine closes"
        )
        for end in ends:
            is_expected = isinstance(end, EngineError | Generation)
            require(is_expected, f"closing ends a call with {end!r}")
        await case.wait(engine.aclose(), "a second aclose")
        try:
            await case.wait(engine.generate(FIRST_PROMPT, params), "a call after aclose")
        except EngineError as error:
            require(bool(error.message.strip()), "a call after aclose fails without a word")
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    require(not left, f"aclose leaves tasks: {', '.join(sorted(map(repr, left)))}")


async def _together(
    case: EngineCase,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    **params: Any,
) -> list[Generation]:
    """Ask for answers to all prompts at the same time, with seeds where they are declared."""
    seeds = range(len(prompts)) if case.abilities.has_seeds else [None] * len(prompts)
    return await asyncio.gather(
        *(
            case.ask(engine, prompt, num_tokens, seed=seed, **params)
            for prompt, seed in zip(prompts, seeds, strict=True)
        )
    )
