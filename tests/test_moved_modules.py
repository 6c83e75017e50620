"""Import paths of earlier versions' documentation work and warn."""

import importlib
import subprocess
import sys

import pytest

from areal_gym import _moved

DOCUMENTED = {
    "areal_gym.envs.tasks": "GeneratedTasks",
    "areal_gym.learning": "train",
    "areal_gym.modeling.config": "DecoderConfig",
    "areal_gym.modeling.decoder": "build_decoder",
    "areal_gym.playing": "rollout",
    "areal_gym.rendering.renderer": "Renderer",
    "areal_gym.rundir": "RunDir",
    "areal_gym.serving.http": "EnvServer",
    "areal_gym.serving.sessions": "Sessions",
    "areal_gym.trainer.advantages": "grpo",
    "areal_gym.trainer.bins": "Row",
    "areal_gym.trainer.learner": "Learner",
    "areal_gym.trainer.losses": "LossOutput",
    "areal_gym.trainer.objective": "score_tokens",
    "areal_gym.trainer.packing": "pack",
    "areal_gym.trainer.weight_syncs.in_process": "InProcessWeightSync",
}


def test_old_documented_imports_work_and_warn():
    lines = [f"from {path} import {name}" for path, name in DOCUMENTED.items()]
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    for number, path in enumerate(DOCUMENTED, start=1):
        # The warning names the line that imports, not the machinery.
        assert f"<string>:{number}: DeprecationWarning: {path} has moved to" in done.stderr, path


@pytest.mark.parametrize("old", _moved.MOVED)
def test_every_row_names_an_existing_module(old):
    new = _moved.new_path(f"areal_gym.{old}")
    assert new is not None
    assert importlib.import_module(new).__name__ == new


def test_old_and_new_names_are_the_same_object():
    sys.modules.pop("areal_gym.trainer.learner", None)
    with pytest.warns(DeprecationWarning, match=r"areal_gym.trainer.learner has moved"):
        from areal_gym.trainer.learner import Learner
    from areal_gym.trainer.trainer import Trainer

    assert Learner is Trainer


def test_modules_of_a_moved_package_are_loaded_once():
    with pytest.warns(DeprecationWarning, match="areal_gym.trainer.weight_syncs"):
        from areal_gym.trainer.weight_syncs.disk import DiskWeightSync as old
    from areal_gym.trainer.weight_sync.disk import DiskWeightSync

    assert old is DiskWeightSync


def test_unknown_modules_are_not_found():
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        importlib.import_module("areal_gym.nowhere")
    with pytest.raises(ModuleNotFoundError, match="nowhere"), pytest.warns():
        importlib.import_module("areal_gym.serving.nowhere")
