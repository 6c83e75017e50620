import random

from hypothesis import given
from hypothesis import strategies as st

from areal_gym.rollout.buffer import GroupBuffer
from areal_gym.rollout.staleness import AdmissionControl, is_fresh
from areal_gym.types import Group, Task, TokenSpan, Trajectory

TASK = Task(id="t", data={})


def group(*versions):
    spans = tuple(
        TokenSpan(origin="policy", token_ids=(1,), logprobs=(-1.0,), policy_version=version)
        for version in versions
    )
    trajectory = Trajectory(id="a", group_id="g", task=TASK, env_id="e", spans=spans)
    return Group(id="g", task=TASK, trajectories=(trajectory,))


def test_one_stale_token_makes_a_group_stale():
    assert is_fresh(group(3, 5).oldest_version, 5, 2)
    assert not is_fresh(group(2, 5).oldest_version, 5, 2)
    assert is_fresh(group().oldest_version, 5, 0)  # nothing was sampled


def test_synchronous_admission_allows_one_batch_per_version():
    admission = AdmissionControl(batch_groups=3, max_staleness=0)
    for version in range(4):
        assert admission.capacity(version) == 3
        for left in (2, 1, 0):
            admission.start()
            assert admission.capacity(version) == left
        admission.reject()
        assert admission.capacity(version) == 1  # a failed group is replaced
        admission.start()
        for _ in range(3):
            admission.accept()
        assert admission.capacity(version) == 0


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_groups_taken_in_starting_order_are_never_stale(seed, batch_groups, max_staleness, start):
    """Play random schedules of starting, finishing, failing and training."""
    rng = random.Random(seed)
    version = start
    admission = AdmissionControl(batch_groups, max_staleness, num_accepted=start * batch_groups)
    running, ready = [], []  # versions at the start, in order
    for _ in range(300):
        move = rng.random()
        if move < 0.4 and admission.capacity(version) > 0:
            admission.start()
            running.append(version)
        elif move < 0.7 and running:
            admission.accept()
            ready.append(running.pop(0))
        elif move < 0.8 and running:
            admission.reject()
            running.pop(rng.randrange(len(running)))
        elif len(ready) >= batch_groups:
            batch, ready = ready[:batch_groups], ready[batch_groups:]
            assert all(version - started <= max_staleness for started in batch)
            version += 1
        assert admission.num_running == len(running)
        ahead = admission.num_accepted + admission.num_running - version * batch_groups
        assert ahead <= (max_staleness + 1) * batch_groups
        # Never stuck: with nothing running and too little ready, something may start.
        if not running and len(ready) < batch_groups:
            assert admission.capacity(version) > 0


def test_group_buffer_returns_groups_in_starting_order():
    buffer = GroupBuffer()
    groups = {index: group(index) for index in (4, 1, 3, 2)}
    for index, item in groups.items():
        buffer.put(index, item)
    assert buffer.indices == [1, 2, 3, 4]
    assert buffer.drop_stale(4, 2) == {1: groups[1]}
    assert buffer.drop_stale(4, 2) == {}
    assert list(buffer.take(2).values()) == [groups[2], groups[3]]
    assert len(buffer) == 1
