"""The end of a run: summary, learning curve, report, and the lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.config.online_settings import ONLINE
from areal_gym.report import keep_report
from areal_gym.report.learning_curve import draw_learning_curve
from areal_gym.runs.evaluation import evaluations_of, is_evaluated
from areal_gym.runs.preparation import PreparedRun
from areal_gym.runs.run_context import RunContext
from areal_gym.utils.command_words import quoted
from areal_gym.utils.files import write_atomic
from areal_gym.utils.markup import counted, three_digits
from areal_gym.utils.statistics import cpu_s
from areal_gym.version import __version__

_Item = TypeVar("_Item")
_NEARLY_ALL = 0.95
"""With at least this share of groups of equal rewards, there is nothing to learn."""
_Rows = list[tuple[str, str, str]]


def conclude(run: RunContext[_Item], best: str | None) -> dict[str, Any]:
    """Write summary, curve and report, show them, and return the summary.

    `best` is the name of the best checkpoint; None if none was evaluated.
    """
    prepared = run.prepared
    config, directory = prepared.config, prepared.directory
    is_supervised = config.objective in SUPERVISED
    summary: dict[str, Any] = {
        "objective": config.objective,
        "env": config.env.id,
        **(_heldout_examples(prepared) if is_supervised else _heldout_tasks(prepared, run.step)),
        "num_steps": run.step,
        "stopped": prepared.callbacks.stopped,
        "first_step": prepared.step + 1,
        "warm_start_s": prepared.warm_start.get("warm_start_s", 0.0),
        "train_s": round(run.train_s, 2),
        "cpu_s": round(cpu_s() - prepared.cpu_before_s, 2),
        "seed": config.seed,
        "warm_start": prepared.warm_start,
        "initial_policy": str(prepared.policy.absolute()),
        "checkpoint": f"checkpoints/step-{run.step:06d}",
        "best_checkpoint": None if best is None else f"checkpoints/{best}",
        "version": __version__,
    }
    write_atomic(directory.learning_curve_file, _curve(prepared, is_supervised=is_supervised))
    directory.save_summary(summary)
    _show(prepared, summary, is_supervised=is_supervised)
    prepared.callbacks.call("on_end", summary)
    return summary


def _heldout_tasks(run: PreparedRun, last: int) -> dict[str, Any]:
    if not is_evaluated(run.config):
        return {"num_heldout_tasks": 0}
    rows = evaluations_of(run.directory)
    after = next(row for row in rows if row["step"] == last)
    names = {"heldout": "sampled", "heldout_greedy": "greedy", "heldout_reward": "reward"}
    return {
        **_changes(names, _before(run, rows), after),
        "heldout_after_interval": [after["low"], after["high"]],
        "num_heldout_tasks": run.directory.read_evaluations()[0]["sampled"]["num_tasks"],
    }


def _heldout_examples(run: PreparedRun) -> dict[str, Any]:
    before, after = _first_and_last(run)
    names = {"heldout": "accuracy", "heldout_loss": "loss"}
    return {**_changes(names, before, after), "num_heldout_examples": len(run.examples[1])}


def _changes(
    names: Mapping[str, str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `NAME_before` and `NAME_after` of what was measured, by the name in the rows."""
    ends = (("before", before), ("after", after))
    return {
        f"{name}_{end}": row[measure]
        for name, measure in names.items()
        for end, row in ends
        if measure in row
    }


def _first_and_last(run: PreparedRun) -> tuple[Mapping[str, float], Mapping[str, float]]:
    rows = run.directory.read_evaluations()
    return _before(run, rows).get("heldout", {}), rows[-1]["heldout"]


