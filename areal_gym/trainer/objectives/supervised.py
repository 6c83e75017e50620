"""Trains on fixed data with an objective.

    examples -> [micro-batch -> objective -> backward] -> update

An objective gives one loss per unit (a token, a pair). The loss of a batch is their mean, exactly,
however the batch is split into micro-batches and over ranks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.bins import Row, best_fit, split_by_patches
from areal_gym.trainer.batch.examples import Example, example_tokens, pack_examples
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.out_of_memory import readable_memory_errors
from areal_gym.trainer.parallel.fsdp import autocast, drop_gathered, reducing_once
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.policy_trainer import PolicyTrainer
from areal_gym.trainer.step_profiler import profiled

Freeze = Callable[[PolicyModel | Path], PolicyModel]
"""Returns a frozen policy, loaded if it is given as a directory, beside the one in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The losses and metrics of some examples."""

    loss_U: Tensor
    """One loss per unit, [U], with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """One number per token, row or example, by name; their means are reported."""


class Objective(ABC):
    """An objective on fixed data. Each example is judged by itself."""

    heads: Sequence[str] = ()
    """Modules of the decoder with fresh weights, which are trained beside an adapter, too."""

    has_batch_mean: bool = False
    """Whether the objective first needs the mean of `batch_values` over the whole batch."""
    batch_mean: float = 0.0
    """That mean, of the current batch."""

    def batch_values(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Tensor:
        """Return a number per example whose mean the objective needs; called without gradient."""
        raise NotImplementedError

    def prepare(self, freeze: Freeze) -> None:  # noqa: B027
        """Load other policies that the objective needs, with `freeze`."""

    @abstractmethod
    def num_units(self, example: Example) -> int:
        """Return the number of losses of an example."""

    @abstractmethod
    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute losses and metrics of the examples whose rows, in order, make up `batch`."""


class Sft(Objective):
    """Computes -log p(y_t | y_<t) of each marked token; a batch's loss is the mean over its tokens.

    Maximum likelihood, as in Ouyang et al. 2022 (InstructGPT), section 3.5. An example is one row.

    Metrics: `accuracy`, the share of tokens that were the likeliest; `exact`, the share of examples
    whose tokens all were.
    """

    def num_units(self, example: Example) -> int:
        """Return the number of marked tokens."""
        return sum(row.num_marked for row in example)

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute the loss of each marked token, and the metrics."""
        masks = [row.mask for rows in examples for row in rows]
        scores = score_tokens(decoder, batch, masks)
        is_right_T = scores.is_likeliest
        lengths = [self.num_units(example) for example in examples]
        return Judgement(
            loss_U=-scores.logprobs,
            metrics={
                "accuracy": is_right_T,
                "exact": torch.stack([part.all() for part in torch.split(is_right_T, lengths)]),
            },
        )


class Supervised(PolicyTrainer):
    """Trains a decoder or a reward model on fixed data.

    The weights of `decoder` are the float32 master weights and are updated in place; each rank gets
    the whole weights.

    Raises:
        ConfigError: the weights are not float32, or `trainer.lora` does not fit the model.
    """

    def __init__(
        self,
        decoder: PolicyModel,
        config: TrainerConfig,
        *,
        objective: Objective,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(decoder, config, ranks)
        self._objective = objective
        objective.prepare(self._frozen)
        self._prepare_training(objective.heads)

    @profiled
    @readable_memory_errors()
    def step(
        self, batch: Sequence[Example], version: int = 0, *, scale: float = 1.0
    ) -> dict[str, float]:
        """Train once on a batch and return its metrics from before the update.

        `scale` multiplies the learning rates, in addition to `warmup_steps`; `version` is ignored.

        Raises:
            NotFiniteError: the loss or its gradient was not finite several times in a row.
            TrainError: memory is too small.
        """
        start_s = time.perf_counter()
        scale *= self._lr_scale()
        metrics = {f"train/{k}": v for k, v in self._measure_examples(batch, learns=True).items()}
        is_finite = math.isfinite(metrics["train/loss"])
        norm = self._optimizer.step(scale, is_usable=is_finite)
        is_applied = self._note_update(
            norm,
            is_loss_finite=is_finite,
            hints=["--resume begins with the same batch, which depends on seed and step"],
        )
        self.num_steps += 1
        return metrics | {
            "train/grad_norm": norm,
            "train/lr": self.config.lr * scale,
            "train/skipped_updates": float(not is_applied),
            "train/tokens": float(sum(len(row.token_ids) for rows in batch for row in rows)),
            "time/train_s": time.perf_counter() - start_s,
        }

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the loss and the objective's metrics on held-out examples."""
        return self._measure_examples(examples, learns=False)

    def _measure_examples(self, examples: Sequence[Example], *, learns: bool) -> dict[str, float]:
        num_units = sum(self._objective.num_units(example) for example in examples)
        totals: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        if self._objective.has_batch_mean:
            self._objective.batch_mean = self._batch_mean(examples)
        passes = self._microbatches(examples)
        has_images = any(row.images for example in examples for row in example)  # of any rank
        for part, is_mine in reducing_once(passes, self.config, self.decoder) if learns else passes:
            with autocast(self._device, self.config):
                batch = pack_examples(part, self._device, has_images=has_images)
                judgement = self._objective(self.decoder, batch, part)
            if learns:
                # Gradients are averaged over the ranks; each data rank has a part of the loss.
                share = self._ranks.num_data_ranks if is_mine else 0
                (judgement.loss_U.sum() / num_units * share).backward()
            if is_mine:
                for name, values in {"loss": judgement.loss_U, **judgement.metrics}.items():
                    totals[name] += float(values.detach().sum())
                    counts[name] += len(values)
        if not learns:
            drop_gathered(self.decoder)
        sums, numbers = self._ranks.sum(totals), self._ranks.sum(counts)
        return {name: total / max(numbers[name], 1) for name, total in sums.items()}

    @torch.no_grad()
    def _batch_mean(self, examples: Sequence[Example]) -> float:
        total = 0.0
        for part, is_mine in self._microbatches(examples):
            with autocast(self._device, self.config):
                batch = pack_examples(part, self._device)
                values_P = self._objective.batch_values(self.decoder, batch, part)
            total += float(values_P.sum()) if is_mine else 0.0
        drop_gathered(self.decoder)
        return self._ranks.sum({"total": total})["total"] / len(examples)

    def _microbatches(self, examples: Sequence[Example]) -> Iterator[tuple[list[Example], bool]]:
        """Yield the micro-batches of this rank's share, and whether each counts."""
        costs = [example_tokens(example) for example in examples]
        mine = self._ranks.share(range(len(examples)), costs)
        bins = best_fit([costs[i] for i in mine], self.config.tokens_per_microbatch)
        image_rows = [
            Row(token_ids=(), images=tuple(image for row in example for image in row.images))
            for example in examples
        ]
        most = self.config.patches_per_microbatch
        full = ([mine[j] for j in part] for part in bins)
        microbatches = [part for bin_ in full for part in split_by_patches(image_rows, bin_, most)]
        spare = min(range(len(examples)), key=lambda i: costs[i])
        for indexes, is_mine in self._ranks.equal_passes(microbatches, spare):
            yield [examples[i] for i in indexes], is_mine
