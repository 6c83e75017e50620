import gc
import weakref

import pytest

from areal_gym.utils.garbage import next_threshold, relax_garbage_collection


@pytest.fixture
def undo():
    gc.unfreeze()
    before = gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)
    undo = relax_garbage_collection()
    yield undo
    undo()
    assert (gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks)) == before


class Node:
    def __init__(self):
        self.me = self


def test_existing_objects_are_frozen_until_undone(undo):
    assert gc.get_freeze_count() > 10_000


def test_objects_that_an_application_has_frozen_stay_frozen():
    gc.freeze()
    relax_garbage_collection()()
    assert gc.get_freeze_count() > 10_000


def test_cycles_that_pile_up_are_collected(undo):
    first = weakref.ref(Node())
    for _ in range(200_000):
        Node()
        if first() is None:
            return
    raise AssertionError("200,000 cycles were not collected")


def test_objects_without_cycles_cause_no_collection(undo):
    before = sum(generation["collections"] for generation in gc.get_stats())
    for _ in range(100):
        assert len([[] for _ in range(5_000)]) == 5_000
    assert sum(generation["collections"] for generation in gc.get_stats()) == before


def test_expensive_collections_become_rarer_and_cheap_ones_more_frequent():
    assert next_threshold(10_000, collection_s=0.001, interval_s=0.1) == 80_000
    assert next_threshold(80_000, collection_s=0.001, interval_s=10) == 40_000


def test_threshold_stays_within_its_bounds():
    assert next_threshold(1_000_000, collection_s=1, interval_s=1) == 2_000_000
    assert next_threshold(10_000, collection_s=0, interval_s=1) == 10_000
