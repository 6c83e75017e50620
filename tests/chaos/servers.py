"""SGLang servers (the stand-in, in processes) killed at random while a run trains over them.

Servers are killed with SIGKILL, singly and all at once, and started again at their addresses. No
group may be lost, dropped or shrunken, no step skipped, and no version of weights may be mixed up.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from areal_gym.config import load_config
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.callbacks import Callback
from areal_gym.runs.train import train

_PATIENCE_S = 300.0


class Server:
    """One server at an address that it keeps; started again after each death."""

    def __init__(self, policy: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.policy, self.log = policy, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it serves."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "areal_gym.engines.sglang.fake"),
                    *("--model-path", str(self.policy), "--port", str(self.port)),
                    *("--context-length", "512", "--max-running-requests", "32"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        deadline_s = time.monotonic() + _PATIENCE_S
        while not self._is_up():
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline_s, "a server did not start"
            time.sleep(0.1)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


class Killer(threading.Thread):
    """Kills one server, or all, at random moments, and starts them again."""

    def __init__(self, servers: list[Server], num_kills: int, rest_s: float) -> None:
        super().__init__()
        self.servers, self.num_kills, self.rest_s = servers, num_kills, rest_s
        self.kills: Counter[str] = Counter()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Go on until the run is over, or all kills are done."""
        choose = random.Random(11)
        try:
            while self.kills.total() < self.num_kills:
                if self.over.wait(self.rest_s * choose.random()):
                    return
                takes_all = self.kills.total() % 2 == 0
                victims = self.servers if takes_all else [choose.choice(self.servers)]
                for victim in victims:
                    victim.kill()
                self.kills["all servers" if takes_all else "one server"] += 1
                for victim in victims:
                    victim.start()
        except BaseException as error:
            self.error = error


class Begin(Callback):
    """Lets the killer begin when the run has."""

    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def on_start(self, run: RunDir) -> None:
        """The engine has been probed."""
        self.killer.start()


def run(small: bool, directory: Path) -> dict[str, object]:
    """Train over two servers, kill them meanwhile, and look at every batch."""
    from tests.chaos.support_policy import make_tiny_policy

    policy = make_tiny_policy(directory)
    num_steps, num_kills, num_servers = (3, 1, 1) if small else (400, 20, 2)
    servers = [Server(policy, directory / f"server-{i}.log") for i in range(num_servers)]
    set_registry(Registry(PluginManager.installed(modules=["tests._support.shaped_env"])))
    killer = Killer(servers, num_kills, rest_s=2.0 if small else 4.0)
    try:
        for server in servers:
            server.start()
        config = load_config(
            overrides=[
                *("env.id=shaped", "engine.id=sglang", f"engine.model={policy}"),
                f"engine.url=[{', '.join(server.url for server in servers)}]",
                *("engine.max_context=256", "engine.kwargs.health_interval_s=0.2"),
                *("rollout.group_size=4", "rollout.batch_groups=4", "rollout.max_in_flight=32"),
                *("rollout.max_new_tokens=24", "rollout.max_retries=0", "eval.num_tasks=2"),
                *("rollout.max_staleness=1", "trainer.runs_in=thread"),
                *("trainer.advantage=reinforce", f"steps={num_steps}"),
            ]
        )
        train(config, run_dir=directory / "run", callbacks=[Begin(killer)])
    finally:
        killer.over.set()
        if killer.ident is not None:
            killer.join()
        for server in servers:
            server.kill()
        set_registry(None)
    if killer.error is not None:
        raise killer.error
    rows, batches = _judge(RunDir(directory / "run"), num_steps)
    last = rows[-1]
    return {
        "steps": len(rows),
        "kills": dict(killer.kills),
        "groups trained": sum(len({t.group_id for t in batch}) for batch in batches),
        "groups dropped": last["rollout/failed_groups"],
        "groups played again": last["rollout/replayed_groups"],
        "episodes lost, and played again": last["rollout/lost_episodes"],
        "servers lost": last["engine/num_servers_lost"],
        "requests moved": last["engine/num_moved"],
    }


def _judge(directory: RunDir, num_steps: int):
    rows = directory.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    batches = [list(directory.read_trajectories(row["step"])) for row in rows]
    seen: set[str] = set()
    for row, batch in zip(rows, batches, strict=True):
        sizes = Counter(trajectory.group_id for trajectory in batch)
        assert set(sizes.values()) == {4}, sizes
        assert len(sizes) == 4
        assert not seen & set(sizes), "a group was trained twice"
        seen |= set(sizes)
        lags = [row["step"] - 1 - v for t in batch for v in t.policy_versions]
        assert 0 <= min(lags) <= max(lags) <= 1
    assert rows[-1]["rollout/failed_groups"] == 0
    return rows, batches
