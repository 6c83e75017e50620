"""Files with packed numbers, and those of earlier versions with lists, are read the same."""

import json
import math

import numpy as np
import pytest

from areal_gym.errors import DataError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.trajectory_files import TrainedFile, TrajectoryFile
from areal_gym.types import (
    FinishReason,
    RoutedExperts,
    Task,
    TokenSpan,
    TopTokens,
    Trajectory,
    Turn,
)
from areal_gym.utils.files import to_json, to_json_line
from areal_gym.utils.packed_numbers import Floats

SPANS = (
    TokenSpan(origin="prompt", token_ids=(1, 2, 3)),
    TokenSpan(
        origin="policy",
        token_ids=(150_000, 5),
        logprobs=(-0.5, -0.1),
        teacher_logprobs=(-0.25, math.nan),
        policy_version=3,
        routed_experts=RoutedExperts(bytes(8), 1, 2),
        teacher_top=TopTokens(bytes(range(24)), bytes(24), 3),
    ),
    TokenSpan(origin="env", token_ids=()),
)
TRAJECTORY = Trajectory(
    id="a",
    group_id="g",
    task=Task(id="t", data={"question": "?"}),
    env_id="e",
    spans=SPANS,
    turns=(Turn(finish_reason=FinishReason.STOP, reward=0.5),),
    messages=({"role": "assistant", "content": "a text to grep for"},),
)
TRAINED = {"trajectory": 0, "advantage": 0.5, "advantages": [0.5, 0.5], "logprobs": [-0.123456, -1]}


def save(run: RunDir, *, is_old: bool) -> None:
    """Write both files in the old or the new form."""
    if is_old:
        for file, row in (
            (run.trajectories_file(1), TRAJECTORY.to_dict()),
            (run.trained_dir / "step-000001.jsonl", TRAINED),
        ):
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps(row).replace("NaN", "null") + "\n")
        return
    run.save_trajectories([TRAJECTORY], name=1)
    packed = {name: Floats(TRAINED[name]) for name in ("advantages", "logprobs")}
    run.save_trained([{**TRAINED, **packed}], step=1)


@pytest.mark.parametrize("is_old", [True, False], ids=["lists", "packed"])
def test_both_forms_are_read(tmp_path, is_old):
    run = RunDir(tmp_path)
    save(run, is_old=is_old)
    assert list(run.read_trajectories(1)) == [TRAJECTORY]
    assert run.read_groups(1)[0].trajectories == (TRAJECTORY,)
    row = TrajectoryFile(run.trajectories_file(1)).read(0)
    assert [span["token_ids"] for span in row["spans"]] == [[1, 2, 3], [150_000, 5], []]
    assert row["spans"][1]["logprobs"] == [-0.5, -0.1]
    assert row["spans"][1]["teacher_logprobs"] == [-0.25, None]
    trained = TrainedFile(run.trained_dir / "step-000001.jsonl")
    assert trained.advantage(0) == 0.5
    assert trained.read(0) == {"advantages": [0.5, 0.5], "logprobs": [-0.12346, -1]}
    assert "a text to grep for" in run.trajectories_file(1).read_text()


def test_damaged_numbers_are_data_errors(tmp_path):
    run = RunDir(tmp_path)
    run.save_trajectories([TRAJECTORY], name=1)
    file = run.trajectories_file(1)
    file.write_text(file.read_text().replace('"int32":"', '"int32":"?'))
    with pytest.raises(DataError, match="line 1"):
        TrajectoryFile(file).read(0)


def test_lines_are_those_of_json_also_where_orjson_refuses(tmp_path):
    rows = [
        {"text": "é\ud800", "number": 2**80},
        {"metrics": {3: math.inf}, "numbers": (np.float32(0.5), math.nan)},
        {"text": "\u2028 </script>", "packed": Floats([0.5, math.nan]), "kind": FinishReason.STOP},
    ]
    for row in rows:
        assert json.loads(to_json_line(row)) == json.loads(to_json(row))
        assert to_json_line(row).endswith(b"\n")
        assert to_json_line(row).count(b"\n") == 1


def test_lists_of_a_plugin_are_written_as_they_are(tmp_path):
    run = RunDir(tmp_path)
    run.save_trained([TRAINED], step=1)
    assert json.loads((run.trained_dir / "step-000001.jsonl").read_text()) == TRAINED
