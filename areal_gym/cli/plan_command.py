"""`areal-gym plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli.options import (
    PATH,
    POSITIVE,
    common_options,
    json_option,
    overrides_argument,
    recipe_option,
)
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.cli.setting_flags import resolve, setting_flags
from areal_gym.errors import UsageError
from areal_gym.utils.files import write_atomic
from areal_gym.utils.markup import counted, gigabytes

if TYPE_CHECKING:
    from areal_gym.plan.run_plan import RunPlan

_BAR = 40
"""The length of a full bar, in characters: all of a GPU's memory, or the longest time."""


@click.command("plan")
@overrides_argument
@recipe_option
@setting_flags({"--model": "engine.model"})
@click.option("--gpu", default="h100-80gb", show_default=True, help="The kind of GPU.")
@click.option(
    "--gpus", "num_gpus", type=POSITIVE, help="The number of GPUs available [as many as needed]."
)
@click.option(
    "--tokens",
    type=POSITIVE,
    help="The mean number of tokens of an episode [half of engine.max_context].",
)
@click.option(
    "--patches",
    type=click.IntRange(min=0),
    metavar="N",
    help="The mean number of patches of a task's pictures, for models that see; 0 are texts only "
    "[one picture of 640 x 480].",
)
@click.option(
    "--node-memory",
    type=POSITIVE,
    metavar="GB",
    help="The host memory of a node of eight GPUs [not compared].",
)
@click.option(
    "--picture",
    type=PATH,
    metavar="FILE",
    help="Draw the plan as SVG into FILE.",
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
    patches: int | None,
    node_memory: int | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Simulate what a run takes on GPUs, in memory and seconds; no GPU is needed.

    The model, its sharding and a training step are the real ones, with tensors that take no
    memory. The directory engine.model needs its config.json only. Seconds are estimates from
    published peaks. Exit code 1 if it does not fit.
    """
    from areal_gym.plan.advice import advice
    from areal_gym.plan.plan_picture import picture as draw
    from areal_gym.plan.run_plan import gpus_of, plan_run

    config = resolve(file=recipe, overrides=overrides, flags=flags, is_chosen=True)
    num_ranks, needed = config.trainer.num_ranks, gpus_of(config)
    if num_gpus is not None and needed > num_gpus:
        raise UsageError(
            f"the run takes {needed} GPUs, {num_ranks} for ranks and {needed - num_ranks} for "
            f"servers; there are {num_gpus}",
            hints=["fewer: trainer.num_ranks=N, engine.kwargs.num_servers=N"],
        )
    talk(f"simulating a step of {config.engine.model} on {counted(num_ranks, 'rank')}")
    plan = plan_run(
        config,
        gpu=gpu,
        tokens_per_episode=tokens,
        patches_per_task=patches,
        node_bytes=None if node_memory is None else int(node_memory * 1e9),
        say=talk,
    )
    if picture is not None:
        write_atomic(picture, draw(plan))
    if as_json:
        print_json(plan.to_json())
    else:
        _print(plan)
    for line in advice(plan, config):
        talk(line)
    return int(not plan.fits)


def _print(plan: RunPlan) -> None:
    from areal_gym.plan.plan_lines import summary

    print_data(
        f"{plan.num_parameters / 1e9:.2f} billion parameters, "
        f"{plan.num_active_parameters / 1e9:.2f} for each token; {plan.num_gpus} x {plan.gpu}: "
        f"{counted(plan.num_ranks, 'rank')}, {counted(plan.num_servers, 'server')} of "
        f"{plan.gpus_per_server}{', in turns' if plan.takes_turns else ''}"
    )
    rows = _bytes_of("a rank, training", plan.rank_bytes, plan.gpu_bytes)
    if not plan.rank_bytes.get("logits"):
        rows.append(("(logits before)", *_part(plan.logits_bytes, plan.gpu_bytes)))
    rows += _bytes_of("rank 0, publishing", plan.publishing_bytes, plan.gpu_bytes)
    if plan.server_stays_bytes:
        rows.append(("(server's weights)", *_part(plan.server_stays_bytes, plan.gpu_bytes)))
    if plan.num_servers:
        server = {"weights": plan.server_weight_bytes, "cache": plan.server_cache_bytes}
        rows += _bytes_of("a server's GPU", server, plan.gpu_bytes)
    rows += _bytes_of("a node's memory", plan.host_bytes, plan.node_bytes)
    rows.append(("a step, estimated", "s", f"{plan.step_tokens:,} tokens"))
    longest = max(plan.seconds.values())
    rows += [(name, f"{s:.1f}", _bar(s, longest)) for name, s in plan.seconds.items()]
    rows.append(("a rank sends", "GB", "a step"))
    rows += [(name, gigabytes(size), "") for name, size in plan.traffic_bytes.items()]
    print_columns(rows)
    print_data(
        f"{plan.step_flops / 1e15:.1f} PFLOP a step that the model needs, "
        f"{plan.computed_flops / 1e15:.1f} that ranks compute; a publication is "
        f"{gigabytes(plan.publication_bytes)} GB"
    )
    for line in summary(plan):
        print_data(line)


def _bytes_of(
    title: str, sizes: Mapping[str, int], whole: int | None
) -> list[tuple[str, str, str]]:
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    parts = [*ordered, ("total", sum(sizes.values()))]
    of_whole = "" if whole is None else f"of {whole / 1e9:.0f}"
    return [(title, "GB", of_whole), *((name, *_part(size, whole)) for name, size in parts)]


def _part(size: float, whole: int | None) -> tuple[str, str]:
    return gigabytes(size), _bar(size, whole) if whole else ""


def _bar(part: float, whole: float) -> str:
    return "█" * min(_BAR, round(_BAR * part / whole))
