import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from areal_gym.engines.base import SamplingParams
from areal_gym.types import FinishReason, StopReason, Task, TokenSpan, Trajectory, Turn


@pytest.mark.parametrize(
    "record",
    [
        SamplingParams(seed=3),
        TokenSpan(origin="policy", token_ids=(1,), logprobs=(-0.5,), policy_version=2),
        Turn(finish_reason=FinishReason.STOP, reward_parts={"a": 1.0}),
        Trajectory(
            id="t",
            group_id="g",
            task=Task(id="x", data={"n": 1}),
            env_id="e",
            stop_reason=StopReason.MAX_TURNS,
        ),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_are_frozen_and_can_be_copied(record):
    name = next(iter(record.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(record, name, None)
    assert copy.deepcopy(record) == pickle.loads(pickle.dumps(record)) == replace(record) == record
