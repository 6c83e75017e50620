"""The files for Slurm, Kubernetes and SkyPilot: their syntax, and the commands in them.

There is no cluster here. Bash parses the scripts without running them, YAML is read, and the
settings of each `areal-gym train` are resolved by a dry run.
"""

import re
import shlex
import subprocess
from itertools import pairwise

import pytest
import yaml

from areal_gym.cli.app import run
from tests._support.paths import ROOT

CLUSTER = ROOT / "examples" / "cluster"
SLURM = (CLUSTER / "slurm.sbatch").read_text()
KUBERAY = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
SKYPILOT = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
SCRIPTS = {
    "slurm": SLURM,
    "kuberay": KUBERAY["spec"]["entrypoint"],
    "skypilot": SKYPILOT["run"],
    "skypilot-setup": SKYPILOT["setup"],
}


def test_page_names_every_cluster_file():
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert {*re.findall(r"^\| `(\w+\.(?:sbatch|yaml))` \|", page, re.M)} == {
        f.name for f in CLUSTER.iterdir()
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_script_is_valid_bash(name):
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["slurm", "kuberay", "skypilot"])
def test_script_command_is_a_valid_command_line(name, capsys):
    (command,) = re.findall(r"^.*(areal-gym train .*)$", SCRIPTS[name], re.M)
    words = shlex.split(re.sub(r"\$resume|\"\$\{resume\[@\]\}\"", "", command))
    recipe = str(ROOT / "examples" / "recipes" / "tir_tiny.yaml")
    given = [recipe if before == "--config" else word for before, word in pairwise(words)]
    assert run([*given, "--dry-run"]) == 0, capsys.readouterr().err
    assert "  address: " in capsys.readouterr().out


def test_pods_define_the_volumes_their_containers_mount():
    spec = KUBERAY["spec"]["rayClusterSpec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayJob")
    for pod in (pod["template"]["spec"] for pod in pods):
        there = {volume["name"] for volume in pod["volumes"]}
        wanted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert wanted <= there
