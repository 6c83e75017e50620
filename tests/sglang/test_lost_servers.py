"""kill -9 of the only server in the middle of a run does not bias the batches around it."""

import os
import signal
import threading
from contextlib import contextmanager
from statistics import fmean, stdev
from urllib.parse import urlsplit

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support import ending_env
from tests._support.display_lines import Lines
from tests._support.long_tests import skip_long_if_real
from tests._support.server_processes import SERVED_CONTEXT
from tests._support.sglang_processes import running_server
from tests._support.sglang_suite import PROMPT, trainer_logprobs

BATCH, SIZE, STEPS, HIT = 8, 4, 5, 3
SHORT = 10
"""The number of answers of the hit batch that have ended when the server dies."""


@pytest.fixture(scope="module")
def ending_policy(policies, tmp_path_factory):
    """A random policy that ends its answer with probability 0.07 after each token."""
    import json

    known = json.loads((policies[0] / "config.json").read_text())
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=known["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=SERVED_CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=known["eos_token_id"],
        pad_token_id=known["pad_token_id"],
    )
    decoder = build_decoder(config, seed=0)
    hidden = []
    with decoder.model.norm.register_forward_hook(lambda _, __, output: hidden.append(output)):
        trainer_logprobs(decoder, PROMPT, 8)
    mean = hidden[0].reshape(-1, 64).mean(0)
    with torch.no_grad():
        decoder.lm_head.weight[known["eos_token_id"]] = 3.2 * mean / mean.dot(mean)
    home = tmp_path_factory.mktemp("ending")
    return save_checkpoint(decoder, home / "policy", tokenizer_dir=policies[0])


@pytest.fixture
def ending():
    set_registry(Registry(PluginManager.installed(modules=["tests._support.ending_env"])))
    yield
    set_registry(None)


class Outage:
    """Kills the server after `die_at` episodes, and starts a new one at the same address."""

    def __init__(self, kind, policy, home):
        self.kind, self.policy, self.home = kind, policy, home
        self.num_ended = 0
        self.die_at = None
        self.over = threading.Event()
        self.relaunched = threading.Event()
        self.thread = None
        self.error = None

    @contextmanager
    def serving(self):
        log = self.home / "first.log"
        with running_server(self.kind, self.policy, log) as (url, process):
            self.url, self.process = url, process
            ending_env.on_end.append(self.count_episode)
            try:
                yield url
            finally:
                ending_env.on_end.remove(self.count_episode)
                self.over.set()
                if self.thread is not None:
                    self.thread.join()
        if self.error is not None:
            raise self.error

    def count_episode(self):
        self.num_ended += 1
        if self.num_ended == self.die_at:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.thread = threading.Thread(target=self.relaunch)
            self.thread.start()

    def relaunch(self):
        log, port = self.home / "second.log", urlsplit(self.url).port
        try:
            with running_server(self.kind, self.policy, log, port=port):
                self.relaunched.set()
                self.over.wait()
        except BaseException as error:
            self.error = error


SETTINGS = [
    "engine.id=sglang",
    "engine.max_context=256",
    "engine.kwargs.health_interval_s=0.2",
    "env.id=ending",
    f"rollout.batch_groups={BATCH}",
    f"rollout.group_size={SIZE}",
    "rollout.max_in_flight=64",
    "rollout.max_new_tokens=64",
    "rollout.max_retries=0",
    "rollout.outage_patience_s=3000",
    "eval.num_tasks=4",
    "trainer.advantage=reinforce",
    "trainer.lr=1e-9",  # lengths of all steps are of one distribution
    f"steps={STEPS}",
]


def check_groups(rows, batches):
    """Check that no group is lost, shrunken or dropped."""
    groups = [group for batch in batches.values() for group in {t.group_id: 0 for t in batch}]
    assert groups == [f"g{index:06d}" for index in range(STEPS * BATCH)]
    assert all(len(batch) == BATCH * SIZE for batch in batches.values())
    assert rows[-1]["rollout/failed_groups"] == 0
    assert rows[HIT - 1]["incidents/lost_episodes"] > 0
    assert rows[HIT - 1]["incidents/lost_servers"] == 1
    assert not any(row["rollout/shrunken_groups"] for row in rows)


def check_hit_batch(values):
    """Check that the mean of the hit batch is that of the others; return their deviation."""
    others = [value for step, own in values.items() if step != HIT for value in own]
    error = stdev(others) * (1 / len(others) + 1 / (BATCH * SIZE)) ** 0.5
    assert abs(fmean(values[HIT]) - fmean(others)) < 4 * error
    return stdev(others)


def run_with_outage(kind, policy, home):
    """Run a training whose server dies in step HIT; return its directory and its display."""
    home.mkdir()
    outage = Outage(kind, policy, home)
    # Four held-out answers before the first step, sampled and greedy, are not of any batch.
    outage.die_at = 2 * 4 + (HIT - 1) * BATCH * SIZE + SHORT
    display = Lines()
    with outage.serving() as url:
        model = [f"engine.model={policy}", f"engine.url={url}"]
        train(load_config(overrides=[*model, *SETTINGS]), run_dir=home / "run", display=display)
        assert outage.relaunched.is_set()
    return RunDir(home / "run"), display


@pytest.mark.slow
def test_outage_of_the_only_server_does_not_bias_batches(kind, ending_policy, ending, tmp_path):
    skip_long_if_real(kind)
    for attempt in range(5):
        run, display = run_with_outage(kind, ending_policy, tmp_path / str(attempt))
        rows = run.read_metrics()
        # On a busy machine, all answers may have arrived before the tenth is looked at.
        if rows[HIT - 1]["incidents/lost_episodes"]:
            break
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    batches = {step: list(run.read_trajectories(step)) for step in range(1, STEPS + 1)}
    check_groups(rows, batches)
    assert any(line.startswith("waiting for servers or workers, ") for line in display.lines)
    # All of the hit batch began before the outage or after it: half of a batch would be short.
    lengths = {step: [t.num_policy_tokens for t in batch] for step, batch in batches.items()}
    assert check_hit_batch(lengths) > 4, "the lengths must differ for this to show anything"
    check_hit_batch({step: [t.reward for t in batch] for step, batch in batches.items()})
