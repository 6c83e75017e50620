"""`areal-gym serve` and `areal-gym serve-env`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from areal_gym.cli.options import (
    POSITIVE,
    Options,
    common_options,
    overrides_argument,
    run_option,
    trust_option,
)
from areal_gym.cli.output import print_data, talk
from areal_gym.cli.own_task import env_with_arguments
from areal_gym.cli.setting_flags import policy_files, resolve, setting_flags
from areal_gym.errors import ConfigError, UsageError
from areal_gym.plugins import registry


@click.command("serve")
@overrides_argument
@run_option("A run: serve its newest checkpoint.")
@setting_flags(
    {
        "--model": "engine.model",
        "--env": "env.id",
        "--engine": "engine.id",
        "--engine.url": "engine.url",
        "--gateway": "gateway",
    }
)
@trust_option
@common_options
@click.pass_obj
def serve_command(
    options: Options,
    overrides: tuple[str, ...],
    run: Path | None,
    checkpoint: Path | None,
    flags: Mapping[str, Any],
    trust: bool,
) -> None:
    """Serve a policy over the APIs of OpenAI and Anthropic, until interrupted.

    The policy is one of --run, --checkpoint, --model or --env (its small starter policy). Prints
    one line of JSON: `base_url` and `api_key`. The key is AREAL_GYM_API_KEY, or a random one.
    """
    policies = (run, checkpoint, flags.get("engine.model"), flags.get("env.id"))
    if sum(policy is not None for policy in policies) != 1:
        raise UsageError(
            "which policy?", hints=["one of: --run RUN, --checkpoint DIR, --model DIR, --env ENV"]
        )
    recipe, checkpoint = policy_files(run, checkpoint)
    config = resolve(file=recipe, overrides=overrides, flags=flags, is_chosen=trust)

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.serve_policy import serve

    is_ready = False

    def on_ready(base_url: str, api_key: str) -> None:
        nonlocal is_ready
        is_ready = True
        display.close()
        print_data(json.dumps({"base_url": base_url, "api_key": api_key}))
        talk("Ctrl-C stops the server")

    with contextlib.closing(make_display(is_plain=options.is_plain)) as display:
        try:
            serve(config, checkpoint=checkpoint, display=display, on_ready=on_ready)
        except KeyboardInterrupt:
            if not is_ready:  # Ctrl-C is how a running server ends
                raise


@click.command("serve-env")
@env_with_arguments()
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=int, default=0, show_default=False, help="Port to listen on [any free one]."
)
@click.option(
    "--max-sessions",
    type=POSITIVE,
    default=4096,
    help="Maximum concurrent episodes; more are refused.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    help="Sessions that are idle for this long are closed.",
)
@click.option(
    "--mcp",
    type=click.Choice(["http", "stdio"]),
    help="Serve as an MCP server instead: the environment's tools become MCP tools.",
)
@common_options
def serve_env_command(
    env: str,
    settings: Mapping[str, Any],
    host: str,
    port: int,
    max_sessions: int,
    idle_s: float,
    mcp: str | None,
) -> None:
    """Serve an environment to other processes and machines, until interrupted.

    key=value are arguments of the environment. Prints one line of JSON with the `url`; other
    machines use it as the environment remote:URL in train, eval, play and check. Beyond this
    machine (--host 0.0.0.0) clients need the `token`: AREAL_GYM_ENV_TOKEN on both sides, or a
    random one that is printed. `check remote:URL` needs the `owner_key`, which gives access to gold
    actions: AREAL_GYM_ENV_OWNER_KEY on both sides, or a random one that is printed.

    With --mcp http, `url` is that of an MCP server (streamable HTTP); --mcp stdio talks to the
    client that started it. Both need the extra: pip install 'areal-gym[mcp]'.
    """
    from areal_gym.envs.server.env_sessions import Sessions
    from areal_gym.envs.server.http_server import EnvServer, made_up_token
    from areal_gym.envs.server.remote_env import TOKEN_VARIABLE
    from areal_gym.envs.server.wire_format import OWNER_VARIABLE
    from areal_gym.utils.http_servers.addresses import is_loopback

    token = os.environ.get(TOKEN_VARIABLE) or made_up_token(host)
    owner_key = os.environ.get(OWNER_VARIABLE) or secrets.token_urlsafe(24)
    sessions = Sessions(
        lambda: registry().make("envs", env, **settings), max_sessions=max_sessions, idle_s=idle_s
    )
    if mcp is not None and find_spec("mcp") is None:
        raise ConfigError(
            "--mcp needs the package mcp", hints=["install it: pip install 'areal-gym[mcp]'"]
        )

    def on_ready(url: str) -> None:
        connection = {"env": env, "url": url, "token": token}
        if mcp is not None:
            print_data(json.dumps(connection))
        else:
            print_data(json.dumps({**connection, "owner_key": owner_key}))
            address = url if is_loopback(host) else f"http://THIS_MACHINE:{url.rpartition(':')[2]}"
            key = "" if token is None else f"{TOKEN_VARIABLE}={token} "
            talk(f"on the other machine:  {key}areal-gym train --env remote:{address}")
        talk("Ctrl-C stops the server")

    async def serve_http() -> None:
        server = EnvServer(sessions, env, host=host, port=port, token=token, owner_key=owner_key)
        async with sessions, server:
            on_ready(server.url)
            await asyncio.Event().wait()

    async def serve_mcp() -> None:
        from areal_gym.envs.server.mcp_server import make_mcp_server, serve_http, serve_stdio

        server = make_mcp_server(sessions, env)
        async with sessions:
            if mcp == "stdio":
                await serve_stdio(server)
            else:
                await serve_http(server, host=host, port=port, token=token, on_ready=on_ready)

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how the server ends
        asyncio.run(serve_http() if mcp is None else serve_mcp())
