"""The sandbox "none": the same processes and limits, without protection. It is never a default."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

from areal_gym.sandbox.base import SandboxLevel, SandboxLimits
from areal_gym.sandbox.process import ProcessSandbox

_WALLS = ("namespaces", "private uid", "private root", "landlock", "seccomp")


class NoSandbox(ProcessSandbox):
    """Runs Python as this user, who can reach files, network and processes.

    Use it for code that you would run yourself, on kernels without any protection. Time, output
    and memory of each process are limited and the environment is empty, as in `ProcessSandbox`;
    processes that a snippet leaves behind are ended where possible.

    Warns:
        RuntimeWarning: always.
    """

    backend: ClassVar[str] = "none"

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        limits: SandboxLimits | None = None,
        modules: Sequence[str] = ("numpy", "sympy"),
    ) -> None:
        message = "sandbox 'none': what a policy writes runs as you and can do what you can"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        super().__init__(
            num_workers=num_workers,
            limits=limits,
            modules=modules,
            min_level=SandboxLevel.NONE,
            without=_WALLS,
        )
