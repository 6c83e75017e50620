"""Call a reward function: fill the parameters of its signature, and check what it returns."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from areal_gym.errors import (
    ConfigError,
    EnvError,
    EpisodeError,
    GymError,
    RewardError,
    did_you_mean,
)
from areal_gym.rewards.base import BATCH_NAMES, SAMPLE_NAMES, RewardInput, Score
from areal_gym.rewards.guarded_calls import CallTimeoutError, ThreadedCalls, run_coroutine
from areal_gym.utils.markup import short

Result = tuple[float | None, Mapping[str, float], Mapping[str, float]]
"""The reward (None if it does not apply to the row), its parts by name, and metrics by name."""

_TIMEOUT_S = 60.0


class RewardFunction:
    """A reward function with its name, weight and fixed arguments.

    A function with the attribute `never_blocks`, such as the built-in rewards, is called directly
    on the event loop, because it returns at once or awaits.

    Args:
        function: any callable; its parameters are named after columns, or as in `SAMPLE_NAMES`.
        name: the name of its part in the episode's reward.
        weight: the factor of its value in the sum.
        kwargs: arguments that are the same in every call.
        timeout_s: the time limit of a call in seconds; by default the function's attribute
            `timeout_s`, otherwise 60.

    Raises:
        ConfigError: the function cannot be called by these names.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        weight: float = 1.0,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self.weight = weight
        if timeout_s is None:
            timeout_s = getattr(function, "timeout_s", _TIMEOUT_S)
        self.timeout_s: float = timeout_s
        self._fixed = dict(kwargs or {})
        parameters = _parameters(function, name)
        self._takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = [
            p for p in parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._require_known_arguments(parameters)
        names = [p.name for p in named if p.name not in self._fixed]
        self.is_batch = BATCH_NAMES[0] in names
        """Whether it scores lists of completions, as TRL's reward functions do."""
        reserved = BATCH_NAMES if self.is_batch else SAMPLE_NAMES
        self._from_sample = [name for name in names if name in reserved]
        columns = [p for p in named if p.name in names and p.name not in reserved]
        self._optional = [p.name for p in columns if p.default is not p.empty]
        self._required = [p.name for p in columns if p.default is p.empty]
        self._is_coroutine = _is_coroutine_function(function)
        self.never_blocks = bool(getattr(function, "never_blocks", False))
        """Whether it is called directly on the event loop, as built-in rewards are."""
        self._call_in_thread = ThreadedCalls(function, self.timeout_s)

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The columns that the data must have."""
        return (*self._required, *getattr(self.function, "required_columns", ()))

    @property
    def is_quick(self) -> bool:
        """Whether it returns at once, and is therefore called before the concurrent ones."""
        return not self._is_coroutine and (self.never_blocks or self._call_in_thread.was_fast)

    @property
    def file(self) -> Path | None:
        """The file with its code; None for code in C or in a notebook."""
        try:
            return Path(inspect.getfile(_code_of(self.function)))
        except (TypeError, OSError):
            return None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise ConfigError if the data do not have a column that the function needs."""
        for column in self.required_columns:
            if column not in columns:
                raise ConfigError(self._lacks(column), hints=self._column_hints(column, columns))

    async def score(self, sample: RewardInput) -> Result:
        """Call the function for one episode.

        Raises:
            RewardError: it returned something that is not a reward.
            EnvError: it raised an exception or took too long, or the row lacks a column.
        """
        arguments = self._arguments(sample)
        error: BaseException | None = None
        try:
            if self.never_blocks:
                value = self.function(**arguments)
                if inspect.isawaitable(value):
                    value = await self._awaited(value)
            elif self._is_coroutine:
                value = await run_coroutine(self.function(**arguments), self.timeout_s)
            else:
                value, error = await self._call_in_thread(arguments)
                if isinstance(error, Exception):
                    raise error
                if inspect.isawaitable(value):  # a plain function that returned a coroutine
                    value = await run_coroutine(value, self.timeout_s)
        except CallTimeoutError:
            raise EnvError(
                f"{self} did not return within {self.timeout_s:g} s{_on(sample)}; raise its "
                '"timeout_s" if it needs longer'
            ) from None
        except EpisodeError as failure:
            message = f"{self}{_on(sample)}: {failure.message}"
            raise type(failure)(message, hints=failure.hints) from failure
        except GymError:
            raise
        except Exception as raised:
            raise self._failure(raised, sample) from raised
        if error is not None:  # the function raised SystemExit, CancelledError, ...
            raise self._failure(error, sample) from error
        return self._read(value, sample)

    async def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await awaitable
        except TimeoutError:
            if limit.expired():
                raise CallTimeoutError from None
            raise

    # ---- arguments -----------------------------------------------------------------------------

    def _require_known_arguments(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        for name in self._fixed:
            known = [p.name for p in parameters.values() if p.kind is not p.VAR_POSITIONAL]
            if name not in known and not self._takes_rest:
                raise ConfigError(
                    f"{self} takes no argument {name!r}",
                    hints=[did_you_mean(name, known), f"it takes: {', '.join(known)}"],
                )
        for parameter in parameters.values():
            is_free = parameter.default is parameter.empty
            if parameter.kind is parameter.POSITIONAL_ONLY and is_free:
                raise ConfigError(
                    f"{self} takes {parameter.name!r} by position only, and rewards are called by "
                    "name",
                    hints=["remove the / from its signature"],
                )

    def _arguments(self, sample: RewardInput) -> dict[str, Any]:
        if self.is_batch:
            return self._batch_arguments(sample)
        row = sample.row
        arguments = {name: getattr(sample, name) for name in self._from_sample}
        if self._takes_rest:
            arguments |= {key: row[key] for key in row if key not in SAMPLE_NAMES}
        for name in self._required:
            try:
                arguments[name] = row[name]
            except KeyError:
                raise self._missing(name, sample) from None
        for name in self._optional:
            if name in row:
                arguments[name] = row[name]
        if self._fixed:
            arguments |= self._fixed
        return arguments

    def _batch_arguments(self, sample: RewardInput) -> dict[str, Any]:
        """Return lists of length 1 as TRL does: texts, or messages if the prompt is messages."""
        completion: Any = sample.completion
        if not isinstance(sample.prompt, str):
            completion = list(sample.messages[len(sample.prompt) :])
        batch = {"completions": [completion], "prompts": [sample.prompt]}
        names = BATCH_NAMES if self._takes_rest else self._from_sample
        arguments: dict[str, Any] = {name: batch[name] for name in names}
        for name in self._required:
            if name not in sample.row:
                raise self._missing(name, sample)
        columns = {*self._required, *self._optional}
        for key, value in sample.row.items():
            if key not in BATCH_NAMES and (self._takes_rest or key in columns):
                arguments[key] = [value]
        return arguments | self._fixed

    def _lacks(self, column: str) -> str:
        return f"{self} needs the column {column!r}, which the data do not have"

    def _column_hints(self, column: str, columns: Collection[str]) -> list[str | None]:
        reserved = BATCH_NAMES if self.is_batch else SAMPLE_NAMES
        return [
            did_you_mean(column, [*columns, *reserved]),
            f"the columns: {', '.join(columns) or 'none'}; besides: {', '.join(reserved)}",
        ]

    def _missing(self, column: str, sample: RewardInput) -> EnvError:
        hints = "; ".join(filter(None, self._column_hints(column, sample.row)))
        return EnvError(f"{self} needs the column {column!r}{_on(sample)}; {hints}")

    # ---- results -------------------------------------------------------------------------------

    def _failure(self, error: BaseException, sample: RewardInput) -> EnvError:
        place = ""
        frames = traceback.extract_tb(error.__traceback__)
        if frames and (file := self.file) is not None:
            own = [frame for frame in frames if Path(frame.filename) == file]
            place = f" ({file.name}, line {own[-1].lineno})" if own else ""
        advice = ""
        if "signal only works in main thread" in str(error):
            advice = (
                "; rewards run in threads, where there are no alarms: use the reward 'math', or "
                "switch the library's own time limit off (math_verify: parsing_timeout=None, "
                "timeout_seconds=None)"
            )
        return EnvError(
            f"{self} raised {type(error).__name__}: {short(error, 300)}{place}{_on(sample)}{advice}"
        )

    def _read(self, value: Any, sample: RewardInput) -> Result:
        """Convert the return value to numbers; raise RewardError if it is not a reward."""
        if self.is_batch:
            values = _as_list(value)
            if values is None:
                raise self._bad(value, "a list with one reward per completion is needed", sample)
            if len(values) != 1:
                raise self._bad(value, f"{len(values)} rewards for 1 completion", sample)
            value = values[0]
        if type(value) is float and math.isfinite(value):  # the usual case
            return value, {}, {}
        if value is None:
            return None, {}, {}
        if isinstance(value, Score):
            parts = {name: self._number(x, sample, name) for name, x in value.parts.items()}
            metrics = {name: self._number(x, sample, name) for name, x in value.metrics.items()}
            return self._number(value.reward, sample), parts, metrics
        if isinstance(value, Mapping):
            return self._read_parts(value, sample)
        return self._number(value, sample), {}, {}

    def _read_parts(self, value: Mapping[Any, Any], sample: RewardInput) -> Result:
        parts = {}
        for name, part in value.items():
            if not isinstance(name, str):
                raise self._bad(value, f"the name {name!r} of a part is no text", sample)
            if part is not None:
                parts[name] = self._number(part, sample, name)
        if not parts:
            return None, {}, {}
        reward = parts.pop("reward") if "reward" in parts else sum(parts.values())
        return reward, parts, {}

    def _number(self, value: Any, sample: RewardInput, part: str = "") -> float:
        number = value
        if not isinstance(number, numbers.Real) and getattr(number, "size", None) is not None:
            number = _item(number)  # an array of numpy or a tensor of torch
        if isinstance(number, numbers.Real):
            try:
                if math.isfinite(result := float(number)):
                    return result
            except OverflowError:
                pass
        of_part = f" as {part!r}" if part else ""
        problem = f"a finite number is needed{of_part}"
        if isinstance(value, str):
            problem += ": return float(...) of the text"
        raise self._bad(value, problem, sample)

    def _bad(self, value: Any, problem: str, sample: RewardInput) -> RewardError:
        shown = f"{short(repr(value), 100)}" if isinstance(value, str) else short(value, 100)
        return RewardError(f"{self} returned {shown}{_on(sample)}; {problem}")

    def __str__(self) -> str:
        return f"reward {self.name!r}"

    def __repr__(self) -> str:
        return f"<{self}: weight {self.weight:g}, needs {', '.join(self.required_columns) or '-'}>"


def _on(sample: RewardInput) -> str:
    return f", on {sample.where}" if sample.where else ""


def _parameters(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    if not callable(function):
        raise ConfigError(
            f"reward {name!r} is {short(repr(function))}, which cannot be called",
            hints=["give a function, a class or the id of a reward: areal-gym list rewards"],
        )
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward {name!r}: Python does not know the signature of {function!r}",
            hints=["wrap it: def reward(completion): return ..."],
        ) from None


def _code_of(function: Any) -> Any:
    """Return the function or class with the source code, also of partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    is_code = inspect.isfunction(function) or inspect.ismethod(function)
    return function if is_code or inspect.isclass(function) else type(function)


def _is_coroutine_function(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = type(function).__call__ if callable(function) else None
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _as_list(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple, an array or a tensor; None for anything else."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        return None
    try:
        return list(value)
    except TypeError:  # an array without dimensions
        return None


def _item(value: Any) -> Any:
    """Return the number in an array or a tensor with one element; None for other values."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
