"""Takes a training step of one rank with fake tensors: no memory, no GPU, no other ranks.

The model's class, its sharding, the trainer's passes and its update are those of a run. What is
left out is what reads values: advantages, metrics, the choice of experts. Attention stands for a
fused kernel, which keeps its inputs, its output and one number for each query and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from areal_gym.config import RunConfig
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.hf.packed_mixing import PackedMixing
from areal_gym.models.hf.token_mixing import ScoreRules
from areal_gym.models.policy_model import ModelShape, Pack, PolicyModel
from areal_gym.plan.memory_tracker import MemoryTracker, labelled_training
from areal_gym.plan.network_shapes import network_of_shapes
from areal_gym.plugins import registry
from areal_gym.trainer.batch.experience import TokenBatch
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.parallel import fsdp
from areal_gym.trainer.parallel.rank_group import Ranks
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
    traffic: Mapping[str, int]
    """Bytes of the whole tensors of each kind of collective, in one micro-batch."""
    num_tokens: int
    """Tokens in one micro-batch of one rank."""


def simulate_step(config: RunConfig, model: PretrainedConfig) -> SimulatedStep:
    """Take a step as rank 0 of `trainer.num_ranks` would.

    It must be called where no process group is: it makes one that sends nothing.

    Raises:
        ConfigError: the model cannot be laid out like that, or the settings do not fit.
    """
    settings = config.trainer_of_run()
    sharding = fsdp.sharding_of(settings, settings.layout, torch.device("cpu"))
    with _fake_process_group(settings.num_ranks):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        ranks = _LoneRank(layout=settings.layout)
        if settings.num_ranks > 1:
            _ = ranks.fsdp_mesh  # a mesh holds real numbers

        def make(*, is_frozen: bool = False, is_trunk: bool = False) -> _SimulatedPolicy:
            is_short = settings.dtype == "bfloat16" and is_frozen
            dtype = torch.bfloat16 if is_short else torch.float32
            with unset_fake_temporarily():  # the ranks' mesh holds numbers
                network = network_of_shapes(
                    model, sharding, mode=mode, dtype=dtype, is_trunk=is_trunk
                )
            return _SimulatedPolicy(network, make)

        policy = make(is_frozen=settings.lora is not None)
        with mode, _HostValues(), _modules_stay():  # type: ignore[no-untyped-call]
            trainer = _SimulatedTrainer(
                policy,
                settings,
                advantage=registry().load("advantages", settings.advantage),
                loss=registry().load("losses", settings.loss),
                temperature=config.rollout.temperature,
                max_new_tokens=config.rollout.max_new_tokens,
                reference=Path(config.engine.model),
                ranks=ranks,
            )
            tracker = MemoryTracker(policy.shape.vocab_size)
            trainer.allocate_states()
            with trainer.labelled(tracker), tracker:
                group = full_group(config, _NUM_MICROBATCHES)
                trainer.step([group], 0)
    num_tokens = sum(len(trajectory.token_ids) for trajectory in group)
    return SimulatedStep(
        shape=policy.shape,
        peak={kind: size for kind, size in tracker.peak.items() if size},
        traffic={name: size // _NUM_MICROBATCHES for name, size in tracker.traffic.items()},
        num_tokens=num_tokens // _NUM_MICROBATCHES,
    )


@contextmanager
def _fake_process_group(num_ranks: int) -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _modules_stay() -> Iterator[None]:
    """Keep modules where they are: fake tensors refuse to be moved."""
    move = nn.Module.to
    nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


class _LoneRank(Ranks):
    """Rank 0 with rows of its own; the others are assumed to have the same values."""

    def share(self, members: Sequence[int], costs: Sequence[int]) -> list[int]:
        return list(members)

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.num_data_ranks


class _HostValues(TorchDispatchMode):
    """Lets the host compute with its own tensors; a fake one reads as 1, and is equal to none."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and all(type(t) is Tensor and not t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = tensors[0].dtype
            return 1.0 if kind.is_floating_point else kind == torch.bool or 1
        if func is torch.ops.aten.equal.default:
            return False
        if func is torch.ops.aten._grouped_mm.default and tensors[0].dtype == torch.float32:
            return _grouped_product(*args)  # torch knows the shape for bfloat16 only
        return func(*args, **(kwargs or {}))


def _grouped_product(left: Tensor, right: Tensor, ends_E: Tensor, *_: Any) -> Tensor:
    """Return a product of the shape that experts' [N, K] and [E, K, O] have, or [K, N] and [N, O].

    The second is a gradient of weights, [E, K, O].
    """
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(len(ends_E), left.shape[0], right.shape[-1])


class _FusedAttention(torch.autograd.Function):
    """The shapes of a fused kernel of attention."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor) -> Tensor:
        out_NHE = q_NHD.new_empty(*q_NHD.shape[:-1], v_NKE.shape[-1])
        sums_NH = q_NHD.new_empty(q_NHD.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q_NHD, k_NKD, v_NKE, out_NHE, sums_NH)
        return out_NHE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _SimulatedMixing(PackedMixing):
    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, rules: ScoreRules
    ) -> Tensor:
        attention: Any = _FusedAttention
        out_NHE: Tensor = attention.apply(q_NHD.to(v_NKE.dtype), k_NKD.to(v_NKE.dtype), v_NKE)
        return out_NHE


class _SimulatedPolicy(HFPolicy):
    takes_cpu_kernels = False

    def __init__(self, network: Any, make: Callable[..., _SimulatedPolicy]) -> None:
        super().__init__(network, lambda **_: make(is_trunk=True))
        self.make = make
        self.is_sharded = torch.distributed.get_world_size() > 1

    def forward(self, batch: PackedBatch, wanted_M: Tensor | None = None) -> Tensor:
        mixing = _SimulatedMixing(batch, self._routing, replays=False)
        hidden_NC = self.hidden_states(batch.token_ids_N, batch.positions_N, mixing)
        return hidden_NC if wanted_M is None else hidden_NC.index_select(0, wanted_M)

    def check_packing(self, pack: Pack, dtype: torch.dtype) -> None:
        """Nothing to compare: there are no values."""


class _SimulatedTrainer(Trainer):
    decoder: _SimulatedPolicy

    def _frozen(self, policy: PolicyModel | Path) -> PolicyModel:
        return super()._frozen(self.decoder.make(is_frozen=True))

    def _compute_advantages(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        num_tokens = sum(row.num_trainable for row in rows)
        for name in ("advantages", *(("values", "returns") if self._critic else ())):
            columns.put(name, torch.zeros(num_tokens))
        return {}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        critics = [self._critic.optimizer] if self._critic else []
        return [part for optimizer in (self._optimizer, *critics) for part in optimizer.parts]

    def allocate_states(self) -> None:
        """Take an update without a pass, after which the optimizers' states are there."""
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                group["fused"] = group["foreach"] = False  # fake tensors know neither
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

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
    budget = config.trainer.tokens_per_microbatch
    length = min(budget, config.engine.max_context)
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
