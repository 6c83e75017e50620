import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import UserDict
from typing import ClassVar

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import TrainError
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.runner import RolloutRunner
from tests._support.paths import ROOT
from tests._support.sums_env import CALL, RecordingEngine, Sums

SCRIPT = ["-m", "tests._support.journaled_run"]


def runner_of(engine, journal, *, state=None, **config):
    config = {"batch_groups": 3, "group_size": 4, "max_new_tokens": 40, **config}
    return RolloutRunner(
        EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()),
        RolloutConfig(**config),
        journal=journal,
        state=state,
    )


def some_groups(num_groups=3, engine=None):
    engine = engine or RecordingEngine(publishes=True)

    async def play():
        async with runner_of(engine, None, batch_groups=num_groups, max_staleness=10**6) as runner:
            return await runner.next_batch()

    return asyncio.run(play())


def test_packed_group_round_trips_exactly():
    groups = [*some_groups(), *some_groups(engine=ScriptedEngine([CALL, CALL, "10 \ud800"]))]
    for group in groups:
        text = dump_row(pack_group(group))
        assert unpack_group(json.loads(text)) == group
        again = unpack_group(json.loads(text))
        assert json.dumps([t.to_dict() for t in again]) == json.dumps([t.to_dict() for t in group])


def test_journal_restores_every_group_state(tmp_path):
    file = tmp_path / "run" / "journal.jsonl"
    waiting, stale, trained = some_groups()
    with Journal(file) as journal:
        assert journal.take_known() == {}
        for index in range(6):
            journal.issued(index, {"difficulty": index})
        journal.dropped(1, "failed")
        journal.dropped(2, "success-rate/too-hard", [0.0, 0.0])
        journal.scored(3, waiting)
        journal.scored(4, stale)
        journal.dropped(4, "stale", stale.rewards_G)
        journal.scored(5, trained)
        journal.taken([5], step=1)
    with Journal(file) as journal:
        known = journal.take_known()
        assert journal.take_known() == {}
    assert [known[i].options for i in range(6)] == [{"difficulty": i} for i in range(6)]
    assert [known[i].dropped for i in range(6)] == [
        None, "failed", "success-rate/too-hard", None, "stale", None,
    ]  # fmt: skip
    assert [known[i].group for i in range(6)] == [None, None, None, waiting, None, trained]
    assert known[2].rewards_G == [0.0, 0.0]
    assert list(known[4].rewards_G) == list(stale.rewards_G)


def test_checkpoint_drops_finished_groups_from_the_journal(tmp_path):
    file = tmp_path / "journal.jsonl"
    one, two, three = some_groups()
    with Journal(file) as journal:
        for index, group in enumerate((one, two, three)):
            journal.issued(index, {})
            journal.scored(index, group)
        journal.issued(3, {})
        journal.dropped(1, "stale")
        journal.taken([0], step=1)
        full = file.stat().st_size
        journal.checkpoint({"next_group": 3, "unfinished": [1]})
        assert file.stat().st_size < full / 10  # two's trajectories went with it
        journal.scored(3, three)
        journal.checkpoint({"next_group": 3, "unfinished": [1]})
        journal.issued(4, {})
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    with Journal(file) as journal:
        known = journal.take_known()
        assert set(known) == {1, 3, 4}
        assert known[1].dropped == "stale"
        assert known[3].group == three


def test_truncated_journal_is_read_up_to_its_last_whole_line(tmp_path):
    file = tmp_path / "journal.jsonl"
    group = some_groups(1)[0]
    with Journal(file) as journal:
        journal.issued(0, {})
        journal.scored(0, group)
        journal.issued(1, {})
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    rng = random.Random(0)
    for size in {*ends, *(end - 1 for end in ends), *rng.sample(range(len(whole)), 40)}:
        file.write_bytes(whole[:size])
        with Journal(file) as journal:
            num_lines = sum(end <= size for end in ends)
            known = journal.take_known()
            assert len(known) == (0, 1, 1, 2)[num_lines]
            assert (known[0].group if known else None) == (group if num_lines >= 2 else None)
            journal.issued(7, {})  # nothing is glued to half a line
        assert len(file.read_bytes().split(b"\n")) == num_lines + 2
    file.write_bytes(whole[: ends[0]] + b"\x00\x00garbage\n" + whole[ends[0] :])
    with Journal(file) as journal:
        assert set(journal.take_known()) == {0}
    assert file.read_bytes() == whole[: ends[0]]


def test_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    import resource

    group = some_groups(1)[0]
    file = tmp_path / "journal.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with Journal(file) as journal:
        journal.issued(0, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 100, hard))
        try:
            with pytest.raises((TrainError, OSError)):
                journal.scored(0, group)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        journal.scored(0, group)
    with Journal(file) as journal:
        assert journal.take_known()[0].group == group


# ---- runs ---------------------------------------------------------------------------------------


