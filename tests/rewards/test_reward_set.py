"""References to rewards, their calling convention, and what becomes of bad values."""

import asyncio
import functools
import pickle
import time

import numpy as np
import pytest

from areal_gym.errors import ConfigError, EnvError, RewardError, UnknownIdError
from areal_gym.rewards import RewardInput, Score, load_rewards

ROW = {"prompt": "2 + 2?", "answer": "4", "level": 3}


def sample(completion="4", **changes):
    fields = {
        "prompt": "2 + 2?",
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": completion},
        ],
        "tool_results": ["four"],
        "row": ROW,
        "where": "prompts.jsonl, line 3",
    }
    return RewardInput(completion=completion, **{**fields, **changes})


def score(reward, *args, **changes):
    return asyncio.run(load_rewards(reward).score(sample(*args, **changes)))


def equal(completion, answer):
    return completion == answer


async def equal_later(completion, answer):
    await asyncio.sleep(0)
    return completion == answer


class Equal:
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def __call__(self, completion, answer):
        return float(completion == answer) + self.bonus

    def method(self, completion, **row):
        return completion == row["answer"]


def trl_lengths(completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    "reward",
    [
        equal,
        equal_later,
        Equal,
        Equal(),
        Equal().method,
        functools.partial(equal, answer="4"),
        trl_lengths,
        "exact",
        lambda completion, row: np.float32(completion == row["answer"]),
        lambda completion, **row: np.bool_(completion == row["answer"]),
        lambda messages, answer, unknown="x": int(messages[-1]["content"] == answer),
        lambda completion, prompt, tool_results: float(
            (prompt, tool_results, completion) == ("2 + 2?", ["four"], "4")
        ),
        lambda completion, answer: equal_later(completion, answer),
        lambda completion, answer: {"right": completion == answer, "short": None},
        lambda completion, answer: {"reward": completion == answer, "length": 7},
        lambda completion, answer: Score(reward=completion == answer, metrics={"tokens": 3}),
    ],
)
def test_every_form_of_a_reward_is_called(reward):
    assert score(reward).reward == 1.0
    assert score(reward, "5").reward == 0.0


def test_weights_parts_and_metrics_are_recorded_by_name():
    def style(completion):
        return Score(reward=0.5, parts={"short": 1}, metrics={"words": 1})

    result = score([{"reward": "exact", "weight": 2}, {"reward": style, "name": "tone"}])
    assert result.reward == 2.5
    assert result.parts == {"exact": 1.0, "tone": 0.5, "tone/short": 1.0}
    assert result.metrics == {"tone_words": 1.0}
    assert score({"exact": 0.5, equal: 2}).reward == 2.5
    assert score("exact=0.25").reward == 0.25
    assert list(score(["exact", "exact"]).parts) == ["exact", "exact_2"]


def test_none_counts_nothing_but_some_reward_must_apply():
    def never(completion):
        return None

    assert score(["exact", never]).parts == {"exact": 1.0}
    with pytest.raises(EnvError, match=r"no reward applies to prompts.jsonl, line 3: never"):
        score(never)


def test_batch_function_gets_messages_of_a_conversation_as_in_trl():
    def reward(prompts, completions, **kwargs):
        assert kwargs == {"answer": ["4"], "level": [3], "prompt": ["2 + 2?"]}
        return [float(completions[0][-1]["content"] == "4" and prompts[0][0]["role"] == "user")]

    assert score(reward, prompt=[{"role": "user", "content": "2 + 2?"}]).reward == 1.0


def test_functions_of_files_travel_to_other_processes(tmp_path):
    file = tmp_path / "my rewards.py"
    file.write_text("def polite(completion):\n    return 'please' in completion\n")
    rewards = load_rewards([f"{file}:polite=0.5", "exact"])
    assert [reward.name for reward in rewards] == ["polite", "exact"]
    assert rewards.rewards[0].file == file
    again = pickle.loads(pickle.dumps(rewards))
    assert asyncio.run(again.score(sample("please"))).reward == 0.5


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (float("nan"), RewardError, "returned nan, on prompts.jsonl, line 3; a finite number"),
        (float("inf"), RewardError, "returned inf"),
        (10**400, RewardError, "a finite number"),
        ("0.5", RewardError, r"returned '0.5'.*return float\(...\) of the text"),
        ([1.0], RewardError, "a finite number"),
        ({"right": "yes"}, RewardError, "a finite number is needed as 'right'"),
        ({3: 1.0}, RewardError, "the name 3 of a part"),
        (np.zeros(2), RewardError, "a finite number"),
    ],
)
def test_bad_values_are_errors_that_name_reward_and_row(value, error, message):
    def reward(completion):
        return value

    with pytest.raises(error, match=message) as caught:
        score(reward)
    assert str(caught.value).startswith("reward 'reward' returned")


