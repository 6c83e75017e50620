"""The presets that define the algorithms, and the sections of the settings that they fill in.

A preset consists of an advantage estimator, a loss and further settings, and fills in those that
are not given. Each part can be replaced and then has its own defaults: `trainer.algorithm=dapo
trainer.loss=gspo` has DAPO's filter and GSPO's clips. `docs/algorithms.md` has the formulas and
papers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from areal_gym.config.settings_model import Settings
from areal_gym.errors import ConfigError


class CorrectionConfig(Settings):
    """Importance correction of tokens that an older policy sampled
    (`areal_gym.trainer.algorithms.corrections`)."""

    proximal: Literal["auto", "recomputed", "loglinear", "linear", "recorded"] = "auto"
    """The proximal policy: the policy at the beginning of the step, against which ratios are taken.
    "auto" recomputes it if a batch has stale tokens or if the engine's log-probabilities differ
    from the trainer's by more than a fifth of the clip; "recomputed" always does; "loglinear" and
    "linear" interpolate it; "recorded" uses the sampling policy instead, without correction."""
    level: Literal["token", "sequence"] = "token"
    """Weight each token by its own ratio, or a whole sequence by its `statistic`."""
    action: Literal["truncate", "mask"] = "truncate"
    """Truncate a weight to the bound, or mask its token or sequence."""
    upper: float | None = 5.0
    """Upper bound; null is none."""
    lower: float | None = None
    """Lower bound; null is none."""
    measure: Literal["ratio", "k1", "k2", "k3", "binary_kl"] = "ratio"
    """With "mask": the quantity that is compared with the bounds."""
    statistic: Literal["mean", "sum", "max"] = "mean"
    """With level "sequence": how its tokens' values are combined."""
    second_moment: float | None = Field(None, gt=0)
    """M2PO: mask the tokens that are furthest from the sampling policy until the mean of
    (old - prox)^2 is below this; null is off."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        others = self.model_copy(update={"proximal": "auto"})
        if self.proximal == "recorded" and others != CorrectionConfig():
            raise ValueError(
                'correction.proximal = "recorded" takes ratios against the sampling policy, '
                "without correction: the other settings of correction would be ignored"
            )
        if self.second_moment is not None and self.proximal in ("loglinear", "linear"):
            raise ValueError(
                "correction.second_moment compares all tokens of a batch, and "
                f'proximal = "{self.proximal}" sees one micro-batch at a time; use "auto"'
            )
        check_correction(
            self.level, self.action, self.upper, self.lower, self.measure, self.statistic
        )
        return self


class KlConfig(Settings):
    """The KL penalty against the reference policy, which is the run's initial policy, frozen."""

    coefficient: float = Field(0.0, ge=0)
    """Coefficient of the penalty; 0 is off, and no reference policy is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence (Schulman, "Approximating KL divergence")."""
    place: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from the tokens' rewards."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.estimator == "k1" and self.place == "loss" and self.coefficient:
            raise ValueError(
                "kl.estimator = 'k1' in the loss has a gradient whose mean is zero: noise, and no "
                "penalty; use kl.place=reward, or kl.estimator=k2 or k3"
            )
        return self


class RewardConfig(Settings):
    """Reward shaping before advantages: length and overlong penalty, (r + bias) * scale, clip."""

    length_penalty: float = Field(0.0, ge=0, lt=1)
    """The largest share of its reward that a right answer loses for being longer than the group's
    other right answers; wrong ones lose nothing. 0 is off."""
    right_reward: float = Field(1.0, gt=0)
    """For the length penalty: the reward from which an answer is right."""

    overlong_tail: float = Field(0.0, ge=0, le=1)
    """The overlong penalty begins in this last fraction of rollout.max_new_tokens and grows
    to its end, for the longest turn of a trajectory. 0 is off; DAPO has 0.2."""
    overlong_factor: float = Field(1.0, ge=0)
    """The overlong penalty of a turn that was cut off."""
    bias: float = 0.0
    """Added to each reward."""
    scale: float = 1.0
    """Factor of each reward, after the bias."""
    clip: float | None = Field(None, gt=0)
    """Rewards are clipped to +-clip; null is off."""