def test_resumed_run_does_not_replay_finished_groups(tmp_path):
    """A run that was interrupted while ahead trains its complete groups and plays the rest."""

    async def before():
        engine = ScriptedEngine(["10"])
        with Journal(tmp_path / "j") as journal:
            async with runner_of(engine, journal, max_staleness=2) as runner:
                first = await runner.next_batch()
                await engine.publish([], 1)
                state = runner.state()
                await asyncio.sleep(0.05)
        assert runner.stats().groups_ready == 9
        return first, state, engine.num_calls

    async def after(state):
        engine = ScriptedEngine(["10"])
        engine.policy_version = 1
        with Journal(tmp_path / "j") as journal:
            async with runner_of(engine, journal, max_staleness=2, state=state) as runner:
                return await runner.next_batch(), runner.stats(), engine.num_calls

    first, state, num_calls = asyncio.run(before())
    assert num_calls == 12 * 4
    then, stats, num_calls = asyncio.run(after(json.loads(json.dumps(state))))
    assert [g.id for g in first + then] == [f"g{i:06d}" for i in range(6)]
    assert stats.num_groups_restored == 9
    assert num_calls == stats.num_episodes == 0


def test_restored_groups_respect_max_staleness(tmp_path):
    async def play(version, state):
        engine = ScriptedEngine(["10"])
        engine.policy_version = version
        with Journal(tmp_path / "j") as journal:
            async with runner_of(engine, journal, max_staleness=1, state=state) as runner:
                batch = await runner.next_batch()
                await asyncio.sleep(0.05)
        return batch, runner.stats(), {"next_group": 3, "unfinished": []}

    _, _, state = asyncio.run(play(0, None))
    batch, stats, _ = asyncio.run(play(4, state))  # the run went on elsewhere, without a journal
    assert stats.num_groups_restored == stats.num_groups_stale == 3
    assert {v for g in batch for t in g for v in t.policy_versions} == {4}


def test_untrained_batch_is_not_lost(tmp_path):
    async def play(state):
        engine = ScriptedEngine(["10"])
        with Journal(tmp_path / "j") as journal:
            async with runner_of(engine, journal, state=state) as runner:
                batch = await runner.next_batch()
                return batch, runner.state()  # the update failed: nothing is published

    first, state = asyncio.run(play(None))
    assert state == {"next_group": 3, "unfinished": [0, 1, 2]}
    assert asyncio.run(play(state))[0] == first


def start(directory, num_steps, max_staleness):
    return subprocess.Popen(
        [sys.executable, *SCRIPT, directory, str(num_steps), str(max_staleness)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def trained(directory):
    return [json.loads(line) for line in (directory / "trained.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_run_killed_repeatedly_trains_what_an_uninterrupted_run_does(tmp_path, max_staleness):
    num_steps = 40
    if max_staleness == 0:  # otherwise the groups of a batch depend on time
        with start(tmp_path / "whole", num_steps, max_staleness) as process:
            process.communicate(timeout=60)
    directory = tmp_path / "killed"
    rng = random.Random(max_staleness)
    num_kills = num_restored = 0
    while True:
        with start(directory, num_steps, max_staleness) as process:
            # Importing takes a random part of this: the moment is anywhere in the run.
            progress = len(trained(directory)) if (directory / "trained.jsonl").exists() else 0
            deadline = time.monotonic() + 30
            while process.poll() is None and num_kills < 4 and time.monotonic() < deadline:
                file = directory / "trained.jsonl"
                if file.exists() and file.read_bytes().count(b"\n") > progress:
                    time.sleep(rng.uniform(0, 0.05))
                    process.kill()
                    num_kills += 1
                    break
                time.sleep(0.002)
            out, _ = process.communicate(timeout=60)
            if process.returncode == 0:
                num_restored += json.loads(out)["restored"]
                break
            assert process.returncode == -signal.SIGKILL
    assert num_kills >= 3
    rows = trained(directory)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    groups = [id for row in rows for id in row["groups"]]
    assert len(set(groups)) == len(groups) == 2 * num_steps  # none twice
    if max_staleness == 0:
        assert rows == trained(tmp_path / "whole")
    assert all(row["step"] - 1 - v <= max_staleness for row in rows for v in row["versions"])
    with Journal(directory / "journal.jsonl") as journal:
        known = journal.take_known()
    assert len(known) < 40  # of more than 80: the file does not grow for ever


class Spy(UserDict):
    """Notes what the encoder was given, when it comes to this mapping."""

    encoded: ClassVar[list[str]] = []

    def keys(self):
        frame = sys._getframe()
        while frame is not None and frame.f_code is not json.JSONEncoder.encode.__code__:
            frame = frame.f_back
        if frame is not None:
            self.encoded.append(frame.f_locals["o"]["id"])
        return super().keys()


def test_members_of_a_group_are_encoded_one_by_one():
    """The encoder holds Python's lock: a whole group in one call would stop the event loop."""
    members = [{"id": "a", "metrics": Spy(x=1)}, {"id": "b", "metrics": Spy(x=2)}]
    row = {"event": "scored", "group": 3, "packed": {"id": "g", "trajectories": members}}
    row["options"] = {1: "a key that is a number becomes a text"}
    Spy.encoded.clear()
    text = dump_row(row)
    assert Spy.encoded == ["a", "b"]
    plain = [{**member, "metrics": dict(member["metrics"])} for member in members]
    expected = {**row, "packed": {"id": "g", "trajectories": plain}}
    assert json.loads(text) == json.loads(json.dumps(expected))