def test_list_of_the_wrong_length_is_an_error():
    with pytest.raises(RewardError, match="2 rewards for 1 completion"):
        score(lambda completions, **kwargs: [1.0, 2.0])
    with pytest.raises(RewardError, match="a list with one reward per completion"):
        score(lambda completions, **kwargs: 1.0)


def test_exceptions_name_the_line_of_the_function():
    def reward(completion):
        raise ValueError("no such thing")

    with pytest.raises(EnvError, match=r"raised ValueError: no such thing \(test_.*py, line \d+\)"):
        score(reward)

    async def later(completion):
        raise SystemExit(3)

    with pytest.raises(EnvError, match=r"reward 'later' raised .*SystemExit\(3\)"):
        score(later)
    with pytest.raises(EnvError, match="raised SystemExit"):
        score(lambda completion: exit(3))


class Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", [Odd, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_is_no_exception_fails_its_episode_only(kind):
    def raises(completion):
        raise kind("no")

    async def raises_later(completion):
        raise kind("no")

    async def main(reward):
        rewards = load_rewards(reward)
        scores = (rewards.score(sample()) for _ in range(2))
        return await asyncio.gather(*scores, return_exceptions=True)

    for reward in (raises, raises_later):
        for failure in asyncio.run(main(reward)):
            assert isinstance(failure, EnvError)
            assert kind.__name__ in str(failure)
            assert "on prompts.jsonl, line 3" in str(failure)


def test_missing_columns_are_said_before_and_while_scoring():
    def reward(completion, anwser):
        return 1.0

    rewards = load_rewards([reward, "exact"])
    assert rewards.required_columns == ("anwser", "answer")
    with pytest.raises(ConfigError, match="needs the column 'anwser'") as caught:
        rewards.check_columns(ROW)
    assert caught.value.hints[0] == "did you mean 'answer'?"
    assert "prompt, answer, level" in caught.value.hints[1]
    with pytest.raises(EnvError, match=r"column 'anwser', on prompts.jsonl, line 3; did you mean"):
        score(reward)
    load_rewards(equal).check_columns(ROW)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("exakt", "no reward 'exakt'"),
        ("exact=much", "'much' is not a weight"),
        ({"reward": "exact", "wieght": 2}, "unknown setting 'wieght'"),
        ({"reward": "exact", "weight": "2"}, "weight = '2'"),
        ({"reward": "exact", "kwargs": {"ignore": 1}}, "ignore"),
        ({"reward": equal, "kwargs": {"anwser": 1}}, "takes no argument 'anwser'"),
        ([{"reward": "exact", "name": "a"}, {"reward": equal, "name": "a"}], "two rewards are"),
        ([], "no reward is given"),
        (3, "is not a reward"),
        ({"exact": "1"}, "is not the settings of a reward"),
        ("nowhere.py:exact", "no file"),
        (lambda text, /: 1.0, "by position only"),
    ],
)
def test_wrong_references_are_explained(reference, message):
    with pytest.raises((ConfigError, UnknownIdError), match=message) as caught:
        load_rewards(reference)
    assert caught.value.hints or "timeout" in message or "number is needed" in str(caught.value)


def sleeps(completion):
    if completion == "hang":
        time.sleep(3600)
    return 1.0


def spins(completion):
    while completion == "hang":
        pass
    return 1.0


async def awaits(completion):
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return 1.0


async def blocks(completion):
    return spins(completion)


@pytest.mark.parametrize("reward", [sleeps, spins, awaits, blocks])
def test_hanging_function_does_not_stall_the_others(reward):
    rewards = load_rewards({"reward": reward, "timeout_s": 0.3})

    async def main():
        texts = ["a", "hang", *"bcd"]
        results = await asyncio.gather(
            *(rewards.score(sample(text)) for text in texts), return_exceptions=True
        )
        later = await rewards.score(sample("e"))
        return results, later

    results, later = asyncio.run(main())
    failed = [result for result in results if isinstance(result, EnvError)]
    assert str(results[1]) == (
        f"reward '{reward.__name__}' did not return within 0.3 s, on prompts.jsonl, line 3; raise "
        'its "timeout_s" if it needs longer'
    )
    # A coroutine that blocks may take those on its loop with it; they are played again.
    assert len(failed) == 1 or reward is blocks
    assert later.reward == 1.0


def test_many_slow_calls_share_the_threads():
    def slow(completion):
        time.sleep(0.01)
        return 1.0

    rewards = load_rewards(slow)

    async def main():
        return await asyncio.gather(*(rewards.score(sample()) for _ in range(80)))

    assert sum(result.reward for result in asyncio.run(main())) == 80
