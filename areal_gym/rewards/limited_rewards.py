"""Built-in rewards whose cost depends on the text; they run in worker processes with time limits.

A regular expression may take exponential time on some texts, and a policy may find such a text. If
the time limit is reached, the text counts as not matching.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from areal_gym.errors import ConfigError, UsageError
from areal_gym.utils.files import path_hints

_FLAGS = {"ignore_case": re.IGNORECASE, "multiline": re.MULTILINE, "dot_all": re.DOTALL}
_MAX_CHARS = 100_000
_SHORT = 1_000
_REPEATS = re.compile(r"[*+?{]|\\\d")


class Regex:
    """1 if a pattern is found in the completion, else 0.

    Args:
        pattern: a regular expression of Python.
        full: whether it must match the whole completion, without surrounding white space.
        flags: any of "ignore_case", "multiline" and "dot_all".
    """

    never_blocks: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 300.0

    def __init__(self, *, pattern: str, full: bool = False, flags: list[str] | None = None) -> None:
        self._flags = re.NOFLAG
        for name in flags or ():
            if name not in _FLAGS:
                raise UsageError(f"unknown flag {name!r}", hints=[f"flags: {', '.join(_FLAGS)}"])
            self._flags |= _FLAGS[name]
        try:
            self._pattern = re.compile(pattern, self._flags)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"pattern = {pattern!r} is no regular expression: {error}") from None
        self._full = full
        # A pattern with at most one repetition takes at most quadratic time.
        self._is_cheap = len(_REPEATS.findall(pattern)) < 2

    async def __call__(self, completion: str) -> float:
        """Return 1.0 or 0.0; a text of more than 100,000 characters does not match."""
        text = completion.strip() if self._full else completion
        if self._is_cheap and len(text) <= _SHORT:
            return has_match(self._pattern.pattern, int(self._flags), self._full, text)
        if len(text) > _MAX_CHARS:
            return 0.0
        arguments = (self._pattern.pattern, int(self._flags), self._full, text)
        return float(await _worker("has_match")(*arguments))


def has_match(pattern: str, flags: int, full: bool, text: str) -> float:
    """Return 1.0 if the pattern matches; runs in a worker process."""
    compiled = re.compile(pattern, flags)
    return float((compiled.fullmatch if full else compiled.search)(text) is not None)


class JsonSchema:
    """1 if the completion is JSON that fits a schema, else 0; the JSON may be in a fenced block.

    Args:
        schema: a JSON schema, or the path of a file with one.
        partial: the reward of valid JSON that does not fit the schema.
    """

    never_blocks: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 300.0

    def __init__(self, *, schema: Mapping[str, Any] | str, partial: float = 0.0) -> None:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        content: Any = schema
        if isinstance(schema, str):
            path = Path(schema)
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                hints = path_hints(path)
                raise ConfigError(f"cannot read the schema {path}: {error}", hints=hints) from None
        if not isinstance(content, Mapping):
            raise ConfigError(f"schema = {schema!r}: an object is needed")
        try:
            validator_for(content).check_schema(content)
        except SchemaError as error:
            raise ConfigError(f"the schema is no JSON schema: {error.message}") from None
        self._schema = json.dumps(content)
        self._partial = partial

    async def __call__(self, completion: str) -> float:
        """Return 1.0, `partial` for other JSON, or 0.0; longer than 100,000 characters is 0.0."""
        if len(completion) > _MAX_CHARS:
            return 0.0
        verdict = await _worker("fits_schema")(self._schema, completion)
        return {"fits": 1.0, "json": self._partial}.get(str(verdict), 0.0)


_FENCED = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*)\n```\s*\Z", re.DOTALL)


def fits_schema(schema: str, text: str) -> str:
    """Return "fits", "json" or "broken"; runs in a worker process."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    fenced = _FENCED.match(text)
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "broken"
    content = json.loads(schema)
    try:
        # With the empty registry, remote references are not fetched.
        validator = validator_for(content)(content, registry=Registry())
        return "fits" if validator.is_valid(value) else "json"
    except RecursionError:
        return "json"


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@cache
def _worker(function: str) -> Any:
    from areal_gym.sandbox import Grader, SandboxLimits

    return Grader(
        f"{__name__}:{function}",
        limits=SandboxLimits(wall_s=60.0, cpu_s=1.0, memory_mb=512),
        on_limit=0,
        preload=("jsonschema.validators", "referencing") if function == "fits_schema" else (),
    )
