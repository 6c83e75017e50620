"""Demonstrations as rows of tokens with their pictures, to imitate."""

from __future__ import annotations

from areal_gym.chat import Renderer
from areal_gym.trainer.batch.examples import Example, TokenRow
from areal_gym.warm_start.demonstrations import Demonstration


def demonstrated_row(
    renderer: Renderer, shown: Demonstration, *, skips_first: bool = False
) -> Example:
    """Return token ids of a demonstration, and the mask of those that the demonstrator wrote.

    `skips_first` leaves out the first token of each turn: what kind of turn to write is the
    demonstrator's choice, and no measure of skill.
    """
    end = renderer.end_of_turn_id
    schemas = [tool.schema() for tool in shown.tools]
    first = renderer.first(shown.first_messages, schemas)
    ids, images = list(first.token_ids), list(first.images)
    mask = [False] * len(ids)
    for turn, text in enumerate(shown.texts):
        written = [*renderer.tokenizer.encode(text), end]
        ids += written
        mask += [not skips_first] + [True] * (len(written) - 1)
        if turn < len(shown.replies):
            bridge = renderer.bridge(end, shown.replies[turn])
            images += [image.moved(len(ids)) for image in bridge.images]
            ids += bridge.token_ids
            mask += [False] * len(bridge.token_ids)
    return (TokenRow(token_ids=tuple(ids), mask=tuple(mask), images=tuple(images)),)
