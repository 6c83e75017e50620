"""The hooks: functions that yield typed specs. None calls back, so their order does not matter.

A plugin is one cheap module that imports `areal_gym.plugins` and nothing else:

    from collections.abc import Iterable
    from areal_gym.plugins import EnvSpec, hookimpl

    @hookimpl
    def register_envs() -> Iterable[EnvSpec]:
        yield EnvSpec(id="dice", entry_point="my_dice.env:Dice", summary="guess the sum")

Its distribution declares it in the entry-point group `areal_gym`:

    [project.entry-points."areal_gym"]
    dice = "my_dice.plugin"

Entry points of specs are text and imported on first use: listing plugins imports nothing.
`docs/plugins.md` has a section with an example for each hook.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

GROUP = "areal_gym"
"""The entry-point group, and pluggy's project name."""

hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plugin module as the implementation of the hook of that name."""


class HookSpecs:
    """One hook for each kind of plugin, such as `register_envs`: `add_hook` adds them."""


def add_hook(name: str, spec_name: str, contract: str) -> None:
    """Declare the hook of a kind of plugin.

    Args:
        name: what a plugin's function is called, like "register_envs".
        spec_name: the class of the specs that it yields, like "EnvSpec".
        contract: what the entry point of such a spec must be; the hook's documentation.
    """

    def hook(self: HookSpecs) -> Iterable[object]:
        return ()

    hook.__name__ = name
    hook.__qualname__ = f"HookSpecs.{name}"
    hook.__doc__ = f"""{contract}

        Example::

            @hookimpl
            def {name}() -> Iterable[{spec_name}]:
                yield {spec_name}(id="mine", entry_point="my_plugin:Mine", summary="what it does")
        """
    setattr(HookSpecs, name, pluggy.HookspecMarker(GROUP)(hook))
