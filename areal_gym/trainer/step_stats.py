"""Sums over the updates of a step: metrics, tokens, padding, FLOPs and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_gym.models.device import device_name, peak_memory, reset_peak_memory
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.flops import peak_flops, training_flops
from areal_gym.models.policy_model import Shape
from areal_gym.trainer.algorithms.token_loss import Proximal
from areal_gym.trainer.batch.experience import TokenBatch
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks


class StepStats:
    """Counts the tokens and FLOPs of one step's micro-batches.

    Passes without a gradient (proximal policy, reference, critic's values) are not counted, because
    they are not part of the model's training FLOPs. `dtype` is that of matrix products: "bfloat16"
    or "float32".
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: str) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        self._counts: Counter[str] = Counter()
        reset_peak_memory(device)

    def add(self, batch: PackedBatch, num_trained: int) -> None:
        """Count a forward and backward pass of a micro-batch that trains `num_trained` tokens."""
        layers_by_window = Counter(self._shape.windows)
        num_seen_N = batch.positions_N + 1  # a token also attends to itself
        self._counts.update(
            micro_batches=1,
            tokens=len(num_seen_N),
            row_tokens=sum(len(index) for index in batch.row_index),
            slots=batch.num_query_slots,
            pairs=sum(
                num_layers * int(num_seen_N.clamp(1, window).sum())
                for window, num_layers in layers_by_window.items()
            ),
            trained=num_trained,
        )

    def metrics(self, seconds: float, ranks: Ranks = ALONE) -> dict[str, float]:
        """Return the metrics over all ranks; `seconds` is how long the step's training took."""
        counts = ranks.sum(self._counts)
        flops = training_flops(
            self._shape,
            num_tokens=counts["tokens"],
            num_pairs=counts["pairs"],
            num_logits=counts["trained"],
        )
        metrics = {
            "train/micro_batches": float(counts["micro_batches"]),
            "train/padding_fraction": 1 - counts["tokens"] / counts["slots"],
            "train/shared_fraction": 1 - counts["tokens"] / counts["row_tokens"],
            "train/tokens_per_s": counts["tokens"] / seconds,
            "train/model_tflops_per_s": flops / seconds / 1e12,
        }
        peak = peak_flops(device_name(self._device), self._dtype)
        if peak is not None:
            metrics["train/mfu"] = flops / seconds / (peak * ranks.size)
        if (memory := peak_memory(self._device)) is not None:
            allocated, reserved = memory
            metrics["memory/gpu_peak_mb"] = allocated / 1e6
            metrics["memory/gpu_reserved_mb"] = reserved / 1e6
        return metrics


_DRIFT_PARTS = ("adverse_drift", "advantage_size")


def drift_of(sums: Mapping[str, float]) -> float:
    """Return the drift of some tokens from sums over them; 0 if none of them has an advantage."""
    adverse, size = (sums.get(part, 0.0) for part in _DRIFT_PARTS)
    return adverse / size if size else 0.0


class Totals(dict[str, float]):
    """Sums of metrics over micro-batches, by name."""

    def add(self, name: str, values: Tensor, count: int = 1) -> None:
        """Add the sum of `values`, divided by `count`."""
        self[name] = self.get(name, 0.0) + float(values.detach().sum()) / count


