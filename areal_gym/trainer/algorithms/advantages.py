"""Advantage estimators: pure functions of rewards and group ids, in float64 on the CPU.

Each takes `rewards_G` [G] and `group_ids_G` [G] (siblings; groups may be ragged) and gives
`advantages_G` [G], one number for all policy tokens of a trajectory. It may name further fields of
`AdvantageInputs` as keyword-only arguments; one that names an input per token, `..._T`, gives an
advantage per token, [T]. `estimate` calls either kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_gym.config.argument_values import fitting_values
from areal_gym.errors import ConfigError, NotFiniteError, TrainError, did_you_mean
from areal_gym.trainer.algorithms.advantage_inputs import AdvantageInputs, TrajectoryInputs

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "Advantages",
    "check_settings",
    "dr_grpo",
    "estimate",
    "estimate_trajectories",
    "gives_token_advantages",
    "grpo",
    "lite_ppo",
    "needs_answer_probs",
    "needs_critic",
    "needs_past_mean",
    "needs_roles",
    "normalise",
    "reinforce",
    "reinforce_baseline",
    "require_finite",
    "returns_to_go",
    "rloo",
    "takes_teacher",
    "takes_tokens",
]

AdvantageEstimator = Callable[..., Any]
"""Returns a tensor, or `Advantages` with the critic's targets."""

EPS = 1e-6
"""Added to the standard deviation of a group."""
WHITENING_EPS = 1e-8
"""Added to the variance of a whole batch: verl's number."""


_INPUTS = {field.name for field in fields(AdvantageInputs)} - {"penalties_T"}
"""The inputs that estimators may name as parameters."""


_ABSENT = {
    "values_T": "trainer has no critic",
    "final_values_G": "trainer has no critic",
    "teacher_logprobs_T": "batch has no teacher",
    "role_means_G": "batch has no roles",
    "answer_probs_T": "batch has no probabilities of answers",
}
"""The reasons why an input is not there."""


