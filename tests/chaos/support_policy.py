"""A checkpoint for chaos scripts: a tiny policy of random weights."""

from importlib import resources
from pathlib import Path


def make_tiny_policy(home: Path) -> Path:
    """Writes the checkpoint below `home`, and returns its directory."""
    from areal_gym.models.tiny.checkpoint_files import save_checkpoint
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig
    from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

    template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
    tokenizer = build_tokenizer(["Make 17 from 3, 4 and 5.", template], vocab_size=320)
    draft = home / "tokenizer"
    draft.mkdir()
    save_tokenizer(tokenizer, draft, max_context=512)
    decoder = build_decoder(
        DecoderConfig(
            architecture="qwen3",
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        ),
        seed=0,
    )
    return save_checkpoint(decoder, home / "policy", tokenizer_dir=draft)
