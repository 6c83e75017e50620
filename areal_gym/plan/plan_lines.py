"""Says a plan in lines of text: in short, as recipes carry it, and what a dry run says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areal_gym.config import RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.models.device import pick_device
from areal_gym.models.hub import is_hub_name
from areal_gym.plan.model_to_plan import model_to_plan
from areal_gym.plan.run_plan import RunPlan
from areal_gym.plan.simulated_step import simulate_step
from areal_gym.utils.markup import gigabytes

_MAX_LAYERS = 40
"""Models with more layers are not simulated by a dry run: a layer takes about a third of a
second."""


def summary(plan: RunPlan) -> list[str]:
    """Return the plan in four lines: ranks, servers, hosts, seconds."""
    lines = [
        f"plan: {plan.num_gpus} x {plan.gpu}{', in turns' if plan.takes_turns else ''}; "
        f"{_each(plan.num_ranks, 'rank')} takes "
        f"{gigabytes(sum(plan.rank_bytes.values()))} GB = {_listed(plan.rank_bytes)}; "
        f"{gigabytes(sum(plan.publishing_bytes.values()))} GB while it publishes"
    ]
    if plan.num_servers:
        gpus = f"{plan.gpus_per_server} GPU{'s' * (plan.gpus_per_server > 1)}"
        lines.append(
            f"{_each(plan.num_servers, 'server')} of {gpus} has "
            f"{gigabytes(plan.server_weight_bytes)} GB weights and "
            f"{gigabytes(plan.server_cache_bytes)} GB cache a GPU: {plan.cache_tokens:,} tokens of "
            f"{plan.cache_bytes_per_token / 1e3:.0f} kB"
        )
    lines.append(
        f"a node of ranks takes {gigabytes(plan.host_bytes_per_node)} GB of memory = "
        f"{_listed(plan.host_bytes)}"
    )
    parts = ", ".join(f"{part} {s:.1f}" for part, s in plan.seconds.items() if part != "step")
    seconds = plan.seconds["step"]
    lines.append(
        f"a step of {plan.step_tokens:,} tokens, estimated: {seconds:.0f} s ({parts}); "
        f"{plan.limit} takes longest, by {plan.limited_by}"
    )
    return lines


def describe_memory(config: RunConfig) -> list[str]:
    """Return what a dry run says of memory; nothing of the starter policy, which fits anywhere.

    Raises:
        ConfigError: the model's `config.json` is not one that can be trained.
    """
    engine = config.engine
    if engine.model == "starter":
        return []
    if is_hub_name(engine.model) or not (Path(engine.model) / "config.json").is_file():
        return [f"memory: is told once there is {engine.model}/config.json"]
    model = model_to_plan(config)
    text = model.get_text_config() if hasattr(model, "get_text_config") else model
    if text.num_hidden_layers > _MAX_LAYERS:
        return [
            f"memory: a model of {text.num_hidden_layers} layers takes longer than a dry run; "
            "areal-gym plan simulates it"
        ]
    is_cpu = pick_device(config.trainer.device).type == "cpu" and engine.id == "embedded"
    step = simulate_step(config, model, is_cpu=is_cpu or config.trainer.device == "cpu")
    shape, num_ranks = step.shape, config.trainer.num_ranks
    each = _each(num_ranks, "rank")
    memory = (
        f"memory: a policy of {shape.num_parameters / 1e9:.2f} billion parameters; {each} takes "
        f"{gigabytes(sum(step.peak.values()))} GB = {_listed(step.peak)}, simulated; "
        "areal-gym plan says more"
    )
    if config.objective in SUPERVISED:  # nothing is sampled but for an evaluation
        return [memory]
    tokens = config.rollout.max_in_flight * engine.max_context
    return [
        memory,
        f"engine: {gigabytes(2 * shape.num_parameters)} GB weights in bfloat16, "
        f"{shape.cache_bytes_per_token / 1e3:.0f} kB of cache a token; "
        f"{config.rollout.max_in_flight:,} in flight, all of {engine.max_context:,} tokens, would "
        f"take {gigabytes(tokens * shape.cache_bytes_per_token)} GB: who finds no room there waits",
    ]


def _each(number: int, noun: str) -> str:
    return f"the {noun}" if number == 1 else f"each of {number} {noun}s"


def _listed(sizes: Mapping[str, int]) -> str:
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = [f"{gigabytes(size)} {kind}" for kind, size in ordered if size >= 0.05e9] or [
        f"{size / 1e6:.1f} MB {kind}" for kind, size in ordered[:1]
    ]
    return " + ".join(shown)
