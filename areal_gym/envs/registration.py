"""Registers our environments under Gymnasium's ids: `gymnasium.make("areal_gym/tir-v0")`."""

from __future__ import annotations

from areal_gym.plugins import EnvSpec, registry


def gymnasium_id(spec: EnvSpec) -> str:
    """Return `areal_gym/math-multi-turn-v0` for `math/multi-turn`; namespaces do not nest."""
    name = spec.id.replace("/", "-").replace(":", "-")
    return f"areal_gym/{name}-v{spec.version}"


def register_envs() -> None:
    """Make every registered environment known to Gymnasium; nothing is imported for it.

    An id that two plugins claim is left out: asking our own registry for it says why.
    """
    import gymnasium

    entries = registry().entries("envs")
    ids = [entry.id for entry in entries]
    for entry in entries:
        spec = entry.spec
        assert isinstance(spec, EnvSpec)
        if ids.count(spec.id) > 1 or gymnasium_id(spec) in gymnasium.registry:
            continue
        gymnasium.register(
            gymnasium_id(spec),
            entry_point=spec.entry_point,
            kwargs=dict(spec.kwargs),
            # The episode's own checks are in TextEnv; wrappers around each step would cost more
            # than the step. `areal-gym check` runs Gymnasium's checker.
            order_enforce=False,
            disable_env_checker=True,
        )
