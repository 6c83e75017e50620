"""The trainers of a run, as a simulated step takes them: what reads values is left out.

They are the run's own classes. Each notes where its micro-batches begin, so that the operations of
one can be told from those of an update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_gym.config import RunConfig, TrainerConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.message_types import ImageRef
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.plan.memory_tracker import MemoryTracker, labelled_training
from areal_gym.plan.operation_costs import Costs
from areal_gym.plan.simulated_models import ModelMaker
from areal_gym.plan.simulated_pictures import PlannedPictures
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.token_loss import Proximal
from areal_gym.trainer.batch.examples import Example, TokenRow
from areal_gym.trainer.batch.experience import TokenBatch
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.chunked_logprobs import TokenScores
from areal_gym.trainer.objectives.dpo import Dpo
from areal_gym.trainer.objectives.kto import Kto
from areal_gym.trainer.objectives.orpo import Orpo
from areal_gym.trainer.objectives.reward_model import BradleyTerry
from areal_gym.trainer.objectives.supervised import Judgement, Objective, Sft, Supervised
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.policy_trainer import PolicyTrainer
from areal_gym.trainer.step_stats import Step
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import FinishReason, Group, StopReason, Task, TokenSpan, Trajectory, Turn


def simulated_settings(config: RunConfig) -> TrainerConfig:
    """Return the trainer's settings, without a replay of experts that no engine has recorded."""
    return config.trainer_of_run().model_copy(update={"routing_replay": False})


class SimulatedTrainer(PolicyTrainer):
    """The base of simulated trainers; a subclass calls `_simulate` first."""

    def _simulate(self, maker: ModelMaker, tracker: MemoryTracker) -> None:
        self._maker = maker
        self._tracker = tracker
        self._begun: list[Costs] = []

    def take_step(
        self, config: RunConfig, num_microbatches: int, pictures: PlannedPictures | None
    ) -> int:
        """Train on a batch that fills so many micro-batches; return its tokens."""
        raise NotImplementedError

    def allocate_states(self) -> None:
        """Take an update without a pass, after which the optimizers' states are there."""
        for optimizer in self._torch_optimizers():
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

    @contextmanager
    def labelled(self, tracker: MemoryTracker) -> Iterator[None]:
        """Label weights, gradients and states in this context."""
        models = nn.ModuleList(self._trained_models())
        with labelled_training(tracker, models, self._torch_optimizers()):
            for frozen in self._frozen_models:
                tracker.label(frozen.parameters(), "frozen")
            tracker.label((p for p in models.parameters() if not p.requires_grad), "frozen")
            yield

    def _trained_models(self) -> list[nn.Module]:
        return [self.decoder]

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = (part for part in self._parts() if isinstance(part, Optimizer))
        return [part for optimizer in optimizers for part in optimizer.parts]

    def _note_microbatch(self) -> None:
        self._begun.append(self._tracker.costs.copy())

    def _frozen(self, policy: PolicyModel | Path) -> PolicyModel:
        return super()._frozen(self._maker.make(is_frozen=True))


def make_simulated_trainer(
    policy: PolicyModel, config: RunConfig, ranks: Ranks, maker: ModelMaker, tracker: MemoryTracker
) -> SimulatedTrainer:
    """Return the trainer of the run's objective."""
    kind = _Supervised if config.objective in SUPERVISED else _ByReward
    return kind(policy, config, ranks, maker, tracker)


# ---- reinforcement learning, distillation ------------------------------------------------------


