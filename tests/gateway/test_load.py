"""256 programs stream through the gateway at once: no token is lost, no sessions mix."""

import asyncio
import json

import aiohttp
import pytest
import torch

from areal_gym.chat import Renderer
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.gateway.session import SessionOptions
from areal_gym.recording import Recorder
from tests._support.scripted_gateway import RewardOnlyEpisode, post

NUM = 256


async def stream_answer(http, session, messages):
    """Stream an answer; return its text, number of log-probabilities and usage."""
    body = {
        "messages": messages,
        "stream": True,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    text, num_logprobs, usage = "", 0, None
    async with http.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                text += choice["delta"].get("reasoning_content") or ""
                if choice["logprobs"]:
                    num_logprobs += len(choice["logprobs"]["content"])
    return text, num_logprobs, usage


def test_long_serving_session_keeps_bounded_state():
    """The state that `serve` keeps for continuing old dialogues is bounded."""
    live = set()

    class Counting(ScriptedEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            live.add(session)
            return await super().generate(prompt_ids, params, session=session)

        def release(self, session):
            live.discard(session)
            super().release(session)

    async def run():
        gateway = Gateway()
        await gateway.start()
        engine = Counting(lambda question: f"Answer {question.turn}.")
        recorder = Recorder(engine, byte_renderer(), SamplingParams(), keeps=False)
        session = gateway.open_session(recorder, SessionOptions(is_training=False, max_points=8))
        sizes = []
        for number in range(40):
            messages = [{"role": "user", "content": f"Dialogue {number}."}]
            for _ in range(3):
                _, answer, _ = await post(session, "/chat/completions", {"messages": messages})
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "On."}]
            await post(session, "/completions", {"prompt": f"Text {number}"})
            sizes.append(len(live))
        assert recorder.outcome()["turns"] == ()
        session.close()
        recorder.release()
        await gateway.aclose()
        return sizes

    sizes = asyncio.run(run())
    assert max(sizes) <= 8 + 8
    assert live == set()


async def play_two_turns(http, gateway, recorder, number):
    """Stream two answers in a session; return its secret, the answers and the recording."""
    session = gateway.open_session(recorder, episode=RewardOnlyEpisode(recorder))
    secret = f"Secret {number}."
    messages = [{"role": "user", "content": secret}]
    answers = []
    for turn in range(2):
        text, num_logprobs, usage = await stream_answer(http, session, messages)
        assert num_logprobs == usage["completion_tokens"]
        answers.append(text)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Turn {turn} of {number}."},
        ]
    outcome = recorder.outcome()
    session.close()
    recorder.release()
    return secret, answers, outcome


def check_episode(renderer, secret, answers, outcome):
    """Check that the recording is of this session; return its number of sampled tokens."""
    policy = [span for span in outcome["spans"] if span.origin == "policy"]
    prompt = renderer.decode(outcome["spans"][0].token_ids)
    assert secret in prompt
    assert prompt.count("Secret") == 1
    assert len(outcome["turns"]) == 2
    for turn, text in enumerate(answers):  # the streamed text is what was sampled
        ids = [i for span in policy if span.turn == turn for i in span.token_ids]
        message = renderer.parse(renderer.decode(ids), "plain")
        assert text == message.get("reasoning_content", "") + message["content"]
    return sum(map(len, policy))


@pytest.mark.slow
def test_256_concurrent_sessions_do_not_mix(tiny_policy):
    torch.set_num_threads(1)
    renderer = Renderer.from_checkpoint(tiny_policy)
    params = SamplingParams(max_new_tokens=12)

    async def run():
        engine = EmbeddedEngine.from_checkpoint(tiny_policy, num_slots=64, max_context=256)
        await engine.start()
        gateway = Gateway()
        await gateway.start()
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:
                recorders = [Recorder(engine, renderer, params, seed=seed) for seed in range(NUM)]
                episodes = await asyncio.gather(
                    *(
                        play_two_turns(http, gateway, recorder, number)
                        for number, recorder in enumerate(recorders)
                    )
                )
            return episodes, gateway, engine.stats.generated
        finally:
            await gateway.aclose()
            await engine.aclose()

    episodes, gateway, num_generated = asyncio.run(run())
    assert gateway.sessions == {}
    num_recorded = sum(check_episode(renderer, *episode) for episode in episodes)
    assert num_recorded == num_generated  # every sampled token is recorded
