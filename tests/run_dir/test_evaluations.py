"""Evaluations on disk: read while they grow, repaired after a crash, old ones as well."""

import json
import random

import pytest

from areal_gym.errors import DataError, NothingToDoError, RunExistsError, UsageError
from areal_gym.run_dir.evaluation_writer import EvaluationWriter
from areal_gym.run_dir.evaluations import SAMPLE_KEYS, Evaluation, list_evaluations
from areal_gym.run_dir.run_dir import RunDir
from tests._support.evaluation_dirs import FACTS, add, sample, write_evaluation

PLACES = [(index, attempt) for index in range(4) for attempt in range(2)]
SCORES = {"pass@1": 0.5, "pass@1_low": 0.2, "pass@1_high": 0.8, "num_tasks": 4}


def test_samples_come_back_in_the_order_of_tasks(tmp_path):
    shuffled = random.Random(0).sample(PLACES, len(PLACES))
    write_evaluation(tmp_path / "e", shuffled, scores=SCORES)
    evaluation = Evaluation.open(tmp_path / "e")
    samples = evaluation.samples()
    assert [(s["index"], s["attempt"]) for s in samples] == PLACES
    assert all(tuple(sorted(s)) == tuple(sorted((*SAMPLE_KEYS,))) for s in samples)
    assert evaluation.samples(3, 2) == samples[3:5]
    for row in samples:
        assert evaluation.read_trajectory(row) == sample(row["index"], row["attempt"])
    info = evaluation.info
    assert (info.status, info.env, info.policy_name) == ("finished", "math", "math-1, step 40")
    assert info.pass_at_1 == (0.5, 0.2, 0.8)
    assert info.started_at
    assert info.duration_s >= 0
    assert not info.is_greedy


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "Qwen/Qwen3-0.6B"),
        ({"model": "/models/Qwen3-0.6B"}, "Qwen3-0.6B"),
        ({"model": "/runs/tir-1/checkpoints/step-000040"}, "tir-1, step 40"),
        ({"model": "/runs/tir-1/checkpoints/best"}, "best"),
        ({}, "?"),
    ],
)
def test_a_policy_has_a_short_name(tmp_path, policy, name):
    write_evaluation(tmp_path / "e", PLACES, scores=SCORES, policy=policy)
    assert Evaluation.open(tmp_path / "e").info.policy_name == name


def test_an_unfinished_one_tells_how_far_it_is(tmp_path):
    write_evaluation(tmp_path / "e", PLACES[:3])
    evaluation = Evaluation.open(tmp_path / "e")
    assert (evaluation.info.status, evaluation.info.num_done) == ("interrupted", 3)
    assert evaluation.info.num_total == 8
    assert evaluation.info.pass_at_1 is None
    successes = [s["success"] for s in evaluation.samples()]
    assert evaluation.pass_at_1().low < 1
    assert len(successes) == 3


@pytest.mark.parametrize("torn", ["line", "trajectory", "both"])
def test_resume_cuts_off_what_a_crash_has_torn(tmp_path, torn):
    path = tmp_path / "e"
    write_evaluation(path, PLACES[:3])
    trajectories = path / "trajectories/eval.jsonl"
    if torn == "both":  # the trajectory is there, its sample's line is not whole
        file = path / "samples.jsonl"
        file.write_bytes(file.read_bytes()[:-20])
    else:
        torn_file = trajectories if torn == "trajectory" else path / "samples.jsonl"
        with torn_file.open("ab") as stream:
            stream.write(b'{"id": "eval-0000')
    with EvaluationWriter(path, FACTS, settings="", mode="resume") as writer:
        num_kept = 2 if torn == "both" else 3
        assert set(writer.kept) == set(PLACES[:num_kept])
        assert writer.repairs
        for index, attempt in PLACES[num_kept:]:
            add(writer, index, attempt)
        writer.finish(SCORES)
    assert [(s["index"], s["attempt"]) for s in Evaluation.open(path).samples()] == PLACES
    assert len([*map(json.loads, trajectories.read_text().splitlines())]) == 8


def test_resume_measures_failed_samples_again(tmp_path):
    path = tmp_path / "e"
    with EvaluationWriter(path, FACTS, settings="") as writer:
        writer.begin(2)
        add(writer, 0, 0)
        add(writer, 0, 1, is_failed=True)
    assert [s["success"] is None for s in Evaluation.open(path).samples()] == [False, True]
    with EvaluationWriter(path, FACTS, settings="", mode="resume") as writer:
        assert set(writer.kept) == {(0, 0)}
        add(writer, 0, 1)
    assert [s["success"] is None for s in Evaluation.open(path).samples()] == [False, False]


def test_what_cannot_be_written_to_is_named(tmp_path):
    path = tmp_path / "e"
    with pytest.raises(UsageError, match="no evaluation to continue"):
        EvaluationWriter(path, FACTS, settings="", mode="resume")
    assert not path.exists()
    write_evaluation(path, PLACES[:1])
    with pytest.raises(RunExistsError, match="already holds an evaluation"):
        write_evaluation(path, PLACES[:1])
    with pytest.raises(UsageError, match="in another way: seed: 0, not 1"):
        write_evaluation(path, [], mode="resume", seed=1)
    write_evaluation(path, PLACES[:2], mode="clean")
    assert len(Evaluation.open(path).samples()) == 2


def test_every_kind_of_evaluation_is_listed(tmp_path):
    write_evaluation(tmp_path / "runs/eval-1", PLACES, scores=SCORES)
    write_evaluation(tmp_path / "runs/suite/math", PLACES)
    write_evaluation(tmp_path / "runs/math-1/evaluations/eval-2", PLACES)
    RunDir(tmp_path / "runs/old").save_trajectories([sample(0, 0), sample(1, 0)], name="eval")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/evaluation.json").write_text("[]")
    damaged = []
    infos = list_evaluations(tmp_path / "runs", on_damaged=lambda path, error: damaged.append(path))
    assert {info.name for info in infos} == {"eval-1", "math", "eval-2", "old"}
    assert [path.name for path in damaged] == ["broken"]
    old = Evaluation.open(tmp_path / "runs/old")
    assert [s["index"] for s in old.samples()] == [0, 1]
    assert old.read_trajectory(old.samples()[1]) == sample(1, 0)
    with pytest.raises(DataError, match="not an object"):
        Evaluation.open(tmp_path / "runs/broken")
    with pytest.raises(NothingToDoError, match="is not an evaluation"):
        Evaluation.open(tmp_path / "runs")


def test_evaluations_on_a_schedule_are_read_like_others(tmp_path):
    with RunDir.open(tmp_path / "run") as run:
        run.save_config("env: {id: math}\nseed: 3\nrollout: {temperature: 0.7}\n")
        for step in (0, 10):
            run.save_trajectories([sample(0, 0), sample(0, 1)], name=f"eval-{step:06d}")
            run.append_evaluation({"step": step, "sampled": {**SCORES, "num_samples": 2}})
    first, second = Evaluation.of_schedule(tmp_path / "run")
    assert (first.info.name, second.info.policy["step"]) == ("run, step 0", 10)
    assert (second.info.seed, second.info.sampling["temperature"]) == (3, 0.7)
    assert [s["attempt"] for s in second.samples()] == [0, 1]
