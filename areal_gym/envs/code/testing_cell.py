"""Runs the statements of hidden tests; runs in a sandbox cell of its own, and is never imported.

No code of the policy is here. A call to one of its functions is a request, which leaves the cell
as plain values and comes back as plain values: what a test compares is of built-in types, and what
it compares with was never seen by the policy's code.
`verification.py` sends this source after that of `plain_values.py`, into one namespace.
"""

from __future__ import annotations

import builtins
import importlib
import json
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.envs.code.plain_values import decode, encode, parse

_CHUNK = 3_900
"""Characters per piece of a message: 8,000 characters of a value, escapes included, leave a
cell."""


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

    def start(self) -> dict[str, Any]:
        """Return the first request, or how the test ended."""
        self._thread.start()
        return self._requests.get()

    def go_on(self, answer: str) -> dict[str, Any]:
        """Return the next request, or how the test ended."""
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
        space: dict[str, Any] = {"__name__": "__test__", "__builtins__": builtins}
        try:
            exec(compile(order["definitions"], "<definitions>", "exec"), space)
        except Exception:
            space = {"__name__": "__test__", "__builtins__": builtins}
        for name, (module, attribute) in order["imports"].items():
            if name in space:
                continue
            try:
                imported = importlib.import_module(module)
                space[name] = getattr(imported, attribute) if attribute else imported
            except (ImportError, AttributeError):
                continue
        for name in order["remote"]:
            if name not in space:
                space[name] = Remote(self, name, is_tested=False)
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
        """Raises `UnverifiableError`, and remembers it: a test may catch everything."""
        self.is_unverifiable = True
        raise UnverifiableError

    def _number_of(self, value: Any) -> int:
        if type(value) is not Remote:
            self.give_up()
        number: int = object.__getattribute__(value, "_target")
        if type(number) is not int:
            self.give_up()
        return number

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
    """Return an exception of the nearest built-in type; never one that would end the test as
    passed."""
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


class Tester:
    """Runs one test after the other."""

    def __init__(self, cpu_s: int) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        self._test: Test | None = None
        self._rest = ""

    def begin(self, order: str) -> str:
        """Return the length of the first message and the first piece of it."""
        self._test = Test(json.loads(order))
        return self._give(self._test.start)

    def answer(self, text: str) -> str:
        """Return the length of the next message and the first piece of it."""
        test = self._test
        assert test is not None
        return self._give(lambda: test.go_on(text))

    def more(self) -> str:
        """Return the next piece of the message."""
        piece, self._rest = self._rest[:_CHUNK], self._rest[_CHUNK:]
        return piece

    def _give(self, message: Callable[[], dict[str, Any]]) -> str:
        self._rest = json.dumps(message())
        return f"{len(self._rest)}:{self.more()}"


def make(cpu_s: int) -> Tester:
    """Return the tester of this cell, whose processor time is bounded from now on."""
    return Tester(cpu_s)
