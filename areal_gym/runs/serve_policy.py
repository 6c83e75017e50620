"""The gateway of a run, and serving a policy at a gateway without a run."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE, split_address
from areal_gym.errors import UsageError
from areal_gym.gateway.shared_gateway import gateway_at, shared_gateway
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.open_engine import open_engine
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display

CONTROL_KEY, API_KEY = "AREAL_GYM_CONTROL_KEY", "AREAL_GYM_API_KEY"
"""Environment variables that hold secrets; without them, secrets are generated."""


@asynccontextmanager
async def open_gateway(
    config: RunConfig, directory: RunDir, display: Display
) -> AsyncIterator[None]:
    """Set where the run's gateway listens; that of an online run starts to listen at once.

    `gateway.json` in the run directory then gives programs its address and control key. A resumed
    run has the same key and, with a fixed port, the same address.
    """
    address = split_address(config.gateway)
    if config.env.id != ONLINE:
        async with gateway_at(*address):
            yield
        return
    file = directory.path / "gateway.json"
    known = json.loads(file.read_text())["control_key"] if file.exists() else None
    key = os.environ.get(CONTROL_KEY) or known or f"agc-{secrets.token_urlsafe(24)}"
    async with gateway_at(*address, control_key=key):
        gateway = await shared_gateway()
        _write_secret(file, {"base_url": f"{gateway.url}/v1", "control_key": key})
        display.say(f"gateway: {gateway.url}/v1; the control key is in {file}")
        yield


def _write_secret(file: Path, content: dict[str, str]) -> None:
    """Write a JSON file that no other user can read, not even while it is being written."""
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
        json.dump(content, stream)
    draft.replace(file)


def serve(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    display: Display | None = None,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve a policy at the gateway until interrupted; it is not trained.

    Args:
        config: the settings; `engine.model` is the policy by default.
        checkpoint: the policy, if it is another one.
        display: shows progress.
        on_ready: called with the base URL and the API key.
    """
    display = display or Display()

    async def serve_on() -> None:
        components = None
        if checkpoint is None and config.engine.model == "starter":
            if config.env.id == ONLINE:
                hint = "--run RUN, --checkpoint DIR or --model DIR"
                raise UsageError("which policy?", hints=[hint])
            components = Components.of(config)
        policy = checkpoint or policy_directory(config, components, display)[0]
        key = os.environ.get(CONTROL_KEY)
        async with (
            open_engine(config, policy, display=display) as (engine, renderer),
            gateway_at(*split_address(config.gateway), control_key=key),
        ):
            gateway = await shared_gateway()
            api_key = os.environ.get(API_KEY) or None
            session = gateway.serve_policy(engine, renderer, api_key=api_key)
            if on_ready is not None:
                on_ready(session.base_url, session.api_key)
            await asyncio.Event().wait()

    asyncio.run(serve_on())
