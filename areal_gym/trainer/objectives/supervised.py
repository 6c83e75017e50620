"""A trainer for objectives on fixed data: examples in, updated weights out.

    examples -> [micro-batch -> objective -> backward] -> update

An objective gives one loss for each of its units (a token, a pair). The loss of a batch is their
mean, exactly, however the batch is split. Alone, or as one of several ranks, each of which is given
the whole batch and passes its share of it.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, NotFiniteError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.batch.bins import best_fit
from areal_gym.trainer.batch.examples import Example, example_tokens, pack_examples
from areal_gym.trainer.batch.packing import PackedBatch
from areal_gym.trainer.lora import add_adapter, merged_weights
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.out_of_memory import readable_memory_errors
from areal_gym.trainer.parallel.fsdp import drop_gathered, full, prepare_decoder
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.states import StateFiles, below, prefixed, room_for, saved_tensors

_MAX_BAD_UPDATES = 3
"""Updates in a row without a finite loss and gradient after which training stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What an objective says of some examples."""

    loss_U: Tensor
    """Of each unit, with gradient."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """By name, one number each for whatever they are about; their means are shown."""


class Objective(ABC):
    """What is learned from fixed data. Examples are judged one by one: none sees another."""

    heads: Sequence[str] = ()
    """Modules of the decoder that begin from nothing: they are trained beside an adapter, too."""

    def prepare(self, freeze: Callable[[Decoder | Path], Decoder]) -> None:  # noqa: B027
        """Have other policies loaded that are needed: `freeze` says where and how they lie."""

    @abstractmethod
    def num_units(self, example: Example) -> int:
        """How many losses the example has."""

    @abstractmethod
    def __call__(
        self, decoder: Decoder, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Judge the examples whose rows, in order, make up `batch`."""


