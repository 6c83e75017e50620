"""Serves the policy's functions; runs in the sandbox cell of the policy's code, and is never
imported.

It gets plain values and gives plain values. The policy's code can change everything here, so that
the other side believes nothing but that these are values that the policy came up with.
`verification.py` sends this source after that of `plain_values.py`, into one namespace.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_gym.envs.code.plain_values import NotPlainError, decode, encode, parse

_CHUNK = 3_900
"""Characters per piece of a reply: 8,000 characters of a value, escapes included, leave a cell."""
_MUTABLE = (list, dict, set, bytearray)


class Server:
    """Answers requests: call a function, read or set an attribute of an object."""

    def __init__(self, namespace: dict[str, Any], cpu_s: int) -> None:
        self._namespace = namespace
        self._objects: list[Any] = []
        self._rest = ""
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))

    def serve(self, text: str) -> str:
        """Return the length of the reply and the first piece of it; `more` gives the others."""
        self._rest = json.dumps(self._reply(text))
        return f"{len(self._rest)}:{self.more()}"

    def more(self) -> str:
        """Return the next piece of the reply."""
        piece, self._rest = self._rest[:_CHUNK], self._rest[_CHUNK:]
        return piece

    def _reply(self, text: str) -> dict[str, Any]:
        try:
            request = parse(text)
            nodes = request.get("args", [])
            args = [decode(node, self._objects.__getitem__) for node in nodes]
            kwargs = {
                name: decode(node, self._objects.__getitem__)
                for name, node in request.get("kwargs", {}).items()
            }
            target = self._target(request["target"])
            value = getattr(self, "_do_" + request["do"])(target, args, kwargs)
            reply = {"value": encode(value, self._refer)}
            if any(isinstance(arg, _MUTABLE) for arg in args):
                after = [encode(arg, self._refer) for arg in args]
                reply["args"] = [
                    None if new == old else new for new, old in zip(after, nodes, strict=True)
                ]
            return reply
        except NotPlainError as error:
            return {"unverifiable": str(error)}
        except RecursionError:
            return {"error": ["RecursionError"], "args": []}
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"error": names, "args": self._plain_arguments(error)}

    def _plain_arguments(self, error: BaseException) -> list[Any]:
        try:
            return [encode(arg) for arg in error.args]
        except Exception:
            return []

    def _target(self, target: Any) -> Any:
        if isinstance(target, int):
            return self._objects[target]
        if target not in self._namespace:
            raise NameError(f"name {target!r} is not defined")
        return self._namespace[target]

    def _refer(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _do_call(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return target(*args, **kwargs)

    def _do_get(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return getattr(target, args[0])

    def _do_set(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return setattr(target, args[0], args[1])

    def _do_item(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return target[args[0]]

    def _do_length(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return len(target)

    def _do_truth(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return bool(target)

    def _do_text(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return str(target)

    def _do_items(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return iter(target)


def make(cpu_s: int) -> Server:
    """Return the server of the cell's `__main__`, whose processor time is bounded from now on."""
    sys.set_int_max_str_digits(0)
    return Server(sys.modules["__main__"].__dict__, cpu_s)
