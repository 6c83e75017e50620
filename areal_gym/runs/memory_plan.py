"""Computes the memory that a run needs: a rank of the trainer at its peak, and the engine.

Nothing is allocated: the parameters are counted on a model without data. Activations are those
that the backward pass needs, for a full micro-batch; what allocators and libraries take comes on
top (on GPUs, one or two GB).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.config import RunConfig
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from torch import nn

    from areal_gym.models.policy_model import PolicyModel
    from areal_gym.models.tiny.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, and of the engine."""

    num_parameters: int  # of the policy
    weights: int
    gradients: int
    states: int  # the optimizer's
    frozen: int  # the reference policy of a KL term, in bfloat16 if that is computed in
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
        activations=num_copies * _activations(config, shape, num_bytes)
        + _logits(config, shape.vocab_size),
        served=2 * num_all,
        cached=shape.cache_bytes_per_token,
    )


def memory_of_policy(config: RunConfig, policy: PolicyModel) -> Memory:
    """Return what training a model of transformers needs with these settings.

    `policy` is the model without data (`ModelLoader.without_weights`); it gets the adapter of the
    settings. Activations are estimated from the sizes of its layers' matrices; what recurrent
    layers keep of their states is not counted.

    Raises:
        ConfigError: the adapter of the settings does not fit it.
    """
    from areal_gym.models.lora_weights import is_adapter
    from areal_gym.trainer.algorithms.advantages import needs_critic
    from areal_gym.trainer.lora import add_adapter

    trainer = config.trainer
    num_ranks, num_bytes = trainer.num_ranks, 2 if trainer.dtype == "bfloat16" else 4
    sizes = {name: p.numel() for name, p in policy.named_parameters()}
    num_all = sum(sizes.values())
    num_matrices = sum(
        p.numel() for n, p in policy.named_parameters() if p.ndim == 2 and ".layers." in n
    )
    num_layer, num_in_layers = 0, 0
    for layer in policy.layers:
        experts = sum(p.numel() for p in layer.parameters() if p.ndim == 3)
        whole = sum(p.numel() for p in layer.parameters())
        # Divided experts stay where they are: tokens travel to them.
        num_layer = max(num_layer, whole - experts + experts // trainer.parallel.expert)
        num_in_layers += whole
    activations = _policy_activations(config, policy, num_bytes)
    num_added = 0
    if trainer.lora is not None:
        add_adapter(policy, trainer.lora)
        num_added = sum(p.numel() for n, p in policy.named_parameters() if is_adapter(n))
    frozen_bytes = num_bytes if num_added else 4
    # Each rank has an adapter whole, beside its shard of what is frozen.
    trained = num_added or num_all // num_ranks
    states = 2 * trained
    if trainer.optimizer == "muon":
        # One momentum each, not two; the adapter's matrices are in layers, too.
        states -= num_added or num_matrices // num_ranks
    trunk, trunk_states = 0, 0
    advantage = registry().load("advantages", trainer.advantage)
    if trainer.critic.trunk == "own" and needs_critic(advantage):
        trunk = (num_all - sizes.get("network.lm_head.weight", 0)) // num_ranks
        trunk_states = 2 * trunk
        if trainer.optimizer == "muon":
            trunk_states -= num_matrices // num_ranks
    gathered = 0
    if num_ranks > 1:
        # As for the tiny decoder; what is frozen has no gradients.
        own = 2 * num_bytes if num_added else 3 * num_bytes + 4
        rest = num_bytes if num_added else 2 * num_bytes + 4
        gathered = num_layer * own + (num_all - num_in_layers) * rest
    elif num_bytes == 2:
        gathered = 0 if num_added else 2 * num_all
    return Memory(
        num_parameters=num_all,
        weights=frozen_bytes * num_all // num_ranks + 4 * (num_added + trunk),
        gradients=4 * (trained + trunk),
        states=4 * (states + trunk_states),
        frozen=num_bytes * num_all // num_ranks if trainer.kl.coefficient else 0,
        gathered=gathered,
        activations=activations * (2 if trunk else 1) + _logits(config, policy.shape.vocab_size),
        served=2 * num_all,
        cached=policy.shape.cache_bytes_per_token,
    )


def _logits(config: RunConfig, vocab_size: int) -> int:
    """A chunk of logits, its log-probabilities, and the gradients of both, float32."""
    from areal_gym.models.device import pick_device
    from areal_gym.trainer.chunked_logprobs import chunk_tokens

    return 4 * 4 * vocab_size * chunk_tokens(vocab_size, pick_device(config.trainer.device))


def _policy_activations(config: RunConfig, policy: PolicyModel, num_bytes: int) -> int:
    """What a micro-batch keeps for its backward pass, as `_activations` says."""
    trainer, hidden = config.trainer, policy.shape.hidden_size
    facts: Any = policy.network.config
    num_chosen = int(getattr(facts.get_text_config(), "num_experts_per_tok", None) or 1)
    residual = hidden * (num_bytes if trainer.num_ranks > 1 else 4)
    layers = [
        2 * residual + num_bytes * _kept_by(layer, hidden, num_chosen) for layer in policy.layers
    ]
    kept = sum(layers)
    if trainer.recompute_layers:
        kept = len(layers) * residual + max(layers)
    return trainer.tokens_per_microbatch * (kept + residual + num_bytes * hidden)


def _kept_by(layer: nn.Module, hidden: int, num_chosen: int) -> int:
    """Return how many numbers a layer keeps of a token, beside the residual stream.

    Norms keep what they normalised and what they give. A linear layer keeps what it gives, if that
    is not added to the residual stream; and one that leads back to it keeps what it is given, and
    so does the activation before it.
    """
    from torch import nn

    kept = 0
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            leads_back = module.out_features == hidden
            kept += 2 * module.in_features if leads_back else module.out_features
        elif "norm" in type(module).__name__.lower():
            kept += 2 * sum(p.numel() for p in module.parameters(recurse=False) if p.ndim == 1)
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 3:  # experts' matrices, either way round
                    kept += num_chosen * (sum(parameter.shape[1:]))
    return kept


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
    loader = ModelLoader(backend=config.model.backend, trusts_code=config.model.trust_remote_code)
    if loader.uses_transformers(model):
        memory = memory_of_policy(config, loader.without_weights(model))
    else:
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
