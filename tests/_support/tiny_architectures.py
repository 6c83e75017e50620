"""Tiny configs of the architectures that people train, for models with random weights."""

import copy

from transformers import AutoConfig, Qwen2_5_VLConfig, Qwen3VLConfig

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large weights: what leaks, or is left out, shows at once.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_WINDOW = {"sliding_window": 8}

ATTENTION = {
    "llama": {},
    "mistral": _WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gemma2": {**_WINDOW, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        **_WINDOW,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "olmo2": {},
    "olmo3": _WINDOW,
    "phi3": {},
    "glm4": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.1},
    "smollm3": {},
    "cohere2": _WINDOW,
    "ernie4_5": {},
    "qwen3_moe": _EXPERTS,
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**_LOCAL_EXPERTS, **_WINDOW},
    "glm4_moe": _ROUTED,
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "minimax_m2": _LOCAL_EXPERTS,
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 16,
        "moe_layers": [1, 3],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "qwen2_5_vl": {},
    "qwen3_vl": {},
}
RECURRENT = {
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_multiple_of": 16,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "hybrid_override_pattern": "M*M-",
    },
}
ARCHITECTURES = {**ATTENTION, **RECURRENT}
_WITHOUT_HEAD_DIM = ("phi3", "olmo2", "olmo3")


def tiny_config(name, **more):
    """The config of a tiny model of an architecture, by transformers' model type.

    Of `num_hidden_layers`, if given, the first ones of four.
    """
    if name in ("qwen3_vl", "qwen2_5_vl"):
        return _with_vision(name, **more)
    settings = {**_BASE, **ARCHITECTURES[name], **more}
    if name in _WITHOUT_HEAD_DIM:
        del settings["head_dim"]
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = kinds[: settings["num_hidden_layers"]]
    return AutoConfig.for_model(name, **settings)


def _with_vision(name, **more):
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    tied = more.pop("tie_word_embeddings", False)
    text = {key: value for key, value in _BASE.items() if key != "tie_word_embeddings"} | more
    ids = {"image_token_id": 120, "video_token_id": 121}
    ids |= {"vision_start_token_id": 122, "vision_end_token_id": 123, "tie_word_embeddings": tied}
    eyes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    eyes["out_hidden_size"] = _BASE["hidden_size"]
    if name == "qwen2_5_vl":
        eyes |= {"window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(
            text_config={**text, "rope_scaling": rope}, vision_config=eyes, **ids
        )
    eyes |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16}
    eyes |= {"deepstack_visual_indexes": [0, 1], "initializer_range": 0.1}
    rope["mrope_interleaved"] = True
    return Qwen3VLConfig(text_config={**text, "rope_scaling": rope}, vision_config=eyes, **ids)


def reference_of(policy):
    """The same network with transformers' own eager attention."""
    network = type(policy.network)(copy.deepcopy(policy.network.config)).eval()
    network.load_state_dict(policy.network.state_dict())
    network.set_attn_implementation("eager")
    return network
