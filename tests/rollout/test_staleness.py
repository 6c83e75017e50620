import random

from hypothesis import given
from hypothesis import strategies as st

from areal_gym.config import RolloutConfig
from areal_gym.rollout.groups import GroupTracker, is_fresh
from areal_gym.rollout.task_scheduler import TaskScheduler
from areal_gym.types import Group, Task, TokenSpan, Trajectory

TASK = Task(id="t", data={})


def trajectory(*versions):
    spans = tuple(
        TokenSpan(origin="policy", token_ids=(1,), logprobs=(-1.0,), policy_version=version)
        for version in versions
    )
    return Trajectory(id="a", group_id="g", task=TASK, env_id="e", spans=spans)


def tracker_of(batch_groups, max_staleness, version=0):
    config = RolloutConfig(
        batch_groups=batch_groups, max_staleness=max_staleness, group_size=1, min_group_size=1
    )
    tasks = TaskScheduler(0, None, lookback=None, first=version * batch_groups, state={})
    return GroupTracker(config, tasks, version, {}, None)


def start(tracker):
    index, _ = tracker.issue()
    return tracker.start(index, TASK)


def finish(tracker, group, *versions):
    group.members.append((0, trajectory(*versions)))
    tracker.finish(group)


def test_one_stale_token_makes_a_group_stale():
    def oldest(*versions):
        return Group(id="g", task=TASK, trajectories=(trajectory(*versions),)).oldest_version

    assert is_fresh(oldest(3, 5), 5, 2)
    assert not is_fresh(oldest(2, 5), 5, 2)
    assert is_fresh(oldest(), 5, 0)  # nothing was sampled


def test_synchronous_admission_allows_one_batch_per_version():
    tracker = tracker_of(3, max_staleness=0)
    for version in range(4):
        assert tracker.room(version) == 3
        groups = []
        for left in (2, 1, 0):
            groups.append(start(tracker))
            assert tracker.room(version) == left
        tracker.fail(groups.pop().index)
        assert tracker.room(version) == 1  # a failed group is replaced
        groups.append(start(tracker))
        for group in groups:
            finish(tracker, group, version)
        assert tracker.room(version) == 0
        assert len(tracker.hand_out(version)) == 3
        assert tracker.room(version) == 0


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_groups_finished_in_starting_order_are_never_stale(
    seed, batch_groups, max_staleness, version
):
    """Play random schedules of starting, finishing, failing and training."""
    rng = random.Random(seed)
    tracker = tracker_of(batch_groups, max_staleness, version)
    running = []  # groups and their version at the start, in order
    for _ in range(300):
        move = rng.random()
        if move < 0.4 and tracker.room(version) > 0:
            running.append((start(tracker), version))
        elif move < 0.7 and running:
            finish(tracker, *running.pop(0))
        elif move < 0.8 and running:
            group, _ = running.pop(rng.randrange(len(running)))
            tracker.fail(group.index)
        elif tracker.num_ready >= batch_groups:
            assert len(tracker.hand_out(version)) == batch_groups
            version += 1
        assert tracker.counts["stale"] == 0
        assert set(tracker.running) == {group.index for group, _ in running}
        num_ahead = tracker.num_ready + len(running)
        assert num_ahead <= (max_staleness + 1) * batch_groups
        # Never stuck: with nothing running and too little ready, something may start.
        if not running and tracker.num_ready < batch_groups:
            assert tracker.room(version) > 0


def test_batches_are_handed_out_in_the_order_of_starting():
    tracker = tracker_of(2, max_staleness=2)
    groups = [start(tracker) for _ in range(5)]
    for index, version in ((4, 4), (1, 1), (3, 3), (2, 2)):
        finish(tracker, groups[index], version)
    batch = tracker.hand_out(4)
    assert [group.id for group in batch] == ["g000002", "g000003"]
    assert tracker.counts["stale"] == 1  # version 1 is three behind
    assert tracker.num_ready == 1
    assert tracker.hand_out(4) is None
