"""The built-in trainer, advantage estimators, policy losses and weight syncs."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import AdvantageSpec, PolicyLossSpec, TrainerSpec, WeightSyncSpec, hookimpl

_REQUIRES = ("torch", "safetensors")
_ADVANTAGES = {
    "grpo": "(reward - group mean) / group standard deviation",
    "dr_grpo": "reward - group mean",
    "rloo": "reward - mean of the siblings",
    "lite_ppo": "(reward - group mean) / standard deviation over the batch",
    "reinforce": "the reward itself",
    "reinforce_baseline": "reward - running mean of earlier steps' rewards",
}
_TOKEN_ADVANTAGES = {
    "gae": "generalised advantage estimation with a critic, by token or by turn",
    "reinforce_pp": "each token's return, normalised over the batch's tokens",
    "reinforce_pp_baseline": "reward - group mean, normalised over the batch's tokens",
    "distill": "each token's log-probability under a teacher minus the policy's",
    "per_turn": "each turn's return against its siblings, with any group baseline",
}
_GROUP_ADVANTAGES = {
    "opo": "reward - group mean weighted by length",
    "gpg": "reward - group mean, times the batch's share of rewards that are not 0, inverted",
    "pass_at_k": "for the best of a group its lead over the second best",
    "gdpo": "each part of the reward normalised by itself, then their sum over the batch's tokens",
    "rae": "reward - running mean of the rewards of the same role",
}
_ANCHOR_ADVANTAGES = {
    "gigpo": "reward - group mean, plus each turn's return against those from the same state",
}
_ANSWER_ADVANTAGES = {
    "igpo": "reward - group mean, plus how much likelier each turn makes the known answer",
}
_LOSSES = {
    "ppo_clip": "PPO's clipped ratio per token, with separate bounds and optional dual clip",
    "gspo": "the clipped ratio of whole sequences",
    "cispo": "clipped, constant importance weights times the log-probability",
    "sapo": "a soft gate on the ratio instead of a clip",
}
_TRUST_REGION_LOSSES = {
    "dppo_tv": "tokens outside of a trust region in probabilities are left out",
    "dppo_kl": "tokens outside of a trust region in binary KL are left out",
    "gmpo": "the geometric mean of a sequence's clipped ratios",
    "dro": "a quadratic penalty on log-ratios instead of clips",
    "gpg": "the log-probability times the advantage, without a ratio",
}
_COVARIANCE_LOSSES = {
    "clip_cov": "the clipped ratio, without some tokens of high covariance with the advantage",
    "kl_cov": "the ratio, with a KL penalty on tokens of high covariance with the advantage",
}
_WEIGHT_SYNCS = (
    ("in-process", "in_process:InProcessWeightSync", "copied by the engine in this process"),
    ("disk", "disk:DiskWeightSync", "safetensors files in a directory shared with the servers"),
    ("tensor", "tensor:TensorWeightSync", "in request bodies, as flat buckets"),
    ("distributed", "distributed:DistributedWeightSync", "broadcast over NCCL or gloo"),
    ("delta", "delta:DeltaWeightSync", "changed bytes, to a relay beside each server"),
    (
        "lora",
        "adapters:LoraWeightSync",
        "LoRA adapters under versioned names; the base model stays",
    ),
)


@hookimpl
def register_trainers() -> Iterable[TrainerSpec]:
    """Offer the trainer."""
    yield TrainerSpec(
        id="single",
        entry_point="areal_gym.trainer.trainer:Trainer",
        summary="one process, float32 master weights, packed micro-batches",
        requires=(*_REQUIRES, "matplotlib"),  # for the learning curve
        extra="train",
    )


@hookimpl
def register_advantage_estimators() -> Iterable[AdvantageSpec]:
    """Offer advantage estimators."""
    for module, summaries in (
        ("advantages", _ADVANTAGES),
        ("token_advantages", _TOKEN_ADVANTAGES),
        ("group_advantages", _GROUP_ADVANTAGES),
        ("anchor_advantages", _ANCHOR_ADVANTAGES),
        ("answer_advantages", _ANSWER_ADVANTAGES),
    ):
        for name, summary in summaries.items():
            path = f"areal_gym.trainer.algorithms.{module}:{name}"
            yield AdvantageSpec(
                id=name, entry_point=path, summary=summary, requires=_REQUIRES, extra="train"
            )


@hookimpl
def register_policy_losses() -> Iterable[PolicyLossSpec]:
    """Offer policy losses."""
    for module, summaries in (
        ("losses", _LOSSES),
        ("trust_region_losses", _TRUST_REGION_LOSSES),
        ("covariance_losses", _COVARIANCE_LOSSES),
    ):
        for name, summary in summaries.items():
            path = f"areal_gym.trainer.algorithms.{module}:{name}"
            yield PolicyLossSpec(
                id=name, entry_point=path, summary=summary, requires=_REQUIRES, extra="train"
            )


@hookimpl
def register_weight_syncs() -> Iterable[WeightSyncSpec]:
    """Offer weight syncs."""
    for name, path, summary in _WEIGHT_SYNCS:
        path = f"areal_gym.trainer.weight_sync.{path}"
        yield WeightSyncSpec(
            id=name, entry_point=path, summary=summary, requires=_REQUIRES, extra="train"
        )