class Supervised:
    """Trains a decoder, or a reward model, on fixed data.

    Args:
        decoder: its weights are updated in place and are the float32 master weights.
        config: the trainer's settings: optimizer, learning rate, precision, micro-batches.
        objective: what is learned.
        ranks: who else trains it; `decoder` holds the whole weights on each of them, and is sharded
            here.

    Raises:
        ConfigError: weights that are not float32, or `trainer.lora` does not fit them.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: TrainerConfig,
        *,
        objective: Objective,
        ranks: Ranks = ALONE,
    ) -> None:
        if any(p.dtype != torch.float32 for p in decoder.parameters()):
            raise ConfigError(
                "master weights must be float32: in bfloat16 most updates round to nothing",
                hints=["trainer.dtype=bfloat16 computes in bfloat16 with float32 weights"],
            )
        self.decoder = decoder
        self.num_steps = 0
        self._config = config
        self._objective = objective
        self._ranks = ranks
        self._device = next(decoder.parameters()).device
        objective.prepare(self._frozen)
        if config.lora is not None:
            add_adapter(decoder, config.lora)
            for name in objective.heads:
                decoder.get_submodule(name).requires_grad_(True)
        prepare_decoder(decoder, config, ranks)
        self._optimizer = Optimizer(decoder, config)
        self._files = StateFiles(ranks)
        self._num_bad = 0

    @readable_memory_errors()
    def step(
        self, batch: Sequence[Example], version: int = 0, *, scale: float = 1.0
    ) -> dict[str, float]:
        """Train on a batch once and return its metrics, as they were before the update.

        Args:
            batch: the examples.
            version: of the weights; examples have none to compare it with.
            scale: of the learning rates, besides `warmup_steps`.

        Raises:
            NotFiniteError: the loss or its gradient was not finite several times in a row.
            TrainError: there is too little memory.
        """
        start_s = time.perf_counter()
        warmup = max(1, self._config.warmup_steps)
        scale *= min(1.0, (self.num_steps + 1) / warmup)
        metrics = {f"train/{k}": v for k, v in self._measure_examples(batch, learns=True).items()}
        is_usable = math.isfinite(metrics["train/loss"])
        norm = self._optimizer.step(scale, is_usable=is_usable)
        is_bad = not (is_usable and math.isfinite(norm))
        self._num_bad = self._num_bad + 1 if is_bad else 0
        if self._num_bad == _MAX_BAD_UPDATES:
            self._num_bad = 0  # whoever goes on from here may try as often
            raise NotFiniteError(
                f"{'the gradient' if is_usable else 'the loss'} was not finite "
                f"{_MAX_BAD_UPDATES} times in a row; nothing was applied",
                hints=[
                    "--resume begins with this very batch, which seed and step decide",
                    f"a smaller learning rate may help: trainer.lr={self._config.lr / 10:g}",
                ],
            )
        self.num_steps += 1
        return metrics | {
            "train/grad_norm": norm,
            "train/lr": self._config.lr * scale,
            "train/skipped_updates": float(is_bad),
            "train/tokens": float(sum(len(row.token_ids) for rows in batch for row in rows)),
            "time/train_s": time.perf_counter() - start_s,
        }

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """The loss and the objective's metrics on examples that are not learned from."""
        return self._measure_examples(examples, learns=False)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, an adapter merged; copy them before the next step."""
        if self._config.lora is None:
            yield from self.decoder.published(full)
        else:
            yield from merged_weights(self.decoder, self._config.lora)

    def checkpoint_bytes(self) -> int:
        """See `Trainer.checkpoint_bytes`."""
        return room_for(self.decoder)

    def states(self) -> dict[str, Tensor]:
        """Everything but the whole weights that a checkpoint keeps, by name: live tensors."""
        counts = {"num_steps": self.num_steps, "num_bad": self._num_bad}
        states = {name: torch.tensor(count) for name, count in counts.items()}
        states |= prefixed("optimizer", self._optimizer.states())
        if self._config.lora is None:
            return states
        parameters = self.decoder.named_parameters()
        return states | prefixed(
            "adapter", {name: p.detach() for name, p in parameters if p.requires_grad}
        )

    def save(self, directory: Path) -> Future[None]:
        """See `Trainer.save`."""
        return self._files.save(self.states(), directory)

    def load(self, directory: Path) -> None:
        """See `Trainer.load`."""
        self._optimizer.allocate(below("optimizer", saved_tensors(directory)))
        states = self.states()
        self._files.load(states, directory)
        self.num_steps, self._num_bad = int(states["num_steps"]), int(states["num_bad"])

    def _frozen(self, policy: Decoder | Path) -> Decoder:
        if isinstance(policy, Path):
            policy = load_checkpoint(policy, device=self._device)
        policy.requires_grad_(False)
        prepare_decoder(policy, self._config, self._ranks)
        return policy

    def _measure_examples(self, examples: Sequence[Example], *, learns: bool) -> dict[str, float]:
        num_units = sum(self._objective.num_units(example) for example in examples)
        totals: dict[str, float] = defaultdict(float)
        counts: dict[str, float] = defaultdict(float)
        for part, is_mine in self._microbatches(examples):
            with self._autocast():
                found = self._objective(self.decoder, pack_examples(part, self._device), part)
            if learns:
                # Gradients are averaged over the ranks, each of which has a part of the sum.
                share = self._ranks.size if is_mine else 0
                (found.loss_U.sum() / num_units * share).backward()
            if is_mine:
                for name, values in {"loss": found.loss_U, **found.metrics}.items():
                    totals[name] += float(values.detach().sum())
                    counts[name] += len(values)
        if not learns:
            drop_gathered(self.decoder)
        sums, numbers = self._ranks.sum(totals), self._ranks.sum(counts)
        return {name: total / max(numbers[name], 1) for name, total in sums.items()}

    def _microbatches(self, examples: Sequence[Example]) -> Iterator[tuple[list[Example], bool]]:
        """The micro-batches of this rank's share, and whether they count.

        All ranks make the same number of passes, as those of `Trainer` do.
        """
        costs = [example_tokens(example) for example in examples]
        mine = self._ranks.share(range(len(examples)), costs)
        parts = best_fit([costs[i] for i in mine], self._config.tokens_per_microbatch)
        for part in parts:
            yield [examples[mine[j]] for j in part], True
        for _ in range(self._ranks.largest(len(parts)) - len(parts)):
            yield [min(examples, key=example_tokens)], False

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)
