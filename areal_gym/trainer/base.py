"""The contracts around a training step.

    BatchSource --batch--> Trainer.step --weights--> WeightSync.publish --> engine
         |
       Teacher (objective "distill" only) adds its log-probabilities to the batch

A trainer written for areal-gym needs what `GroupTrainer` lists; a subclass of
`areal_gym.trainer.trainer.Trainer` has it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from areal_gym.types import Group

if TYPE_CHECKING:  # whoever only runs a trainer need not import torch
    from torch import Tensor

    from areal_gym.models.policy_model import PolicyModel
    from areal_gym.trainer.batch.examples import Example, TokenRow
    from areal_gym.trainer.batch.sequences import Sequence as TokenSequence

_Item = TypeVar("_Item", covariant=True)
_Trained = TypeVar("_Trained", contravariant=True)

Weights = Iterable[tuple[str, "Tensor"]]
"""Hugging Face names and tensors; they may change after `publish` has returned, not before."""


class BatchSource(Protocol[_Item]):
    """Supplies the batches: groups of trajectories, or examples."""

    async def next_batch(self) -> Sequence[_Item]:
        """Return the next batch to train on."""


class Trainer(Protocol[_Trained]):
    """Takes optimizer steps on one policy."""

    @property
    def decoder(self) -> PolicyModel:
        """The model that is trained; checkpoints take their config from it."""

    def step(self, batch: Sequence[_Trained], version: int) -> dict[str, float]:
        """Train on a batch once and return its metrics; `version` is that of the weights now."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors, which the next step may change."""

    def checkpoint_bytes(self) -> int:
        """Return about how many bytes a checkpoint takes."""

    def save(self, directory: Path) -> Future[None]:
        """Write optimizer state and counters; when this returns, they may change already."""

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote."""


class GroupTrainer(Trainer[Group], Protocol):
    """Trains on groups of trajectories: plugins of kind `trainers`."""

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens under the current weights."""

    def trained_tokens(self) -> list[dict[str, Any]]:
        """Return advantages and log-probabilities of the last step's tokens, row by row."""

    def recompute_proximal(self) -> None:
        """Take ratios against the trainer's own log-probabilities from now on."""

    def adapter(self) -> dict[str, Tensor]:
        """Return the LoRA adapter's tensors by peft's names."""


class ExampleTrainer(Trainer["Example"], Protocol):
    """Trains on fixed examples (objectives sft, dpo and rm)."""

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return loss and metrics on examples that are not trained on."""


@runtime_checkable
class CheckpointWriter(Protocol):
    """A trainer that writes the policy's files itself: an optional part of the contract.

    The weights of another one are written from `weights`, while training waits.
    """

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write weights in Hugging Face's layout, and what `save` writes into "trainer" there.

        When this returns, both may change already.
        """


@runtime_checkable
class ClosableTrainer(Protocol):
    """A trainer that holds processes or files: an optional part of the contract."""

    def close(self) -> None:
        """Give them back. Idempotent."""


@runtime_checkable
class ReferenceTrainer(Protocol):
    """A trainer that servers are compared with at temperature 1: an optional part of the contract.

    Without it, those of `GroupTrainer.score` are taken, if sampling is at temperature 1.
    """

    def score_at(self, rows: list[TokenSequence], temperature: float) -> list[Tensor]:
        """Return what `GroupTrainer.score` does, of another temperature than that of sampling."""


@runtime_checkable
class OffloadingTrainer(Protocol):
    """A trainer that can leave its GPUs to servers for a while (`trainer.colocate`)."""

    def offload(self) -> None:
        """Move weights and optimizer states into host memory. Idempotent."""

    def reload(self) -> None:
        """Move them back; called before the next step. Idempotent."""


def close_trainer(trainer: Trainer[Any]) -> None:
    """Close a trainer that has something to close."""
    if isinstance(trainer, ClosableTrainer):
        trainer.close()


class WeightSync(Protocol):
    """Publishes weights under a version.

    The class is called with the engine, `directory=` (its own directory in the run directory, which
    need not exist yet) and the settings' `kwargs`.
    """

    async def publish(self, weights: Weights, version: int) -> None:
        """Return when the engine samples with the new weights.

        Raises:
            EngineError: no server took them; those that there are keep the old ones.
        """

    async def aclose(self) -> None:
        """Give back groups and files. Idempotent."""


@runtime_checkable
class AdapterWeightSync(Protocol):
    """A weight sync, or its class, that may publish the adapter instead of all weights."""

    takes_adapter: bool


class Teacher(Protocol):
    """A frozen policy that scores what the student has sampled."""

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row."""
