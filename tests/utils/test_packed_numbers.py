"""Packed numbers read as tuples do, and cost a tenth."""

import copy
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.utils.packed_numbers import Bools, Floats, Ints, from_packed

numbers = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(numbers, numbers, st.slices(20))
def test_ints_behave_as_a_tuple(first, second, part):
    packed, plain = Ints(first), tuple(first)
    assert packed == plain
    assert plain == packed
    assert hash(packed) == hash(plain)
    assert repr(packed) == repr(plain)
    assert list(packed) == first
    assert packed[part] == plain[part]
    assert packed + Ints(second) == plain + tuple(second)
    assert packed + tuple(second) == tuple(second)[:0] + plain + tuple(second)
    assert tuple(second) + packed == tuple(second) + plain
    assert (packed == Ints(second)) == (first == second)
    assert Ints.joined((first, second)) == first + second


def test_a_list_stays_the_same_list():
    ids = same = [1]
    ids += Ints((2, 3))
    assert same == [1, 2, 3]


@given(st.lists(st.floats(allow_subnormal=False), max_size=20))
def test_floats_survive_every_border(values):
    packed = Floats(values)
    for copied in (
        pickle.loads(pickle.dumps(packed)),
        copy.deepcopy(packed),
        Floats.from_text(packed.to_text()),
        from_packed(json.loads(json.dumps(packed.to_packed()))),
    ):
        assert copied.to_text() == packed.to_text()  # to the bit: one nan is not another
        assert np.array_equal(np.asarray(copied), np.asarray(values, float), equal_nan=True)


def test_float32_is_written_where_it_is_exact():
    assert list(Floats((-0.5, math.nan)).to_packed()) == ["float32"]
    assert list(Floats((-0.1,)).to_packed()) == ["float64"]
    assert list(Floats((1e300,)).to_packed()) == ["float64"]


def test_arrays_share_the_memory():
    packed = Ints(range(1000))
    array = np.asarray(packed)
    assert array.dtype == np.int32
    assert np.shares_memory(array, np.asarray(packed))
    assert not array.flags.writeable
    assert np.asarray(Bools((True, False))).dtype == bool
    assert np.asarray(Ints(), dtype=float).shape == (0,)
    assert np.shares_memory(np.asarray(packed[10:20]), array)


def test_arrays_are_accepted():
    assert Ints(np.arange(3)) == (0, 1, 2)
    assert Floats(np.array([0.5], "float32")) == (0.5,)
    assert Ints.from_array(np.arange(6)[::2]) == (0, 2, 4)


@pytest.mark.parametrize(
    ("values", "error"), [([1.5], TypeError), ([2**31], OverflowError), (["1"], TypeError)]
)
def test_other_values_are_refused(values, error):
    with pytest.raises(error):
        Ints(values)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {},
        {"int32": 3},
        {"int7": ""},
        {"int32": "AAA="},
        {"int32": "?"},
        {"float32": "AA=="},
    ],
)
def test_damaged_numbers_are_refused(value):
    with pytest.raises(ValueError, match=r"numbers|int32|base64|buffer|Only"):
        from_packed(value)


def test_deferred_numbers_are_made_once_when_they_are_read():
    calls = []

    def make() -> Ints:
        calls.append(1)
        return Ints((9, 12))

    numbers = Ints.deferred(make)
    assert Ints.of(numbers) is numbers
    assert copy.deepcopy(numbers) is numbers
    assert not calls
    assert pickle.loads(pickle.dumps(numbers)) == numbers == (9, 12)
    assert np.asarray(numbers).tolist() == list(numbers)
    assert len(numbers) == 2
    assert calls == [1]
    with pytest.raises(AttributeError, match="shape"):
        _ = numbers.shape
