"""Messages between a trainer's processes: large arrays are not copied into the pickle."""

import copy
import pickle
from multiprocessing import Pipe
from threading import Thread

import numpy as np
import pytest
import torch

from areal_gym.trainer.batch.rank_batches import OtherRanksTokens
from areal_gym.trainer.parallel.messages import Message
from areal_gym.utils.packed_numbers import Floats, Ints


def passed(value):
    ours, theirs = Pipe()
    message = Message.of(value)
    sender = Thread(target=message.send, args=(ours,))
    sender.start()
    received = Message.receive(theirs)
    sender.join()
    ours.close()
    with pytest.raises(EOFError):
        Message.receive(theirs)
    return received.value(), message


def test_values_arrive_as_they_are():
    ids, logprobs = Ints(range(5000)), Floats([-0.5] * 5000)
    writable, fixed = np.arange(5000), np.arange(5000.0)
    fixed.flags.writeable = False
    value = {
        "spans": [(ids, logprobs), (Ints([1, 2]), Ints())],
        "arrays": [writable, fixed, np.arange(3)],
        "tensor": torch.arange(5000),
        "none": None,
    }
    got, message = passed(("step", value))
    assert got[0] == "step"
    assert got[1]["spans"] == value["spans"]
    assert type(got[1]["spans"][0][0]) is Ints
    for ours, theirs in zip(value["arrays"], got[1]["arrays"], strict=True):
        assert (ours == theirs).all()
        assert ours.flags.writeable == theirs.flags.writeable
    assert torch.equal(got[1]["tensor"], value["tensor"])
    assert len(message.arrays) == 4
    assert len(message.head) < 50_000  # torch pickles a tensor by value


def test_placeholders_of_other_ranks_tokens_arrive():
    (got,), message = passed([OtherRanksTokens(10_000)])
    assert len(got) == 10_000
    assert type(got) is OtherRanksTokens
    assert not message.arrays


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_packed_numbers_pickle_with_every_protocol(protocol):
    numbers = Floats([1.5, -2.0])
    assert pickle.loads(pickle.dumps(numbers, protocol)) == numbers
    assert copy.copy(numbers) == numbers
