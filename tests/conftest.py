"""What tests of several parts need."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile

import pytest
from hypothesis import settings

from tests._support.long_tests import skip_long
from tests._support.long_variants import LONG_VARIANTS

# Nothing is fetched, and nobody waits for what is not there to be fetched.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

# Modules are compiled once, and not again by each of the many processes that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Four processes and their children share the cores: threads of torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What modules and tests consist of, a million objects, stays. Python's collector leaves it alone,
# or it takes a fifth of the time: each run in this process begins with a collection.
gc.disable()  # until all tests are collected

# A shell that starts us in the background makes us, and all we start, deaf to Ctrl-C, which is
# what several tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine: what a search finds by chance must not fail somebody's
# change. To search: pytest --hypothesis-profile=search
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=2000, deadline=None)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.removeprefix("tests/") in LONG_VARIANTS:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish(session):
    gc.enable()
    gc.freeze()


# ---- several processes: pytest -n 4 --dist loadscope -----------------------------------------

# What runs in one of them, one test after the other: what shares servers that are dear to start, a
# container engine, or the one Ray of a machine. Otherwise each file for itself.
TOGETHER = {"sglang": "servers", "vllm": "servers", "distributed": "servers", "sandbox": "sandbox"}
# Files of few tests come last. These take half a minute and more, for which the other processes
# would wait at the end.
EARLY = (
    *("cli/test_train_eval.py", "envs/harbor/", "install/"),
    *("runs/test_restarts.py", "test_annotations.py", "test_gpu_hour.py", "test_reproduce.py"),
    *("trainer/test_hf_ranks.py", "trainer/test_lost_writers.py"),
)

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER:
    # What others leave in the temporary directory meanwhile does not concern a test that looks.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=f"{WORKER}-")
    os.chmod(tempfile.tempdir, 0o1777)
    # Not in pytest_unconfigure: multiprocessing removes its own folder in it as the process ends.
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    # Groups by marks (`--dist loadgroup`) have no effect in xdist 3.8 with pytest 9.2.
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0].removeprefix("tests/")
            if file.startswith(EARLY):
                return "sandbox"
            return TOGETHER.get(file.split("/")[0], file)

    return Together(config, log)


@pytest.fixture
def shaped_env():
    """The plugin of the environment `shaped` is installed, so to speak."""
    from areal_gym.plugins import PluginManager, Registry, set_registry

    set_registry(Registry(PluginManager.installed(modules=["tests._support.shaped_env"])))
    yield "shaped"
    set_registry(None)


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory):
    """A checkpoint directory: a tiny policy of random weights, for what needs no skill."""
    from importlib import resources

    from areal_gym.models.tiny.checkpoint_files import save_checkpoint
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig
    from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

    home = tmp_path_factory.mktemp("tiny")
    template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
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


def pytest_runtest_setup(item):
    if item.get_closest_marker("long"):
        skip_long()
