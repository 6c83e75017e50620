from __future__ import annotations

import pytest

from areal_gym.envs.search.search_env import citation_score, cited_ids, exact_match, f1_score


@pytest.mark.parametrize(
    ("answer", "golds", "em", "f1"),
    [
        ("The Beatles", ["beatles"], 1.0, 1.0),
        ("beatles!", ["The Beatles", "Beatles band"], 1.0, 1.0),
        ("John Lennon", ["Lennon"], 0.0, 2 / 3),
        ("in the year 1969", ["1969"], 0.0, 0.5),
        ("New York City", ["city of New York"], 0.0, 6 / 7),
        ("yes", ["yes"], 1.0, 1.0),
        ("yes he did", ["yes"], 0.0, 0.0),
        ("", ["a"], 0.0, 0.0),
        ("a the", [""], 0.0, 0.0),
        ("Ada Ada", ["Ada"], 0.0, 2 / 3),
        ("x", [], 0.0, 0.0),
    ],
)
def test_exact_match_and_f1_of_short_answers(answer, golds, em, f1):
    assert exact_match(answer, golds) == em
    assert f1_score(answer, golds) == pytest.approx(f1)


def test_citation_scores():
    assert cited_ids("It is [a1], as [b2] and [a1] say; [not this] \\boxed{[c]}") == [
        "a1",
        "b2",
        "c",
    ]
    assert citation_score(["a", "b"], ["a", "b"]) == 1.0
    assert citation_score(["a"], ["a", "b"]) == pytest.approx(2 / 3)
    assert citation_score([], ["a"]) == 0.0
    assert citation_score(["x", "x"], ["a"]) == 0.0
