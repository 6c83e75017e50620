"""`areal-gym data show` and `data check`."""

from __future__ import annotations

import json

import pytest

from areal_gym.cli import app


def run(capsys, *argv):
    code = app.run(["data", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def questions(path, texts):
    rows = ({"question": text, "answer": str(n)} for n, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tasks_are_printed_as_a_table(capsys):
    code, out, err = run(capsys, "show", "countdown", "-n", "3", "num_numbers=3")
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split() == ["index", "task", "question", "data"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert all("Use each of" in line and "solution=" in line for line in lines)
    assert "train: generated, without limit" in err


def test_json_contains_whole_tasks(capsys):
    code, out, _ = run(
        capsys, "show", "math", "--split", "test", "--first", "4", "-n", "2", "--json"
    )
    shown = json.loads(out)
    assert code == 0
    assert [task["index"] for task in shown["tasks"]] == [4, 5]
    assert shown["tasks"][0]["split"] == "test"
    assert shown["tasks"][0]["messages"][1]["content"] == shown["tasks"][0]["data"]["question"]
    assert shown["num_tasks"] == {"train": None, "test": None}


def test_skipped_rows_are_reported(capsys, tmp_path):
    train = questions(tmp_path / "train.jsonl", ["a?", "b?", "c?"])
    with train.open("a") as file:
        file.write('{"question": "d?", "answer": null}\n')
    test = questions(tmp_path / "test.jsonl", ["A?"])
    tasks = f"data: {train}, test: {test}"
    code, _, err = run(capsys, "show", "math", f"tasks={{{tasks}}}")
    assert code == 2
    assert "train.jsonl, line 4" in err
    code, out, err = run(capsys, "show", "math", f"tasks={{{tasks}, skip_broken: true}}")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "train: 2 tasks" in err
    assert "1 broken rows were skipped" in err
    assert "1 training rows were skipped: the test split has the same questions" in err


@pytest.mark.parametrize(("train", "code"), [("other", 0), ("same", 1)])
def test_contamination_exits_with_an_error_code(capsys, tmp_path, train, code):
    words = " ".join(f"word{n}" for n in range(19))
    heldout = questions(tmp_path / "h.jsonl", [f"{words} what?"])
    text = f"{words} what!" if train == "same" else "something else"
    learned = questions(tmp_path / "t.jsonl", [text])
    tasks = f"tasks={{data: {learned}, test: {heldout}}}"
    got, out, err = run(capsys, "check", "math", tasks)
    assert got == code
    assert f"{code} of 1 questions in test are in train" in err
    assert ("0.92" in out) == bool(code)
    got, out, _ = run(capsys, "check", "math", tasks, "--json")
    assert got == code
    assert len(json.loads(out)["overlaps"]) == code


def test_long_lists_of_overlaps_are_shortened(capsys):
    code, out, err = run(capsys, "check", "code")
    assert code == 1
    assert len(out.splitlines()) == 1 + 20
    assert "the 20 most similar" in err


def test_data_usage_errors_are_explained(capsys):
    code, _, err = run(capsys, "show", "mtah")
    assert code == 2
    assert "did you mean 'math'?" in err
    code, _, err = run(capsys, "show", "math", "levle=2")
    assert code == 2
    assert "did you mean 'level'?" in err
    code, _, err = run(capsys, "show", "math", "--split", "tset")
    assert code == 2
