"""Takes a training step of one rank with fake tensors: no memory, no GPU, no other ranks.

The model's class, its sharding, the trainer's passes and its update are those of a run. What is
left out is what reads values: advantages, metrics, the choice of experts. Attention on accelerators
stands for a fused kernel, which keeps its inputs, its output and one number per query and head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from areal_gym.config import RunConfig
from areal_gym.models.policy_model import ModelShape
from areal_gym.plan.memory_tracker import MemoryTracker
from areal_gym.plan.model_to_plan import PlannedModel, vocab_size_of
from areal_gym.plan.operation_costs import Costs
from areal_gym.plan.simulated_models import ModelMaker, shape_of, surroundings
from areal_gym.plan.simulated_pictures import planned_pictures
from areal_gym.plan.simulated_trainers import make_simulated_trainer, simulated_settings
from areal_gym.trainer.parallel import fsdp
from areal_gym.trainer.parallel.rank_group import Ranks

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
    num_patches: int
    """Patches of pictures in it; 0 without pictures."""
    patches_per_picture: int
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
    config: RunConfig,
    model: PlannedModel,
    *,
    is_cpu: bool = False,
    has_pictures: bool = True,
) -> SimulatedStep:
    """Take a step as rank 0 of `trainer.num_ranks` would, on an accelerator or on a CPU.

    A model that sees is shown pictures, unless `has_pictures` is false.

    It must be called where no process group is: it makes one that sends nothing.

    Raises:
        ConfigError: the model cannot be laid out like that, or the settings do not fit.
    """
    settings = simulated_settings(config)
    sharding = fsdp.sharding_of(settings, settings.layout, torch.device("cpu"))
    with _fake_process_group(settings.num_ranks):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        ranks = _LoneRank(layout=settings.layout)
        if settings.num_ranks > 1:
            _ = ranks.fsdp_mesh, ranks.context_group  # meshes hold real numbers
        pictures = planned_pictures(config, model) if has_pictures else None
        tracker = MemoryTracker(vocab_size_of(model))
        maker = ModelMaker(model, settings, sharding, mode, tracker, pictures)
        with surroundings(mode, is_cpu=is_cpu):
            policy = maker.make(
                is_frozen=settings.lora is not None, is_reward_model=config.objective == "rm"
            )
            shape = shape_of(policy)
            largest = max(parameter.numel() for parameter in policy.parameters())
            trainer = make_simulated_trainer(policy, config, ranks, maker, tracker)
            trainer.allocate_states()
            with trainer.labelled(tracker), tracker:
                kept = tracker.now
                num_tokens = trainer.take_step(config, _NUM_MICROBATCHES, pictures)
    looks, first, second = trainer.sections(tracker.costs)
    return SimulatedStep(
        shape=shape,
        peak={kind: size for kind, size in tracker.peak.items() if size},
        kept={kind: size for kind, size in kept.items() if size},
        logits=tracker.largest.get("logits", 0),
        largest_weight=largest,
        num_tokens=num_tokens // _NUM_MICROBATCHES,
        num_patches=0 if pictures is None else pictures.patches_per_microbatch,
        patches_per_picture=0 if pictures is None else pictures.num_patches,
        looks=looks.times(1 / _NUM_MICROBATCHES),
        microbatch=first,
        update=second - first,
    )


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
