import gc
import weakref

import pytest

from areal_gym.utils.garbage import next_look, relax_garbage_collection


@pytest.fixture
def undo():
    before = gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)
    undo = relax_garbage_collection()
    yield undo
    if len(gc.callbacks) > before[2]:
        undo()
    assert (gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)) == before


class Node:
    def __init__(self):
        self.me = self


def test_collector_freezes_loaded_objects_and_restores(undo):
    assert gc.get_freeze_count() > 10_000
    undo()


def test_cyclic_garbage_is_collected(undo):
    first = weakref.ref(Node())
    for _ in range(200_000):
        Node()
        if first() is None:
            return
    raise AssertionError("200,000 cycles, and nobody has looked")


def test_objects_without_cycles_bring_no_look(undo):
    before = sum(look["collections"] for look in gc.get_stats())
    for _ in range(100):
        assert len([[] for _ in range(5_000)]) == 5_000
    assert sum(look["collections"] for look in gc.get_stats()) == before


def test_dear_looks_become_rarer_and_cheap_ones_more_frequent():
    assert next_look(10_000, look_s=0.001, since_s=0.1) == 80_000
    assert next_look(80_000, look_s=0.001, since_s=10) == 40_000


def test_looks_are_never_more_than_two_million_objects_apart():
    assert next_look(1_000_000, look_s=1, since_s=1) == 2_000_000
    assert next_look(10_000, look_s=0, since_s=1) == 10_000
