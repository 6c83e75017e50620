"""The contracts around a training step.

    BatchSource --batch--> Trainer.step --weights--> WeightSync.publish --> engine
         |
       Teacher (objective "distill" only) adds its log-probabilities to the batch

A trainer plugin implements `GroupTrainer`; a subclass of `areal_gym.trainer.trainer.Trainer` does
already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from areal_gym.types import Group, TopTokens

if TYPE_CHECKING:  # code that only runs a trainer need not import torch
    from torch import Tensor

    from areal_gym.models.policy_model import PolicyModel
    from areal_gym.trainer.batch.examples import Example, TokenRow
    from areal_gym.trainer.batch.sequences import Sequence as TokenSequence

_Item = TypeVar("_Item", covariant=True)
_Trained = TypeVar("_Trained", contravariant=True)

Weights = Iterable[tuple[str, "Tensor"]]
"""Hugging Face names and tensors, which must not change until `publish` has returned."""


class BatchSource(Protocol[_Item]):
    """Supplies batches: groups of trajectories, or examples."""

    async def next_batch(self) -> Sequence[_Item]:
        """Return the next batch to train on."""


class Trainer(Protocol[_Trained]):
    """Takes optimizer steps on one policy."""

    @property
    def decoder(self) -> PolicyModel:
        """The trained model; checkpoints take their config from it."""

    def step(self, batch: Sequence[_Trained], version: int) -> dict[str, float]:
        """Train once on a batch and return its metrics; `version` is the weights' version."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors, which the next step may change."""

    def checkpoint_bytes(self) -> int:
        """Return the approximate size of a checkpoint in bytes."""

    def save(self, directory: Path) -> Future[None]:
        """Write optimizer state and counters; they may change as soon as this returns."""

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote."""


class GroupTrainer(Trainer[Group], Protocol):
    """A trainer on groups of trajectories: the contract of plugins of kind `trainers`."""

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens, [T], under the weights now."""

    def trained_tokens(self) -> list[dict[str, Any]]:
        """Return the advantages and log-probabilities of the last step's tokens, row by row."""

    def recompute_proximal(self) -> None:
        """Take ratios against the trainer's own log-probabilities from now on."""

    def adapter(self) -> dict[str, Tensor]:
        """Return the LoRA adapter's tensors by peft's names."""


class ExampleTrainer(Trainer["Example"], Protocol):
    """Trains on fixed examples (objectives sft, dpo and rm)."""

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the loss and metrics on held-out examples."""


@runtime_checkable
class CheckpointWriter(Protocol):
    """A trainer that writes the policy's files itself: an optional part of the contract.

    Without it, the weights are written from `weights`, and training waits.
    """

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write weights in Hugging Face's layout, and what `save` writes into its folder "trainer".

        Both may change as soon as this returns.
        """


@runtime_checkable
class ClosableTrainer(Protocol):
    """A trainer that holds processes or files: an optional part of the contract."""

    def close(self) -> None:
        """Release processes and files. Idempotent."""


@runtime_checkable
class ReferenceTrainer(Protocol):
    """A trainer that can score at any temperature: an optional part of the contract.

    Servers' log-probabilities are compared with it at temperature 1. Without it, the comparison
    uses `GroupTrainer.score`, and only if sampling is at temperature 1.
    """

    def score_at(self, rows: list[TokenSequence], temperature: float) -> list[Tensor]:
        """Return what `GroupTrainer.score` does, at this temperature instead of sampling's."""


@runtime_checkable
class TopScoringTrainer(Protocol):
    """A trainer that can list the likeliest tokens: an optional part of the contract.

    It is needed where the policy teaches itself by `teacher.top_k`.
    """

    def score_top(self, rows: list[TokenSequence], top_k: int) -> list[TopTokens]:
        """Return the likeliest tokens at each row's trained tokens, at temperature 1."""


@runtime_checkable
class OffloadingTrainer(Protocol):
    """A trainer that can lend its GPUs to servers between steps (`trainer.colocate`)."""

    def offload(self) -> None:
        """Move weights and optimizer states into host memory. Idempotent."""

    def reload(self) -> None:
        """Move them back to the GPU; called before the next step. Idempotent."""


def close_trainer(trainer: Trainer[Any]) -> None:
    """Close a trainer if it can be closed."""
    if isinstance(trainer, ClosableTrainer):
        trainer.close()


class WeightSync(Protocol):
    """Publishes weights under a policy version.

    The class is called with the engine, with `directory=` (a directory of its own in the run
    directory, which need not exist yet) and with the settings' `kwargs`.
    """

    async def publish(self, weights: Weights, version: int) -> None:
        """Publish the weights, and return when the engine samples with them.

        Raises:
            EngineError: no server took the weights; reachable servers keep the old ones.
        """

    async def aclose(self) -> None:
        """Release process groups and files. Idempotent."""


@runtime_checkable
class AdapterWeightSync(Protocol):
    """A weight sync, or its class, that can publish the adapter instead of all weights."""

    takes_adapter: bool


class Teacher(Protocol):
    """A frozen policy that scores what the student sampled."""

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities of each row's marked tokens, at temperature 1."""


@runtime_checkable
class TopTeacher(Protocol):
    """A teacher that can tell which tokens it holds likeliest."""

    async def score_top(self, rows: Sequence[TokenRow], top_k: int) -> list[TopTokens]:
        """Return the `top_k` likeliest tokens at each row's marked tokens, at temperature 1."""
