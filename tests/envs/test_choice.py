"""Multiple choice: letters in many spellings, orders of their own, rows of several kinds."""

import json

import pytest

import areal_gym
from areal_gym.envs.choice import chosen_letter
from areal_gym.errors import DataError


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("Let me see. It could be A.\n\n**Answer: C**", "C"),
        (r"So $\boxed{\text{D}}$", "D"),
        (r"\boxed{(A)}", "A"),
        ("The answer is (B) 42.", "B"),
        ("A, because", None),
        ("Answer: Because of gravity", None),
        ("", None),
    ],
)
def test_letters(text, letter):
    assert chosen_letter(text) == letter


def test_the_order_of_choices_depends_on_question_and_seed_only(tmp_path):
    rows = [
        {"question": f"q{n}?", "choices": ["right", "b", "c", "d"], "answer": "A"}
        for n in range(40)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def letters(**kwargs):
        env = areal_gym.make("choice", tasks={"data": str(file), "test": str(file)}, **kwargs)
        for index in range(40):
            env.reset(seed=index, options={"split": "test", "index": index})
            yield env.gold_action()

    assert list(letters()) == list(letters())
    assert set(letters()) == {f"Answer: {letter}" for letter in "ABCD"}
    assert list(letters(order_seed=1)) != list(letters())
    assert set(letters(order_seed=-1)) == {"Answer: A"}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "choices": ["a", "b"], "answer": "E"},
        {"question": "?", "choices": ["a", "a"], "answer": "a"},
        {"question": "?", "choices": "ab", "answer": "a"},
        {"question": "?", "choices": ["a"], "answer": "0"},
    ],
)
def test_broken_rows_are_named(tmp_path, row):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="line 1"):
        areal_gym.make("choice", tasks=str(file))