class MeansByLag:
    """Means of a value per token, grouped by the token's staleness: 0 to 4, and 5 or more."""

    _MAX = 5

    def __init__(self) -> None:
        self._sums = torch.zeros(self._MAX + 1)
        self._counts = torch.zeros(self._MAX + 1)

    def add(self, lags_T: Tensor, values_T: Tensor) -> None:
        """Add the values of some tokens."""
        # After --from-step, the journal may hold groups of versions that are still to come.
        lags_T = lags_T.cpu().clamp(0, self._MAX)
        self._sums.index_add_(0, lags_T, values_T.cpu().float())
        self._counts += lags_T.bincount(minlength=self._MAX + 1)

    def metrics(self, prefix: str, ranks: Ranks = ALONE) -> dict[str, float]:
        """Return the means over all ranks, as `{prefix}{lag}`, for the lags that occur."""
        sums, counts = torch.stack(ranks.gather(torch.stack((self._sums, self._counts)))).sum(0)
        return {
            f"{prefix}{lag}{'+' if lag == self._MAX else ''}": float(sums[lag] / count)
            for lag, count in enumerate(counts.tolist())
            if count
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The batch of one step, and the sums over its updates."""

    rows: list[TokenSequence]
    columns: TokenBatch
    proximal: Proximal
    version: int
    staleness: float
    """The mean staleness of the batch's tokens, in versions."""
    num_updates: int
    work: StepStats
    lr_scales: list[float] = field(default_factory=list)
    """Factors of the learning rates in the updates so far."""
    update: Totals = field(default_factory=Totals)
    """Sums over this rank's micro-batches of the update under way."""
    totals: Totals = field(default_factory=Totals)
    """Sums over all ranks, of the updates that have ended."""
    by_lag: MeansByLag = field(default_factory=MeansByLag)
    gap_by_lag: MeansByLag = field(default_factory=MeansByLag)
    """|trainer's log-probability - recorded log-probability| in the first update."""
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    """Log-probabilities of this rank's rows, by row index, at the beginning of their own update."""

    def trajectory_lengths(self, members: Sequence[int]) -> Counter[int]:
        """Return how many tokens of each trajectory are trained in the rows `members`."""
        lengths_G: Counter[int] = Counter()
        for i in members:
            lengths_G[self.rows[i].trajectory_id] += self.rows[i].num_trainable
        return lengths_G

    def add(
        self,
        batch: PackedBatch,
        indexes: Sequence[int],
        logprobs_T: Tensor,
        metrics: Mapping[str, Tensor],
        *,
        num_tokens: int,
        is_first: bool,
    ) -> None:
        """Add a micro-batch.

        Args:
            batch: the packed rows.
            indexes: the rows' indexes in the step.
            logprobs_T: the policy's log-probabilities.
            metrics: values per token, [T], by name.
            num_tokens: tokens of the whole update, over which the metrics are means.
            is_first: whether this is the step's first update, in which the weights may be those
                that the engine sampled with.
        """
        self.work.add(batch, len(logprobs_T))
        for name, values_T in metrics.items():
            self.update.add(name, values_T, num_tokens)
        lengths = [self.rows[i].num_trainable for i in indexes]
        self.logprobs.update(zip(indexes, torch.split(logprobs_T, lengths), strict=True))
        lags_T = self.version - self.columns.take("versions", indexes)
        self.by_lag.add(lags_T, metrics["approx_kl"])
        if is_first:
            self.gap_by_lag.add(lags_T, (logprobs_T - self.columns.take("old", indexes)).abs())

    def end_update(self, ranks: Ranks) -> dict[str, float]:
        """Add the update's sums over all ranks to the step's, and return them."""
        sums = ranks.sum(self.update)
        self.update.clear()
        for name, value in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        return sums

    def metrics(self, ranks: Ranks, *, is_stale: bool) -> dict[str, float]:
        """Return the means over all ranks and updates."""
        metrics = {
            f"train/{name}": total / self.num_updates
            for name, total in self.totals.items()
            if name not in _DRIFT_PARTS
        }
        metrics["train/drift"] = drift_of(self.totals)
        if is_stale:
            metrics |= self.by_lag.metrics("train/approx_kl_stale", ranks)
        gaps = self.gap_by_lag.metrics("", ranks)
        if "0" in gaps:
            metrics["train/engine_gap"] = gaps["0"]
        return metrics


def router_agreement(agreed: int, recorded: int, ranks: Ranks = ALONE) -> dict[str, float]:
    """Return the share of the engine's experts that the trainer's routers choose as well.

    Returns {} if the batch has no record of experts. All ranks call this.
    """
    counts = ranks.sum({"agreed": agreed, "recorded": recorded})
    if not counts["recorded"]:
        return {}
    return {"train/router_agreement": counts["agreed"] / counts["recorded"]}


def expert_metrics(counts_LE: Tensor | None, ranks: Ranks = ALONE) -> dict[str, float]:
    """Return how evenly tokens were spread over the experts of a mixture; {} without experts.

    Args:
        counts_LE: this rank's tokens per layer and expert, [L, E].
        ranks: the ranks, all of which call this.
    """
    if counts_LE is None:
        return {}
    total_LE = torch.stack(ranks.gather(counts_LE.cpu())).sum(0).double()
    share_LE = total_LE / total_LE.sum(1, keepdim=True).clamp_min(1)
    return {
        "train/expert_load_max": float(share_LE.max(1).values.mean()) * total_LE.shape[1],
        "train/experts_idle": float((total_LE == 0).double().mean()),
    }
