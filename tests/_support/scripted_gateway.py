"""A gateway in front of a scripted policy."""

import asyncio
import contextlib
import io
import json

import aiohttp

from areal_gym.engines.base import Piece, SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import AgentError
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.gateway.session import SessionOptions
from areal_gym.recording import Recorder

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


class TokenwiseEngine(ScriptedEngine):
    """Streams one token at a time, and counts aborted streams."""

    def __init__(self, replies, pause_s=0.0, **kwargs):
        super().__init__(replies, **kwargs)
        self.pause_s = pause_s
        self.num_aborted = 0

    async def stream(self, prompt_ids, params, *, session=None):
        is_done = False
        try:
            # A call may be aborted while it is here, too.
            whole = await self.generate(prompt_ids, params, session=session)
            for i, token_id in enumerate(whole.token_ids):
                await asyncio.sleep(self.pause_s)
                is_done = i + 1 == len(whole.token_ids)
                yield Piece(
                    token_ids=(token_id,),
                    logprobs=(whole.logprobs[i],),
                    versions=(whole.versions[i],),
                    finish_reason=whole.finish_reason if is_done else None,
                )
        finally:
            self.num_aborted += not is_done


@contextlib.asynccontextmanager
async def running_gateway(engine=None, **kwargs):
    """Run a gateway; yield it and a session that is not trained on."""
    gateway = Gateway(**kwargs)
    await gateway.start()
    try:
        engine = engine or ScriptedEngine(lambda question: "Hello.")
        yield gateway, gateway.serve_policy(engine, byte_renderer())
    finally:
        await gateway.aclose()


class RewardOnlyEpisode:
    """An episode without tools that only collects rewards."""

    first_messages = ({"role": "user", "content": "Hi."},)
    tools = ()
    is_over = False
    roles = ()
    role = None

    def __init__(self, recorder):
        self.recorder = recorder

    async def call_tool(self, call_id):
        raise AgentError(f"the policy has not made a call {call_id!r}")

    async def reply(self, answer):
        return ()

    def give_reward(self, reward, *, turn=None):
        (turn or self.recorder.turns[-1]).reward += reward


def open_recorded_session(
    gateway, engine, *, seed=0, max_new_tokens=200, temperature=1.0, **options
):
    """Open a session whose calls are recorded."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    recorder = Recorder(engine, byte_renderer(), params, seed=seed)
    episode = RewardOnlyEpisode(recorder)
    return gateway.open_session(recorder, SessionOptions(**options), episode=episode)


async def post(session, route, body, *, key=None, headers=()):
    """Post without a client library; return status, body and headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    keys = {"Authorization": f"Bearer {key or session.api_key}", **dict(headers)}
    async with (
        aiohttp.ClientSession() as http,
        http.post(session.base_url + route, data=io.BytesIO(data), headers=keys) as answer,
    ):
        text = await answer.text()
        try:
            return answer.status, json.loads(text), answer.headers
        except ValueError:
            return answer.status, text, answer.headers
