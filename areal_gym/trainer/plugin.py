"""The built-in trainer, advantage estimators, policy losses and weight syncs."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import AdvantageSpec, PolicyLossSpec, TrainerSpec, WeightSyncSpec, hookimpl

_REQUIRES = ("torch", "safetensors")


@hookimpl
def register_trainers() -> Iterable[TrainerSpec]:
    """One process."""
    yield TrainerSpec(
        id="single",
        entry_point="areal_gym.trainer.trainer:Trainer",
        summary="one process, float32 master weights, packed micro-batches",
        requires=(*_REQUIRES, "matplotlib"),  # the picture at the end of a run
        extra="train",
    )


@hookimpl
def register_advantage_estimators() -> Iterable[AdvantageSpec]:
    """What a reward says about a trajectory."""
    for module, estimators in (
        (
            "advantages",
            {
                "grpo": "(reward - group mean) / group standard deviation",
                "dr_grpo": "reward - group mean",
                "rloo": "reward - mean of the siblings",
                "lite_ppo": "(reward - group mean) / standard deviation over the batch",
                "reinforce": "the reward itself",
                "reinforce_baseline": "reward - running mean of earlier steps' rewards",
            },
        ),
        (
            "token_advantages",
            {
                "gae": "generalised advantage estimation with a critic, by token or by turn",
                "reinforce_pp": "each token's return, normalised over the batch's tokens",
                "reinforce_pp_baseline": "reward - group mean, normalised over the batch's tokens",
                "distill": "what a teacher gives each token, against what the policy gives it",
                "per_turn": "each turn's return against its siblings, with any of the above",
            },
        ),
    ):
        for name, summary in estimators.items():
            yield AdvantageSpec(
                id=name,
                entry_point=f"areal_gym.trainer.algorithms.{module}:{name}",
                summary=summary,
                requires=_REQUIRES,
                extra="train",
            )


@hookimpl
def register_policy_losses() -> Iterable[PolicyLossSpec]:
    """What an advantage does to the policy."""
    for name, summary in (
        ("ppo_clip", "PPO's clipped ratio per token, with separate bounds and optional dual clip"),
        ("gspo", "the clipped ratio of whole sequences"),
        ("cispo", "clipped, constant importance weights times the log-probability"),
        ("sapo", "a soft gate on the ratio instead of a clip"),
    ):
        yield PolicyLossSpec(
            id=name,
            entry_point=f"areal_gym.trainer.algorithms.losses:{name}",
            summary=summary,
            requires=_REQUIRES,
            extra="train",
        )


@hookimpl
def register_weight_syncs() -> Iterable[WeightSyncSpec]:
    """How weights reach the engine."""
    for name, cls, summary in (
        ("in-process", "in_process:InProcessWeightSync", "the engine in this process copies them"),
        ("disk", "disk:DiskWeightSync", "safetensors in a directory that servers share"),
        ("tensor", "tensor:TensorWeightSync", "in the body of requests, in flat buckets"),
        ("distributed", "distributed:DistributedWeightSync", "broadcast over NCCL or gloo"),
        ("lora", "adapters:LoraWeightSync", "adapters under versioned names, the base stays"),
    ):
        yield WeightSyncSpec(
            id=name,
            entry_point=f"areal_gym.trainer.weight_sync.{cls}",
            summary=summary,
            requires=_REQUIRES,
            extra="train",
        )