class Advantages(NamedTuple):
    """Advantages and returns, both [T]."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    """Targets of the critic; None from estimators without a critic."""


def estimate(estimator: AdvantageEstimator, inputs: AdvantageInputs, **settings: Any) -> Advantages:
    """Call an estimator of either kind on the whole batch; return an advantage per policy token.

    Raises:
        ConfigError: a setting that it does not have, or an input that this batch does not hold.
        TrainError: it gave numbers of another shape.
        NotFiniteError: rewards or other inputs are not finite, or what it gave is not.
    """
    if inputs.penalties_T is not None:
        inputs = replace(inputs, rewards_T=inputs.rewards_T - inputs.penalties_T)
    result = _call(estimator, inputs, settings)
    if not takes_tokens(estimator):
        result = Advantages(result.advantages_T[inputs.trajectory_ids_T])
    if inputs.penalties_T is not None and "rewards_T" not in _keywords(estimator):
        to_go_T = _sums_to_go(inputs.penalties_T, inputs.trajectory_ids_T)
        result = result._replace(advantages_T=result.advantages_T - to_go_T)
    return result


def estimate_trajectories(
    estimator: AdvantageEstimator, inputs: TrajectoryInputs, **settings: Any
) -> Tensor:
    """Call an estimator that takes no tokens; return an advantage per trajectory, [G].

    Raises:
        GymError: what `estimate` raises.
    """
    return _call(estimator, inputs, settings).advantages_T


def _call(
    estimator: AdvantageEstimator, inputs: TrajectoryInputs, settings: Mapping[str, Any]
) -> Advantages:
    """Return what the estimator gives, per token or per trajectory, once both sides are checked."""
    name, keywords = _name(estimator), _keywords(estimator)
    settings = check_settings(estimator, settings)
    further = _INPUTS & keywords.keys()
    given = {key: value for key in further if (value := getattr(inputs, key)) is not None}
    require_finite(name, rewards_G=inputs.rewards_G, **given)
    for key in sorted(further - given.keys()):
        if keywords[key].default is inspect.Parameter.empty:
            reason = _ABSENT.get(key, "batch has none")
            raise ConfigError(
                f"the advantage estimator {name} needs {key}, but the {reason}",
                hints=["trainer.advantage=grpo needs none"],
            )
    output = estimator(inputs.rewards_G, inputs.group_ids_G, **given, **settings)
    result = output if isinstance(output, Advantages) else Advantages(output)
    unit, expected = "trajectory", tuple(inputs.rewards_G.shape)
    if takes_tokens(estimator):
        assert isinstance(inputs, AdvantageInputs)
        unit, expected = "policy token", tuple(inputs.rewards_T.shape)
    if (shape := tuple(result.advantages_T.shape)) != expected:
        raise TrainError(
            f"the advantage estimator {name} gave advantages of shape {shape}, "
            f"not one per {unit}: {expected}",
            hints=["it gives one per token when it names an input per token, such as rewards_T"],
        )
    if not result.advantages_T.isfinite().all():
        raise NotFiniteError(f"the advantage estimator {name} gave advantages that are not finite")
    return result


def require_finite(name: str, **inputs: Tensor | Mapping[str, Tensor] | None) -> None:
    """Refuse NaN, which compares false: a group with NaN would count as one of equal rewards.

    Raises:
        NotFiniteError: names the input and counts its invalid values.
    """
    named: dict[str, Tensor | None] = {}
    for key, given in inputs.items():
        if isinstance(given, Mapping):
            named |= {f"{key}[{part!r}]": values for part, values in given.items()}
        else:
            named[key] = given
    for key, values in named.items():
        if values is not None and not bool((is_finite := values.isfinite()).all()):
            num = int((~is_finite).sum())
            raise NotFiniteError(
                f"the advantage estimator {name} was given {key} of which {num} of "
                f"{values.numel()} are not finite",
                hints=["a reward model or a reward function that divides by 0 gives such numbers"],
            )


def check_settings(estimator: AdvantageEstimator, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the types of the estimator's annotations.

    Raises:
        ConfigError: a setting that the estimator does not have, or a value that does not fit it.
    """
    own = sorted(_keywords(estimator).keys() - _INPUTS)
    for key in settings:
        if key not in own:
            near = did_you_mean(key, own)
            raise ConfigError(
                f"the advantage estimator {_name(estimator)} takes no setting {key!r}",
                hints=[near] if near else [f"it takes: {', '.join(own) or 'none'}"],
            )
    return fitting_values(estimator, settings, key="trainer.advantage_kwargs")


