"""Well-known benchmarks that areal-gym does not have, and why: commands that are asked say it."""

from __future__ import annotations

from areal_gym.errors import UnknownIdError

LEFT_OUT = {
    "bfcl": "its calls are matched with lists of allowed values, and its multi-turn tasks run on "
    "its own simulated programs: neither is here, and a near-copy would give numbers that look "
    "comparable. Run its own program (gorilla-llm, bfcl-eval) against your policy",
    "livecodebench": "many of its problems read standard input and write standard output, which "
    "the environment `code` does not grade, and its data set is one of several gigabytes whose "
    "private tests are pickled. Run its own program (lcb_runner) against your policy",
}
"""The reason by the id under which it is known."""
_HINT = "serve the policy for it: areal-gym serve --run RUN"
_OTHER_NAMES = {"lcb": "livecodebench", "gorilla": "bfcl"}


def require_not_left_out(id: str) -> None:
    """Raise UnknownIdError for a benchmark that was left out on purpose, by any of its names.

    Raises:
        UnknownIdError: it is one of `LEFT_OUT`; with the reason.
    """
    word = id.lower().replace("-", "_").split("_")[0].split(":")[0]
    name = _OTHER_NAMES.get(word, word)
    for known, reason in LEFT_OUT.items():
        if name.startswith(known):
            raise UnknownIdError(
                f"the benchmark {id!r} is not offered: {reason}",
                hints=[_HINT, "those that are offered: areal-gym list benchmarks"],
            )
