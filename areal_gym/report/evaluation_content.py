"""The content of a report about one evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_gym.config.settings_model import flat
from areal_gym.report.content import EXAMPLES, Report, best_and_worst, shown
from areal_gym.run_dir.evaluations import Evaluation
from areal_gym.utils.markup import number

_NUMBERS = ("num_episodes", "num_failed", "mean_turns", "mean_policy_tokens", "wall_s")


def collect_evaluation(evaluation: Evaluation) -> Report:
    """Read the content of a report about an evaluation, finished or not."""
    info = evaluation.info
    facts = identity(evaluation)
    how = f"{info.num_tasks or '?'} tasks x {info.num_samples}"
    state = "" if info.status == "finished" else f", {info.status}"
    file = evaluation.trajectories_file
    return Report(
        title=info.name,
        lead=f"{info.benchmark or info.env} {info.split}, {how}, {info.policy_name}{state}",
        facts=_scores(evaluation),
        evaluations=[],
        charts=[],
        changed={name: shown(value) for name, value in facts.items()},
        settings={name: shown(value) for name, value in facts.items()},
        examples=best_and_worst(file, EXAMPLES) if file.is_file() else [],
        used=[],
        environment={name: shown(value) for name, value in info.software.items()},
    )


def identity(evaluation: Evaluation) -> dict[str, Any]:
    """Return the settings with which an evaluation was measured, by dotted key."""
    info = evaluation.info
    tree = {
        "env": {"id": info.env, "kwargs": dict(info.env_kwargs)},
        "benchmark": info.benchmark,
        "split": info.split,
        "policy": dict(info.policy),
        "agent": info.agent,
        "engine": info.engine,
        "sampling": dict(info.sampling),
        "seed": info.seed,
        "num_tasks": info.num_tasks,
        "num_samples": info.num_samples,
    }
    return {name: value for name, value in flat(tree) if value is not None}


def _scores(evaluation: Evaluation) -> dict[str, str]:
    scores = evaluation.info.scores
    if not scores:
        estimate = evaluation.pass_at_1()
        return {} if estimate is None else {"pass@1 so far": _interval(*estimate)}
    facts = {}
    for name, value in scores.items():
        if name.startswith("pass@") and not name.endswith(("_low", "_high")):
            facts[name] = _interval(value, scores.get(f"{name}_low"), scores.get(f"{name}_high"))
        elif name.startswith("pass^") and name != "pass^1":
            facts[name] = number(value)
    reward = (scores.get("reward"), scores.get("reward_low"), scores.get("reward_high"))
    facts["reward"] = _interval(*reward)
    facts |= {name: number(scores[name]) for name in _NUMBERS if scores.get(name) is not None}
    facts |= _counts("stopped by", scores.get("stop_reasons"))
    return facts | _counts("error", scores.get("errors"))


def _interval(value: Any, low: Any, high: Any) -> str:
    return number(value) + ("" if low is None else f" ({number(low)} to {number(high)})")


def _counts(label: str, counts: Any) -> dict[str, str]:
    rows = counts.items() if isinstance(counts, Mapping) else ()
    return {f"{label} {name}": f"{count:,}" for name, count in rows}
