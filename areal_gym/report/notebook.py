"""Records and run directories as HTML, for notebooks: their `_repr_html_` leads here."""

from __future__ import annotations

from functools import singledispatch

from areal_gym.episode_roles import rewards_by_role
from areal_gym.report.charts import draw
from areal_gym.report.content import collect
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.types import Group, Task, Trajectory, thaw
from areal_gym.utils.markup import block, dialogue, escaped, number, pairs, short, table

_MOST_ROWS = 20
_MOST_CHARTS = 4


@singledispatch
def html_of(record: object) -> str:
    """Return the HTML that a notebook shows of a record."""
    raise TypeError(f"no HTML view of {type(record).__name__}")


@html_of.register
def _task(task: Task) -> str:
    rows = {name: short(thaw(value), 400) for name, value in list(task.data.items())[:_MOST_ROWS]}
    return block(task.headline, pairs(rows))


@html_of.register
def _trajectory(trajectory: Trajectory) -> str:
    facts = {
        "task": short(trajectory.task.id),
        **{f"reward of {role}": number(x) for role, x in rewards_by_role(trajectory).items()},
        **{f"reward, {short(n, 40)}": number(x) for n, x in trajectory.reward_parts.items()},
        **{short(n, 40): number(x) for n, x in trajectory.metrics.items()},
    }
    if trajectory.error is not None:
        facts["error"] = short(trajectory.error, 400)
    shown = dict(list(facts.items())[:_MOST_ROWS])
    return block(trajectory.headline, pairs(shown), dialogue(trajectory.messages))


@html_of.register
def _group(group: Group) -> str:
    rows = (
        (t.id, number(t.reward), len(t.turns), f"{t.num_policy_tokens:,}", t.stop_reason)
        for t in group.trajectories[:_MOST_ROWS]
    )
    head = ("trajectory", "reward", "turns", "tokens", "stop reason")
    return block(group.headline, table(head, rows))


@html_of.register
def _run(run: RunFiles) -> str:
    title = f"Run {short(run.path, 200)}"
    if not run.config_file.is_file():
        return block(title, "<div>nothing is in it yet</div>")
    report = collect(run)
    charts = "".join(map(draw, report.charts[:_MOST_CHARTS]))
    return block(
        title, f"<div>{escaped(report.lead)}</div>", pairs(report.facts), f"<div>{charts}</div>"
    )
