"""Makes models without values, and the surroundings in which a trainer runs them.

In them the trainer's own code runs; replaced is what reads values, or needs the device: kernels of
attention and of CPUs, sizes of messages between experts, and the placement of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from areal_gym.config import TrainerConfig
from areal_gym.models import flat_batch
from areal_gym.models.context_parallel import ContextGroup
from areal_gym.models.flat_batch import Block, Segment
from areal_gym.models.hf.hf_loading import Sharding
from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.hf.hf_reward_model import HFRewardModel
from areal_gym.models.policy_model import ModelShape, Pack, PolicyModel
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.kernels import (
    attention_kernels,
    kernel_library,
    pointwise_kernels,
    product_kernels,
)
from areal_gym.models.tiny.scored_decoder import RewardModel
from areal_gym.plan.memory_tracker import MemoryTracker
from areal_gym.plan.network_shapes import network_of_shapes
from areal_gym.plan.simulated_pictures import PlannedPictures, SimulatedVision
from areal_gym.trainer import chunked_logprobs

_ACCELERATOR = torch.device("meta")
"""Any device but the CPU: the trainer asks for no more than that."""
_MAX_HEAD_DIM = 256
"""The limit of the variable-length kernel."""


class ModelMaker:
    """Makes the models of one simulated trainer: policy, reference, critic's trunk.

    With `pictures`, they see.
    """

    def __init__(
        self,
        config: PretrainedConfig | DecoderConfig,
        settings: TrainerConfig,
        sharding: Sharding | None,
        mode: FakeTensorMode,
        tracker: MemoryTracker,
        pictures: PlannedPictures | None = None,
    ) -> None:
        self._config = config
        self._is_short = settings.dtype == "bfloat16"
        self._sharding = sharding
        self._mode = mode
        self._tracker = tracker
        self.pictures = pictures

    def make(
        self, *, is_frozen: bool = False, is_trunk: bool = False, is_reward_model: bool = False
    ) -> PolicyModel:
        """Return a model; a frozen one has weights in the type that is computed in."""
        if isinstance(self._config, DecoderConfig):
            kind = RewardModel if is_reward_model else Decoder
            return _simulated_decoder(kind, self._config, self._mode)
        dtype = torch.bfloat16 if self._is_short and is_frozen else torch.float32
        with unset_fake_temporarily():  # the ranks' mesh holds numbers
            network = network_of_shapes(
                self._config,
                self._sharding,
                mode=self._mode,
                dtype=dtype,
                is_trunk=is_trunk or is_reward_model,
            )
            if not is_reward_model:
                policy = _SimulatedPolicy(network, self)
                if self.pictures is not None:
                    seen = (self.pictures, self._mode, self._tracker)
                    policy.vision = SimulatedVision(network, *seen)
                return policy
            with self._mode:
                weight_1C = torch.zeros(1, self._config.get_text_config().hidden_size)
            return _SimulatedRewardModel(network, weight_1C, self)


class _SimulatedPolicy(HFPolicy):
    def __init__(self, network: Any, maker: ModelMaker) -> None:
        super().__init__(network, lambda **_: maker.make(is_trunk=True))  # type: ignore[arg-type]
        self.is_sharded = maker._sharding is not None

    def check_packing(self, pack: Pack, dtype: torch.dtype) -> None:
        """Nothing to compare: there are no values."""


class _SimulatedRewardModel(HFRewardModel):
    def __init__(self, network: Any, weight_1C: Tensor, maker: ModelMaker) -> None:
        super().__init__(network, weight_1C)
        self.is_sharded = maker._sharding is not None

    def check_packing(self, pack: Pack, dtype: torch.dtype) -> None:
        """Nothing to compare: there are no values."""


def _simulated_decoder(
    kind: type[Decoder], config: DecoderConfig, mode: FakeTensorMode
) -> PolicyModel:
    with unset_fake_temporarily():
        decoder = kind(config, device="meta")
    with mode:
        for module in decoder.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape)))
    return decoder


def _trunks(mode: FakeTensorMode) -> Callable[[Decoder], PolicyModel]:
    """Return a method that makes a critic's trunk; fake tensors cannot be copied with a module."""

    def duplicate_trunk(decoder: Decoder) -> PolicyModel:
        trunk = _simulated_decoder(Decoder, decoder.config, mode)
        trunk.lm_head = None  # type: ignore[assignment]
        return trunk

    return duplicate_trunk


def shape_of(policy: PolicyModel) -> ModelShape:
    """Return the sizes of a model, before its weights are sharded by others than transformers."""
    shape = policy.shape
    if isinstance(shape, ModelShape):
        return shape
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    return ModelShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_hidden_layers,
        windows=shape.windows,
        attention_width=shape.num_attention_heads * shape.head_dim,
        num_parameters=num_parameters,
        num_active_parameters=num_parameters,
        cache_bytes_per_token=shape.cache_bytes_per_token,
    )


