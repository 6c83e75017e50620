"""`areal-gym list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from areal_gym.cli import complete
from areal_gym.cli.options import PATH, common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk, warn
from areal_gym.errors import DataError, NothingToDoError, UsageError, choices
from areal_gym.plugins import KINDS, Entry, Kind, registry
from areal_gym.run_dir.evaluations import (
    Evaluation,
    EvaluationInfo,
    is_graded_reward,
    list_evaluations,
)
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_list import RunInfo, run_info, run_paths
from areal_gym.utils.markup import counted, short, three_digits

CHOICES = (*KINDS, "algorithms", "runs", "evals")


@click.command("list")
@click.argument(
    "kind",
    required=False,
    metavar=f"[{'|'.join(CHOICES)}]",
    shell_complete=complete.one_of(*CHOICES),
)
@json_option()
@click.option("--root", type=PATH, default=Path("runs"), help="The directory of runs and evals.")
@common_options
def list_command(kind: str | None, as_json: bool, root: Path) -> None:
    """List what plugins offer, by kind; or list algorithms, runs or evaluations."""
    if kind == "runs":
        _list_runs(root, as_json)
    elif kind == "evals":
        _list_evals(root, as_json)
    elif kind == "algorithms":
        _list_algorithms(as_json)
    elif kind is None or kind in KINDS:
        _list_plugins(kind, as_json)
    else:
        hints = choices(kind, CHOICES)
        if kind in ("preset", "presets"):
            hints.insert(0, "the presets of trainer.algorithm: areal-gym list algorithms")
        raise UsageError(f"unknown kind of plugin {kind!r}", hints=hints)


def _list_plugins(only: Kind | None, as_json: bool) -> None:
    tables = {kind: registry().entries(kind) for kind in ([only] if only else KINDS)}
    if as_json:
        rows = {kind: [entry.to_dict() for entry in tables[kind]] for kind in tables}
        print_json(rows[only] if only else rows)
    elif only:
        _print_entries(tables[only])
        talk(_count(only, tables[only]))
    else:
        for kind, entries in tables.items():
            if entries:
                print_data(f"{kind}:")
                _print_entries(entries, indent="  ")
    for kind in tables:
        registry().check_duplicates(kind)


def _print_entries(entries: Sequence[Entry], indent: str = "") -> None:
    rows = []
    for entry in entries:
        source = f"needs: {entry.install_command}" if entry.missing else entry.plugin.source
        rows.append((entry.spec.shown_id, entry.spec.summary, source))
    print_columns(rows, indent=indent)


def _count(kind: Kind, entries: Sequence[Entry]) -> str:
    plugins = {entry.plugin for entry in entries}
    noun = KINDS[kind].kind
    if len(entries) != 1:
        noun += "es" if noun.endswith(("s", "x")) else "s"  # losses, sandboxes
    return f"{len(entries)} {noun} from {counted(len(plugins), 'plugin')}"


def _list_algorithms(as_json: bool) -> None:
    """Print the values of `trainer.algorithm`, which are presets of settings, not plugins."""
    from areal_gym.config.algorithm_settings import PRESETS

    rows = [
        {"id": name, "summary": preset.summary, **preset.trainer(), "filters": [*preset.filters]}
        for name, preset in PRESETS.items()
    ]
    if as_json:
        print_json(rows)
    else:
        print_columns([(row["id"], row["summary"]) for row in rows])


def _list_runs(root: Path, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for path in run_paths(root):
        try:
            rows.append(_run_row(run_info(path)))
        except DataError as error:  # a damaged run must not hide the others
            warn(f"{path} is skipped: {error}")
    if not rows:
        raise NothingToDoError(f"no runs in {root}", hints=["start one: areal-gym train --env tir"])
    if as_json:
        print_json(rows)
        return
    cells = []
    for row in rows:
        facts = (f"reward {three_digits(row['reward'])}", _heldout_text(row))
        state = (f"step {row['steps']}", row["status"])
        cells.append((row["path"], row["env"], *state, *facts, short(row["error"] or "", 60)))
    print_columns(cells)


def _run_row(run: RunInfo) -> dict[str, Any]:
    directory = RunDir(run.path)
    return {
        "path": str(run.path),
        "env": run.env_id,
        "steps": run.num_steps,
        "is_finished": run.is_finished,
        "status": (status := directory.status),
        "error": directory.error if status == "failed" else None,
        "reward": run.reward,
        **_heldout(run),
    }


def _heldout(run: RunInfo) -> dict[str, Any]:
    """Return the held-out scores before and after training; None where nothing was measured.

    `heldout_reward_*` are None if all rewards are 0 or 1.
    """
    evaluations = [evaluation.info for evaluation in Evaluation.of_schedule(run.path)]
    scores = [info.scores for info in evaluations]
    before = [info.scores for info in evaluations if info.policy["step"] == 0]
    after = [info.scores for info in evaluations if info.policy["step"] > 0]
    is_graded = any(map(is_graded_reward, scores))
    row: dict[str, Any] = {}
    for name, measure in (("heldout", "pass@1"), ("heldout_reward", "reward")):
        is_shown = is_graded or measure == "pass@1"
        row[f"{name}_before"] = before[0].get(measure) if before and is_shown else None
        row[f"{name}_after"] = after[-1].get(measure) if after and is_shown else None
    row |= {name: run.summary[name] for name in row if name in run.summary}
    ends = [scores[-1].get(f"reward_{end}") for end in ("low", "high")] if is_graded else [None]
    return {**row, "heldout_reward_interval": None if None in ends else ends}


def _heldout_text(row: Mapping[str, Any]) -> str:
    def known(name: str) -> list[float]:
        return [x for end in ("before", "after") if (x := row[f"{name}_{end}"]) is not None]

    graded = known("heldout_reward")
    is_graded = bool(graded)
    label = "held-out reward" if is_graded else "held out"
    text = f"{label} {' -> '.join(map(three_digits, graded or known('heldout'))) or '-'}"
    if is_graded and row["heldout_reward_interval"] is not None:
        low, high = row["heldout_reward_interval"]
        text += f" ({low:.3f} to {high:.3f})"
    return text


def _list_evals(root: Path, as_json: bool) -> None:
    infos = list_evaluations(
        root, on_damaged=lambda path, error: warn(f"{path} is skipped: {error}")
    )
    if not infos:
        raise NothingToDoError(
            f"no evaluations in {root}", hints=["start one: areal-gym eval --env tir"]
        )
    if as_json:
        print_json([evaluation_card(info) for info in infos])
        return
    cells = [("", "measured", "policy", "pass@1", "tasks", "status", "seconds", "started")]
    for info in infos:
        score = info.pass_at_1
        interval = (
            "-" if score is None else f"{score.mean:.3f} ({score.low:.3f} to {score.high:.3f})"
        )
        cells.append(
            (
                str(info.path),
                info.benchmark or info.env,
                info.policy_name + (", greedy" if info.is_greedy else ""),
                interval,
                f"{info.scores.get('num_tasks', info.num_tasks or '?')} x {info.num_samples}",
                _progress(info),
                "-" if info.duration_s is None else f"{info.duration_s:.0f}",
                (info.started_at or "-")[:16].replace("T", " "),
            )
        )
    print_columns(cells)


def _progress(info: EvaluationInfo) -> str:
    if info.status == "finished" or info.num_total is None:
        return info.status
    return f"{info.status}, {info.num_done}/{info.num_total}"


def evaluation_card(info: EvaluationInfo) -> dict[str, Any]:
    """Return all facts about an evaluation as JSON values; its scores are separate keys."""
    card = {name: getattr(info, name) for name in EvaluationInfo.__dataclass_fields__}
    scores = card.pop("scores")
    card["path"] = str(info.path)
    return {**card, **{name: value for name, value in scores.items() if name not in card}}
