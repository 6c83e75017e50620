"""Rules for engines of policies that see: pictures are read, told apart, and read anew."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.chat.tokenizer import FastTokenizer
from areal_gym.chat.vision import Rendered, Vision
from areal_gym.engines.base import (
    Engine,
    Generation,
    SamplingParams,
    StreamingEngine,
    stream_from,
)
from areal_gym.images import image_store, use_image_store
from areal_gym.images.reading import pillow
from areal_gym.message_types import ImagePart, ImageRef
from areal_gym.testing.engine_case import EngineCase, must_refuse, require
from areal_gym.testing.engine_policies import FIRST_PROMPT

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDES = ((64, 64), (96, 64))
"""Width and height of the pictures of a dialogue's turns, in pixels."""


async def check_pictures(case: EngineCase) -> None:
    """Check turns with a picture each: read by the model, and told apart by their content."""
    if not (case.abilities.takes_images and case.abilities.has_model):
        return
    with use_image_store(case.directory / "images"):
        async with case.engine() as engine:
            # Two siblings, and two that have equal ids and other pictures.
            numbers = [(0, "a"), (0, "b"), (1, "c"), (2, "d")]
            await asyncio.gather(*(_play(case, engine, *number) for number in numbers))
            row = _Dialogue(case, 0).add_turn()
            if isinstance(engine, StreamingEngine):
                await _check_stream(case, engine, row)
            await _check_refusals(case, engine, row)


async def check_picture_updates(case: EngineCase) -> None:
    """Check that pictures are read by the new weights after each publication."""
    if not (case.abilities.takes_images and case.abilities.has_model):
        return
    with use_image_store(case.directory / "images"):
        row = _Dialogue(case, 0).add_turn()
        for id in case.abilities.full_syncs:
            async with case.engine() as engine, case.weight_sync(engine, id) as sync:
                version = engine.policy_version
                await _ask(case, engine, row, f"before {id}", session="kept")
                for policy in (case.policies.second, case.policies.first):
                    version += 1
                    await case.wait(sync.publish(case.weights(policy), version), f"publishing {id}")
                    where = f"a picture that was seen before a publication by {id}"
                    for session in ("kept", None):
                        turn = await _ask(case, engine, row, where, session=session, policy=policy)
                        versions = set(turn.versions)
                        require(versions == {version}, f"{where}: versions {versions}")


class _Dialogue:
    """A row with pictures that grows by turns; equal numbers have equal pictures.

    All dialogues have the same prompts.
    """

    def __init__(self, case: EngineCase, number: int) -> None:
        policy = case.policies.first
        vision = Vision.from_checkpoint(policy, FastTokenizer(policy))
        require(vision is not None, f"{policy} is no vision-language model that is known here")
        assert vision is not None
        self._case, self._number, self._vision = case, number, vision
        self._wire_ids: list[int] = []
        """With one placeholder for each picture."""
        self._parts: list[ImagePart] = []

    def add_turn(self, answer: Sequence[int] = ()) -> Rendered:
        """Add the policy's answer and a text with a picture; return the whole row."""
        turn = len(self._parts)
        seed = 10 * self._number + turn
        self._parts.append(image_store().add(_picture(seed, *_SIDES[turn])))
        before, after = self._case.prompt(turn, 5), self._case.prompt(turn + 9, 4)
        self._wire_ids += [*answer, *before, self._vision.placeholder_id, *after]
        return self._vision.expanded(self._wire_ids, self._parts)


def _picture(seed: int, width: int, height: int) -> Image:
    """Return a Pillow picture of random rectangles."""
    rng = random.Random(seed)
    picture: Image = pillow().new("RGB", (width, height), "white")
    for _ in range(8):
        left, top = rng.randrange(width - 8), rng.randrange(height - 8)
        right, bottom = rng.randrange(left + 8, width + 1), rng.randrange(top + 8, height + 1)
        color = tuple(rng.randrange(256) for _ in range(3))
        picture.paste(color, (left, top, right, bottom))
    return picture


async def _play(case: EngineCase, engine: Engine, number: int, session: str) -> None:
    dialogue, answer = _Dialogue(case, number), tuple[int, ...]()
    for turn in range(len(_SIDES)):
        row = dialogue.add_turn(answer)
        where = f"turn {turn} of a dialogue with a picture in each"
        done = await _ask(case, engine, row, where, session=session)
        answer = tuple(done.token_ids)
    engine.release(session)


async def _ask(
    case: EngineCase,
    engine: Engine,
    row: Rendered,
    where: str,
    *,
    session: str | None = None,
    policy: Path | None = None,
) -> Generation:
    """Sample a turn, and compare it with the first policy, or another one."""
    ids, images = row
    turn = await case.ask(engine, ids, 8, session=session, images=images)
    reference = case.reference(policy or case.policies.first)
    case.check_logprobs(reference, ids, turn, where=where, images=images)
    return turn


async def _check_stream(case: EngineCase, engine: Engine, row: Rendered) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    whole = await case.ask(engine, row.token_ids, 24, temperature=0.0, images=row.images)
    stream = stream_from(engine, row.token_ids, params, images=row.images)
    ids = [id async for piece in stream for id in piece.token_ids]
    rule = f"a stream of a row with a picture gives {ids}, and generate {list(whole.token_ids)}"
    require(ids == list(whole.token_ids), rule)


async def _check_refusals(case: EngineCase, engine: Engine, row: Rendered) -> None:
    """Check a row that has a placeholder too few; texts are read as before."""
    (image,) = row.images
    short = ImageRef(image.sha256, image.start, image.length - 1, image.grid)
    ids = [*row.token_ids[: image.start], *row.token_ids[image.start + 1 :]]
    with must_refuse("a row with one placeholder fewer than its picture has features"):
        await case.ask(engine, ids, images=(short,))
    turn = await case.ask(engine, FIRST_PROMPT)
    policy = case.reference(case.policies.first)
    case.check_logprobs(policy, FIRST_PROMPT, turn, where="a text beside pictures")
