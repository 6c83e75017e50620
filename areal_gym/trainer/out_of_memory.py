"""Turns failed allocations into errors that name the settings which need less memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from areal_gym.errors import TrainError

MEMORY_HINTS = (
    "out of memory? lower trainer.tokens_per_microbatch: what a pass keeps grows with it",
    "or trainer.recompute_layers=true: a third more work for a fraction of that memory",
    "or trainer.dtype=bfloat16, or a larger trainer.num_ranks: each holds a part of the weights",
)
"""The cheapest first."""
DEATH_HINTS = ("the same command with --resume goes on from the last checkpoint", *MEMORY_HINTS)


def out_of_memory(error: BaseException) -> TrainError | None:
    """Return the error to report for a failed allocation; None if `error` is not one."""
    text = str(error)
    is_gpu = isinstance(error, torch.OutOfMemoryError)
    # torch has no exception class for host memory; C++ code outside its allocator says
    # "std::bad_alloc".
    is_host = any(word in text for word in ("DefaultCPUAllocator", "std::bad_alloc"))
    if not (is_gpu or is_host or isinstance(error, MemoryError)):
        return None
    reason = next((line for line in text.splitlines() if "allocate" in line), "")
    where = "a trainer's GPU is" if is_gpu else "the trainer is"
    return TrainError(
        f"{where} out of memory{': ' if reason else ''}{reason.strip()[:200]}", hints=MEMORY_HINTS
    )


@contextmanager
def readable_memory_errors() -> Iterator[None]:
    """Raise a TrainError if an allocation in the block fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        readable_error = out_of_memory(error)
        if readable_error is None:
            raise
        raise readable_error from error
