"""A causal language model of transformers, as the trainer sees it.

    flat batch --model's own forward, no logits--> hidden states [N, C]
    hidden states of a chunk --model's own forward over a stub body--> logits [chunk, V]

The second line is why no family has to be known here: what an architecture does around its output
projection (caps, scales, biases) is done by its own code, a chunk at a time, so that logits of a
whole batch never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from areal_gym.errors import ConfigError
from areal_gym.models.context_parallel import ContextGroup
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.hf.cpu_kernels import use_cpu_kernels
from areal_gym.models.hf.hf_vision import HFVision, PlacedPictures, parameters_that_see
from areal_gym.models.hf.packed_mixing import PackedMixing
from areal_gym.models.hf.packing_check import require_exact_packing
from areal_gym.models.hf.routing import RoutingStats, watch_routers
from areal_gym.models.hf.token_mixing import (
    TokenMixing,
    current_mixing,
    let_mixing_decide,
    mixing_with,
    recurrent_parts,
)
from areal_gym.models.lora_weights import NetworkTensor, network_tensors
from areal_gym.models.policy_model import ModelShape, Pack, PolicyModel


class HFPolicy(PolicyModel):
    """A `PolicyModel` around a network that was made with `attn_implementation="areal_packed"`.

    The network stays in evaluation mode: a policy that drops units by chance would not be the one
    that sampled.

    Args:
        network: a causal language model; `hf_loading.load_policy` reads one.
        read_trunk: reads the same weights into another model, of type `dtype`; needed for
            `duplicate_trunk` where the weights are sharded, which FSDP2 cannot copy.
    """

    network: PreTrainedModel
    vision: HFVision | None = None
    """How pictures get into rows; None for models that do not see."""
    takes_cpu_kernels = True
    """Whether parts on a CPU are run by our kernels, which keep less than torch's."""

    def __init__(
        self, network: PreTrainedModel, read_trunk: Callable[..., HFPolicy] | None = None
    ) -> None:
        super().__init__()
        self.is_sharded = read_trunk is not None
        self._read_trunk = read_trunk
        self.network = network.eval()
        recurrent = recurrent_parts(self.layers)
        self._shape = shape_of(network, num_recurrent=len(recurrent))
        if self.takes_cpu_kernels and not has_tensor_ranks(network):
            use_cpu_kernels(network, is_recurrent=bool(recurrent))
        for part in recurrent:
            let_mixing_decide(part)
        self.can_share_prompts = not recurrent
        self._routers = watch_routers(self.layers)
        self._routing = RoutingStats()

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self._shape

    @property
    def has_routers(self) -> bool:
        """Whether it has routers that can be watched."""
        return bool(self._routers)

    @property
    def body(self) -> nn.Module:
        """All of the network but the output projection."""
        body: nn.Module = getattr(self.network, _body_name(self.network))
        return body

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the language model."""
        inner: Any = self.body
        while not hasattr(inner, "layers"):
            inner = inner.language_model
        layers: nn.ModuleList = inner.layers
        return layers

    def forward(self, batch: PackedBatch, wanted_M: Tensor | None = None) -> Tensor:
        """Return the hidden states after the last norm; see `PolicyModel.forward`."""
        context = self.context
        stats = self._routing if self.counts_experts else RoutingStats()
        placed = None if batch.images is None else self._placed(batch)
        mixing = PackedMixing(
            batch,
            stats,
            context,
            replays=self.replays_experts,
            pictures_N=None if placed is None else placed.pictures_N,
        )
        hidden_nC = self.hidden_states(
            context.own(batch.token_ids_N), context.own(batch.positions_N), mixing, placed
        )
        if wanted_M is None:
            return hidden_nC
        return context.wanted(hidden_nC, wanted_M, len(batch.token_ids_N))

    def _placed(self, batch: PackedBatch) -> PlacedPictures:
        if self.vision is None:
            raise ConfigError(
                f"rows have pictures, and {_own_class(self.network).__name__} has no parts that "
                "see them, or its checkpoint no image processor"
            )
        if self.context.size > 1:
            raise ConfigError(
                f"trainer.parallel.context = {self.context.size}: ranks cannot share the tokens of "
                "rows with pictures",
                hints=["trainer.parallel.context=1"],
            )
        return self.vision.placed(batch)

    def hidden_states(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        mixing: TokenMixing,
        placed: PlacedPictures | None = None,
    ) -> Tensor:
        """Return the hidden states of tokens that see each other as `mixing` says, [N, C].

        `placed` are pictures among the tokens, of a model that sees.
        """
        for layer in self.layers:
            if isinstance(layer, GradientCheckpointingLayer):
                layer.gradient_checkpointing = self.recomputes_layers
                layer.training = self.recomputes_layers  # transformers asks for both
                layer._gradient_checkpointing_func = _recompute
        hidden: list[Tensor] = []
        hook = self.body.register_forward_hook(
            lambda module, inputs, output: hidden.append(output.last_hidden_state[0])
        )
        seeing: AbstractContextManager[None] = nullcontext()
        if placed is not None and self.vision is not None:
            keeps_pace = self.is_sharded and torch.is_grad_enabled()
            seeing = self.vision.seeing(placed, keeps_pace=keeps_pace)
        try:
            with mixing_with(mixing), seeing:
                # Through the root, where FSDP2 gathers, and without any logits.
                out = self.network(
                    input_ids=token_ids_N[None],
                    position_ids=positions_N[None],
                    use_cache=False,
                    logits_to_keep=token_ids_N.new_zeros(0),
                )
        finally:
            hook.remove()
        hidden_NC: Tensor = hidden[0] + 0 * out.logits.sum()
        return hidden_NC

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return [N, V], by the architecture's own forward over a body that gives `hidden_NC`."""
        shell = _shell_of(self.network)
        shell._modules[_body_name(self.network)] = _GivenBody(hidden_NC[None])
        ids = torch.zeros(1, 1, dtype=torch.long, device=hidden_NC.device)
        logits: Tensor = shell.forward(input_ids=ids, use_cache=False).logits[0]
        return logits if self.vision is None else self.vision.without_banned(logits)

    def network_tensors(self) -> Iterator[NetworkTensor]:
        """Yield the network's tensors, of tied ones the first."""
        tied = set(getattr(self.network, "all_tied_weights_keys", None) or ())
        return network_tensors(self.network, prefix="network.", without=tied)

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what `save_pretrained` would write of it: its names and values."""
        tensors: dict[str, Tensor] = revert_weight_conversion(self.network, {name: tensor})
        return tensors

    def share_tokens(self, context: ContextGroup) -> None:
        """Share the tokens of every pass; see `PolicyModel.share_tokens`."""
        kinds = _rope_types(self.network.config.get_text_config())
        if context.size > 1 and (kinds := [k for k in kinds if "dynamic" in k or k == "longrope"]):
            raise ConfigError(
                f"{_own_class(self.network).__name__} turns positions by the longest sequence of a "
                f"pass (rope_type {kinds[0]}), of which a rank of trainer.parallel.context = "
                f"{context.size} sees a part only",
                hints=["trainer.parallel.context=1"],
            )
        super().share_tokens(context)

    def take_expert_counts(self) -> Tensor | None:
        """Return the tokens that each layer's experts were given in training, [L, E]."""
        return self._routing.take_counts(self.context)

    def take_router_agreement(self) -> tuple[int, int]:
        """Return how many experts that engines recorded the routers chose as well, and all."""
        return self._routing.take_agreement(self.context)

    def check_packing(self, pack: Pack, dtype: torch.dtype) -> None:
        """Refuse to train an architecture in which packed sequences see each other."""
        require_exact_packing(self, pack, dtype)

    def duplicate_trunk(self) -> PolicyModel:
        """Return another model with the weights that this one was read with, in float32."""
        if self._read_trunk is not None:
            return self._read_trunk(dtype=torch.float32)
        head = self.network.get_output_embeddings()
        return copy.deepcopy(self, {} if head is None else {id(head): _NoLogits()}).float()

    def hf_config(self) -> dict[str, Any]:
        """Return the content of the checkpoint's `config.json`."""
        config: dict[str, Any] = self.network.config.to_dict()
        config["architectures"] = [_own_class(self.network).__name__]
        return config


