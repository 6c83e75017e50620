"""The loss of each token: policy loss and KL, weighted by the policy's distance.

    w (policy loss + kl.coefficient * KL(policy || reference))

w is 1 where nothing is stale, and the constant weight of `corrections.correct` where something is;
for losses that are `weighted_by_sequence`, its geometric mean over the sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import CorrectionConfig
from areal_gym.config.argument_values import fitting_values
from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.trainer.algorithms.advantages import AdvantageEstimator, gives_token_advantages
from areal_gym.trainer.algorithms.corrections import correct, interpolate_proximal
from areal_gym.trainer.algorithms.losses import (
    LossInputs,
    LossOutput,
    PolicyLoss,
    batch_pass,
    has_sequence_weights,
)
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS, adverse_drift, k3, sequence_weights
from areal_gym.trainer.batch.experience import TokenBatch

Proximal = Literal["recorded", "scored", "current", "loglinear", "linear"]
"""The source of the proximal policy's log-probabilities."""


def proximal_source(
    correction: CorrectionConfig, *, is_stale: bool, num_updates: int, engine_rounds: bool = False
) -> Proximal:
    """Return the source of the proximal log-probabilities; "recorded" corrects nothing.

    `is_stale`: the batch holds tokens of an older policy. `engine_rounds`: the engine's
    log-probabilities differ from the trainer's by so much that the loss's clip would see it
    (`narrowest_clip`): "auto" recomputes then, too.
    """
    wanted = correction.proximal
    needs_recomputing = wanted == "recomputed" or (wanted == "auto" and engine_rounds)
    if wanted == "recorded" or not (is_stale or needs_recomputing):
        return "recorded"
    if correction.second_moment is not None:
        return "scored"
    if num_updates == 1:
        return "current"  # the one update of a step begins at the weights of the proximal policy
    return wanted if wanted == "loglinear" or wanted == "linear" else "scored"


class TokenLoss:
    """Computes the loss of the tokens of some rows. Its columns are `old`, `versions`, `advantages`
    and, if needed, `proximal`, `kept` (M2PO's mask), `picked` (by the loss's batch pass) and
    `reference`.

    Raises:
        ConfigError: arguments that the policy loss does not take.
    """

    def __init__(self, loss: PolicyLoss, config: TrainerConfig) -> None:
        self._loss = loss
        self._batch_pass = batch_pass(loss)
        self._kwargs = loss_arguments(loss, config)
        self._kl = config.kl
        self._correction = config.correction.model_dump(exclude={"proximal", "second_moment"})

    @property
    def has_batch_pass(self) -> bool:
        """Whether the loss needs `pick` before the micro-batches of an update."""
        return self._batch_pass is not None

    def __call__(
        self,
        logprobs_T: Tensor,
        columns: TokenBatch,
        indexes: list[int],
        *,
        proximal: Proximal,
        version: int,
    ) -> LossOutput:
        """Return the loss of each token of the rows `indexes`, and metrics.

        `logprobs_T` are the trained policy's, with gradient; `columns` hold the numbers of all
        rows; `version` is that of the weights at the step's beginning.
        """
        inputs = self._inputs(logprobs_T, columns, indexes, proximal, version)
        old_T, now_T = inputs.old_logprobs, logprobs_T.detach()
        output = self._loss(inputs, **self._kwargs)
        # The tokens are the old policy's, so `approx_kl` is the divergence *from* it.
        loss_T, metrics = output.loss, {**output.metrics, "approx_kl": k3(old_T, now_T)}
        metrics["adverse_drift"] = adverse_drift(now_T, old_T, inputs.advantages)
        metrics["advantage_size"] = inputs.advantages.abs()
        if "reference" in columns:
            reference_T = columns.take("reference", indexes)
            metrics["kl_reference"] = k3(now_T, reference_T)
            if self._kl.place == "loss":
                kl_T = KL_ESTIMATORS[self._kl.estimator](logprobs_T, reference_T)
                loss_T = loss_T + self._kl.coefficient * kl_T
        if proximal != "recorded":
            correction = correct(inputs.proximal, old_T, inputs.sequence_ids, **self._correction)
            weights_T = correction.weights
            if has_sequence_weights(self._loss):
                weights_T = sequence_weights(weights_T, inputs.sequence_ids)
            metrics |= correction.metrics
            if "kept" in columns:
                kept_T = columns.take("kept", indexes)
                weights_T = weights_T * kept_T
                metrics["kept_fraction"] = kept_T
            loss_T = weights_T * loss_T
        return LossOutput(loss=loss_T, metrics=metrics)

    def pick(
        self,
        logprobs_T: Tensor,
        columns: TokenBatch,
        indexes: list[int],
        *,
        proximal: Proximal,
        version: int,
    ) -> Tensor:
        """Return the tokens that the batch pass of the loss picks of all rows of an update, [T].

        `logprobs_T` are the policy's before the update, of all tokens of the rows `indexes`.
        """
        assert self._batch_pass is not None
        inputs = self._inputs(logprobs_T, columns, indexes, proximal, version)
        return self._batch_pass(inputs, **self._kwargs)

    def _inputs(
        self,
        logprobs_T: Tensor,
        columns: TokenBatch,
        indexes: list[int],
        proximal: Proximal,
        version: int,
    ) -> LossInputs:
        return LossInputs(
            logprobs=logprobs_T,
            proximal=self._proximal(proximal, logprobs_T.detach(), columns, indexes, version),
            old_logprobs=columns.take("old", indexes),
            advantages=columns.take("advantages", indexes),
            sequence_ids=columns.row_ids(indexes),
            picked=columns.take("picked", indexes) if "picked" in columns else None,
        )

    def _proximal(
        self, source: Proximal, now_T: Tensor, columns: TokenBatch, indexes: list[int], version: int
    ) -> Tensor:
        if source == "current":
            return now_T
        if source in ("recorded", "scored"):
            return columns.take("old" if source == "recorded" else "proximal", indexes)
        return interpolate_proximal(
            now_T,
            columns.take("old", indexes),
            columns.take("versions", indexes),
            proximal_version=version,
            current_version=version + 1,
            kind="linear" if source == "linear" else "loglinear",
        )


