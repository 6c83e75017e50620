"""Rules for abilities that not every engine has: declared ones work, others are refused."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING

from areal_gym.engines.base import (
    Engine,
    Generation,
    GrammarEngine,
    ImageEngine,
    LocalEngine,
    RemoteEngine,
    SamplingParams,
    ScoringEngine,
    SleepingEngine,
    SnapshotEngine,
    StreamingEngine,
    TopScoringEngine,
)
from areal_gym.testing.engine_case import EngineCase, must_refuse, require
from areal_gym.testing.engine_policies import (
    FIRST_PROMPT,
)
from areal_gym.types import FinishReason

if TYPE_CHECKING:
    from torch import Tensor


async def check_protocols(case: EngineCase) -> None:
    """Check that the engine has the protocols of the abilities that it declares, and no others."""
    able = case.abilities
    async with case.engine() as engine:
        require(isinstance(engine, Engine), "it lacks methods of areal_gym.engines.base.Engine")
        require(type(engine.policy_version) is int, f"its version is {engine.policy_version!r}")
        require(engine.max_context > 1, f"max_context is {engine.max_context}")
        is_remote = any(id != "in-process" for id in able.weight_syncs)
        for ability, is_declared, protocol in (
            ("streams", able.streams, StreamingEngine),
            ("snapshots", able.snapshots, SnapshotEngine),
            ("sleeps", able.sleeps, SleepingEngine),
            ("scores_prompts", able.scores_prompts, ScoringEngine),
            ("lists_top_tokens", able.lists_top_tokens, TopScoringEngine),
            ("weight_syncs: in-process", "in-process" in able.weight_syncs, LocalEngine),
            ("weight_syncs to servers", is_remote, RemoteEngine),
        ):
            if is_declared != isinstance(engine, protocol):
                not_ = "" if is_declared else "not "
                has = "lacks" if is_declared else "has"
                require(
                    False,
                    f"{ability} is {not_}declared, and it {has} areal_gym.engines.base."
                    f"{protocol.__name__}",
                )
        if able.takes_grammars:
            takes = isinstance(engine, GrammarEngine) and engine.takes_grammars
            require(takes, "takes_grammars is declared, and the engine does not say so")
        takes = isinstance(engine, ImageEngine) and engine.takes_images
        which = "is declared, and" if able.takes_images else "is not declared, but"
        require(takes == able.takes_images, f"takes_images {which} the engine has it as {takes}")


async def check_streams(case: EngineCase) -> None:
    """Check that the pieces of a stream make the whole turn, and that closing one ends it."""
    if not case.abilities.streams:
        return
    async with case.engine() as engine:
        assert isinstance(engine, StreamingEngine)
        whole = await case.ask(engine, FIRST_PROMPT, 40, temperature=0.0)
        ids = list(whole.token_ids)
        for stops in ((), (ids[20],)):
            params = SamplingParams(max_new_tokens=40, temperature=0.0, stop_token_ids=stops)
            pieces = [piece async for piece in engine.stream(FIRST_PROMPT, params, session="s")]
            reasons = [piece.finish_reason for piece in pieces]
            rule = f"the reasons in a stream's pieces: {reasons}"
            require(None not in reasons[-1:] and set(reasons[:-1]) <= {None}, rule)
            turn = Generation(
                token_ids=[i for piece in pieces for i in piece.token_ids],
                logprobs=[p for piece in pieces for p in piece.logprobs],
                versions=[v for piece in pieces for v in piece.versions],
                finish_reason=reasons[-1] or FinishReason.ABORT,
            )
            case.check_form(turn, params)
            end = ids.index(stops[0]) + 1 if stops else len(ids)
            rule = f"a stream gives {turn.token_ids}, and generate {ids[:end]}"
            require(list(turn.token_ids) == ids[:end], rule)
            if case.abilities.has_model:
                policy = case.reference(case.policies.first)
                case.check_logprobs(policy, FIRST_PROMPT, turn, where="in a stream")
        params = SamplingParams(max_new_tokens=engine.max_context)
        for _ in range(12):
            async with aclosing(engine.stream(FIRST_PROMPT, params)) as stream:
                async for _piece in stream:
                    break
        await case.ask(engine, FIRST_PROMPT)


async def check_grammars(case: EngineCase) -> None:
    """Check that a grammar is obeyed, and refused where it is not declared or not valid."""
    schema = json.dumps({"enum": ["yes", "no"]})
    stops = tuple(case.policies.eos_ids)
    async with case.engine() as engine:
        if not case.abilities.takes_grammars:
            with must_refuse("a grammar, which is not declared,"):
                await case.ask(engine, FIRST_PROMPT, grammar=("json_schema", schema))
            await case.ask(engine, FIRST_PROMPT)
            return
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(case.policies.first / "tokenizer.json"))
        turn = await case.ask(
            engine, FIRST_PROMPT, 40, grammar=("json_schema", schema), stop_token_ids=stops
        )
        text = tokenizer.decode(list(turn.token_ids), skip_special_tokens=True)
        require(text.strip() in ('"yes"', '"no"'), f"{schema} allows no {text!r}")
        with must_refuse("a schema with the type 7"):
            await case.ask(engine, FIRST_PROMPT, grammar=("json_schema", '{"type": 7}'))
        await case.ask(engine, FIRST_PROMPT)


async def check_scores(case: EngineCase) -> None:
    """Check the log-probabilities of a prompt, and of the likeliest tokens in its places."""
    if not case.abilities.scores_prompts:
        return
    async with case.engine() as engine:
        assert isinstance(engine, ScoringEngine)
        ids = case.prompt(1)
        scores = await engine.score(ids)
        require(len(scores) == len(ids) - 1, f"{len(scores)} scores for {len(ids)} tokens")
        turn = Generation(
            token_ids=ids[1:],
            logprobs=scores,
            versions=[0] * len(scores),
            finish_reason=FinishReason.LENGTH,
        )
        policy = case.reference(case.policies.first)
        case.check_logprobs(policy, ids[:1], turn, where="scores of a prompt")
        if case.abilities.lists_top_tokens:
            await _check_top(case, engine, ids, policy.logits(ids[:1], ids[1:]).log_softmax(-1))


async def _check_top(case: EngineCase, engine: Engine, ids: list[int], logprobs_TV: Tensor) -> None:
    """Compare the likeliest tokens of all places, and of the last ones, with the model's own."""
    assert isinstance(engine, TopScoringEngine)
    for top_k, start in ((5, 1), (1, len(ids) - 3), (16, len(ids) - 1)):
        top = await engine.score_top(ids, top_k, start=start)
        shape = (len(top), top.top_k)
        wanted = (len(ids) - start, top_k)
        require(shape == wanted, f"places and tokens: {shape}, and {wanted} were asked for")
        for place, (token_ids, logprobs) in enumerate(zip(*top.arrays(), strict=True), start):
            own_V, listed = logprobs_TV[place - 1], token_ids.tolist()
            require(len(set(listed)) == top_k, f"place {place} lists a token twice: {listed}")
            gaps = abs(own_V[listed].sort(descending=True).values.numpy() - logprobs)
            missed = own_V.topk(top_k).values.sum() - own_V[listed].sum()
            worst, limit = max(float(gaps.max()), float(missed)), case.abilities.max_logprob_gap
            require(
                worst <= limit * top_k,
                f"the {top_k} likeliest tokens of place {place} are {worst:.2g} off the model's "
                f"own, {limit * top_k:g} is allowed",
            )


async def check_experts(case: EngineCase) -> None:
    """Check the form of the experts of tokens, which only some engines tell."""
    async with case.engine() as engine:
        turn = await case.ask(engine, FIRST_PROMPT, temperature=0.0)
        experts = turn.routed_experts
        if not case.abilities.routes_experts:
            require(experts is None, "it tells experts of tokens, and does not declare it")
            return
        require(
            experts is not None and len(experts) == len(turn.token_ids), "experts of each token"
        )
