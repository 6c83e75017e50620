"""Whole runs over servers, from the first probe to the summary, also under kill -9."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from areal_gym.trainer.weight_sync.disk import DiskWeightSync
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_processes import NEEDS_REAL, command_of, require_retract
from tests._support.sglang_suite import TOLERANCE, ask, engine_over, logprob_gap, turns_in_flight

SMALL = [
    "env.id=shaped",
    "engine.id=sglang",
    "engine.max_context=256",
    "rollout.group_size=4",
    "rollout.batch_groups=4",
    "rollout.max_in_flight=32",
    "rollout.max_new_tokens=24",
    "eval.num_tasks=4",
    "trainer.advantage=reinforce",
    "trainer.lr=1e-3",
]


def config_of(policy, *overrides, steps=4):
    return load_config(overrides=[f"engine.model={policy}", f"steps={steps}", *SMALL, *overrides])


@pytest.mark.parametrize("sync", ["disk", "tensor", "distributed"])
def test_run_over_a_server(server, policies, shaped_env, tmp_path, sync):
    config = config_of(
        policies[0],
        f"engine.url={server}",
        "engine.kwargs.take_over=true",
        f"trainer.weight_sync={sync}",
        "rollout.max_staleness=1",
    )
    summary = train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rollout/staleness_max"] <= 1 for row in rows)
    versions = {v for s in range(1, 5) for t in run.read_trajectories(s) for v in t.policy_versions}
    assert {0, 1, 2} <= versions <= {0, 1, 2, 3}
    # The first batch was sampled by the weights that train on it: nothing to correct.
    assert rows[0]["train/ratio"] == pytest.approx(1, abs=1e-4)
    assert summary["num_steps"] == 4
    assert not (tmp_path / "run" / "weights").exists()
    # The record alone makes the same weights, without any server.
    assert replay(load_config(run.config_file), run.path).is_identical


def test_run_that_publishes_adapters(server, policies, shaped_env, tmp_path):
    """The base is fixed; ratios of 1 show that each step is sampled with the newest adapter."""
    pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
    base = load_checkpoint(policies[0]).state_dict()

    async def serve_the_base():
        async with engine_over(policies[0], server) as engine:
            sync = DiskWeightSync(engine, directory=tmp_path / "weights")
            await sync.publish(base.items(), 0)
            await sync.aclose()

    asyncio.run(serve_the_base())
    adapter = ["trainer.lora.rank=8", "trainer.lora.alpha=8", "trainer.lr=3e-3"]
    sync = ["trainer.weight_sync=lora", f"engine.url={server}"]
    train(config_of(policies[0], *adapter, *sync, steps=3), run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    for row in run.read_metrics():
        assert row["train/ratio"] == pytest.approx(1, abs=1e-3)
        assert row["train/approx_kl"] < 1e-4
    merged = load_checkpoint(run.checkpoints_dir / "step-000003").state_dict()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)


def test_server_with_another_model_is_refused(server, policies, shaped_env, tmp_path):
    async def serve_the_other():
        async with engine_over(policies[1], server) as engine:
            sync = DiskWeightSync(engine, directory=tmp_path / "weights")
            await sync.publish(load_checkpoint(policies[1]).state_dict().items(), 7)
            await sync.aclose()

    asyncio.run(serve_the_other())
    config = config_of(policies[0], f"engine.url={server}")
    with pytest.raises(ConfigError, match="not the same model") as caught:
        train(config, run_dir=tmp_path / "run")
    assert any("take_over" in hint for hint in caught.value.hints)
    # With take_over the run first publishes its own weights.
    config = config_of(policies[0], f"engine.url={server}", "engine.kwargs.take_over=true", steps=1)
    train(config, run_dir=tmp_path / "taken", mode="new")


def test_calls_of_a_killed_server_move_to_another(server, spare, policies, decoders, tmp_path):
    url, process = spare.started()

    async def play():
        async with engine_over(policies[0], url, server) as engine:
            sync = DiskWeightSync(engine, directory=tmp_path / "weights")
            await sync.publish(decoders[0].state_dict().items(), 0)
            turns = await turns_in_flight(engine, 8, 200)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for generation in await asyncio.gather(*turns):
                # Not a short answer: what was sampled is whole, wherever it was.
                assert len(generation.token_ids) == 200
                assert logprob_gap(decoders[0], generation) < TOLERANCE
            assert len(engine.servers) == 2
            assert [state.client.url for state in engine.servers if state.is_serving] == [server]
            await sync.publish(decoders[1].state_dict().items(), 1)
            assert set((await ask(engine)).versions) == {1}
            await sync.aclose()

    asyncio.run(play())


def test_error_after_the_last_server_dies_has_the_start_command(spare, policies):
    url, process = spare.started()

    async def play():
        async with engine_over(policies[0], url, grace_s=0.5, max_retries=20) as engine:
            turns = await turns_in_flight(engine, 12, 400)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with pytest.raises(EngineUnreachableError) as caught:
                await asyncio.gather(*turns)
            await asyncio.gather(*turns, return_exceptions=True)
            assert url in str(caught.value)
            assert any("sglang.launch_server" in hint for hint in caught.value.hints)

    asyncio.run(play())


def test_killed_launched_server_is_restarted(kind, policies, tmp_path):
    skip_long_if_real(kind)
    command, arguments = command_of(kind)
    others = set(servers_below())  # the one that the other tests share

    async def play():
        options = {"command": command, "server_args": arguments, "log_dir": tmp_path}
        async with engine_over(policies[0], grace_s=120, max_retries=20, **options) as engine:
            sync = DiskWeightSync(engine, directory=tmp_path / "weights")
            decoder = load_checkpoint(policies[1])
            await sync.publish(decoder.state_dict().items(), 1)
            turns = await turns_in_flight(engine, 12, 400)
            kill_servers(besides=others)
            for generation in await asyncio.gather(*turns):
                # The new process starts with version 0; it is given 1 before it serves.
                assert logprob_gap(decoder, generation) < TOLERANCE
                assert set(generation.versions) == {1}
            assert engine.stats.num_relaunches == 1
            await sync.aclose()

    asyncio.run(play())
    assert set(servers_below()) <= others


def kill_servers(besides):
    """Kill -9 every server process of this one but those in `besides`, not their guards."""
    servers = [
        pid for pid in servers_below() if pid not in besides and "guard" not in command_line(pid)
    ]
    assert servers
    for pid in servers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def servers_below():
    """Return the descendants of this process that serve a model."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat:
                    parents[int(entry)] = int(stat.read().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    descendants, frontier = [], {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        descendants += frontier
    return [pid for pid in descendants if "model-path" in command_line(pid)]


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


@NEEDS_REAL
@pytest.mark.slow
def test_run_that_launches_the_real_server(policies, shaped_env, tmp_path):
    require_retract("real")
    command, arguments = command_of("real")
    others = set(servers_below())
    config = config_of(
        policies[0],
        f"engine.kwargs.command={command}",
        f"engine.kwargs.server_args={arguments}",
        "engine.kwargs.interrupt=retract",
        "rollout.max_staleness=2",
        "rollout.filters=[zero-variance]",
        steps=3,
    )
    train(config, run_dir=tmp_path / "run")
    assert [row["step"] for row in RunDir(tmp_path / "run").read_metrics()] == [1, 2, 3]
    assert set(servers_below()) <= others


def test_url_answering_html_is_refused(policies, shaped_env, tmp_path):
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"<html><body>Welcome to nginx!</body></html>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        config = config_of(policies[0], f"engine.url=http://127.0.0.1:{page.server_address[1]}")
        with pytest.raises((ConfigError, EngineError), match="HTML"):
            train(config, run_dir=tmp_path / "run")
        page.shutdown()