def has_tensor_ranks(network: PreTrainedModel) -> bool:
    """Return whether each layer's matrices are divided among ranks (tensor parallelism)."""
    return bool((getattr(network, "_tp_size", None) or 1) > 1)


def shape_of(network: PreTrainedModel, *, num_recurrent: int = 0) -> ModelShape:
    """Return the sizes of a network from its config and its parameters.

    `num_recurrent` layers keep no keys and values.
    """
    config = network.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_cached = 2 * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    num_cached *= head_dim
    if latent := getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        num_cached = latent + config.qk_rope_head_dim
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    num_parameters = sum(p.numel() for p in network.parameters())
    num_expert, num_experts = 0, 1
    for name, parameter in network.named_parameters():
        if ".experts." in name:
            num_expert += parameter.numel()
            if parameter.ndim == 3:
                num_experts = parameter.shape[0]
    num_chosen = getattr(config, "num_experts_per_tok", None) or num_experts
    num_idle = num_expert * (num_experts - num_chosen) // num_experts
    num_idle += sum(p.numel() for p in parameters_that_see(network))
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - num_idle,
        cache_bytes_per_token=2 * (config.num_hidden_layers - num_recurrent) * int(num_cached),
    )


def _rope_types(config: Any) -> list[str]:
    """Return the kinds of rotary positions of a config; those of some differ by layer type."""
    settings = getattr(config, "rope_parameters", None) or {}
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    return [str(part["rope_type"]) for part in parts if "rope_type" in part]


class _BodyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """Hidden states, and None for whatever else a model's forward asks its body for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _NoLogits(nn.Module):
    """Stands where the output projection is, in a model that is asked for no logits."""

    def forward(self, hidden_1NC: Tensor) -> Tensor:
        """Return no logits."""
        return hidden_1NC[..., :0]


class _GivenBody(nn.Module):
    """Stands where the body is and gives hidden states that were computed before."""

    def __init__(self, hidden_1NC: Tensor) -> None:
        super().__init__()
        self.hidden_1NC = hidden_1NC

    def forward(self, *args: Any, **kwargs: Any) -> _BodyOutput:
        """Return the given hidden states."""
        return _BodyOutput(last_hidden_state=self.hidden_1NC)


def _shell_of(network: PreTrainedModel) -> PreTrainedModel:
    """Return a second object with the network's parameters, whose parts can be replaced."""
    shell: PreTrainedModel = object.__new__(_own_class(network))
    shell.__dict__.update(network.__dict__)
    shell.__dict__["_modules"] = copy.copy(network._modules)
    return shell


def _own_class(network: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the network's class, without what FSDP2 puts in front of it."""
    return next(c for c in type(network).__mro__ if not c.__name__.startswith("FSDP"))


def _body_name(network: PreTrainedModel) -> str:
    """Return the attribute that is the body; llama4's prefix names no part of it."""
    prefix = str(network.base_model_prefix)
    return prefix if prefix in network._modules else "model"


def _recompute(function: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint a layer; when it is computed again tokens see each other as before."""
    mixing = current_mixing()

    def forward(*inputs: Any) -> Any:
        with mixing_with(mixing):
            return function(*inputs)

    return checkpoint(partial(forward), *args, use_reentrant=False)
