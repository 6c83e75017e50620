"""One trajectory in full: its dialogue, and its tokens with everything recorded about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from areal_gym.viewer.catalog import Run


def rows(run: Run, file: str, start: int = 0, limit: int | None = None) -> dict[str, Any]:
    """Return a page of a file's trajectories as columns, which keeps ten thousand rows small.

    Besides the columns of `TrajectoryFile`, `advantage` is the mean over the trajectory's tokens.
    `is_last` says that no more can follow.
    """
    trajectories, trained = run.file(file), run.trained(file)
    heads = trajectories.page(start, limit)
    columns = {name: [head.summary[name] for head in heads] for name in trajectories.COLUMNS}
    columns["advantage"] = [trained.advantage(start + i) for i in range(len(heads))]
    return {"columns": columns, "is_last": limit is None or len(heads) < limit}


def detail(run: Run, file: str, place: int, *, has_texts: bool = True) -> dict[str, Any]:
    """Read the trajectory at `place`.

    Returns:
        Its line, with shorter numbers, and `place`; `trained`, the advantages and
        log-probabilities of its sampled tokens in their order, or null; `texts` of its token ids.

    Raises:
        UnknownIdError: the file is shorter.
    """
    row = run.file(file).read(place)
    for span in row["spans"]:
        for name in ("logprobs", "teacher_logprobs"):
            if span.get(name) is not None:
                span[name] = [round(value, 5) for value in span[name]]
    row["trained"] = run.trained(file).read(place)
    row["place"] = place
    if has_texts:
        row["texts"] = run.vocabulary.texts(token_ids(row["spans"]))
    return row


def token_ids(spans: Sequence[dict[str, Any]]) -> Iterable[int]:
    """Return all token ids of a trajectory."""
    return (token_id for span in spans for token_id in span["token_ids"])
