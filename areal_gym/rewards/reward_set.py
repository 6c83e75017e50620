"""Weighted sums of reward functions: `load_rewards` makes a `RewardSet` from references."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from areal_gym.errors import ConfigError, EnvError, UnknownIdError, choices
from areal_gym.plugins import RewardSpec, registry
from areal_gym.rewards.base import RewardInput, Score
from areal_gym.rewards.reward_function import Result, RewardFunction
from areal_gym.utils.code_references import is_code_reference, load_reference
from areal_gym.utils.markup import short

Reference = str | Callable[..., Any]
"""A function, a class, an id of `areal-gym list rewards`, `FILE.py:NAME` or `module:NAME`."""
References = Reference | Mapping[Any, Any] | Sequence[Any]

_SETTINGS = ("reward", "name", "weight", "kwargs", "timeout_s")
_EXAMPLE = '{"reward": "rewards.py:polite", "weight": 0.5}'


def load_rewards(references: References | RewardSet) -> RewardSet:
    """Load reward functions, with their weights.

    `references` is one reference or a list of them. A reference is a function or a class; a text
    (`math`, `rewards.py:polite`, `my_package.rewards:polite`, optionally with `=WEIGHT`); or
    settings: `{"reward": ...}`, optionally with `name`, `weight`, `kwargs` and `timeout_s`. A
    mapping from references to weights is accepted, too: `{"math": 1, polite: 0.5}`.

    Raises:
        ConfigError: a reference or a setting is wrong, or a reward cannot be made.
        UnknownIdError: no plugin offers the id.
    """
    if isinstance(references, RewardSet):
        return references
    rewards: list[RewardFunction] = []
    settings: list[Mapping[str, Any]] = []
    taken: set[str] = set()
    for reward_settings in _settings_of(references):
        reward = _load(reward_settings, taken)
        taken.add(reward.name)
        rewards.append(reward)
        settings.append(reward_settings)
    if not rewards:
        raise ConfigError("no reward is given", hints=["name one: areal-gym list rewards"])
    return RewardSet(rewards, settings)


class RewardSet:
    """Scores episodes by several reward functions; `load_rewards` makes it."""

    def __init__(
        self, rewards: Sequence[RewardFunction], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        self.rewards = tuple(rewards)
        self.settings = tuple(settings)
        """The settings that each reward was loaded from."""

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The columns that the data must have."""
        columns = (column for reward in self.rewards for column in reward.required_columns)
        return tuple(dict.fromkeys(columns))

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ConfigError if a reward needs a column that is not one of `columns`."""
        for reward in self.rewards:
            reward.check_columns(columns)

    async def score(self, sample: RewardInput) -> Score:
        """Return the weighted sum of the rewards, the value of each, and their metrics.

        A reward that returns None does not apply to the row and is left out.

        Raises:
            RewardError: a function returned something that is not a reward.
            EnvError: a function raised an exception or took too long, or no reward applies to the
                row.
        """
        if len(self.rewards) == 1:
            (reward,) = self.rewards
            value, own_parts, own_metrics = await reward.score(sample)
            if value is not None and not own_parts and not own_metrics:  # the usual case
                return Score(reward=0.0 + reward.weight * value, parts={reward.name: value})
            return self._joined({reward: (value, own_parts, own_metrics)}, sample)
        results = {r: await r.score(sample) for r in self.rewards if r.is_quick}
        slow = [reward for reward in self.rewards if reward not in results]
        if len(slow) == 1:
            results[slow[0]] = await slow[0].score(sample)
        elif slow:
            scores = [reward.score(sample) for reward in slow]
            for reward, result in zip(
                slow, await asyncio.gather(*scores, return_exceptions=True), strict=True
            ):
                if isinstance(result, BaseException):
                    raise result
                results[reward] = result
        return self._joined(results, sample)

    def _joined(self, results: Mapping[RewardFunction, Result], sample: RewardInput) -> Score:
        total, parts, metrics, is_scored = 0.0, {}, {}, False
        for reward in self.rewards:
            value, own_parts, own_metrics = results[reward]
            if value is None:
                continue
            is_scored = True
            total += reward.weight * value
            parts[reward.name] = value
            for name, part in own_parts.items():
                parts[name if len(self.rewards) == 1 else f"{reward.name}/{name}"] = part
            for name, number in own_metrics.items():
                metrics[f"{reward.name}_{name}"] = number
        if not is_scored:
            raise self._none_applies(sample)
        return Score(reward=total, parts=parts, metrics=metrics)

    async def try_own(self, sample: RewardInput) -> None:
        """Call the user's own functions for a sample, to find their errors early; see `score`."""
        own = [reward for reward in self.rewards if not reward.never_blocks]
        values = [(await reward.score(sample))[0] for reward in own]
        if own and len(own) == len(self) and all(value is None for value in values):
            raise self._none_applies(sample)

    def _none_applies(self, sample: RewardInput) -> EnvError:
        names = ", ".join(reward.name for reward in self.rewards)
        return EnvError(
            f"no reward applies to {sample.where or 'the row'}: {names} returned None; return "
            "a number, or add a reward that applies to all rows"
        )

    def __iter__(self) -> Iterator[RewardFunction]:
        return iter(self.rewards)

    def __len__(self) -> int:
        return len(self.rewards)

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes load the functions again: those from files cannot be pickled.
        return load_rewards, (list(self.settings),)

    def __repr__(self) -> str:
        return f"<RewardSet: {', '.join(f'{r.name} x {r.weight:g}' for r in self.rewards)}>"


