"""Evaluations as the viewer's server reads them: which there are, their samples, trajectories."""

import json
import os

import pytest

from areal_gym.errors import DataError, UnknownIdError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.viewer import Catalog
from areal_gym.viewer.evaluation_catalog import EvaluationCatalog
from tests._support.evaluation_dirs import sample, write_evaluation
from tests._support.run_dirs import make_run

SCORES = {
    **{"pass@1": 0.5, "pass@1_low": 0.25, "pass@1_high": 0.75, "pass@2": 0.75, "pass^2": 0.25},
    **{"reward": 0.5, "num_failed": 1, "stop_reasons": {"completed": 8}, "pass@x": 3},
}
PAIRS = [(index, attempt) for index in range(4) for attempt in range(2)]


@pytest.fixture
def root(tmp_path, tiny_policy):
    """A run with two evaluations on its schedule and one of a checkpoint; one on its own."""
    path = make_run(tmp_path / "math-1", num_steps=1, num_trajectories=1, is_finished=False)
    with RunDir.open(path, "resume") as run:
        run.save_trajectories([sample(*pair) for pair in PAIRS], name="eval-000001")
        run.save_tokenizer(tiny_policy)
    write_evaluation(path / "evaluations" / "eval-math-a", PAIRS, scores=SCORES)
    write_evaluation(tmp_path / "eval-math-b", PAIRS[:3], env="math/gsm8k")
    write_evaluation(tmp_path / "suite" / "gsm8k", PAIRS, scores=SCORES, benchmark="gsm8k")
    return tmp_path


def test_evaluations_of_all_places_are_listed(root):
    cards = {card["id"]: card for card in EvaluationCatalog(Catalog([root])).cards()}
    assert sorted(cards) == [
        *("eval-math-b", "math-1:eval-math-a", "math-1:step-0", "math-1:step-1", "suite:gsm8k"),
    ]
    one = cards["math-1:eval-math-a"]
    assert (one["run"], one["step"], one["env"], one["status"]) == (
        *("math-1", 40, "math", "finished"),
    )
    assert one["scores"] == [
        {"name": "pass@1", "value": 0.5, "low": 0.25, "high": 0.75},
        {"name": "pass@2", "value": 0.75, "low": None, "high": None},
        {"name": "pass^2", "value": 0.25, "low": None, "high": None},
    ]
    unfinished = cards["eval-math-b"]
    assert (unfinished["status"], unfinished["scores"]) == ("interrupted", [])
    assert (unfinished["num_done"], unfinished["num_total"], unfinished["run"]) == (3, 8, "math-1")
    scheduled = cards["math-1:step-1"]
    assert (scheduled["step"], scheduled["scores"][0]["value"]) == (1, 0.75)
    assert cards["suite:gsm8k"]["benchmark"] == "gsm8k"


def test_samples_and_trajectories_are_read(root):
    evaluations = EvaluationCatalog(Catalog([root]))
    page = evaluations.page("math-1:eval-math-a", 2, 3)
    columns = page["columns"]
    assert not page["is_last"]
    assert columns["task"] == ["test/1", "test/1", "test/2"]
    assert columns["attempt"] == [0, 1, 0]
    assert columns["reward"] == [sample(*pair).reward for pair in PAIRS[2:5]]
    assert evaluations.page("math-1:eval-math-a", 5, 3)["is_last"]
    for id in ("math-1:eval-math-a", "math-1:step-1"):
        row = evaluations.trajectory(id, 4)
        assert (row["id"], row["place"], row["trained"]) == ("eval-000002-0", 4, None)
        assert row["texts"]  # of the run's tokenizer
    assert evaluations.page("math-1:step-1")["columns"]["task"] == columns_of(PAIRS)
    assert evaluations.page("math-1:step-0") == {
        **evaluations.page("math-1:step-0"),
        "is_last": True,
        "version": None,
    }
    with pytest.raises(UnknownIdError, match="no sample 8"):
        evaluations.trajectory("math-1:eval-math-a", 8)
    with pytest.raises(UnknownIdError, match="no evaluation"):
        evaluations.page("math-1:step-7")


def columns_of(pairs):
    return [f"test/{index}" for index, _ in pairs]


def test_growing_evaluation_is_read_on(root):
    evaluations = EvaluationCatalog(Catalog([root]))
    first = evaluations.page("eval-math-b")
    assert len(first["columns"]["task"]) == 3
    file = root / "eval-math-b" / "samples.jsonl"
    with file.open("a") as stream:
        stream.write('{"index": 9, "attempt": 0, "task": "new", "success": true}\n')
        stream.write('{"oops\n[]\n{"index": 10, "attempt": 0, "task": "torn"')
    page = evaluations.page("eval-math-b", 3)
    assert page["columns"]["task"] == ["new"]
    assert (page["version"], page["num_damaged"]) == (first["version"], 2)
    with pytest.raises(DataError, match="no line of 0 bytes"):
        evaluations.trajectory("eval-math-b", 3)
    other = file.with_suffix(".new")
    other.write_text('{"index": 0, "attempt": 0, "task": 7, "success": 1, "reward": 1e999}\n')
    os.replace(other, file)
    replaced = evaluations.page("eval-math-b")
    assert replaced["version"] != first["version"]
    assert replaced["columns"]["task"] == ["7"]
    assert replaced["columns"]["reward"] == [None]


def test_damaged_evaluation_is_listed_with_its_reason(root):
    for text in ("{", "[]", '{"env": 3}', '{"env": "x", "scores": [1]}'):
        (root / "eval-math-b" / "evaluation.json").write_text(text)
        cards = {card["id"]: card for card in EvaluationCatalog(Catalog([root])).cards()}
        assert cards["eval-math-b"]["problems"], text
        assert not cards["math-1:eval-math-a"]["problems"]
    odd = {"env": "x", "scores": {"pass@1": "high", "stop_reasons": 3, "reward": {}}, "seed": []}
    (root / "eval-math-b" / "evaluation.json").write_text(json.dumps(odd))
    cards = {card["id"]: card for card in EvaluationCatalog(Catalog([root])).cards()}
    assert (cards["eval-math-b"]["scores"], cards["eval-math-b"]["seed"]) == ([], None)


@pytest.mark.parametrize("name", ["evaluation.json", "samples.jsonl", "trajectories/eval.jsonl"])
def test_links_out_of_an_evaluation_are_not_followed(root, tmp_path_factory, name):
    outside = tmp_path_factory.mktemp("outside") / "file"
    link = root / "eval-math-b" / name
    outside.write_bytes(link.read_bytes().replace(b"test/", b"secret/"))
    link.unlink()
    link.symlink_to(outside)
    evaluations = EvaluationCatalog(Catalog([root]))
    text = json.dumps(evaluations.cards())
    for read in (evaluations.page, evaluations.about, lambda id: evaluations.trajectory(id, 0)):
        try:
            text += json.dumps(read("eval-math-b"))
        except (DataError, UnknownIdError) as error:
            text += str(error)
    assert "secret" not in text
