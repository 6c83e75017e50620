"""A run with servers and rollout workers placed by Ray, on the real server if installed."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")

from test_runs import config_of

from areal_gym.config import load_config
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_processes import LORA, command_of, require_retract

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("has_adapters", [pytest.param(False, marks=pytest.mark.long), True])
def test_run_over_servers_placed_by_ray(kind, policies, tmp_path, has_adapters):
    skip_long_if_real(kind)
    require_retract(kind)
    # Servers take half a minute to start: one kind of publication each, and adapters.
    settings = ["trainer.weight_sync=" + {"fake": "tensor", "real": "disk"}[kind]]
    command, arguments = command_of(kind)
    if has_adapters:
        pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
        settings = ["trainer.weight_sync=lora", "trainer.lora.rank=8", "trainer.lr=3e-3"]
        arguments = [*arguments, *LORA]
    config = config_of(
        policies[0],
        "env.id=countdown",
        f"engine.kwargs.command={' '.join(command)}",
        f"engine.kwargs.server_args={' '.join(arguments)}",
        "cluster.address=local",
        "cluster.servers=1",
        "cluster.gpus_per_server=0",
        "cluster.rollout_workers=1",
        *settings,
        "trainer.runs_in=thread",
        "rollout.max_staleness=1",
        steps=3,
    )
    train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    versions = {v for s in range(1, 4) for t in run.read_trajectories(s) for v in t.policy_versions}
    # On a busy machine no group may begin between two publications.
    assert {0} < versions <= {0, 1, 2}
    # The server's log-probabilities are the trainer's.
    assert rows[0]["train/ratio"] == pytest.approx(1, abs=1e-4)
    assert all(not row["rollout/failures/worker_error"] for row in rows)
    assert replay(load_config(run.config_file), run.path).is_identical
