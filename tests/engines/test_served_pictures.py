"""Policies that see, behind the stand-ins for SGLang and vLLM: one placeholder on the wire."""

import asyncio

import pytest
import torch

from areal_gym.engines.base import ImageEngine, SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.servers.server_pictures import require_read_whole
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.errors import EngineError
from tests._support.picture_rows import placed_picture, seeing_policy
from tests.engines.test_hf_pictures import play_three_turns

SERVERS = [(SGLangEngine, FakeSGLangServer), (VLLMEngine, FakeVLLMServer)]


@pytest.mark.parametrize(("engine_class", "server_class"), SERVERS)
def test_served_turns_with_pictures_are_exact(engine_class, server_class, tmp_path):
    async def play():
        directory = tmp_path / "policy"
        embedded = EmbeddedEngine.from_checkpoint(directory, max_context=256)
        async with server_class(embedded, model_path=str(directory)) as server:
            engine = engine_class(directory, urls=[server.url])
            assert isinstance(engine, ImageEngine)
            assert engine.takes_images
            await engine.start()
            try:
                assert await play_three_turns(engine, policy, "a", 0) <= 2e-5
            finally:
                await engine.aclose()

    with seeing_policy("qwen3_vl", tmp_path) as policy:
        asyncio.run(play())


@pytest.mark.parametrize(("engine_class", "server_class"), SERVERS)
def test_server_that_reads_other_pictures_is_refused(
    engine_class, server_class, tmp_path, monkeypatch
):
    async def play():
        directory = tmp_path / "policy"
        embedded = EmbeddedEngine.from_checkpoint(directory, max_context=256)
        async with server_class(embedded, model_path=str(directory)) as server:
            # A server that does not see: it leaves the prompt as it was sent.
            monkeypatch.setattr(server.pictures, "expanded", lambda ids, urls: (list(ids), ()))
            engine = engine_class(directory, urls=[server.url], max_retries=0)
            await engine.start()
            try:
                image = placed_picture(policy, 0, 1)
                ids = [5, *[policy.vision.banned_ids[0]] * image.length, 7]
                with pytest.raises(EngineError, match=r"read 3 tokens .* that has 18"):
                    await engine.generate(ids, SamplingParams(max_new_tokens=2), images=[image])
            finally:
                await engine.aclose()

    with seeing_policy("qwen3_vl", tmp_path) as policy:
        asyncio.run(play())


def test_rows_that_were_read_whole_pass():
    require_read_whole("http://server", 18, 18)
    for wrong in (17, None, "18"):
        with pytest.raises(EngineError, match="http://server read"):
            require_read_whole("http://server", wrong, 18)


def test_logits_of_placeholders_are_banned_in_training_as_on_servers(tmp_path):
    with seeing_policy("gemma3", tmp_path) as policy:
        logits = policy.vision.without_banned(torch.zeros(2, 300))
        banned = list(policy.vision.banned_ids)
        assert float(logits.softmax(-1)[:, banned].max()) == 0.0
        assert torch.isfinite(logits).all()
