"""The shape of a decoder, and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from areal_gym.errors import ConfigError

__all__ = ["Architecture", "DecoderConfig", "Llama3Rope"]

Architecture = Literal["llama", "qwen2", "qwen3"]

_CAUSAL_LM_CLASS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretched rotary frequencies: low ones divided by `factor`, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Shape of a Llama, Qwen2 or Qwen3 decoder. The three differ in two switches only.

    Example: `DecoderConfig(vocab_size=512, hidden_size=128, intermediate_size=384,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)`
    """

    architecture: Architecture = "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    """Standard deviation of freshly drawn weights."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads = {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def has_qkv_bias(self) -> bool:
        """Qwen2 adds a bias to queries, keys and values."""
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises each head's queries and keys."""
        return self.architecture == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the content of a checkpoint's `config.json`, of transformers 4 or 5.

        Raises:
            ConfigError: another architecture, or a feature that this decoder does not have.
        """
        architecture = _architecture(config)
        _refuse_unsupported(config, architecture)
        missing = [key for key in _REQUIRED if not isinstance(config.get(key), int)]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        heads = config["num_attention_heads"]
        rope_theta, rope_scaling = _rope(config)
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=_head_dim(config, architecture),
            max_position_embeddings=config.get("max_position_embeddings", 4096),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=config.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers 4 and 5 both read."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": (
                    self.rope_scaling.original_max_position_embeddings
                ),
            }
        eos = self.eos_token_id
        config: dict[str, Any] = {
            "architectures": [_CAUSAL_LM_CLASS[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
        if self.rope_scaling is not None:
            config["rope_scaling"] = rope
        if self.architecture != "qwen2":  # Qwen2 derives it
            config |= {"head_dim": self.head_dim, "attention_bias": False}
        return config


def _architecture(config: Mapping[str, Any]) -> Architecture:
    found = config.get("model_type")
    if found not in get_args(Architecture):
        raise ConfigError(
            f"the checkpoint's architecture is {found!r}; the embedded decoder runs "
            + ", ".join(get_args(Architecture)),
            hints=["serve other architectures with SGLang: engine.id=sglang"],
        )
    return cast(Architecture, found)


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture) -> None:
    found: list[str] = []
    for switch in ("use_sliding_window", "mlp_bias"):
        if config.get(switch):
            found.append(f"{switch} = {config[switch]!r}")
    if architecture != "qwen2" and config.get("attention_bias"):
        found.append(f"attention_bias = {config['attention_bias']!r}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        found.append("layer_types other than 'full_attention'")
    if config.get("num_experts") or config.get("num_local_experts"):
        found.append("a mixture of experts")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act = {config['hidden_act']!r} (supported: 'silu')")
    if config.get("quantization_config"):
        found.append("quantized weights")
    if found:
        raise ConfigError(
            f"the embedded decoder does not support {'; '.join(found)} of this {architecture} "
            "checkpoint; it runs dense models with full causal attention",
            hints=["serve it with SGLang: engine.id=sglang"],
        )


def _head_dim(config: Mapping[str, Any], architecture: Architecture) -> int:
    """Qwen2 has no such setting; Qwen3's default is 128, whatever the hidden size."""
    derived: int = config["hidden_size"] // config["num_attention_heads"]
    if architecture == "qwen2":
        return derived
    head_dim = config.get("head_dim")
    if head_dim is not None:
        return int(head_dim)
    return 128 if architecture == "qwen3" else derived


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """transformers 5 keeps all in `rope_parameters`; 4 in `rope_theta` and `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise ConfigError(f"partial_rotary_factor = {partial} is not supported (only 1.0)")
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"rope_type = {kind!r} is not supported; the embedded decoder has 'default', 'llama3'",
            hints=["serve it with SGLang: engine.id=sglang"],
        )
    try:
        return theta, Llama3Rope(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(f"rope_type 'llama3' without {error.args[0]} in config.json") from None
