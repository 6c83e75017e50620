"""Takes a training step of one rank with fake tensors: no memory, no GPU, no other ranks.

The model's class, its sharding, the trainer's passes and its update are those of a run. What is
left out is what reads values: advantages, metrics, the choice of experts. Attention on accelerators
stands for a fused kernel, which keeps its inputs, its output and one number per query and head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from areal_gym.config import RunConfig, TrainerConfig
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import ModelShape, PolicyModel
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.plan.memory_tracker import MemoryTracker, labelled_training
from areal_gym.plan.operation_costs import Costs
from areal_gym.plan.simulated_models import ModelMaker, shape_of, surroundings
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.token_loss import Proximal
from areal_gym.trainer.batch.experience import TokenBatch
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.chunked_logprobs import TokenScores
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel import fsdp
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.step_stats import Step
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import FinishReason, Group, StopReason, Task, TokenSpan, Trajectory, Turn

_NUM_MICROBATCHES = 2
"""In the second one, the gradients of the first are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A step of one rank, measured without running it."""

    shape: ModelShape
    peak: Mapping[str, int]
    """Bytes by what they are for, when their sum is largest."""
    kept: Mapping[str, int]
    """Bytes by what they are for, between steps."""
    logits: int
    """The most bytes of logits, which may be gone when the sum is largest."""
    largest_weight: int
    """Elements of the largest weight, whole."""
    num_tokens: int
    """Tokens in one micro-batch of one rank."""
    looks: Costs
    """Of the passes without a gradient of one micro-batch: reference, proximal policy, values."""
    microbatch: Costs
    """Of a forward and backward pass."""
    update: Costs
    """Of an update, without its micro-batches; also what its last micro-batch has more."""

    def costs(self, num_microbatches: int, num_updates: int) -> Costs:
        """Return the costs of a rank's step of so many micro-batches and updates."""
        return (self.looks + self.microbatch).times(num_microbatches) + self.update.times(
            num_updates
        )


def simulate_step(
    config: RunConfig, model: PretrainedConfig | DecoderConfig, *, is_cpu: bool = False
) -> SimulatedStep:
    """Take a step as rank 0 of `trainer.num_ranks` would, on an accelerator or on a CPU.

    It must be called where no process group is: it makes one that sends nothing.

    Raises:
        ConfigError: the model cannot be laid out like that, or the settings do not fit.
    """
    settings = _simulated_settings(config)
    sharding = fsdp.sharding_of(settings, settings.layout, torch.device("cpu"))
    with _fake_process_group(settings.num_ranks):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        ranks = _LoneRank(layout=settings.layout)
        if settings.num_ranks > 1:
            _ = ranks.fsdp_mesh, ranks.context_group  # meshes hold real numbers
        maker = ModelMaker(model, settings, sharding, mode)
        with surroundings(mode, is_cpu=is_cpu):
            policy = maker.make(is_frozen=settings.lora is not None)
            shape = shape_of(policy)
            largest = max(parameter.numel() for parameter in policy.parameters())
            tracker = MemoryTracker(shape.vocab_size)
            trainer = _SimulatedTrainer(policy, config, ranks, maker, tracker)
            trainer.allocate_states()
            group = full_group(config, _NUM_MICROBATCHES)
            with trainer.labelled(tracker), tracker:
                kept = tracker.now
                trainer.step([group], 0)
    num_tokens = sum(len(trajectory.token_ids) for trajectory in group)
    looks, first, second = trainer.sections(tracker.costs)
    return SimulatedStep(
        shape=shape,
        peak={kind: size for kind, size in tracker.peak.items() if size},
        kept={kind: size for kind, size in kept.items() if size},
        logits=tracker.largest.get("logits", 0),
        largest_weight=largest,
        num_tokens=num_tokens // _NUM_MICROBATCHES,
        looks=looks.times(1 / _NUM_MICROBATCHES),
        microbatch=first,
        update=second - first,
    )


def _simulated_settings(config: RunConfig) -> TrainerConfig:
    """Return the trainer's settings, without a replay of experts that no engine has recorded."""
    return config.trainer_of_run().model_copy(update={"routing_replay": False})


@contextmanager
def _fake_process_group(num_ranks: int) -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class _LoneRank(Ranks):
    """Rank 0 with rows of its own; the others are assumed to have the same values."""

    def share(self, members: Sequence[int], costs: Sequence[int]) -> list[int]:
        return list(members)

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.num_data_ranks


class _SimulatedTrainer(Trainer):
    def __init__(
        self,
        policy: PolicyModel,
        config: RunConfig,
        ranks: Ranks,
        maker: ModelMaker,
        tracker: MemoryTracker,
    ) -> None:
        self._maker = maker
        self._tracker = tracker
        self._begun: list[Costs] = []
        settings = _simulated_settings(config)
        super().__init__(
            policy,
            settings,
            advantage=registry().load("advantages", settings.advantage),
            loss=registry().load("losses", settings.loss),
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            reference=Path(config.engine.model),
            ranks=ranks,
        )

    def allocate_states(self) -> None:
        """Take an update without a pass, after which the optimizers' states are there."""
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["fused"] = group["foreach"] = False  # fake tensors know neither
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def sections(self, costs: Costs) -> list[Costs]:
        """Return the costs before the first micro-batch, and of each with what follows."""
        ends = [*self._begun, costs]
        return [ends[0], *(end - start for start, end in pairwise(ends))]

    def _frozen(self, policy: PolicyModel | Path) -> PolicyModel:
        return super()._frozen(self._maker.make(is_frozen=True))

    def _compute_advantages(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        num_tokens = sum(row.num_trainable for row in rows)
        for name in ("advantages", *(("values", "returns") if self._critic else ())):
            columns.put(name, torch.zeros(num_tokens))
        return {}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = (part for part in self._parts() if isinstance(part, Optimizer))
        return [part for optimizer in optimizers for part in optimizer.parts]

    def _losses(
        self, step: Step, batch: PackedBatch, indexes: list[int], proximal: Proximal
    ) -> tuple[TokenScores, Tensor, dict[str, Tensor]]:
        self._begun.append(self._tracker.costs.copy())
        return super()._losses(step, batch, indexes, proximal)

    @contextmanager
    def labelled(self, tracker: MemoryTracker) -> Iterator[None]:
        """Label weights, gradients and states in this context."""
        models = nn.ModuleList([self.decoder, *([self._critic] if self._critic else [])])
        with labelled_training(tracker, models, self._optimizers()):
            if self._reference is not None:
                tracker.label(self._reference.parameters(), "frozen")
            tracker.label((p for p in models.parameters() if not p.requires_grad), "frozen")
            yield


def full_group(config: RunConfig, num_microbatches: int) -> Group:
    """Return a group whose rows fill that many micro-batches with tokens to train on."""
    length = config.engine.max_context  # a row is never cut
    budget = max(length, config.trainer.tokens_per_microbatch)
    spans = (
        TokenSpan(origin="prompt", token_ids=(1,)),
        TokenSpan(
            origin="policy",
            token_ids=(1,) * (length - 1),
            logprobs=(-1.0,) * (length - 1),
            policy_version=0,
            turn=0,
        ),
    )
    task = Task(id="task", data={})
    members = tuple(
        Trajectory(
            id=str(number),
            group_id="group",
            task=task,
            env_id="plan",
            spans=spans,
            turns=(Turn(finish_reason=FinishReason.STOP, reward=float(number % 2)),),
            stop_reason=StopReason.COMPLETED,
        )
        for number in range(budget // length * num_microbatches)
    )
    return Group(id="group", task=task, trajectories=members)
