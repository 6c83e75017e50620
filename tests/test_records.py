import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from areal_gym.engines.base import SamplingParams
from areal_gym.types import FinishReason, StopReason, Task, TokenSpan, Trajectory, Turn
from areal_gym.utils.records import quickly_made


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: int
    y: int = 3
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


def test_a_quick_record_is_made_as_a_slow_one_would_be():
    assert Point(x=1) == Point(x=1, y=3, names=[])
    assert Point(x=1).names is not Point(x=1).names
    assert replace(Point(x=1), y=4) == Point(x=1, y=4)
    with pytest.raises(ValueError, match="negative"):
        Point(x=-1)
    with pytest.raises(TypeError, match="required keyword-only argument: 'x'"):
        Point()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Point(x=1, z=2)
    with pytest.raises(TypeError, match="positional"):
        Point(1)


def test_its_signature_is_that_of_the_dataclass():
    signature = inspect.signature(Point)
    assert list(signature.parameters) == ["x", "y", "names"]
    assert signature.parameters["y"].default == 3
    assert signature.parameters["x"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize(
    "record",
    [
        Point(x=1),
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
