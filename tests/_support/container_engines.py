"""A separate Docker engine that tests may kill, with more than one runtime."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

OPTIONS = (
    *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"),
    *("--ip-masq=false", "--storage-driver=overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs"),
)
# gVisor: the host's socket is mounted into the container. Hybrid cgroups are beyond runsc of 2022.
GVISOR = ("--host-uds=open", "--platform=ptrace", "--ignore-cgroups", "--network=none")


class OwnEngine:
    """A dockerd with its own socket, data and runtimes `second-runc` and, if installed, `runsc`."""

    def __init__(self, directory: Path) -> None:
        for program in ("dockerd", "runc"):
            if os.geteuid() != 0 or shutil.which(program) is None:
                pytest.skip(f"only root with {program} can start a Docker engine")
        self.directory = directory
        self.host = f"unix://{directory}/engine.sock"
        runtimes = {"second-runc": {"path": shutil.which("runc")}}
        if runsc := shutil.which("runsc"):
            runtimes["runsc"] = {"path": runsc, "runtimeArgs": list(GVISOR)}
        (directory / "daemon.json").write_text(json.dumps({"runtimes": runtimes}))
        self.runtimes = set(runtimes)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; skip the test where that is impossible."""
        command = [
            *("dockerd", "--config-file", self.directory / "daemon.json", "-H", self.host),
            *("--data-root", self.directory / "data", "--exec-root", self.directory / "exec"),
            *("--pidfile", self.directory / "pid", *OPTIONS),
        ]
        (self.directory / "pid").unlink(missing_ok=True)
        # An engine that was killed left its containerd's pid here, which may seem alive.
        shutil.rmtree(self.directory / "exec", ignore_errors=True)
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                reason = (self.directory / "log").read_text()[-500:]
                self.end()
                pytest.skip(f"no second engine can be started here: {reason}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        import docker

        try:
            # The docker package would leave its socket open when no engine listens.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.directory / "engine.sock"))
            with contextlib.closing(docker.DockerClient(base_url=self.host)) as client:
                return bool(client.ping())
        except (docker.errors.DockerException, OSError):
            return False

    def kill(self) -> None:
        """Kill the engine, its containerd and everything that it started, as a crash would."""
        pids = self._pids()
        # All at once: who is killed later would report the death of who was killed before.
        _signal(pids, signal.SIGSTOP)
        _signal(pids, signal.SIGKILL)
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        _signal(self._pids(), signal.SIGKILL)

    def _pids(self) -> set[int]:
        """Return the processes of this engine: containerd, shims, and their containers."""
        pids, parents = set(), {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    command = (entry / "cmdline").read_bytes()
                    parents[int(entry.name)] = int(
                        (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    )
                    if os.fsencode(self.directory) in command and entry.name != str(os.getpid()):
                        pids.add(int(entry.name))
        more = True
        while more:
            more = {pid for pid, parent in parents.items() if parent in pids} - pids
            pids |= more
        return pids

    def end(self) -> None:
        """End it and everything that it started, and wait until it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        self.kill()
        deadline = time.monotonic() + 60
        while self._pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        for line in reversed(mounts):
            place = line.split()[1]
            if place.startswith(str(self.directory)):
                subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
