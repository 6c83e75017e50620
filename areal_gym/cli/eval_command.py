"""`areal-gym eval`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from areal_gym.cli import complete
from areal_gym.cli.eval_jobs import Plan, Request, plan_of
from areal_gym.cli.options import (
    PATH,
    Options,
    common_options,
    json_option,
    mixed_env_option,
    overrides_argument,
    recipe_option,
    run_option,
    trust_option,
)
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.cli.own_task import own_arguments, own_task_options
from areal_gym.cli.setting_flags import setting_flags
from areal_gym.errors import UsageError, choices
from areal_gym.utils.command_words import quoted
from areal_gym.utils.markup import counted


@click.command("eval")
@overrides_argument
@mixed_env_option
@own_task_options
@recipe_option
@run_option("A run: evaluate its newest checkpoint.")
@setting_flags(
    {
        "--model": "engine.model",
        "--agent": "agent.id",
        "--engine": "engine.id",
        "--engine.url": "engine.url",
        "-n": "eval.num_tasks",
        "-k": "eval.num_samples",
        "--split": "eval.split",
        "--seed": "seed",
    }
)
@trust_option
@click.option("--greedy", is_flag=True, help="Take the likeliest token instead of sampling.")
@json_option()
@click.option(
    "--benchmark",
    "benchmarks",
    multiple=True,
    metavar="ID[,ID]...",
    shell_complete=complete.ids("benchmarks"),
    help="A known benchmark: data, prompt, grader and sampling (areal-gym list benchmarks).",
)
@click.option(
    "--out",
    type=PATH,
    help="The directory of the evaluation; several get a folder each in it "
    "[runs/eval-ENV-DATE-TIME, or evaluations/ in the run].",
)
@click.option("--resume", is_flag=True, help="Continue the evaluation in --out.")
@click.option("--clean", is_flag=True, help="Replace the evaluation in --out.")
@click.option(
    "--fail-under", metavar="[METRIC=]X", help="Exit with 1 if the metric [pass@1] is below X."
)
@common_options
@click.pass_obj
def eval_command(
    options: Options,
    overrides: tuple[str, ...],
    env: tuple[str, ...],
    data: str | None,
    reward: tuple[str, ...],
    tools: tuple[str, ...],
    recipe: Path | None,
    run: Path | None,
    checkpoint: Path | None,
    flags: Mapping[str, Any],
    trust: bool,
    greedy: bool,
    as_json: bool,
    benchmarks: tuple[str, ...],
    out: Path | None,
    resume: bool,
    clean: bool,
    fail_under: str | None,
) -> int:
    """Measure a policy on held-out tasks: pass@1 and pass@k with 95% intervals, and failures.

    With --run, the settings are those of the run. Without --run, --checkpoint and --model, the
    policy is the one that a run would start with. For a URL as --model, the key is OPENAI_API_KEY
    and engine.kwargs.model=NAME is the model's name on that server.

    Several --env without weights, or several benchmarks, are measured one after another.
    """
    threshold = _parse_threshold(fail_under)
    request = Request(
        overrides=overrides,
        envs=env,
        benchmarks=benchmarks,
        recipe=recipe,
        run=run,
        checkpoint=checkpoint,
        flags=flags,
        own=own_arguments(data, reward, tools),
        trust=trust,
        greedy=greedy,
        out=out,
        resume=resume,
        clean=clean,
    )
    plan = plan_of(request)
    from areal_gym.runs.evaluation import evaluate_jobs
    from areal_gym.runs.live_display import make_display

    try:
        if threshold is not None:
            for job in plan.jobs:
                _require_metric(threshold[0], job.config.eval.num_samples)
        with contextlib.closing(make_display(is_plain=options.is_plain)) as display:
            reports = evaluate_jobs(plan.jobs, display)
    finally:
        with contextlib.suppress(OSError):
            plan.folder.rmdir()  # it was reserved, and nothing was written
    results = _results(plan, [report.to_dict() for report in reports])
    if as_json:
        print_json(results if plan.is_suite else results[0])
    elif plan.is_suite or not reports:
        print_columns(score_table(results))
    else:
        print_data(reports[0].to_text())
    if plan.finished:
        talk(f"{counted(len(plan.finished), 'evaluation')} had ended before")
    codes = [] if threshold is None else [_compare(row, *threshold) for row in results]
    talk(f"view the episodes: areal-gym view {quoted(plan.shown)}")
    return max(codes, default=0)


def _results(plan: Plan, scores: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores of all evaluations as JSON values, each with its directory."""
    measured = [
        {"directory": str(job.out), "benchmark": job.benchmark, **row}
        for job, row in zip(plan.jobs, scores, strict=True)
    ]
    before = [
        {"directory": str(info.path), "benchmark": info.benchmark, **info.scores}
        for info in plan.finished
    ]
    return measured + before


def score_table(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a table with one row per evaluation."""
    table: list[tuple[str, ...]]
    table = [("", "tasks", "pass@1", "95% interval", "pass@k", "reward", "failed")]
    for row in results:
        k = row["num_samples"]
        bounds = f"{row['pass@1_low']:.3f} to {row['pass@1_high']:.3f}"
        best = f"{row[f'pass@{k}']:.3f} (k={k})" if k > 1 else "-"
        cells = (f"{row['pass@1']:.3f}", bounds, best, f"{row['reward']:.3f}")
        name = row["benchmark"] or row["env"]
        table.append((name, f"{row['num_tasks']} x {k}", *cells, str(row["num_failed"])))
    return table


def _parse_threshold(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    metric, separator, raw = text.rpartition("=")
    try:
        return (metric if separator else "pass@1"), float(raw)
    except ValueError:
        raise UsageError(
            f"--fail-under {text!r} is not a number", hints=["an example: --fail-under pass@1=0.8"]
        ) from None


def _require_metric(metric: str, num_samples: int) -> None:
    """Raise UsageError for a metric that no evaluation has, before any work is done."""
    ks = [2**i for i in range(num_samples.bit_length())]
    names = [f"pass@{k}{bound}" for k in ks for bound in ("", "_low", "_high")]
    names += [f"pass^{k}" for k in ks]
    names += ["reward", "mean_turns", "mean_policy_tokens", "num_episodes"]
    if metric not in names:
        raise UsageError(f"--fail-under: no metric {metric!r}", hints=choices(metric, names))


def _compare(scores: Mapping[str, Any], metric: str, least: float) -> int:
    """Return the exit code: 1 if the metric is below the threshold."""
    if scores[metric] >= least:
        return 0
    name = scores["benchmark"] or scores["env"]
    talk(f"areal-gym: {metric} of {name} is {scores[metric]:.4f}, below {least:g}")
    return 1
