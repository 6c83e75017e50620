"""Runs the statements of hidden tests; runs in a sandbox cell of its own, and is never imported.

No code of the policy is here. A call to one of its functions is a request, which leaves the cell
as plain values and comes back as plain values: what a test compares is of built-in types, and what
it compares with was never seen by the policy's code.
`verification.py` sends this source after that of `plain_values.py`, into one namespace.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import queue
import resource
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "Pieces" not in globals():  # else this is sent behind `plain_values`
    from areal_gym.envs.code.plain_values import Pieces, decode, encode, parse


class UnverifiableError(BaseException):
    """Only the policy's own code could decide the test: it never passes.

    Outside of `Exception`, so that tests which expect an exception do not take it for one.
    """


class Test:
    """One test, run on a thread that waits while the policy's side computes."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.is_unverifiable = False
        self._mutates = bool(order["mutates"])
        self._requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(order,), daemon=True)

    def go_on(self, answer: str | None = None) -> dict[str, Any]:
        """Start, or take an answer; return the next request, or how the test ended."""
        if answer is None:
            self._thread.start()
        else:
            self._answers.put(answer)
        return self._requests.get()

    def _run(self, order: dict[str, Any]) -> None:
        try:
            exec(compile(order["test"], "<test>", "exec"), self._namespace(order))
            end = "passed"
        except UnverifiableError:
            end = "unverifiable"
        except BaseException as error:
            end = type(error).__name__
        self._requests.put({"end": "unverifiable" if self.is_unverifiable else end})

    def _namespace(self, order: dict[str, Any]) -> dict[str, Any]:
        empty = {"__name__": "__test__", "__builtins__": builtins}
        space: dict[str, Any] = dict(empty)
        try:
            exec(compile(order["definitions"], "<definitions>", "exec"), space)
        except Exception:
            space = empty
        for name, (module, attribute) in order["imports"].items():
            with contextlib.suppress(ImportError, AttributeError):
                imported = importlib.import_module(module)
                space.setdefault(name, getattr(imported, attribute) if attribute else imported)
        for name in order["remote"]:
            space.setdefault(name, Remote(self, name, is_tested=False))
        if order["entry"]:
            space[order["entry"]] = Remote(self, order["entry"], is_tested=True)
        return space

    def ask(
        self, do: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the answer of the policy's side; raise its exception."""
        request = {
            "do": do,
            "target": target,
            "args": [encode(arg, self._number_of) for arg in args],
            "kwargs": {key: encode(arg, self._number_of) for key, arg in (kwargs or {}).items()},
        }
        self._requests.put({"ask": request})
        reply = parse(self._answers.get())
        if "unverifiable" in reply:
            self.give_up()
        if "error" in reply:
            raise _exception(reply["error"], [decode(arg, self._remote) for arg in reply["args"]])
        value = decode(reply["value"], self._remote)
        if do == "call" and (value is None or self._mutates):
            for arg, node in zip(args, reply.get("args", []), strict=False):
                if node is not None:
                    _update(arg, decode(node, self._remote))
        return value

    def give_up(self) -> None:
        """Raise `UnverifiableError`, and remember it: a test may catch everything."""
        self.is_unverifiable = True
        raise UnverifiableError

    def _number_of(self, value: Any) -> int:
        number: Any = None
        if type(value) is Remote:
            number = object.__getattribute__(value, "_target")
        if type(number) is not int:
            self.give_up()
        return int(number)

    def _remote(self, number: int) -> Remote:
        return Remote(self, number, is_tested=True)


class Remote:
    """A function or an object of the policy: calls and attributes are requests.

    It is equal to nothing and compares with nothing: its own methods would decide that.
    """

    __slots__ = ("_is_tested", "_target", "_test")

    def __init__(self, test: Test, target: Any, *, is_tested: bool) -> None:
        for name, value in (("_test", test), ("_target", target), ("_is_tested", is_tested)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the policy's function; raise its exception."""
        value = self._test.ask("call", self._target, args, kwargs)
        if isinstance(value, bool) and not self._is_tested:
            self._test.give_up()  # a judge of the policy's own
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._test.ask("get", self._target, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._test.ask("set", self._target, (name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._test.ask("item", self._target, (key,))

    def __len__(self) -> int:
        return int(self._test.ask("length", self._target))

    def __bool__(self) -> bool:
        return bool(self._test.ask("truth", self._target))

    def __str__(self) -> str:
        return str(self._test.ask("text", self._target))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._test.ask("items", self._target))

    def _refuse(self, *others: Any) -> Any:
        self._test.give_up()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse
    __hash__ = __repr__ = _refuse


def _exception(names: Any, args: list[Any]) -> Exception:
    """Return an exception of the nearest built-in type; never one that ends the test as passed."""
    for name in names:
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(*args)
            except TypeError:
                return kind()
    return RuntimeError("the policy's code ended")


def _update(old: Any, new: Any) -> None:
    """Give an argument what it holds after the call, its parts in place where they can be."""
    if type(old) is not type(new):
        return
    if isinstance(old, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            if type(before) is type(after) and isinstance(before, list | dict | set):
                _update(before, after)
            else:
                old[place] = after
    elif isinstance(old, list | bytearray):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)


class Tester(Pieces):
    """Runs one test after the other."""

    def begin(self, order: str) -> str:
        """Return the length of the first message and the first piece of it."""
        self._test = Test(json.loads(order))
        return self.first(self._test.go_on())

    def answer(self, text: str) -> str:
        """Return the length of the next message and the first piece of it."""
        return self.first(self._test.go_on(text))


def make(cpu_s: int) -> Tester:
    """Return the tester of this cell, whose processor time is bounded from now on."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    return Tester()
