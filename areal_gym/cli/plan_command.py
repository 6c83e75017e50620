"""`areal-gym plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli.options import (
    POSITIVE,
    common_options,
    json_option,
    overrides_argument,
    recipe_option,
)
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.cli.setting_flags import resolve, setting_flags
from areal_gym.errors import UsageError

if TYPE_CHECKING:
    from areal_gym.plan.run_plan import RunPlan

_BAR = 40
"""Characters for all of a GPU's memory."""


@click.command("plan")
@overrides_argument
@recipe_option
@setting_flags({"--model": "engine.model"})
@click.option("--gpu", default="h100-80gb", show_default=True, help="The kind of GPU.")
@click.option(
    "--gpus", "num_gpus", type=POSITIVE, help="The GPUs that there are [as many as used]."
)
@click.option(
    "--tokens",
    type=POSITIVE,
    help="The mean number of tokens of an episode [half of engine.max_context].",
)
@json_option()
@common_options
def plan_command(
    overrides: tuple[str, ...],
    recipe: Path | None,
    flags: Mapping[str, Any],
    gpu: str,
    num_gpus: int | None,
    tokens: int | None,
    as_json: bool,
) -> int:
    """Simulate what a run takes on GPUs, in memory and seconds; no GPU is needed.

    The model, its sharding and a training step are the real ones, with tensors that take no
    memory. The directory engine.model needs its config.json only. Seconds are estimates from
    published peaks. Exit code 1 if it does not fit.
    """
    from areal_gym.plan.run_plan import advice, gpus_of, plan_run

    config = resolve(file=recipe, overrides=overrides, flags=flags, is_chosen=True)
    num_ranks, needed = config.trainer.num_ranks, gpus_of(config)
    if num_gpus is not None and needed > num_gpus:
        raise UsageError(
            f"the run takes {needed} GPUs, {num_ranks} for ranks and {needed - num_ranks} for "
            f"servers; there are {num_gpus}",
            hints=["fewer: trainer.num_ranks=N, engine.kwargs.num_servers=N"],
        )
    talk(f"simulating a step of {config.engine.model} on {num_ranks} ranks")
    if config.trainer.parallel.expert > 1:
        talk("experts are counted as gathered on every rank, layer by layer: an upper bound")
    plan = plan_run(config, gpu=gpu, tokens_per_episode=tokens, say=talk)
    if as_json:
        print_json(plan.to_json())
    else:
        _print(plan)
    for line in advice(plan, config):
        talk(line)
    return int(not plan.fits)


def _print(plan: RunPlan) -> None:
    total = sum(plan.rank_bytes.values())
    print_data(
        f"{plan.num_parameters / 1e9:.2f} billion parameters, "
        f"{plan.num_active_parameters / 1e9:.2f} for each token; {plan.num_gpus} x {plan.gpu}: "
        f"{plan.num_ranks} ranks, {plan.num_servers} servers of {plan.gpus_per_server}"
    )
    rows = [("a rank", "GB", f"of {plan.gpu_bytes / 1e9:.0f}")]
    for kind, size in sorted(plan.rank_bytes.items(), key=lambda item: -item[1]):
        rows.append((kind, *_part(size, plan.gpu_bytes)))
    rows.append(("total", *_part(total, plan.gpu_bytes)))
    if plan.num_servers:
        cache = plan.cache_tokens * plan.cache_bytes_per_token // plan.gpus_per_server
        rows += [
            ("a server's GPU", "GB", ""),
            ("weights", *_part(plan.server_weight_bytes, plan.gpu_bytes)),
            ("cache", *_part(cache, plan.gpu_bytes)),
        ]
    rows += [
        ("a node's memory", "GB", ""),
        ("checkpoint's copies", _gb(plan.host_bytes_per_node), ""),
        ("a step, estimated", "s", f"{plan.step_tokens:,} tokens"),
    ]
    longest = max(plan.seconds.values())
    rows += [(name, f"{s:.1f}", _bar(s, longest)) for name, s in plan.seconds.items()]
    print_columns(rows)
    traffic = ", ".join(f"{_gb(size)} GB {name}" for name, size in plan.traffic_bytes.items())
    print_data(
        f"{plan.step_flops / 1e15:.1f} PFLOP and, for each rank, {traffic or 'no traffic'} a step; "
        f"a publication is {_gb(plan.publication_bytes)} GB; {plan.limit} takes longest"
    )
    if plan.num_servers:
        print_data(
            f"a server has room for {plan.cache_tokens:,} tokens, "
            f"{plan.cache_bytes_per_token / 1e3:.0f} kB each"
        )


def _part(size: float, whole: float) -> tuple[str, str]:
    return _gb(size), _bar(size, whole)


def _bar(part: float, whole: float) -> str:
    return "█" * min(_BAR, round(_BAR * part / whole))


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"
