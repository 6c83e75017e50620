"""The relay of `delta` for servers that a run has started: it comes and goes with the run."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from areal_gym.config import PluginConfig
from areal_gym.engines.servers.fake_tensors import read_weights
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.weight_sync import make_weight_sync
from areal_gym.trainer.weight_sync.launched_relay import LaunchedRelay
from areal_gym.trainer.weight_sync.rank_posts import request

FAKE = [sys.executable, "-m", "areal_gym.engines.sglang.fake"]


def until(condition):
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_started_server_has_a_relay_that_ends_with_the_run(tiny_policy, tmp_path):
    weights = load_checkpoint(tiny_policy).state_dict()

    async def play():
        engine = SGLangEngine(tiny_policy, command=FAKE, max_context=64)
        await engine.start()
        settings = PluginConfig(id="delta")
        sync = make_weight_sync(engine, settings, directory=tmp_path / "weights")
        relay, directories = None, []

        def has_ended():
            return not relay.is_running

        try:
            for version in (1, 2, 3):
                if version == 3:  # killed, it is replaced, and the new one gets all weights
                    relay._process.kill()
                    until(has_ended)
                weights["model.norm.weight"][0] += 1
                await sync.publish(weights.items(), version)
                relay = sync._relays._started
                directories.append(relay.directory)
                kept = read_weights(relay.directory)
                assert kept.keys() == weights.keys()
                assert all(torch.equal(kept[name], weights[name].bfloat16()) for name in kept)
                assert engine.policy_version == version
                num_bytes = sync.last.num_bytes[relay.url]
                assert (num_bytes < 1000) == (version == 2)  # the changes alone
        finally:
            await sync.aclose()
            await engine.aclose()
        assert directories[0] == directories[1] != directories[2]
        assert not relay.is_running
        assert not any(directory.exists() for directory in directories)

    asyncio.run(play())


def test_killed_run_leaves_no_relay_and_no_files(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from areal_gym.trainer.weight_sync.launched_relay import LaunchedRelay
relay = LaunchedRelay(Path({str(tmp_path)!r}), None)
print(relay.url, relay._process.pid, flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:
        url, pid = process.stdout.readline().split()
        [directory] = tmp_path.iterdir()
        assert request("GET", url, "/weights", timeout_s=60)["directory"] == str(directory)
        process.kill()
        until(lambda: not directory.exists())
        until(lambda: has_ended(pid))


def has_ended(pid):
    """Whether a process is gone, or has ended and waits for whoever adopts orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("num_bytes", "is_in_memory"), [(None, False), (1, True), (2**60, False)])
def test_files_lie_in_memory_where_they_have_room(tmp_path, num_bytes, is_in_memory):
    relay = LaunchedRelay(tmp_path, num_bytes)
    try:
        assert (relay.directory.parent != tmp_path) is is_in_memory
    finally:
        relay.close()
    assert not relay.directory.exists()
    assert not list(tmp_path.iterdir())
