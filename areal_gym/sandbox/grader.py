"""Runs reward code in worker processes, where slow or broken graders cannot harm a run."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any, Final

from areal_gym.errors import EnvError, SandboxError, UsageError
from areal_gym.sandbox.base import SandboxLimits, SandboxStatus
from areal_gym.sandbox.shared_pool import shared_sandbox

_RAISE: Final = object()
_LIMITS = SandboxLimits(wall_s=60.0, cpu_s=5.0, memory_mb=1024)
_TOO_EXPENSIVE = (SandboxStatus.TIMEOUT, SandboxStatus.MEMORY, SandboxStatus.KILLED)

_CALL = """
import json
from {module} import {name}
json.dumps({name}(*json.loads({arguments!r})))
"""


class Grader:
    """Calls a function in forked worker processes, asynchronously.

    score = Grader("my_package.rewards:score")
    reward = await score(answer, task.data["answer"])

    Each call gets a fresh process, forked from one that has imported the function's module. It can
    read its own package and installed ones, but no other files and no network, as far as this
    machine supports it; unlike a policy's code it also runs without such protection.

    Args:
        function: `"module:name"`. It takes and returns JSON values (at most 8,000 characters are
            returned); its prints are dropped.
        limits: processor time and memory limit the cost of an answer. The wall-clock limit should
            be generous, because exceeding it is blamed on the machine, not on the answer.
        on_limit: the result of a call that used up processor time or memory, or crashed; by
            default this is an error.
        preload: modules that the function imports lazily; they are imported once, ahead of calls.

    Raises:
        UsageError: `function` does not have this form.
    """

    def __init__(
        self,
        function: str,
        *,
        limits: SandboxLimits = _LIMITS,
        on_limit: Any = _RAISE,
        preload: Sequence[str] = (),
    ) -> None:
        module, _, name = function.partition(":")
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(
                f"{function!r} does not name a function",
                hints=["write module:function, for example my_package.rewards:score"],
            )
        self.function = function
        self.limits = limits
        self._module, self._name = module, name
        self._on_limit = on_limit
        self._modules = [module, *preload]

    async def __call__(self, *arguments: Any) -> Any:
        """Return the function's result for these arguments.

        Raises:
            EnvError: it raised, returned no JSON value, or exceeded its limits without `on_limit`.
            SandboxError: the worker failed, or the machine was too busy to finish in time.
        """
        sandbox = shared_sandbox(
            "process", modules=self._modules, packages=[self._module], min_level="none"
        )
        code = _CALL.format(module=self._module, name=self._name, arguments=json.dumps(arguments))
        result = await sandbox.run(code, limits=self.limits)
        if result.is_ok and result.value is not None:
            try:
                text: str = ast.literal_eval(result.value)
            except (ValueError, SyntaxError):  # it was cut
                raise EnvError(f"{self.function} returned more than 8,000 characters") from None
            return json.loads(text)
        if result.status is SandboxStatus.TIMEOUT and result.elapsed_s >= self.limits.wall_s:
            raise SandboxError(
                f"{self.function} got no result within {self.limits.wall_s:g} s, and too little "
                "processor time to blame it on the answer"
            )
        if result.status in _TOO_EXPENSIVE and self._on_limit is not _RAISE:
            return self._on_limit
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with the status {result.status}"
        raise EnvError(f"{self.function} failed: {reason}")
