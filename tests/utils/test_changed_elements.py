"""Changes of arrays come back bit for bit, and damaged ones are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import DataError
from areal_gym.utils.changed_elements import apply_changes, as_bits, encode_changes


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(0, 200),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_changed_elements_come_back_bit_for_bit(itemsize, length, share, seed):
    random = np.random.default_rng(seed)
    old = as_bits(random.integers(0, 256, length * itemsize, dtype=np.uint8), itemsize)
    new = old.copy()
    changed = random.random(length) < share
    new[changed] = as_bits(random.integers(0, 256, length * itemsize, dtype=np.uint8), itemsize)[
        changed
    ]
    num_changed, encoded = encode_changes(old, new)
    assert num_changed == (old != new).sum()
    patched = old.copy()
    apply_changes(patched, num_changed, encoded)
    assert np.array_equal(patched, new)


def test_small_changes_take_few_bytes():
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    positions = random.choice(len(old), 20_000, replace=False)
    new[positions] += random.choice(np.array([1, 2**16 - 1], dtype=np.uint16), len(positions))
    num_changed, encoded = encode_changes(old, new)
    assert num_changed == 20_000
    assert len(encoded) < 2 * num_changed


@pytest.mark.parametrize(
    ("num_changed", "spoil"),
    [
        (3, lambda encoded: encoded[:-4]),
        (3, lambda encoded: b"none" + encoded),
        (2, lambda encoded: encoded),
        (4, lambda encoded: encoded),
        (-1, lambda encoded: encoded),
        (10**9, lambda encoded: encoded),
    ],
    ids=["cut", "other bytes", "too many", "too few", "negative", "more than elements"],
)
def test_damaged_changes_are_refused(num_changed, spoil):
    old = np.zeros(100, dtype=np.uint16)
    new = old.copy()
    new[[3, 50, 99]] = 7
    _, encoded = encode_changes(old, new)
    with pytest.raises(DataError):
        apply_changes(old, num_changed, spoil(encoded))
    assert not old.any()


def test_changes_of_a_longer_array_are_refused():
    old, new = np.zeros(100, dtype=np.uint16), np.ones(100, dtype=np.uint16)
    num_changed, encoded = encode_changes(old, new)
    with pytest.raises(DataError, match="of an array of"):
        apply_changes(np.zeros(50, dtype=np.uint16), num_changed, encoded)
    new[:98] = 0
    num_changed, encoded = encode_changes(old, new)
    with pytest.raises(DataError, match="99 of an array of 50"):
        apply_changes(np.zeros(50, dtype=np.uint16), num_changed, encoded)
