"""The built-in rewards, on right, wrong and hostile texts."""

import asyncio

import pytest

from areal_gym.errors import EnvError, GymError
from areal_gym.rewards import RewardInput, load_rewards
from areal_gym.testing import check_reward


def rewards_of(reward, texts, row=None, **kwargs):
    rewards = load_rewards({"reward": reward, "kwargs": kwargs})

    async def main():
        return [
            (await rewards.score(RewardInput(completion=text, row=row or {}))).reward
            for text in texts
        ]

    return asyncio.run(main())


SUM = {"answer": "4", "tests": ["assert add(2, 2) == 4", "assert add(1, 2) == 3"]}
ADD = "```python\ndef add(a, b):\n    return {}\n```"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"pattern": "^(x+x+)+y$"}},
    "required": ["a"],
}
CASES = [
    ("exact", {}, {"4": 1, " 4\n": 1, "four": 0}),
    ("exact", {"ignore_case": True, "answer": "names"}, {"ADA": 1, "bob": 1, "Eve": 0}),
    ("exact", {"ignore_punctuation": True}, {"4.": 1, "4 5": 0}),
    ("math", {}, {r"so \boxed{\frac{8}{2}}": 1, "#### 4.0": 1, r"\boxed{5}": 0, "no idea": 0}),
    ("regex", {"pattern": r"\d+"}, {"a 12": 1, "a": 0}),
    ("regex", {"pattern": "YES", "full": True, "flags": ["ignore_case"]}, {" yes ": 1, "yes!": 0}),
    ("regex", {"pattern": "(x+x+)+y"}, {"xxy": 1, "x" * 5_000: 0}),
    (
        "json_schema",
        {"schema": SCHEMA, "partial": 0.25},
        {
            '{"a": 1}': 1,
            '```json\n{"a": 1}\n```': 1,
            '{"a": "1"}': 0.25,
            "a: 1": 0,
            '{"a": 1, "b": "' + "x" * 3_000 + '"}': 0,
        },
    ),
    ("length", {"high": 4}, {"one two": 1, "": 1, "1 2 3 4 5 6": 0.5, "1 " * 9: 0}),
    ("length", {"low": 4, "unit": "characters"}, {"ab": 0.5, "abcd": 1}),
    (
        "format",
        {},
        {
            "<think>a</think>\n<answer>b</answer>": 1,
            "<think>a</think> and <answer>b</answer>": 0,
            "<think></think><answer>b</answer>": 0,
            "<think>a<answer>b</answer></think>": 0,
            "<answer>b</answer>": 0,
        },
    ),
    (
        "code",
        {},
        {ADD.format("a + b"): 1, ADD.format("4"): 0.5, ADD.format("1 / 0"): 0, "I cannot.": 0},
    ),
]


@pytest.mark.parametrize(("reward", "kwargs", "cases"), CASES, ids=[case[0] for case in CASES])
def test_built_in_reward(reward, kwargs, cases):
    row = {**SUM, "names": ["Ada", "Bob"]}
    assert rewards_of(reward, cases, row, **kwargs) == list(cases.values())


@pytest.mark.parametrize(
    "case", list({case[0]: case for case in CASES}.values()), ids=lambda case: case[0]
)
def test_built_in_reward_keeps_the_contract(case):
    reward, kwargs, scores = case
    given = {"reward": reward, "kwargs": kwargs}
    by_score = sorted(scores, key=scores.__getitem__)
    row = {**SUM, "names": ["Ada", "Bob"]}
    check_reward(given, row=row, right=by_score[-1], wrong=by_score[0])


def test_code_takes_the_forms_of_tests_that_data_sets_have():
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    rows = [
        {"tests": [{"args": [1, 2], "result": 3}], "entry_point": "add"},
        {"tests": check, "entry_point": "add", "prompt": "import math\ndef add(a, b):\n"},
        {"tests": "assert add(1, 2) == 3"},
    ]
    for row in rows:
        assert rewards_of("code", [ADD.format("a + b"), ADD.format("a")], row) == [1.0, 0.0]
    with pytest.raises(EnvError, match="tests = 3"):
        rewards_of("code", ["x"], {"tests": 3})
    half = [ADD.format("4")]
    assert rewards_of("code", half, SUM, all_or_nothing=True) == [0.0]


@pytest.mark.parametrize(
    ("reward", "kwargs", "message"),
    [
        ("regex", {"pattern": "("}, "is no regular expression"),
        ("regex", {"pattern": "a", "flags": ["loud"]}, "unknown flag 'loud'"),
        ("json_schema", {"schema": {"type": "thing"}}, "is no JSON schema"),
        ("json_schema", {"schema": "nowhere.json"}, "cannot read the schema"),
        ("length", {}, "a length from low to high"),
        ("length", {"high": 3, "unit": "tokens"}, "unit = 'tokens'"),
        ("format", {"tags": "think"}, "a list of different names"),
        ("exact", {"answer": ""}, "the name of a column"),
        ("code", {"sandbox": "proces"}, "no sandbox 'proces'"),
    ],
)
def test_wrong_arguments_are_explained(reward, kwargs, message):
    with pytest.raises(GymError, match=message):
        load_rewards({"reward": reward, "kwargs": kwargs})


def test_row_without_an_answer_is_an_error_and_not_zero():
    with pytest.raises(EnvError, match="no value in the column 'answer'"):
        rewards_of("math", ["4"], {"answer": None})
