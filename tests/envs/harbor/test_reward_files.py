import io
import tarfile

import pytest

from areal_gym.envs.harbor.reward_files import (
    MOST_BYTES,
    combined,
    main_reward,
    parse_rewards,
    passes,
    read_reward_file,
)
from areal_gym.errors import EnvError

JSON, TXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"


def archive(data=b"1", **attributes):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("logs/verifier/reward.txt")
        entry.size = len(data)
        for name, value in attributes.items():
            setattr(entry, name, value)
        tar.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
    return buffer.getvalue()


def test_only_a_small_regular_file_is_a_reward_file():
    assert read_reward_file(archive(b"0.5\n"), TXT) == "0.5\n"
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    assert read_reward_file(empty.getvalue(), TXT) is None
    for odd in (tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE):
        with pytest.raises(EnvError, match="not a regular file"):
            read_reward_file(archive(type=odd, linkname="/app/mine", size=0), TXT)
    with pytest.raises(EnvError, match="larger than 64 kB"):
        read_reward_file(archive(b"1" * (MOST_BYTES + 1)), TXT)
    with pytest.raises(EnvError, match="larger than 64 kB"):
        read_reward_file(archive(b"1" * 4096)[:2048], TXT)  # as `take` cuts it off


def test_rewards_are_finite_numbers_by_name():
    assert parse_rewards(" 0.25\n", TXT) == {"reward": 0.25}
    assert parse_rewards('{"reward": 1, "speed": 0.5}', JSON) == {"reward": 1.0, "speed": 0.5}
    for path, text, reason in (
        (TXT, "", "is empty"),
        (TXT, "one", "not one finite number"),
        (TXT, "1 2", "not one finite number"),
        (TXT, "nan", "not one finite number"),
        (JSON, " \n", "is empty"),
        (JSON, "{", "is not JSON"),
        (JSON, "[" * 100_000, "is not JSON"),
        (JSON, "[1]", "not an object"),
        (JSON, "{}", "not an object"),
        (JSON, '{"reward": "1"}', "reward is"),
        (JSON, '{"reward": NaN}', "reward is"),
        (JSON, '{"reward": 1e999}', "reward is"),
        (JSON, '{"reward": 1%s}' % ("0" * 400), "reward is"),
        (JSON, '{"a": 1, "b": null}', "b is"),
    ):
        with pytest.raises(EnvError, match=reason):
            parse_rewards(text, path)


def test_the_reward_is_the_one_of_that_name_or_the_only_one_or_the_mean():
    assert main_reward({"reward": 0.2, "a": 1.0}) == 0.2
    assert main_reward({"a": 0.7}) == 0.7
    assert main_reward({"a": 0.0, "b": 1.0}) == 0.5


def test_a_step_passes_at_its_min_reward():
    assert passes({"reward": 0.0}, None)
    assert passes({"reward": 0.5}, 0.5)
    assert not passes({"reward": 0.4}, 0.5)
    assert passes({"a": 1.0, "b": 0.0}, {"a": 1.0})
    assert not passes({"a": 1.0}, {"a": 1.0, "b": 0.0})  # a missing one does not pass


def test_several_steps_are_their_mean_by_name_or_the_last_one():
    steps = [{"reward": 1.0, "tests": 1.0}, {"reward": 0.5}]
    assert combined(steps, None) == combined(steps, "mean") == 0.75
    assert combined(steps, "final") == 0.5
    assert combined([{"a": 1.0}, {"b": 1.0}], "mean") == 0.5
    assert combined([], "mean") == 0.0
