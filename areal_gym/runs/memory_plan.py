"""Computes the memory that a run needs: a rank of the trainer at its peak, and the engine.

Nothing is allocated: the parameters are counted on a model without data. Activations are those
that the backward pass needs, for a full micro-batch; what allocators and libraries take comes on
top (on GPUs, one or two GB).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.config import RunConfig
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from areal_gym.models.tiny.decoder_config import DecoderConfig

_LOGITS = 4 * 4 * 2**22
"""A chunk of logits, its log-probabilities, and the gradients of both, float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, and of the engine."""

    num_parameters: int  # of the policy
    weights: int
    gradients: int
    states: int  # the optimizer's
    frozen: int  # the reference policy of a KL term
    gathered: int  # weights that are whole, or in another type, while they are computed with
    activations: int
    served: int  # the policy in the engine, in bfloat16, all of it
    cached: int  # keys and values of one token in the engine, in bfloat16

    @property
    def total(self) -> int:
        """The bytes at the peak: in the backward pass of a full micro-batch."""
        kept = self.weights + self.gradients + self.states + self.frozen
        return kept + self.gathered + self.activations


def memory_of(config: RunConfig, shape: DecoderConfig) -> Memory:
    """Return what training a policy of that shape needs with these settings.

    With `cpu_offload`, weights, gradients and states are the host's, not the GPU's.
    """
    from areal_gym.models.tiny.decoder import Decoder
    from areal_gym.trainer.algorithms.advantages import needs_critic

    trainer = config.trainer
    num_ranks, num_bytes = trainer.num_ranks, 2 if trainer.dtype == "bfloat16" else 4
    decoder = Decoder(shape, device="meta")
    num_all = sum(p.numel() for p in decoder.parameters())
    num_layer = sum(p.numel() for p in decoder.model.layers[0].parameters())
    num_matrices = sum(
        p.numel() for n, p in decoder.named_parameters() if p.ndim == 2 and ".layers." in n
    )
    num_added = 0
    if trainer.lora is not None:
        num_added = trainer.lora.rank * sum(
            sum(p.shape)
            for n, p in decoder.named_parameters()
            if p.ndim == 2 and ".layers." in n
            if trainer.lora.targets == "all" or n.split(".")[-2] in trainer.lora.targets
        )
    num_trained = num_added or num_all
    num_states = 2 * num_trained
    if trainer.optimizer == "muon":
        num_states -= num_matrices  # one momentum each, not two
    advantage = registry().load("advantages", trainer.advantage)
    num_copies = 2 if trainer.critic.trunk == "own" and needs_critic(advantage) else 1
    if num_ranks > 1:
        # Two layers are whole at a time, the rest all the while; and their gradients, once more in
        # float32 while these are summed.
        num_rest = num_all - num_layer * shape.num_hidden_layers
        gathered = num_layer * (3 * num_bytes + 4) + num_rest * (2 * num_bytes + 4)
    else:
        gathered = num_bytes * num_all if num_bytes == 2 else 0
    return Memory(
        num_parameters=num_all,
        weights=num_copies * 4 * (num_all + num_added) // num_ranks,
        gradients=num_copies * 4 * num_trained // num_ranks,
        states=num_copies * 4 * num_states // num_ranks,
        frozen=4 * num_all // num_ranks if trainer.kl.coefficient else 0,
        gathered=gathered,
        activations=num_copies * _activations(config, shape, num_bytes) + _LOGITS,
        served=2 * num_all,
        cached=2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim,
    )


def _activations(config: RunConfig, shape: DecoderConfig, num_bytes: int) -> int:
    """What a micro-batch keeps for its backward pass.

    A layer keeps, for each token: what enters attention and the MLP, before and after the norm;
    queries, keys and values as attention takes them (before their norms, too, where there are
    such), and what attention gives; and of the MLP's inner axis gate, activated gate (not so on
    CPUs in float32, where the gated unit is one operation), the other branch, and the product.
    """
    trainer = config.trainer
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    # The residual stream of a single rank stays float32: autocast does not touch embeddings.
    residual = shape.hidden_size * (num_bytes if trainer.num_ranks > 1 else 4)
    inner = 2 * queries + 2 * keys + 2 * shape.hidden_size + 4 * shape.intermediate_size
    inner += (queries + keys) * shape.family.has_qk_norm
    layer = 2 * residual + num_bytes * inner
    layers = shape.num_hidden_layers * layer
    if trainer.recompute_layers:
        layers = shape.num_hidden_layers * residual + layer
    return trainer.tokens_per_microbatch * (layers + residual + num_bytes * shape.hidden_size)


def describe_memory(config: RunConfig) -> list[str]:
    """Return lines for people; none for the starter policy, which fits anywhere.

    Raises:
        ConfigError: the model's `config.json` is not one that can be trained.
    """
    if config.engine.model == "starter":
        return []
    if find_spec("torch") is None:
        return ["memory: is told where torch is installed"]
    if not (Path(config.engine.model) / "config.json").is_file():
        return [f"memory: is told once there is {config.engine.model}/config.json"]
    from areal_gym.models.backend import ModelLoader
    from areal_gym.models.tiny.checkpoint_files import read_config
    from areal_gym.models.tiny.hf_config import config_from_hf

    model = Path(config.engine.model)
    if ModelLoader(backend=config.model.backend).uses_transformers(model):
        return [f"memory: not estimated for the architecture of {model}"]
    memory = memory_of(config, config_from_hf(read_config(model)))
    tokens = config.rollout.max_in_flight * config.engine.max_context
    parts = [
        (memory.weights, "weights"),
        (memory.gradients, "gradients"),
        (memory.states, "optimizer states"),
        (memory.frozen, "reference policy"),
        (memory.gathered, "gathered or cast weights"),
        (memory.activations, f"activations of {config.trainer.tokens_per_microbatch:,} tokens"),
    ]
    listed = " + ".join(f"{_gb(size)} {name}" for size, name in parts if size)
    num_ranks = config.trainer.num_ranks
    each = "the trainer" if num_ranks == 1 else f"each of {num_ranks} ranks"
    return [
        f"memory: a policy of {memory.num_parameters / 1e9:.2f} billion parameters; {each} takes "
        f"{_gb(memory.total)} GB = {listed}",
        f"engine: {_gb(memory.served)} GB weights in bfloat16, {memory.cached / 1e3:.0f} kB of "
        f"cache a token; {config.rollout.max_in_flight:,} in flight, all of "
        f"{config.engine.max_context:,} tokens, would take {_gb(tokens * memory.cached)} GB: "
        "who finds no room there waits",
    ]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}"