class _ByReward(SimulatedTrainer, Trainer):
    def __init__(
        self,
        policy: PolicyModel,
        config: RunConfig,
        ranks: Ranks,
        maker: ModelMaker,
        tracker: MemoryTracker,
    ) -> None:
        self._simulate(maker, tracker)
        settings = simulated_settings(config)
        Trainer.__init__(
            self,
            policy,
            settings,
            advantage=registry().load("advantages", settings.advantage),
            loss=registry().load("losses", settings.loss),
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            reference=Path(config.engine.model),
            ranks=ranks,
        )

    def take_step(
        self, config: RunConfig, num_microbatches: int, pictures: PlannedPictures | None
    ) -> int:
        group = full_group(config, num_microbatches, pictures)
        self.step([group], 0)
        return sum(len(trajectory.token_ids) for trajectory in group)

    def _compute_advantages(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        num_tokens = sum(row.num_trainable for row in rows)
        for name in ("advantages", *(("values", "returns") if self._critic else ())):
            columns.put(name, torch.zeros(num_tokens))
        return {}

    def _trained_models(self) -> list[nn.Module]:
        return [self.decoder, *([self._critic] if self._critic else [])]

    def _losses(
        self, step: Step, batch: PackedBatch, indexes: list[int], proximal: Proximal
    ) -> tuple[TokenScores, Tensor, dict[str, Tensor]]:
        self._note_microbatch()
        return super()._losses(step, batch, indexes, proximal)


def full_group(
    config: RunConfig, num_microbatches: int, pictures: PlannedPictures | None = None
) -> Group:
    """Return a group whose rows fill that many micro-batches with tokens to train on.

    With `pictures`, each row has some of its own before them.
    """
    length = config.engine.max_context  # a row is never cut
    budget = max(length, config.trainer.tokens_per_microbatch)
    num_rows = budget // length if pictures is None else pictures.num_rows
    task = Task(id="task", data={})
    members = tuple(
        Trajectory(
            id=str(number),
            group_id="group",
            task=task,
            env_id="plan",
            spans=_full_spans(length, pictures.of_row(number) if pictures else ()),
            turns=(Turn(finish_reason=FinishReason.STOP, reward=float(number % 2)),),
            stop_reason=StopReason.COMPLETED,
        )
        for number in range(num_rows * num_microbatches)
    )
    return Group(id="group", task=task, trajectories=members)


def _full_spans(length: int, images: tuple[ImageRef, ...]) -> tuple[TokenSpan, ...]:
    num_seen = 1 + sum(image.length for image in images)
    return (
        TokenSpan(origin="prompt", token_ids=(1,) * num_seen, images=images),
        TokenSpan(
            origin="policy",
            token_ids=(1,) * (length - num_seen),
            logprobs=(-1.0,) * (length - num_seen),
            policy_version=0,
            turn=0,
        ),
    )


# ---- fixed data --------------------------------------------------------------------------------


class _Supervised(SimulatedTrainer, Supervised):
    def __init__(
        self,
        policy: PolicyModel,
        config: RunConfig,
        ranks: Ranks,
        maker: ModelMaker,
        tracker: MemoryTracker,
    ) -> None:
        self._simulate(maker, tracker)
        objective = _Noted(_objective_of(config), self._note_microbatch)
        Supervised.__init__(
            self, policy, simulated_settings(config), objective=objective, ranks=ranks
        )

    def take_step(
        self, config: RunConfig, num_microbatches: int, pictures: PlannedPictures | None
    ) -> int:
        examples = full_examples(config, num_microbatches, pictures)
        self.step(examples)
        return sum(len(row.token_ids) for example in examples for row in example)


class _Noted(Objective):
    """An objective whose calls are noted first: one for each micro-batch."""

    def __init__(self, objective: Objective, note: Any) -> None:
        self.heads = objective.heads
        self.prepare = objective.prepare  # type: ignore[method-assign]
        self.has_batch_mean = objective.has_batch_mean
        self.batch_values = objective.batch_values  # type: ignore[method-assign]
        self._objective = objective
        self._note = note

    def num_units(self, example: Example) -> int:
        return self._objective.num_units(example)

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        self._note()
        return self._objective(decoder, batch, examples)


def _objective_of(config: RunConfig) -> Objective:
    if config.objective == "rm":
        return BradleyTerry()
    if config.objective == "dpo":
        return Dpo(Path(config.engine.model), kind=config.dpo.kind, beta=config.dpo.beta)
    if config.objective == "kto":
        return Kto(Path(config.engine.model), **config.kto.model_dump())
    if config.objective == "orpo":
        return Orpo(weight=config.orpo.weight)
    return Sft()


def full_examples(
    config: RunConfig, num_microbatches: int, pictures: PlannedPictures | None = None
) -> list[Example]:
    """Return examples whose rows fill that many micro-batches, all but the first tokens marked.

    The two rows of a pair share nothing: no example takes more tokens. With `pictures`, each
    example has some of its own.
    """
    length = config.engine.max_context  # a row is never cut
    num_each = 1 if config.objective == "sft" else 2
    budget = max(num_each * length, config.trainer.tokens_per_microbatch)
    num_examples = budget // (num_each * length)
    if pictures is not None:
        num_examples = max(1, min(num_examples, pictures.num_rows))

    def example(number: int) -> Example:
        images = pictures.of_row(number) if pictures else ()
        num_seen = 1 + sum(image.length for image in images)
        mask = (*(False,) * num_seen, *(True,) * (length - num_seen))
        row = TokenRow(token_ids=(1,) * length, mask=mask, num_shared=0, images=images)
        return (row,) * num_each

    return [example(number) for number in range(num_examples * num_microbatches)]
