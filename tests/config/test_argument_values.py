"""Values of settings that are keyword arguments of estimators and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import pytest

from areal_gym.config import TrainerConfig, load_config
from areal_gym.config.argument_values import fitting_values
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.trainer.algorithms.advantages import check_settings
from areal_gym.trainer.algorithms.token_loss import loss_arguments

if TYPE_CHECKING:
    from decimal import Decimal

NAN = float("nan")


def advantage(id, **settings):
    return check_settings(registry().load("advantages", id), settings)


def loss(id, **settings):
    return loss_arguments(registry().load("losses", id), TrainerConfig(loss_kwargs=settings))


@pytest.mark.parametrize(
    ("make", "id", "settings", "message", "hint"),
    [
        (advantage, "gae", {"unit": "trn"}, "unit = 'trn': it is one of 'token' or 'turn'", "turn"),
        (advantage, "per_turn", {"by": "trn"}, "by = 'trn': it is one of 'trajectory'", "turn"),
        (advantage, "per_turn", {"baseline": ["x"]}, "baseline = ['x']: it is one of", "grpo"),
        (advantage, "gae", {"is_normalised": "yess"}, "'yess': it takes true or false", "false"),
        (advantage, "gpg", {"scale": "abc"}, "scale = 'abc': it takes a number", "default is 1.0"),
        (advantage, "gpg", {"scale": None}, "scale = None: it takes a number", "default is 1.0"),
        (advantage, "gpg", {"scale": NAN}, "scale = nan: it takes a number, and NaN", "1.0"),
        (advantage, "igpo", {"answer": 5}, "answer = 5: it takes a text", "{answer}"),
        (advantage, "gdpo", {"weights": {"x": "abc"}}, "for 'x', it takes a number", "null"),
        (advantage, "gdpo", {"weights": {"x": NAN}}, "NaN is none", "null"),
        (advantage, "gdpo", {"weights": {3: 1.0}}, "as a name, 3 does not fit", "null"),
        (advantage, "gdpo", {"weights": ["x"]}, "it takes names and values", "null"),
        (advantage, "gdpo", {"weights": {}}, "weights = {} names nothing", "weights={NAME: VALUE}"),
        (loss, "gspo", {"level": "tokn"}, "level = 'tokn': it is one of", "did you mean 'token'?"),
        (loss, "ppo_clip", {"dual_clip": "abc"}, "'abc': it takes a number or null", "is null"),
        (loss, "ppo_clip", {"clip_low": [1]}, "clip_low = [1]: it takes a number or null", "0.2"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(make, id, settings, message, hint):
    key = "trainer.advantage_kwargs" if make is advantage else "trainer.loss_kwargs"
    with pytest.raises(ConfigError) as caught:
        make(id, **settings)
    assert str(caught.value).startswith(f"{key}.{next(iter(settings))} = ")
    assert message in str(caught.value)
    assert hint in caught.value.hints[0]


def test_numbers_that_are_written_as_texts_are_numbers():
    settings = advantage("gae", discount="0.5", lam=1, is_normalised="yes", unit="turn")
    assert settings == {"discount": 0.5, "lam": 1.0, "is_normalised": True, "unit": "turn"}
    assert advantage("gdpo", weights={"format": "2e-1"}) == {"weights": {"format": 0.2}}
    assert advantage("gdpo", weights=None) == {"weights": None}
    arguments = loss("ppo_clip", dual_clip="3", clip_high=None)
    assert (arguments["dual_clip"], arguments["clip_high"]) == (3.0, None)
    assert loss("dppo_tv", truncation=float("inf"))["truncation"] == float("inf")


def test_functions_of_plugins_take_what_their_annotations_do_not_rule_out():
    def typed(x, *, kind: Literal["a", "b"] = "a", numbers: Iterable[float] = (), other=None):
        return x

    def local(x, *, amount: Decimal | None = None):
        return x

    class Called:
        def __call__(self, x, *, kind: Literal["a", "b"] = "a", call: Callable | None = None):
            return x

    values: Mapping[str, object] = {"numbers": [1, "2"], "other": {}}
    assert fitting_values(typed, values, key="k") == values
    assert fitting_values(local, {"amount": "abc"}, key="k") == {"amount": "abc"}
    assert fitting_values(len, {"size": "abc"}, key="k") == {"size": "abc"}
    for function in (typed, Called()):
        assert fitting_values(function, {"kind": "b"}, key="k") == {"kind": "b"}
        with pytest.raises(ConfigError, match=r"k\.kind = 'c'"):
            fitting_values(function, {"kind": "c"}, key="k")


def test_a_list_as_baseline_is_left_to_the_estimator():
    overrides = ["trainer.advantage=per_turn", "trainer.advantage_kwargs.baseline=[x]"]
    assert load_config(overrides=overrides).trainer.advantage_kwargs == {"baseline": ["x"]}
