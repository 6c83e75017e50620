"""Helpers for the tests of SGLang servers: reference log-probabilities, calls, publications."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import torch

from areal_gym.config import LoraConfig, PluginConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.servers.server_client import RefusedError
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.weight_sync import make_weight_sync

PROMPT = list(range(20, 60))
TOLERANCE = 2e-5
"""Allowed difference of float32 log-probabilities; the real server differs by 5e-7."""
LONG_TOLERANCE = 5e-5
"""The same in turns of hundreds of tokens: the fake came to 2.003e-5, the other weights to 2.8."""


@asynccontextmanager
async def engine_over(policy, *urls, **options):
    """Run an engine over servers whose current weights count as version 0."""
    engine = SGLangEngine(policy, urls=urls, max_context=512, health_interval_s=0.2, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


def trainer_logprobs(decoder, token_ids, num_prompt, temperature=1.0):
    """Return the trainer's log-probabilities of the tokens after the prompt."""
    torch.set_num_threads(1)
    mask = [False] * num_prompt + [True] * (len(token_ids) - num_prompt)
    batch = pack([Row(token_ids=tuple(token_ids), num_shared=0)], torch.device("cpu"))
    with torch.no_grad():
        return score_tokens(decoder, batch, [mask], temperature).logprobs.tolist()


def logprob_gap(decoder, generation, prompt=PROMPT, temperature=1.0):
    """Return the largest difference between the server's log-probabilities and the trainer's."""
    mine = trainer_logprobs(decoder, [*prompt, *generation.token_ids], len(prompt), temperature)
    return max(abs(a - b) for a, b in zip(generation.logprobs, mine, strict=True))


def ask(engine, num_tokens=32, prompt=PROMPT, **params):
    return engine.generate(prompt, SamplingParams(max_new_tokens=num_tokens, **params))


async def turns_in_flight(engine, num_turns, num_tokens):
    """Return `num_turns` calls that are being sampled.

    Servers take requests in order of arrival: when a later call of one token is answered, the
    others have begun.
    """
    turns = [asyncio.create_task(ask(engine, num_tokens)) for _ in range(num_turns)]
    await asyncio.sleep(0)  # now they have asked
    await ask(engine, 1)
    return turns


@asynccontextmanager
async def turns_kept_in_flight(engine, num_turns=6):
    """Keep `num_turns` turns in flight however quick the server is; yield the finished ones."""
    ended = []
    lengths = itertools.cycle(range(150, 400, 50))  # so that they do not all end at once
    is_over = False

    async def play():
        while not is_over:
            ended.append(await ask(engine, next(lengths)))

    players = [asyncio.create_task(play()) for _ in range(num_turns)]
    try:
        await asyncio.sleep(0)
        await ask(engine, 1)
        yield ended
        is_over = True
        await asyncio.gather(*players)
    finally:
        for player in players:
            player.cancel()


def is_ascending(versions):
    return list(versions) == sorted(versions)


def check_each_version(decoders, generation):
    """Every token's log-probability is that of the weights whose version it carries."""
    token_ids, versions = generation.token_ids, generation.versions
    for version in set(versions):
        start, end = versions.index(version), len(versions) - versions[::-1].index(version)
        prompt = [*PROMPT, *token_ids[:start]]
        part = type(generation)(
            token_ids=token_ids[start:end],
            logprobs=generation.logprobs[start:end],
            versions=versions[start:end],
            finish_reason=generation.finish_reason,
        )
        assert logprob_gap(decoders[version % 2], part, prompt) < LONG_TOLERANCE, version


def sync_of(engine, id, directory, **kwargs):
    """Make a weight sync to the engine's servers."""
    settings = PluginConfig(id=id, kwargs=kwargs)
    return make_weight_sync(engine, settings, directory=directory, lora=LoraConfig())


async def checksums(url):
    """Return the server's own checksums of its weights; None where it has none."""
    server = SGLangClient(url)
    try:
        answer = await server.post("/weights_checker", {"action": "checksum"}, timeout_s=60)
        return answer["ranks"][0]["checksums"]
    except RefusedError as error:
        if "CUDA" in str(error):  # 0.5.19 computes them on GPUs only
            return None
        raise
    finally:
        await server.aclose()
