"""The embedded engine samples policies that see, over several turns with a picture each."""

import asyncio

import pytest
import torch

from areal_gym.engines.base import ImageEngine, SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.embedded.hf_network import CachedHFPolicy
from areal_gym.engines.embedded.scheduler import Scheduler
from areal_gym.errors import EngineError
from areal_gym.models.hf.hf_loading import load_policy
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from tests._support.picture_rows import placed_picture, seeing_policy
from tests._support.tiny_training import tiny_checkpoint
from tests._support.tiny_vision import FAMILIES

SIZES = [(64, 64), (48, 80), (96, 64)]


def worst_gap(policy, ids, images, generation):
    """The largest difference between what was recorded and the packed trainer's numbers."""
    row = Row(token_ids=(*ids, *generation.token_ids), images=images)
    batch = pack([row])
    with torch.no_grad():
        logprobs = policy.logits(policy(batch)[len(ids) - 1 : -1]).float().log_softmax(-1)
    wanted = torch.tensor(generation.token_ids)[:, None]
    ours = logprobs.gather(1, wanted).squeeze(1)
    return float((ours - torch.tensor(generation.logprobs)).abs().max())


async def play_three_turns(engine, policy, session, seed):
    """Three turns with a picture each; give the largest gap of any."""
    generator = torch.Generator().manual_seed(seed // 2)  # two sessions begin alike
    draw = lambda count: torch.randint(3, 200, (count,), generator=generator).tolist()  # noqa: E731
    ids, images, worst = [], (), 0.0
    for turn, size in enumerate(SIZES):
        ids += draw(4)
        image = placed_picture(policy, 10 * seed + turn, len(ids), size)
        images = (*images, image)
        ids += [policy.vision.banned_ids[0]] * image.length + draw(3)
        params = SamplingParams(max_new_tokens=6, seed=seed)
        done = await engine.generate(ids, params, session=session, images=images)
        assert not set(done.token_ids) & set(policy.vision.banned_ids)
        worst = max(worst, worst_gap(policy, ids, images, done))
        ids += done.token_ids
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_with_a_picture_each_are_exact(family, tmp_path):
    async def play():
        network = CachedHFPolicy(load_policy(tmp_path / "policy"), num_rows=4, max_context=512)
        engine = EmbeddedEngine(Scheduler(network, 4))
        assert isinstance(engine, ImageEngine)
        assert engine.takes_images
        await engine.start()
        try:
            gaps = [play_three_turns(engine, policy, f"session-{seed}", seed) for seed in range(4)]
            assert max(await asyncio.gather(*gaps)) <= 2e-5
            # After new weights, pictures that were seen before are looked at anew.
            with torch.no_grad():
                for parameter in policy.network.parameters():
                    parameter.mul_(1.1)
            await engine.publish(policy.published(), 1)
            assert await play_three_turns(engine, policy, "later", 0) <= 2e-5
            copy = await engine.snapshot()
            await copy.start()
            assert await play_three_turns(copy, policy, "copied", 1) <= 2e-5
            await copy.aclose()
        finally:
            await engine.aclose()

    with seeing_policy(family, tmp_path) as policy:
        asyncio.run(play())


def test_siblings_share_a_prompt_with_pictures_and_others_do_not(tmp_path):
    async def play():
        engine = EmbeddedEngine.from_checkpoint(tmp_path / "policy", max_context=256)
        await engine.start()
        try:
            ids = [5, 6, *[policy.vision.banned_ids[0]] * 16, 7, 8]
            params = SamplingParams(max_new_tokens=4, seed=0)
            for seed, session, num_reused in [(0, "a", 0), (0, "b", 19), (1, "c", 2)]:
                images = (placed_picture(policy, seed, 2),)
                before = engine.stats.reused
                done = await engine.generate(ids, params, session=session, images=images)
                assert worst_gap(policy, ids, images, done) <= 2e-5
                assert engine.stats.reused - before <= num_reused
                assert session != "b" or engine.stats.reused - before == num_reused
        finally:
            await engine.aclose()

    with seeing_policy("qwen3_vl", tmp_path) as policy:
        asyncio.run(play())


def test_siblings_of_a_prompt_that_ends_with_a_picture_of_one_token_see_it(tmp_path):
    async def play():
        engine = EmbeddedEngine.from_checkpoint(tmp_path / "policy", max_context=256)
        await engine.start()
        try:
            images = (placed_picture(policy, 0, 3, (16, 16)),)
            assert images[0].length == 1
            ids = [5, 6, 7, policy.vision.banned_ids[0]]
            for session in ("a", "b"):
                params = SamplingParams(max_new_tokens=4, seed=0)
                done = await engine.generate(ids, params, session=session, images=images)
                assert worst_gap(policy, ids, images, done) <= 2e-5
            assert engine.stats.reused == 3
        finally:
            await engine.aclose()

    with seeing_policy("qwen3_vl", tmp_path) as policy:
        asyncio.run(play())


def test_policy_without_eyes_refuses_pictures(tmp_path):
    async def play():
        engine = EmbeddedEngine.from_checkpoint(tiny_checkpoint(), max_context=64)
        await engine.start()
        try:
            assert not engine.takes_images
            with seeing_policy("qwen3_vl", tmp_path) as policy:
                image = placed_picture(policy, 0, 1)
            with pytest.raises(EngineError, match="cannot see"):
                await engine.generate([1] * 20, SamplingParams(), images=[image])
        finally:
            await engine.aclose()

    asyncio.run(play())
