"""Streams from engines that answer in one piece, by short generations one after another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from areal_gym.engines.base import Engine, Piece, SamplingParams, piece_of
from areal_gym.types import FinishReason, ImageRef


async def stream_in_chunks(
    engine: Engine,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    session: str | None,
    chunk_tokens: int,
    images: Sequence[ImageRef] = (),
) -> AsyncGenerator[Piece, None]:
    """Stream by short generations, each of which continues the one before.

    This suits engines that cache sessions, so that continuing is cheap, and whose sampling depends
    on seed and position. All guarantees of `generate` (retries, versions, publications) hold for
    each chunk.
    """
    token_ids = list(prompt_ids)
    left = min(params.max_new_tokens, engine.max_context - len(token_ids))
    image_arguments: dict[str, Any] = {"images": images} if images else {}
    finish_reason = None
    while finish_reason is None:
        chunk = replace(params, max_new_tokens=min(left, chunk_tokens))
        part = await engine.generate(token_ids, chunk, session=session, **image_arguments)
        token_ids += part.token_ids
        left -= len(part.token_ids)
        if part.finish_reason is not FinishReason.LENGTH or left <= 0:
            finish_reason = part.finish_reason
        yield piece_of(part, finish_reason)
