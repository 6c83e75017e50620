"""The base of trainers on groups and on examples: weights, optimizer, ranks and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, NotFiniteError
from areal_gym.models.backend import ModelLoader
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.exported_weights import MASTER_WEIGHTS, STATES, ExportedWeights
from areal_gym.trainer.lora import add_adapter
from areal_gym.trainer.lr_schedule import lr_factor, require_steps
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.fsdp import (
    full,
    load_for_training,
    prepare_decoder,
    require_exact_packing,
)
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.states import StateFiles, below, prefixed, room_for_moments, saved_tensors
from areal_gym.trainer.step_profiler import StepProfiler
from areal_gym.trainer.weight_sync.rank_tasks import RankSide, RankTask, cast, cast_all

_T = TypeVar("_T")

_MAX_BAD_UPDATES = 3
"""Updates in a row without a finite loss and gradient after which training stops."""


class PolicyTrainer:
    """Trains a decoder in this process, alone or as one of several ranks.

    A subclass calls `_prepare_training` at the end of its `__init__`, after it has copied any
    initial weights that it needs.

    Raises:
        ConfigError: the weights are not float32, or the learning-rate schedule has no end.
    """

    def __init__(self, decoder: PolicyModel, config: TrainerConfig, ranks: Ranks) -> None:
        require_steps(config)
        if config.lora is None and any(p.dtype != torch.float32 for p in decoder.parameters()):
            raise ConfigError(
                "master weights must be float32: in bfloat16 most updates round to nothing",
                hints=["trainer.dtype=bfloat16 computes in bfloat16 with float32 weights"],
            )
        self.decoder = decoder
        self.config = config
        self.num_steps = 0
        self._ranks = ranks
        self._device = next(decoder.parameters()).device
        self.profiler = StepProfiler(config, self._device, ranks.rank)
        self._files = StateFiles(ranks)
        self._num_bad = 0
        self._frozen_models: list[PolicyModel] = []
        self._kept: dict[str, Any] = {}
        """Objects that rank tasks keep here, such as the process group with the servers."""
        # Frozen policies use the same model code, because another one would round differently.
        self._loader = ModelLoader(
            backend="tiny" if isinstance(decoder, Decoder) else "transformers",
            trusts_code=decoder.trusts_code,
        )

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors, with the adapter merged; copy them before a step.

        Floating-point tensors are cast to `dtype` before they are gathered: bfloat16 halves the
        bytes.
        """
        if dtype is None or self.config.lora is not None:  # adapters are merged before rounding
            return cast_all(self.decoder.published(full), dtype)
        return self.decoder.published(lambda tensor: full(cast(tensor, dtype)))

    def run_in_ranks(self, task: RankTask[_T]) -> _T:
        """Run a task with the weights on this rank; every rank must call this."""
        return task(RankSide(self.weights, self._ranks, self._kept))

    def checkpoint_bytes(self) -> int:
        """Return the approximate bytes of a checkpoint: weights, and AdamW's moments."""
        weights = self._exported_weights.num_bytes(self._ranks.size)
        return weights + room_for_moments(self.decoder)

    def states(self) -> dict[str, Tensor]:
        """Return, by name, the live tensors that a checkpoint keeps besides the policy's weights.

        There is no random state: seeds derive from the run's seed and a group's number.
        """
        counts = {"num_steps": self.num_steps, "num_bad": self._num_bad}
        states = {name: torch.tensor(count) for name, count in counts.items()}
        states |= prefixed("optimizer", self._optimizer.states())
        if self.config.lora is None:
            return states
        parameters = self.decoder.named_parameters()
        adapter = {name: p.detach() for name, p in parameters if p.requires_grad}
        return states | prefixed("adapter", adapter)

    def save(self, directory: Path) -> Future[None]:
        """Write `states` into a new directory; they may change as soon as this returns.

        Returns a future that is done when all is on disk; it holds any error, such as OSError.
        """
        return self._files.save(self.states(), directory)

    def save_checkpoint(self, directory: Path) -> Future[None]:
        """Write the weights into a directory, and `states` into its folder "trainer".

        All ranks call this, and each writes its part. The tensors may change as soon as this
        returns; the future is like that of `save`.
        """
        with self._files.copying():
            weights = self._exported_weights.save(self._files, directory)
            states = self.save(directory / STATES)

            def report() -> None:
                for written in (weights, states):
                    written.result()

            return self._files.submit(report)

    def offload(self) -> None:
        """Move weights and optimizer states into host memory, so that servers can use the GPU."""
        self._move(torch.device("cpu"))
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def reload(self) -> None:
        """Move weights and optimizer states back to the GPU, before the next step."""
        self._move(self._device)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, with the same or another number of ranks.

        Master weights that `save_checkpoint` left in the directory are restored as well; otherwise
        the trainer must have the checkpoint's weights already.

        Raises:
            TrainError: the states are of another optimizer, or lack the critic's.
        """
        masters = directory / MASTER_WEIGHTS
        if masters.is_dir():
            self._files.load(self._exported_weights.tensors(), masters)
        self._allocate(saved_tensors(directory))
        states = self.states()
        self._files.load(states, directory)
        self.num_steps, self._num_bad = int(states["num_steps"]), int(states["num_bad"])

    def _parts(self) -> list[nn.Module | Optimizer]:
        """Return everything that holds tensors on the device."""
        return [self.decoder, self._optimizer, *self._frozen_models]

    def _move(self, device: torch.device) -> None:
        if not self.config.cpu_offload:  # then FSDP2 keeps all in host memory, and refuses moves
            for part in self._parts():
                part.to(device)

    def _allocate(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        self._optimizer.allocate(below("optimizer", saved))

    def _prepare_training(self, heads: Sequence[str] = ()) -> None:
        """Add the adapter, shard the decoder and make its optimizer.

        `heads` names modules that are trained beside an adapter.
        """
        if (vision := getattr(self.decoder, "vision", None)) is not None:
            if self.config.lora is not None and self.config.vision != "frozen":
                raise ConfigError(
                    "trainer.lora trains an adapter of the language model and nothing else; "
                    f"trainer.vision={self.config.vision} is not possible beside it",
                    hints=["trainer.vision=frozen", "or train all weights: trainer.lora=null"],
                )
            vision.set_trained(self.config.vision)
        if self.config.lora is not None:
            add_adapter(self.decoder, self.config.lora)
            for name in heads:
                self.decoder.get_submodule(name).requires_grad_(True)
        prepare_decoder(self.decoder, self.config, self._ranks)
        require_exact_packing(self.decoder, self.config)
        self._exported_weights = ExportedWeights(
            self.decoder, has_adapter=self.config.lora is not None
        )
        self._optimizer = Optimizer(self.decoder, self.config, self._ranks)

    def _frozen(self, policy: PolicyModel | Path) -> PolicyModel:
        if isinstance(policy, Path):
            policy = load_for_training(
                policy,
                self.config,
                self._ranks,
                device=self._device,
                loader=self._loader,
                is_frozen=True,
            )
        policy.requires_grad_(False)
        self._frozen_models.append(policy)
        prepare_decoder(policy, self.config, self._ranks)
        return policy

    def _lr_scale(self) -> float:
        return lr_factor(self.config, self.num_steps)

    def _note_update(self, norm: float, *, is_loss_finite: bool, hints: Sequence[str] = ()) -> bool:
        """Return whether the update was applied.

        Raises:
            NotFiniteError: several updates in a row were not.
        """
        if is_loss_finite and math.isfinite(norm):
            self._num_bad = 0
            return True
        self._num_bad += 1
        if self._num_bad == _MAX_BAD_UPDATES:
            self._num_bad = 0  # a caller that continues may try as often again
            raise NotFiniteError(
                f"{'the gradient' if is_loss_finite else 'the loss'} was not finite "
                f"{_MAX_BAD_UPDATES} times in a row; nothing was applied",
                hints=[
                    *hints,
                    f"a smaller learning rate may help: trainer.lr={self.config.lr / 10:g}",
                ],
            )
        return False
