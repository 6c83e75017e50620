"""Tiny vision-language checkpoints of three families, made from nothing: files, and the models."""

import json
from pathlib import Path

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
SIDE, PATCH = 64, 8

# The shape of Qwen's own template: what a message says is a text or a list of parts.
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>"
    "{% elif p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_CONTROL = {
    "qwen": (
        "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> "
        "<|video_pad|>"
    ),
    "gemma": (
        "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image> "
        "<image_soft_token>"
    ),
}


def tokenizer(family):
    """Return a tokenizer of bytes and control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = "gemma" if family == "gemma3" else "qwen"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(_CONTROL[kind].split())
    if kind == "qwen":
        names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    else:
        names = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
        names["extra_special_tokens"] = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
    return PreTrainedTokenizerFast(tokenizer_object=fast, model_max_length=4096, **names)


def image_processor(family, side=SIDE, patch=PATCH):
    """Return the family's processor of pixels, in its variant for Pillow."""
    half = [0.5] * 3
    if family == "gemma3":
        from transformers import Gemma3ImageProcessorPil

        size = {"height": side, "width": side}
        return Gemma3ImageProcessorPil(size=size, image_mean=half, image_std=half)
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
        image_mean=half,
        image_std=half,
    )


def config(family, words, *, side=SIDE, patch=PATCH, width=64, layers=4, heads=4, init=0.08):
    """Return the configuration of a model of 0.3 to 0.6 M parameters."""
    ids = words.convert_tokens_to_ids
    text = {
        "vocab_size": len(words),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "max_position_embeddings": 4096,
        "initializer_range": init,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
    }
    if family == "gemma3":
        from transformers import Gemma3Config

        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        text |= {"sliding_window": 16, "query_pre_attn_scalar": width // heads}
        text |= {"layer_types": kinds, "bos_token_id": words.bos_token_id}
        tower = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 3}
        tower |= {"num_attention_heads": 2, "image_size": side, "patch_size": patch}
        return Gemma3Config(
            text_config=text,
            vision_config={**tower, "vision_use_head": False},
            mm_tokens_per_image=(side // patch // 2) ** 2,
            boi_token_index=ids("<start_of_image>"),
            eoi_token_index=ids("<end_of_image>"),
            image_token_id=ids("<image_soft_token>"),
            tie_word_embeddings=True,
            initializer_range=init,
        )
    half = width // heads // 2
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    tower = {"depth": 3, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2}
    tower |= {"patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tower |= {"out_hidden_size": width, "initializer_range": init}
    shared = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": False,
    }
    if family == "qwen3_vl":
        from transformers import Qwen3VLConfig

        rope["mrope_interleaved"] = True
        tower |= {"num_position_embeddings": (side // patch) ** 2}
        tower |= {"deepstack_visual_indexes": [0, 1]}
        text["rope_parameters"] = rope
        return Qwen3VLConfig(text_config=text, vision_config=tower, **shared)
    from transformers import Qwen2_5_VLConfig

    tower |= {"window_size": 4 * patch, "fullatt_block_indexes": [2]}
    text["rope_parameters"] = rope
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, **shared)


def save_files(family, directory, **sizes):
    """Write all of a checkpoint but its weights, and return the configuration."""
    directory = Path(directory)
    words = tokenizer(family)
    made = config(family, words, **sizes)
    words.save_pretrained(directory)
    made.save_pretrained(directory)
    image_processor(family).save_pretrained(directory)
    template = GEMMA_TEMPLATE if family == "gemma3" else QWEN_TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    ends = [words.convert_tokens_to_ids("<end_of_turn>" if family == "gemma3" else "<|im_end|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return made


def model(family, made, *, seed=0, attention="sdpa"):
    """Return a random model of a configuration."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    network = AutoModelForImageTextToText.from_config(
        made, attn_implementation=attention, dtype=torch.float32
    )
    if family == "gemma3":
        # It starts at zero: no picture would change anything, and every test would pass.
        network.model.multi_modal_projector.mm_input_projection_weight.data.normal_(0, 0.3)
    return network


def picture(seed, width=64, height=64, num_squares=5):
    """Return a Pillow image of coloured squares; the same seed gives the same one."""
    import random

    from PIL import Image, ImageDraw

    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    cells = [(x, y) for x in range(width // 16) for y in range(height // 16)]
    for x, y in rng.sample(cells, min(len(cells), num_squares)):
        box = (x * 16 + 2, y * 16 + 2, x * 16 + 13, y * 16 + 13)
        draw.rectangle(box, fill=rng.choice(["red", "blue", "green"]))
    return image