def try_loss(loss: PolicyLoss, config: TrainerConfig) -> None:
    """Call the loss with one token, so that errors in its settings appear before any episode.

    Raises:
        ConfigError: arguments that the policy loss does not take, or does not like.
    """
    _tried(loss, config, [0.0])


def check_credit(loss: PolicyLoss, advantage: AdvantageEstimator, config: TrainerConfig) -> None:
    """Refuse a loss level that averages out an estimator's per-token advantages.

    That is tried out: the loss's gradient, on policy, does not change when the two tokens of a
    sequence swap their advantages.

    Raises:
        ConfigError: the loss has one advantage per sequence, the estimator one per token or turn.
    """
    is_per_token = gives_token_advantages(advantage)
    has_token_costs = config.kl.coefficient > 0 and config.kl.place == "reward"
    if not (is_per_token or has_token_costs):
        return
    tries = (_tried(loss, config, advantages) for advantages in ([3, 1], [1, 3], [1, 1]))
    gradient, swapped, other = (
        torch.autograd.grad(loss_T.sum(), logprobs_T)[0] for logprobs_T, loss_T in tries
    )
    if not torch.equal(gradient, swapped) or torch.equal(gradient, other):
        return  # the last: a loss that looks at no advantage loses none
    loss_name = getattr(loss, "__name__", config.loss)
    name = getattr(advantage, "__name__", config.advantage)
    source = f"trainer.advantage = {name!r}" if is_per_token else "trainer.kl.place = 'reward'"
    hints = ["or an advantage per sequence: trainer.advantage=grpo, trainer.kl.place=loss"]
    if "level" in inspect.signature(loss).parameters:
        hints.insert(0, "an advantage for each token: trainer.loss_kwargs.level=token")
    raise ConfigError(
        f"trainer.loss = {loss_name!r} gives all tokens of a sequence one advantage, their mean, "
        f"and {source} gives each token its own: the credit of single turns would be lost",
        hints=hints,
    )


def _tried(
    loss: PolicyLoss, config: TrainerConfig, advantages: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and losses of the tokens of one sequence, on policy."""
    known_T = torch.full((len(advantages),), -1.0)
    logprobs_T = known_T.clone().requires_grad_(True)
    output = loss(
        LossInputs(
            logprobs=logprobs_T,
            proximal=known_T,
            old_logprobs=known_T,
            advantages=torch.tensor(advantages, dtype=torch.float32),
            sequence_ids=torch.zeros(len(advantages), dtype=torch.long),
        ),
        **loss_arguments(loss, config),
    )
    return logprobs_T, output.loss


def narrowest_clip(loss: PolicyLoss, config: TrainerConfig) -> float | None:
    """Return the distance from 1 of the nearer bound of the loss's clip; None without a clip."""
    parameters = inspect.signature(loss).parameters
    arguments = loss_arguments(loss, config)
    bounds = [
        arguments.get(name, parameters[name].default)
        for name in ("clip_low", "clip_high")
        if name in parameters
    ]
    return min((bound for bound in bounds if isinstance(bound, int | float)), default=None)


def loss_arguments(loss: PolicyLoss, config: TrainerConfig) -> dict[str, Any]:
    """Return the settings as keyword arguments of the loss, with the clips if it takes them.

    Raises:
        ConfigError: `loss_kwargs` names an argument that the loss does not have, or gives one a
            value that does not fit it.
    """
    parameters = inspect.signature(loss).parameters
    takes = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in config.loss_kwargs:
        if name not in takes:
            near = did_you_mean(name, takes)
            raise ConfigError(
                f"the loss {config.loss!r} takes no argument {name!r}",
                hints=[near] if near else [f"it takes: {', '.join(takes) or 'none'}"],
            )
    # The loss's own default matters: 0.2 is a sensible clip for a token's ratio, not a sequence's.
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    given = {name: v for name, v in clips.items() if name in takes and v != "default"}
    return {**given, **fitting_values(loss, config.loss_kwargs, key="trainer.loss_kwargs")}
