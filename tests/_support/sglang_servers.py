"""Fake SGLang servers for tests, and an engine over them."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from tests._support.web_app import served

POLICY = Path("policy")
LIMIT = 200


def count(question):
    """A policy whose every token follows from the one before, however often it is interrupted."""
    last = question.prompt_ids[-1]
    return [(last + 1 + i) % LIMIT for i in range(question.params.max_new_tokens)]


def counted(start, num_tokens):
    """Return the tokens that `count` samples after `start`."""
    return tuple((start + 1 + i) % LIMIT for i in range(num_tokens))


def fake(latency_s=0.0, **options):
    return FakeSGLangServer(ScriptedEngine(count, latency_s=latency_s), **options)


@asynccontextmanager
async def serving(*fakes, **options):
    """Run fake servers and an engine over them."""
    settings = {"grace_s": 0.3, "health_interval_s": 0.05, **options}
    async with AsyncExitStack() as stack:
        for server in fakes:
            await stack.enter_async_context(server)
        engine = SGLangEngine(POLICY, urls=[server.url for server in fakes], **settings)
        stack.push_async_callback(engine.aclose)
        await engine.start()
        yield engine


def ask(engine, num_tokens=20, prompt=(1, 2), session=None, **params):
    params = SamplingParams(max_new_tokens=num_tokens, **params)
    return engine.generate(prompt, params, session=session)


async def publish(engine, version, directory):
    async with engine.updating(version) as servers:
        for server in servers:
            await server.load_from_disk(directory, version)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def is_sampling(request):
    """Return whether the request is an engine's call; probes use the same route."""
    return request.path == "/generate" and "return_logprob" in await request.json()


@asynccontextmanager
async def website(handle, *, behind=None):
    """Run a web server of one handler; where it returns None, requests go to `behind`."""

    async def answer(request):
        response = await handle(request)
        return response if response is not None else await pass_on(request)

    async def pass_on(request):
        body = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, behind.url + request.path_qs, data=body) as response,
        ):
            return web.Response(
                body=await response.read(),
                status=response.status,
                content_type=response.content_type,
            )

    app = web.Application()
    app.router.add_route("*", "/{anything:.*}", answer)
    async with served(app) as url:
        yield url