def _settings_of(references: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each reward that is referenced."""
    if isinstance(references, str):
        reference, _, weight = references.rpartition("=")
        if not reference:
            yield {"reward": weight}
            return
        try:
            yield {"reward": reference, "weight": float(weight)}
        except ValueError:
            if is_code_reference(references):  # a file with = in its path
                yield {"reward": references}
                return
            raise ConfigError(
                f"{references!r}: {weight!r} is not a weight", hints=["write it: math=0.5"]
            ) from None
    elif isinstance(references, Mapping):
        if "reward" in references:
            yield references
            return
        for reference, weight in references.items():
            is_reference = callable(reference) or isinstance(reference, str)
            if not is_reference or not isinstance(weight, numbers.Real):
                hints = [f"write {_EXAMPLE}, or weights by reference: {{'math': 1.0}}"]
                raise ConfigError(
                    f"{short(references)} is not the settings of a reward", hints=hints
                )
            yield {"reward": reference, "weight": weight}
    elif isinstance(references, Sequence):
        for reference in references:
            yield from _settings_of(reference)
    elif callable(references):
        yield {"reward": references}
    else:
        raise ConfigError(
            f"{short(repr(references))} is not a reward",
            hints=["give a function, an id (areal-gym list rewards) or FILE.py:NAME"],
        )


def _load(settings: Mapping[str, Any], taken: Collection[str]) -> RewardFunction:
    """Make a reward function from its settings; its name is none of those in `taken`."""
    for key in settings:
        if key not in _SETTINGS:
            raise ConfigError(f"unknown setting {key!r} of a reward", hints=choices(key, _SETTINGS))
    reference = settings["reward"]
    given_name, kwargs = settings.get("name"), settings.get("kwargs")
    weight = _number(settings, "weight", 1.0)
    timeout_s = _number(settings, "timeout_s", 0.0) if "timeout_s" in settings else None
    if timeout_s is not None and timeout_s <= 0:
        raise ConfigError(f"timeout_s = {timeout_s:g}: a call needs some time")
    if not isinstance(kwargs, Mapping | None):
        raise ConfigError(f"kwargs = {kwargs!r} of a reward: names and values are needed")
    if given_name is not None and not (isinstance(given_name, str) and given_name.strip()):
        raise ConfigError(f"name = {given_name!r} of a reward: a text is needed")
    if given_name in taken:
        raise ConfigError(f"two rewards are called {given_name!r}", hints=["give them other names"])
    name, function, arguments = _resolve(reference)
    arguments |= kwargs or {}
    if inspect.isclass(function):
        function, arguments = _instance(function, name, arguments), {}
    return RewardFunction(
        function,
        name=given_name or _unused(name, taken),
        weight=weight,
        kwargs=arguments,
        timeout_s=timeout_s,
    )


def _resolve(reference: Any) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of a reward, its callable, and the arguments that its plugin sets."""
    if not isinstance(reference, str):
        name = getattr(reference, "__name__", None)
        if name is None and hasattr(reference, "func"):  # functools.partial
            name = getattr(reference.func, "__name__", None)
        return str(name or type(reference).__name__), reference, {}
    entries = {entry.id: entry for entry in registry().entries("rewards")}
    if reference not in entries and is_code_reference(reference):
        name = reference.rpartition(":")[2].rpartition(".")[2]
        return name, load_reference(reference, "reward"), {}
    try:
        entry = registry().get("rewards", reference)
    except UnknownIdError as error:
        example = f"{reference}:NAME" if reference.endswith(".py") else "FILE.py:NAME"
        raise UnknownIdError(
            error.message, hints=[*error.hints, f"a function of yours: {example}"]
        ) from None
    assert isinstance(entry.spec, RewardSpec)
    return reference, entry.load(), dict(entry.spec.kwargs)


def _instance(cls: type, name: str, arguments: Mapping[str, Any]) -> Any:
    """Make an instance of a class whose instances are reward functions."""
    try:
        inspect.signature(cls).bind(**arguments)
    except (TypeError, ValueError) as error:
        known = ", ".join(inspect.signature(cls).parameters) or "no arguments"
        raise ConfigError(
            f"reward {name!r}: {error}",
            hints=[
                f"it takes: {known}",
                f'set them so: {{"reward": "{name}", "kwargs": {{...}}}} (docs/rewards.md)',
            ],
        ) from None
    return cls(**arguments)


def _number(settings: Mapping[str, Any], key: str, default: float) -> float:
    value = settings.get(key, default)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ConfigError(f"{key} = {value!r} of a reward: a finite number is needed")
    return float(value)


def _unused(name: str, taken: Collection[str]) -> str:
    number, unused = 1, name
    while unused in taken:
        number += 1
        unused = f"{name}_{number}"
    return unused