def _before(run: PreparedRun, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the evaluation before training; it is empty if there was none."""
    return rows[0] if run.config.eval.at_start or rows[0]["step"] == 0 else {}


def _curve(run: PreparedRun, *, is_supervised: bool) -> bytes:
    config, directory = run.config, run.directory
    title, best = f"{config.objective}, seed {config.seed}", None
    if not is_supervised:
        title = f"{config.env.id}, seed {config.seed}: held-out accuracy"
        best = run.warm_start.get("best_demonstrator")
    return draw_learning_curve(
        directory.read_metrics(),
        directory.read_evaluations(),
        title=title,
        baselines={} if best is None else {"best demonstrator": best},
    )


def _show(run: PreparedRun, summary: dict[str, Any], *, is_supervised: bool) -> None:
    directory, say = run.directory, run.display.say
    path = quoted(directory.path)
    table = _example_table(run) if is_supervised else _task_table(summary)
    for left, middle, right in table:
        say(f"  {left:<20}{middle:>8}{right:>8}".rstrip())
    for line in _unlearned(directory.read_metrics(), summary):
        say(line)
    num_taken = summary["num_steps"] - summary["first_step"] + 1
    duration = f"training {summary['train_s']:.0f} s for {counted(num_taken, 'step')}"
    if not is_supervised:
        duration = f"warm start {summary['warm_start_s']:.0f} s, {duration}"
    say(duration)
    say(f"curve:     {directory.learning_curve_file}")
    say(f"report:    {keep_report(directory)}")
    is_reward_model = summary["objective"] == "rm"
    label = "model: " if is_reward_model else "policy:"
    say(f"{label}    {directory.path / summary['checkpoint']}")
    best = summary["best_checkpoint"]
    if best not in (None, summary["checkpoint"]):
        say(f"best:      {directory.checkpoints_dir / 'best'} ({best})")
    if not is_supervised:
        say(f"look:      areal-gym view {path}")
    command = f"eval --env {summary['env']} --run {path} -k 4"
    if not is_supervised and not summary["num_heldout_tasks"]:
        command += " eval.split=train"  # nothing was held out
    if summary["env"] == ONLINE:
        command = f"serve --run {path}"
    if not is_reward_model:
        say(f"next:      areal-gym {command}")


def _task_table(summary: dict[str, Any]) -> _Rows:
    rows = []
    if "heldout_after" in summary:
        rows.append(("", "before", "after"))
        keys = {"reward": "heldout_reward", "sampled": "heldout", "greedy": "heldout_greedy"}
        for label, key in keys.items():
            if f"{key}_after" in summary:
                before, after = summary.get(f"{key}_before"), summary[f"{key}_after"]
                rows.append((f"held-out, {label}", three_digits(before), three_digits(after)))
    best = summary["warm_start"].get("best_demonstrator")
    if best is not None:
        rows.append(("best demonstrator", f"{best:.3f}", ""))
    return rows


def _unlearned(steps: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield advice after a run whose held-out accuracy or reward did not rise."""
    key = "heldout_reward" if "heldout_reward_after" in summary else "heldout"
    before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
    if summary["objective"] in SUPERVISED or before is None or after is None:
        return
    if after > before or (before == 1 and key == "heldout"):
        return
    measure = "reward " if key == "heldout_reward" else ""
    yield f"warning: nothing was learned: held-out {measure}{before:.3f} before, {after:.3f} after"

    def share(name: str) -> float:
        return float(sum(row.get(name, 0.0) for row in steps)) / max(1, len(steps))

    if share("reward/solve_none") > _NEARLY_ALL:
        yield f"  hardly any group earned a reward: easier tasks (areal-gym show {summary['env']}),"
        yield "  more tries (rollout.group_size=16), a better start (--objective sft, --model DIR)"
    elif share("reward/solve_all") > _NEARLY_ALL:
        yield f"  hardly any group failed: harder tasks (areal-gym show {summary['env']})"
    else:
        yield "  take more steps (--steps), or another learning rate (trainer.lr)"


def _example_table(run: PreparedRun) -> _Rows:
    before, after = _first_and_last(run)
    values = [(n, three_digits(before.get(n)), three_digits(after[n])) for n in after]
    return [("held-out", "before", "after"), *values]
