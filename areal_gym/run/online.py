"""The gateway of a run, and the policy behind a gateway without any run."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from areal_gym.config import RunConfig
from areal_gym.errors import UsageError
from areal_gym.gateway.shared import shared_gateway, use_address
from areal_gym.online import ONLINE, split_address
from areal_gym.run.display import Display, SilentDisplay
from areal_gym.run.parts import Parts, open_engine, policy_directory
from areal_gym.rundir import RunDir, write_atomic

__all__ = ["open_gateway", "serve"]

CONTROL_KEY, API_KEY = "AREAL_GYM_CONTROL_KEY", "AREAL_GYM_API_KEY"
"""Variables of the environment that hold secrets; without them, secrets are made up."""


async def open_gateway(config: RunConfig, directory: RunDir, display: Display) -> None:
    """Say where the run's gateway listens; that of an online run listens from now on.

    `gateway.json` of the run directory then tells programs where it is and with which control key.
    A resumed run has the same key, and with a fixed port the same address.
    """
    if config.env.id != ONLINE:
        use_address(*split_address(config.gateway))
        return
    file = directory.path / "gateway.json"
    known = json.loads(file.read_text())["control_key"] if file.exists() else None
    key = os.environ.get(CONTROL_KEY) or known or f"agc-{secrets.token_urlsafe(24)}"
    use_address(*split_address(config.gateway), control_key=key)
    gateway = await shared_gateway()
    file.touch(mode=0o600)
    content = {"base_url": f"{gateway.url}/v1", "control_key": key}
    write_atomic(file, json.dumps(content).encode())
    file.chmod(0o600)
    display.say(f"gateway: {gateway.url}/v1; the control key is in {file}")


def serve(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    display: Display | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve a policy at the gateway until interrupted; nothing is learned.

    Args:
        config: the settings; engine and gateway matter.
        checkpoint: the policy; by default `config.engine.model`.
        display: where to say what goes on.
        on_ready: told of base URL and key.

    Raises:
        GymError: see `areal_gym.errors`.
    """
    shown = display or SilentDisplay()

    async def serve_on() -> None:
        parts = None
        if checkpoint is None and config.engine.model == "starter":
            if config.env.id == ONLINE:
                raise UsageError(
                    "which policy?", hints=["--run RUN, --checkpoint DIR or --model DIR"]
                )
            parts = Parts.of(config)
        policy = checkpoint or policy_directory(config, parts, shown)[0]
        use_address(*split_address(config.gateway), control_key=os.environ.get(CONTROL_KEY))
        async with open_engine(config, policy) as (engine, renderer):
            gateway = await shared_gateway()
            session = gateway.serve_policy(
                engine, renderer, api_key=os.environ.get(API_KEY) or None
            )
            if on_ready is not None:
                on_ready(session.base_url, session.api_key)
            await asyncio.Event().wait()

    asyncio.run(serve_on())
