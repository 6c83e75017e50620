"""What tests of several parts need."""

import os
import signal

import pytest
from hypothesis import settings

# Nothing is fetched, and nobody waits for what is not there to be fetched.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

# A shell that starts us in the background makes us, and all we start, deaf to Ctrl-C, which is
# what several tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine: what a search finds by chance must not fail somebody's
# change. To search: pytest --hypothesis-profile=search
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile("fixed")

# What runs in one process of `pytest -n`, one test after the other: what shares servers that are
# dear to start, a container engine, or the one Ray of a machine. Otherwise each file for itself.
TOGETHER = {"sglang": "servers", "distributed": "servers", "sandbox": "sandbox"}


def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        group = TOGETHER.get(folder, item.path.stem)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def shaped_env():
    """The plugin of the environment `shaped` is installed, so to speak."""
    from areal_gym.plugins import PluginManager, Registry, set_registry

    set_registry(Registry(PluginManager.installed(modules=["shaped_env"])))
    yield "shaped"
    set_registry(None)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """A checkpoint directory: a tiny policy of random weights, for what needs no skill."""
    from importlib import resources

    from areal_gym.modeling.checkpoint import save_checkpoint
    from areal_gym.modeling.config import DecoderConfig
    from areal_gym.modeling.decoder import build_decoder
    from areal_gym.starter.tokenizer import build_tokenizer, save_tokenizer

    home = tmp_path_factory.mktemp("tiny")
    template = resources.files("areal_gym.starter").joinpath("chat_template.jinja").read_text()
    tokenizer = build_tokenizer(["Make 17 from 3, 4 and 5.", template], vocab_size=320)
    draft = home / "tokenizer"
    draft.mkdir()
    save_tokenizer(tokenizer, draft, max_context=256)
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
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        ),
        seed=0,
    )
    save_checkpoint(decoder, home / "policy", tokenizer_dir=draft)
    return home / "policy"
