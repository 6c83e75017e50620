"""A sandbox for untrusted Jinja templates that limits the time and the size of a rendering.

Chat templates come with checkpoints, so they are data. jinja2's sandbox keeps them from attributes
that lead to code, but not from looping for hours or from filling the memory. This environment adds
limits, as far as an interpreter can: every call and every loop check a time limit, and operations
that make a text longer than `MOST_CHARACTERS` are refused.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

MOST_CHARACTERS = 2**26
"""The maximum length of a text that a template makes, a hundred times a model's longest context."""
MOST_SECONDS = 60.0
"""The time limit of a rendering, which usually takes less than a millisecond."""
_MOST_NUMBER = 10**6
"""The maximum of a count or a width that a template passes to a function."""
_MOST_BITS = 2**12
"""The maximum number of bits of a number that a template computes."""
_LARGE_WIDTH = re.compile(r"\d{6,}|\*")
# Templates cannot use filters with these names, which are not valid in Jinja, or redefine them.
_EACH, _CONCAT, _ADD, _KEEP = "+each", "+concat", "+add", "+keep"


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that Hugging Face's templates are written for, with limits."""

    concat = staticmethod(lambda parts: "".join(_small_parts("", parts)))
    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._running = threading.local()
        for name in ("center", "indent", "format", "batch", "slice", "wordwrap", "truncate"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters["join"] = _with_small_join(self.filters["join"])
        self.filters["replace"] = _with_small_replace(self.filters["replace"])
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.filters |= {_EACH: self._each, _CONCAT: _concat, _ADD: _add, _KEEP: _small}

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit the time of the rendering in this block, from now on."""
        self._running.deadline_s = time.monotonic() + MOST_SECONDS
        try:
            yield
        finally:
            self._running.deadline_s = None

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a call that the sandbox allows, after checking the size of its arguments."""
        self._check_time()
        _require_small(args, kwargs)
        name = getattr(__obj, "__name__", None)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if name == "join" and args:
                args = (_small_parts(owner, args[0]), *args[1:])
            elif name == "replace" and len(args) > 1:
                _require_small_replacement(owner, *args[:2])
        return _small(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Return the replacement of `str.format`; refuse formats with very large widths."""
        if isinstance(owner := getattr(value, "__self__", None), str):
            _require_small_format(owner)
        return super().wrap_str_format(value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `*`, `**` or `%`, unless the result would be too large."""
        if operator == "%":
            if isinstance(left, str):
                _require_small_format(left)
                _require_small(right if isinstance(right, tuple) else (right,), {})
        else:
            _require_small_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        bounded: jinja2.nodes.Template = _Bounding().visit(tree)
        bounded.set_environment(self)
        return bounded

    def _each(self, items: Any) -> Any:
        """Return the items of a loop; long loops check the time limit every 64 rounds."""
        self._check_time()
        if isinstance(items, list | tuple | str | dict) and len(items) < 64:
            return items  # the loops inside this one check the time, too
        return self._watched(items)

    def _watched(self, items: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(items):
            if not number % 64:
                self._check_time()
            yield item

    def _check_time(self) -> None:
        deadline_s = getattr(self._running, "deadline_s", None)
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise SecurityError(f"the template is not done after {MOST_SECONDS:g} s: it is stopped")


class _Generation(jinja2.ext.Extension):
    """Ignores `{% generation %}...{% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


class _Bounding(jinja2.visitor.NodeTransformer):
    """Inserts checks into a template: in loops, and where a text could double in length.

    Adding a literal text is not checked, because the text grows only by its length; assignments to
    variables check the length instead.
    """

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(_EACH, cast(jinja2.nodes.Expr, node.iter))
        return node

    def visit_Assign(self, node: jinja2.nodes.Assign) -> jinja2.nodes.Assign:
        self.generic_visit(node)
        node.node = _filtered(_KEEP, cast(jinja2.nodes.Expr, node.node))
        return node

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if isinstance(node.left, jinja2.nodes.Const) or isinstance(node.right, jinja2.nodes.Const):
            return node
        pair = jinja2.nodes.List([node.left, node.right], lineno=node.lineno)
        return _filtered(_ADD, pair)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(_CONCAT, jinja2.nodes.List(node.nodes, lineno=node.lineno))


def _filtered(name: str, value: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    _require_small((), options)
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _add(pair: list[Any]) -> Any:
    left, right = pair
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _require_length(len(left) + len(right), type(left))
    return left + right


def _concat(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _require_length(sum(map(len, texts)))
    return "".join(texts)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _require_small(args, kwargs)
        for value in args[:2]:
            if isinstance(value, str) and function.__name__ == "do_format":
                _require_small_format(value)
        return _small(function(*args, **kwargs))

    return bounded


def _with_small_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        if attribute is None:
            value = _small_parts(str(d), value)
        return _small(function(context, value, d, attribute))

    return bounded


def _with_small_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
        _require_small_replacement(str(s), old, new)
        return function(context, s, old, new, count)

    return bounded


def _small_parts(separator: str, parts: Iterable[Any]) -> list[Any]:
    taken: list[Any] = []
    length = 0
    for part in parts:
        length += len(separator) + (len(part) if isinstance(part, str) else len(str(part)))
        _require_length(length)
        taken.append(part)
    return taken


def _require_small_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        _require_length(len(text) + times * len(new))


def _require_small_format(text: str) -> None:
    if _LARGE_WIDTH.search(text) and ("%" in text or "{" in text):
        raise SecurityError("a template formats with a very large width")


def _require_small_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if abs(right) > 64 or (isinstance(left, int) and left.bit_length() * right > _MOST_BITS):
            raise SecurityError("a template computes a very large number")
        return
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple | bytes) and isinstance(number, int):
            _require_length(len(sequence) * max(number, 0), type(sequence))
    is_whole = isinstance(left, int) and isinstance(right, int)
    if is_whole and left.bit_length() + right.bit_length() > _MOST_BITS:
        raise SecurityError("a template computes a very large number")


def _require_small(args: Iterable[Any], kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        _small(value)
        if isinstance(value, int) and abs(value) > _MOST_NUMBER:
            raise SecurityError(
                f"a template passes on the number {value}, more than {_MOST_NUMBER}"
            )


def _require_length(length: int, kind: type = str) -> None:
    if length > (most := MOST_CHARACTERS if issubclass(kind, str) else _MOST_NUMBER):
        raise SecurityError(f"a template makes a {kind.__name__} of more than {most} items")


def _small(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        _require_length(len(value), type(value))
    return value
