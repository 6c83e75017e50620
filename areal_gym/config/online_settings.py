"""Settings of the gateway and of online runs, whose episodes external programs play."""

from __future__ import annotations

ONLINE = "online"
"""The id of the environment and of the agent in online runs."""


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; raise ValueError if it is not an address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address; write host:port, port 0 is any free one")
    return host.strip("[]"), int(port)


def check_online(env: str, agent: str, model: str, *, is_elsewhere: bool) -> None:
    """Raise ValueError for settings that an online run cannot have.

    `is_elsewhere` says whether episodes are played in other processes or deterministically.
    """
    if (env == ONLINE) != (agent == ONLINE):
        raise ValueError(
            f"env.id = {env!r} with agent.id = {agent!r}: programs outside play with both set to "
            "'online', or with neither"
        )
    if env == ONLINE and model == "starter":
        raise ValueError(
            "env.id = 'online' with engine.model = 'starter': the small policy learns from an "
            "environment's demonstrations first, and there are none; use engine.model=DIR"
        )
    if env == ONLINE and is_elsewhere:
        raise ValueError(
            "env.id = 'online' with deterministic = true or cluster.rollout_workers: programs "
            "outside connect at any time, and to one gateway"
        )