@contextmanager
def surroundings(mode: FakeTensorMode, *, is_cpu: bool) -> Iterator[None]:
    """Let trainers run without values in this context, as on a CPU or as on an accelerator."""
    with ExitStack() as stack:
        for module in (pointwise_kernels, product_kernels, attention_kernels):
            # Outputs and what is kept are allocated outside of the compiled functions.
            stack.enter_context(_replaced(module, "run", lambda *_, **__: None))
        stack.enter_context(_replaced(flat_batch, "_block", _block))
        stack.enter_context(_replaced(ContextGroup, "wanted", _wanted))
        stack.enter_context(_replaced(Decoder, "duplicate_trunk", _trunks(mode)))
        if not is_cpu:
            stack.enter_context(_replaced(kernel_library, "is_there", lambda: False))
            stack.enter_context(_replaced(flat_batch, "fits_kernel", _fits_kernel))
            stack.enter_context(_replaced(flat_batch, "_kernel", lambda: _fused_attention))
            stack.enter_context(_replaced(chunked_logprobs, "chunk_tokens", _chunk_tokens()))
        stack.enter_context(mode)
        stack.enter_context(_HostValues())  # type: ignore[no-untyped-call]
        # Fake tensors refuse to be moved.
        stack.enter_context(_replaced(nn.Module, "to", lambda module, *_, **__: module))
        yield


def _wanted(context: ContextGroup, hidden_nC: Tensor, wanted_M: Tensor, num_tokens: int) -> Tensor:
    """Return as many hidden states as a rank gets, whichever rank has computed them."""
    return hidden_nC.index_select(0, context.own(wanted_M))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _chunk_tokens() -> Callable[..., int]:
    chunk_tokens = chunked_logprobs.chunk_tokens
    return lambda vocab_size, _: chunk_tokens(vocab_size, _ACCELERATOR)


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
        if func in _INDEXING and args[1]:
            args = [args[0], _places(args[1]), *args[2:]]
        return func(*args, **(kwargs or {}))


_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return indices in which masks with values are the places that they name."""
    places: list[Tensor | None] = []
    for index in indices:
        if type(index) is Tensor and index.dtype == torch.bool:
            with unset_fake_temporarily():
                places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return places


def _grouped_product(left: Tensor, right: Tensor, ends_E: Tensor, *_: Any) -> Tensor:
    """Return a product of the shape that experts' [N, K] and [E, K, O] have, or [K, N] and [N, O].

    The second is a gradient of weights, [E, K, O].
    """
    if right.ndim == 3:
        return left.new_empty(left.shape[0], right.shape[-1])
    return left.new_empty(len(ends_E), left.shape[0], right.shape[-1])


# ---- attention ---------------------------------------------------------------------------------


def _fits_kernel(v_NKD: Tensor, softcap: float | None, window: int | None = None) -> bool:
    """Return whether the variable-length kernel of accelerators supports these."""
    is_short = v_NKD.dtype in (torch.float16, torch.bfloat16)
    return is_short and softcap is None and v_NKD.shape[-1] <= _MAX_HEAD_DIM


class _FusedAttention(torch.autograd.Function):
    """The shapes of a fused kernel: it keeps inputs, output, and a number per query and head."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_PKD: Tensor, v_PKE: Tensor) -> Tensor:
        out_NHE = q_NHD.new_empty(*q_NHD.shape[:-1], v_PKE.shape[-1])
        sums_NH = q_NHD.new_empty(q_NHD.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q_NHD, k_PKD, v_PKE, out_NHE, sums_NH)
        return out_NHE

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _fused_attention(
    q_NHD: Tensor,
    k_PKD: Tensor,
    v_PKE: Tensor,
    *_: Any,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    attention: Any = _FusedAttention
    out_NHE: Tensor = attention.apply(q_NHD, k_PKD, v_PKE)
    return out_NHE


def _block(chunk: list[Segment], device: torch.device) -> Block:
    """Return a rectangle of attention of the right sizes."""
    num_rows = len(chunk)
    num_own = max(len(own) for _, own in chunk)
    num_keys = num_own + max(len(prompt) for prompt, _ in chunk)
    index: Any = {"dtype": torch.long, "device": device}
    return Block(
        query_index_BQ=torch.zeros(num_rows, num_own, **index),
        key_index_BK=torch.zeros(num_rows, num_keys, **index),
        mask_B1QK=torch.zeros(num_rows, 1, num_own, num_keys, device=device),
        query_position_BQ=torch.zeros(num_rows, num_own, **index),
        key_position_BK=torch.zeros(num_rows, num_keys, **index),
        longest=num_keys,
        is_real_BK=torch.zeros(num_rows, num_keys, dtype=torch.bool, device=device),
    )
