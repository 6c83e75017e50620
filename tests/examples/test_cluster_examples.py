"""The files for Slurm, Kubernetes and SkyPilot, as far as they can be tried without a cluster."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from areal_gym.cli.app import app as cli
from areal_gym.config import load_config
from areal_gym.run_dir.run_dir import RunDir
from tests._support.paths import ROOT

FOLDER = ROOT / "examples" / "cluster"
RECIPE = ROOT / "examples" / "recipes" / "mixtures" / "qwen3_30b_a3b_gspo.yaml"


class Strict(BaseModel):
    """A part of a schema: only fields that are listed may be used."""

    model_config = ConfigDict(extra="forbid")


# The fields of KubeRay's RayJob (ray.io/v1) and of Kubernetes' pods that the file uses, with the
# types that their schemas demand.
class Resources(Strict):
    requests: dict[str, str]
    limits: dict[str, str]


class Mount(Strict):
    name: str
    mountPath: str = Field(pattern="^/")


class Container(Strict):
    name: str = Field(pattern="^[a-z0-9-]+$")
    image: str
    resources: Resources
    volumeMounts: list[Mount]


class Claim(Strict):
    claimName: str


class ConfigMap(Strict):
    name: str


class EmptyDir(Strict):
    medium: Literal["", "Memory"]
    sizeLimit: str


class Volume(Strict):
    name: str
    persistentVolumeClaim: Claim | None = None
    configMap: ConfigMap | None = None
    emptyDir: EmptyDir | None = None


class Security(Strict):
    fsGroup: int


class PodSpec(Strict):
    securityContext: Security
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume]


class Pod(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: Pod


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class RayCluster(Strict):
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayJobSpec(Strict):
    entrypoint: str
    shutdownAfterJobFinishes: bool
    backoffLimit: int
    rayClusterSpec: RayCluster


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: dict[Literal["name"], str]
    spec: RayJobSpec


class Task(Strict):
    """SkyPilot's task, as far as the file uses it."""

    name: str
    num_nodes: int
    resources: dict[Literal["accelerators"], str]
    workdir: str
    file_mounts: dict[str, dict[Literal["name", "mode"], str]]
    envs: dict[str, str]
    setup: str
    run: str


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def require_valid_command(words, run_file):
    """The command and its options exist, and its settings load beside those of a recipe."""
    program, name, *arguments = words
    assert program == "areal-gym"
    command = cli.get_command(None, name)
    context = command.make_context(name, ["--config", str(run_file), *arguments[2:]])
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    assert arguments[0] == "--config"
    assert context.params
    config = load_config(run_file, overrides)
    assert config.cluster.address is not None


def train_command(script, **variables):
    """The words of the script's `areal-gym` command, with its variables filled in."""
    (line,) = [line for line in script.splitlines() if line.strip().startswith("areal-gym train")]
    shown = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {line.strip().removesuffix(" &")}'],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return [word for word in shown.stdout.split("\0") if word]


def test_kuberay_file_has_the_fields_of_the_schema():
    job = RayJob.model_validate(read("kuberay.yaml"))
    require_valid_command(shlex.split(job.spec.entrypoint), RECIPE)
    cluster = job.spec.rayClusterSpec
    for group in (cluster.headGroupSpec, *cluster.workerGroupSpecs):
        pod = group.template.spec
        volumes = {volume.name: volume for volume in pod.volumes}
        for container in pod.containers:
            assert container.resources.requests == container.resources.limits
            mounts = {mount.mountPath: mount.name for mount in container.volumeMounts}
            assert set(mounts.values()) <= set(volumes)
            assert volumes[mounts["/dev/shm"]].emptyDir.medium == "Memory"
    out = Path(shlex.split(job.spec.entrypoint)[5])
    assert any(out.is_relative_to(mount) for mount in mounts)
    for group in cluster.workerGroupSpecs:
        assert group.minReplicas <= group.replicas <= group.maxReplicas


def test_skypilot_file_has_the_fields_of_a_task():
    task = Task.model_validate(read("skypilot.yaml"))
    for script in (task.setup, task.run):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = train_command(task.run, head_ip="10.0.0.1", **task.envs)
    require_valid_command(words, RECIPE)
    assert any(task.envs["OUT"].startswith(mount) for mount in task.file_mounts)


SRUN = """#!/bin/bash
# Runs the command here, as srun would on the node that is named.
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; esac
    shift
done
echo "$node $*" >>"$SRUN_LOG"
exec "$@"
"""
SCONTROL = "#!/bin/bash\necho node-a\necho node-b\n"


@pytest.mark.slow
def test_slurm_script_trains_on_two_nodes(tiny_policy, tmp_path):
    """A real Ray of two nodes, both here: `srun` runs its command on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    activate = tmp_path / "activate"
    activate.write_text(f'export PATH="{programs}:{Path(sys.executable).parent}:$PATH"\n')
    run_file = tmp_path / "run.yaml"
    settings = {
        "engine": {"model": str(tiny_policy), "num_slots": 8, "max_context": 256},
        "env": {"id": "countdown"},
        "rollout": {"group_size": 2, "batch_groups": 2, "max_new_tokens": 12},
        "trainer": {"num_ranks": 2, "advantage": "reinforce"},
        "cluster": {"rollout_workers": 1},
        "eval": {"num_tasks": 2},
        "steps": 1,
    }
    run_file.write_text(yaml.safe_dump(settings))
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "AREAL_GYM_ENV": str(activate),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "0",
        "RAY_PORT": str(port),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SRUN_LOG": str(tmp_path / "srun.log"),
        "OMP_NUM_THREADS": "1",
    }
    job = subprocess.run(
        ["bash", script, run_file, tmp_path / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    started = (tmp_path / "srun.log").read_text().splitlines()
    assert [line.split()[0] for line in started if "ray start" in line] == ["node-a", "node-b"]
    assert [row["step"] for row in RunDir(tmp_path / "run").read_metrics()] == [1]
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