class CriticConfig(Settings):
    """The critic of estimators that need one (`gae`)."""

    trunk: Literal["own", "shared"] = "own"
    """"own" is a second decoder that starts as the policy; "shared" is a head on the policy."""
    lr_scale: float = Field(3.0, gt=0)
    """The critic's learning rate relative to the policy's."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of values in one step; null is off."""
    coefficient: float = Field(0.5, gt=0)
    """Coefficient of the value loss with a shared trunk."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings that an algorithm's name stands for."""

    summary: str
    advantage: str
    loss: str = "ppo_clip"
    settings: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Further settings below `trainer`."""
    filters: tuple[str, ...] = field(default=(), kw_only=True)
    """The value of `rollout.filters`."""
    refuses: tuple[str, ...] = field(default=(), kw_only=True)
    """Estimators that contradict the algorithm, and are refused with it."""

    def trainer(self) -> dict[str, Any]:
        """Return the settings below `trainer`."""
        tree = {"advantage": self.advantage, "loss": self.loss, "aggregation": "token_mean"}
        return tree | copy.deepcopy(dict(self.settings))


_SYMMETRIC = {"clip_low": 0.2, "clip_high": 0.2}
_CONSTANT = {"clip_low": None, "clip_high": None, "aggregation": "constant_length"}
_SEQUENCE = {"aggregation": "seq_mean"}
_KL_IN_REWARD = {"coefficient": 0.01, "estimator": "k1", "place": "reward"}
_FROM_SAMPLER = {"correction": {"proximal": "recorded"}}
_WITH_STD = ("grpo", "lite_ppo", "reinforce_pp", "reinforce_pp_baseline")

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        "reward against the siblings' mean and deviation, clipped ratios",
        "grpo",
        settings=_SYMMETRIC,
    ),
    "dr_grpo": Preset(
        "GRPO without its bias towards long answers and tasks of low variance",
        "dr_grpo",
        settings={**_SYMMETRIC, "aggregation": "constant_length"},
        refuses=_WITH_STD,
    ),
    "dapo": Preset(
        "GRPO with clip-higher, a filter for uninformative groups and an overlong penalty",
        "grpo",
        settings={"clip_low": 0.2, "clip_high": 0.28, "reward": {"overlong_tail": 0.2}},
        filters=("success-rate",),
    ),
    "gspo": Preset("one ratio per sequence", "grpo", "gspo", settings=_SEQUENCE),
    "ppo": Preset(
        "a critic, generalised advantages per token or turn, clipped ratios",
        "gae",
        settings={**_SYMMETRIC, "advantage_kwargs": {"is_normalised": True}},
    ),
    "rloo": Preset(
        "REINFORCE with the siblings' mean as baseline",
        "rloo",
        settings=_CONSTANT,
        refuses=_WITH_STD,
    ),
    "reinforce": Preset("the reward itself, nothing else", "reinforce", settings=_CONSTANT),
    "reinforce_pp": Preset(
        "returns normalised over the batch, KL in the reward; needs no groups",
        "reinforce_pp",
        settings={**_SYMMETRIC, "kl": _KL_IN_REWARD},
    ),
    "reinforce_pp_baseline": Preset(
        "reward against the siblings' mean, normalised over the batch, KL in the loss",
        "reinforce_pp_baseline",
        settings={**_SYMMETRIC, "kl": {"coefficient": 0.01, "estimator": "k2"}},
    ),
    "lite_ppo": Preset(
        "siblings' mean, deviation of the whole batch, token mean", "lite_ppo", settings=_SYMMETRIC
    ),
    "sapo": Preset(
        "a soft gate on the ratio instead of a clip", "grpo", "sapo", settings=_SEQUENCE
    ),
    "cispo": Preset("clipped weights that drop no token's gradient", "grpo", "cispo"),
    "m2po": Preset(
        "GRPO for very stale data: the tokens furthest from their policy are masked",
        "grpo",
        settings={**_SYMMETRIC, "correction": {"second_moment": 0.04}},
    ),
    "dppo": Preset(
        "a trust region in probabilities around the sampling policy: binary total variation",
        "grpo",
        "dppo_tv",
        settings={"clip_low": 0.15, "clip_high": 0.15, **_FROM_SAMPLER},
    ),
    "dppo_kl": Preset(
        "DPPO with the binary KL divergence",
        "grpo",
        "dppo_kl",
        settings={"clip_low": 0.05, "clip_high": 0.05, **_FROM_SAMPLER},
    ),
    "gmpo": Preset(
        "geometric mean of a sequence's clipped ratios",
        "grpo",
        "gmpo",
        settings={"clip_low": 0.4, "clip_high": 0.4, **_SEQUENCE},
    ),
    "clip_cov": Preset(
        "GRPO that cuts off some of the tokens that cost the most entropy; a wide clip",
        "grpo",
        "clip_cov",
        settings={"clip_low": 1.0, "clip_high": 1.0},
    ),
    "kl_cov": Preset(
        "a KL penalty on the tokens that cost the most entropy, and no clip",
        "grpo",
        "kl_cov",
        settings={"loss_kwargs": {"cov_fraction": 2e-3, "kl_coefficient": 1.0}},
    ),
    "gpg": Preset("plain policy gradient, scaled up where groups teach nothing", "gpg", "gpg"),
    "opo": Preset(
        "reward against the siblings' mean weighted by length; no clip",
        "opo",
        settings={"clip_low": None, "clip_high": None},
        refuses=_WITH_STD,
    ),
    "pass_at_k": Preset(
        "for the best of a group: its lead over the second best",
        "pass_at_k",
        settings=_SYMMETRIC,
    ),
    "gdpo": Preset(
        "each part of the reward normalised by itself, then their sum over the batch",
        "gdpo",
        settings=_SYMMETRIC,
    ),
    "concise": Preset(
        "GRPO with a length penalty for right answers only",
        "grpo",
        settings={**_SYMMETRIC, "reward": {"length_penalty": 0.3}},
    ),
    "rae": Preset(
        "reward against the running mean of the role, for games; no clip",
        "rae",
        settings={"clip_low": None, "clip_high": None},
    ),
    "gigpo": Preset(
        "GRPO, plus what each turn's return is against those from the same state",
        "gigpo",
        settings=_SYMMETRIC,
    ),
    "igpo": Preset(
        "GRPO, plus how much likelier each turn makes the known answer",
        "igpo",
        settings=_SYMMETRIC,
    ),
    "dro": Preset("a quadratic penalty on log-ratios instead of clips", "grpo", "dro"),
}

_COMPARE_SIBLINGS = frozenset(
    {
        *("grpo", "dr_grpo", "rloo", "lite_ppo", "reinforce_pp_baseline"),
        *("opo", "gpg", "pass_at_k", "gdpo", "gigpo", "igpo"),
    }
)


def compares_siblings(advantage: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a built-in estimator compares siblings, so a group of one has advantage 0."""
    if advantage == "per_turn":
        advantage = str(kwargs.get("baseline", "grpo"))  # a wrong value is refused later
    return advantage in _COMPARE_SIBLINGS


def check_correction(
    level: str, action: str, upper: float | None, lower: float | None, measure: str, statistic: str
) -> None:
    """Raise ConfigError for bounds that allow nothing and for settings that contradict."""
    if action == "truncate" and measure != "ratio":
        raise ConfigError(
            f"measure = {measure!r} cannot truncate: its bounds are not bounds of the weight; "
            "use action=mask"
        )
    if statistic != "mean" and (level, action) != ("sequence", "mask"):
        raise ConfigError(
            f"statistic = {statistic!r} applies only to masks of sequences; use "
            "level=sequence action=mask"
        )
    if upper is not None and lower is not None and lower >= upper:
        raise ConfigError(f"lower = {lower} must be below upper = {upper}")
    if measure == "ratio" and upper is not None and upper <= 0:
        raise ConfigError(f"upper = {upper} must be above 0: weights are positive")
    if action == "mask" and upper is None and lower is None:
        raise ConfigError("action = 'mask' without bounds masks nothing; give upper or lower")
