"""What the updates of a step amount to: tokens, padding, operations, memory."""

from __future__ import annotations

from collections import Counter

import torch

from areal_gym.models.flops import peak_flops, training_flops
from areal_gym.models.policy_model import Shape
from areal_gym.trainer.batch.packing import PackedBatch
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks


class StepStats:
    """Counts the micro-batches of one step.

    Passes without a gradient (proximal policy, reference, critic's values) are not counted: they
    take time, but what they compute is not what the model needs to learn.

    Args:
        shape: of the policy.
        device: where it is trained.
        dtype: what it is computed in: "bfloat16" or "float32".
    """

    def __init__(self, shape: Shape, device: torch.device, dtype: str) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        self._counts: Counter[str] = Counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def add(self, batch: PackedBatch, num_trained: int) -> None:
        """Count a micro-batch that goes forward and backward and trains `num_trained` tokens."""
        layers_by_window = Counter(self._shape.windows)
        num_seen_N = batch.positions_N + 1  # a token sees itself, too
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
        """What it comes to, all ranks together, for a step whose training took so many seconds."""
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
        if self._device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(self._device), self._dtype)
            if peak is not None:
                metrics["train/mfu"] = flops / seconds / (peak * ranks.size)
            allocated = torch.cuda.max_memory_allocated(self._device)
            metrics["memory/gpu_peak_mb"] = allocated / 1e6
            metrics["memory/gpu_reserved_mb"] = torch.cuda.memory_reserved(self._device) / 1e6
        return metrics