def needs_past_mean(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator compares with the rewards of earlier steps."""
    return "past_mean" in _keywords(estimator)


def needs_roles(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator compares with the earlier rewards of each role."""
    return "role_means_G" in _keywords(estimator)


def needs_answer_probs(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator compares turns by the probability of the known answer."""
    return "answer_probs_T" in _keywords(estimator)


def takes_teacher(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator uses a teacher's log-probabilities."""
    return "teacher_logprobs_T" in _keywords(estimator)


def needs_critic(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator needs a critic's predictions."""
    parameter = _keywords(estimator).get("values_T")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def takes_tokens(estimator: AdvantageEstimator) -> bool:
    """Return whether the estimator names an input per token, and so gives advantages per token."""
    return bool(_token_inputs(estimator))


def gives_token_advantages(estimator: AdvantageEstimator) -> bool:
    """Return whether advantages may differ within a trajectory: the estimator works on tokens."""
    # The trajectory's number says nothing about the token itself.
    return bool(_token_inputs(estimator) - {"trajectory_ids_T"})


def grpo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """Compute (r - mean) / (std + 1e-6) per group (Shao et al. 2024, DeepSeekMath, section 4.1.2).

    The standard deviation is the unbiased one. A group of equal rewards gets exactly 0.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = centred(rewards_G, group_ids_G, "grpo")
    squares = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index_G, centred_G**2)
    std_G = (squares / (counts - 1)).sqrt()[index_G]
    return torch.where(std_G > 0, centred_G / (std_G + EPS), torch.zeros_like(centred_G))


def dr_grpo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """Compute r - mean per group, without the standard deviation (Liu et al. 2025, Dr. GRPO).

    Its loss is aggregated with a constant length: `trainer.aggregation=constant_length`.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    return centred(rewards_G, group_ids_G, "dr_grpo")[0]


def rloo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """Compute r - mean of the other members of the group (Ahmadian et al. 2024, eq. 8).

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, index_G, counts = centred(rewards_G, group_ids_G, "rloo")
    counts_G = counts[index_G]
    return centred_G * counts_G / (counts_G - 1)


def lite_ppo(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """Compute (r - group mean) / (batch std + 1e-6) (Liu et al. 2025, Lite PPO).

    The deviation is the unbiased one of what is divided, r - group mean over the batch: how hard
    its tasks are does not change it. A group of equal rewards gets exactly 0.

    Raises:
        ConfigError: a group has fewer than two members.
    """
    centred_G, _, _ = centred(rewards_G, group_ids_G, "lite_ppo")
    return centred_G / (centred_G.std() + EPS) if len(centred_G) else centred_G


def reinforce(rewards_G: Tensor, group_ids_G: Tensor) -> Tensor:
    """Return the reward itself (Williams 1992), without a baseline and without groups."""
    require_finite("reinforce", rewards_G=rewards_G)
    return rewards_G.to("cpu", torch.float64)


def reinforce_baseline(
    rewards_G: Tensor, group_ids_G: Tensor, *, past_mean: Tensor | None = None
) -> Tensor:
    """Compute r - running mean of earlier rewards (Williams 1992, reinforcement comparison).

    The baseline does not depend on the batch, so the gradient stays unbiased; needs no groups. At
    the first step there is none.
    """
    require_finite("reinforce_baseline", rewards_G=rewards_G, past_mean=past_mean)
    rewards_G = rewards_G.to("cpu", torch.float64)
    return rewards_G if past_mean is None else rewards_G - past_mean


def returns_to_go(turn_rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """Compute R_k = r_k + discount R_{k+1} for each turn of one trajectory."""
    backwards = accumulate(reversed(turn_rewards), lambda later, reward: reward + discount * later)
    return list(backwards)[::-1]


def normalise(values_T: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(var + 1e-8), unbiased, as verl; equal values give exactly 0."""
    require_finite("normalise", values_T=values_T)
    values_T = values_T.to("cpu", torch.float64)
    if not len(values_T) or bool((values_T == values_T[0]).all()):
        return torch.zeros_like(values_T)
    return (values_T - values_T.mean()) / (values_T.var() + WHITENING_EPS).sqrt()


def _sums_to_go(values_T: Tensor, trajectory_ids_T: Tensor) -> Tensor:
    """Sum over each token and all later tokens of its trajectory."""
    sums_T = values_T.cumsum(0)
    _, counts = torch.unique_consecutive(trajectory_ids_T, return_counts=True)
    last_T = (counts.cumsum(0) - 1).repeat_interleave(counts)
    return sums_T[last_T] - sums_T + values_T


def _keywords(estimator: AdvantageEstimator) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(estimator).parameters
    return {key: p for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _token_inputs(estimator: AdvantageEstimator) -> set[str]:
    return {name for name in _INPUTS & _keywords(estimator).keys() if name.endswith("_T")}


def _name(estimator: AdvantageEstimator) -> str:
    return getattr(estimator, "__name__", type(estimator).__name__)


def centred(rewards_G: Tensor, group_ids_G: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return r - group mean [G], each member's group index [G], and the group sizes [groups]."""
    require_finite(name, rewards_G=rewards_G)
    rewards_G = rewards_G.to("cpu", torch.float64)
    _, index_G, counts = torch.unique(
        group_ids_G.to("cpu"), return_inverse=True, return_counts=True
    )
    if len(counts) and int(counts.min()) < 2:
        raise ConfigError(
            f"{name} compares siblings, and a group has only one member",
            hints=["rollout.min_group_size=2 drops such groups", "or trainer.advantage=reinforce"],
        )
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index_G, rewards_G)
    centred_G = rewards_G - (sums / counts)[index_G]
    # Equal rewards must give exactly 0, whatever rounding made of their mean.
    high = torch.full_like(sums, -torch.inf).scatter_reduce(0, index_G, rewards_G, "amax")
    low = torch.full_like(sums, torch.inf).scatter_reduce(0, index_G, rewards_G, "amin")
    is_flat_G = (high == low)[index_G]
    return centred_G.masked_fill(is_flat_G, 0.0), index_G, counts
