"""`areal-gym serve-env`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, talk
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from areal_gym.envs.server.env_sessions import Sessions
    from areal_gym.envs.server.http_server import EnvServer


@click.command("serve-env")
@click.argument("env", shell_complete=complete.ids("envs"))
@click.argument(
    "settings", nargs=-1, metavar="[key=value]...", shell_complete=complete.env_arguments
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=0, help="Port to listen on [any free one].")
@click.option(
    "--max-sessions",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Maximum concurrent episodes; more are refused.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(min=0, min_open=True),
    default=1800.0,
    show_default=True,
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
    settings: tuple[str, ...],
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
    from areal_gym.config import parse_override
    from areal_gym.envs.base import TextEnv
    from areal_gym.envs.server.env_sessions import Sessions
    from areal_gym.envs.server.http_server import EnvServer, is_loopback, made_up_token
    from areal_gym.envs.server.remote_env import TOKEN_VARIABLE
    from areal_gym.envs.server.wire_format import OWNER_VARIABLE

    kwargs = dict(map(parse_override, settings))

    def make() -> TextEnv:
        instance: TextEnv = registry().make("envs", env, **kwargs)
        return instance

    token = os.environ.get(TOKEN_VARIABLE) or made_up_token(host)
    owner_key = os.environ.get(OWNER_VARIABLE) or secrets.token_urlsafe(24)
    sessions = Sessions(make, max_sessions=max_sessions, idle_s=idle_s)

    if mcp is not None and find_spec("mcp") is None:
        raise ConfigError(
            "--mcp needs the package mcp", hints=["install it: pip install 'areal-gym[mcp]'"]
        )

    def on_ready(url: str) -> None:
        facts = {"env": env, "url": url, "token": token}
        if mcp is not None:
            print_data(json.dumps(facts))
        else:
            print_data(json.dumps({**facts, "owner_key": owner_key}))
            address = url if is_loopback(host) else f"http://THIS_MACHINE:{url.rpartition(':')[2]}"
            key = "" if token is None else f"{TOKEN_VARIABLE}={token} "
            talk(f"on the other machine:  {key}areal-gym train --env remote:{address}")
        talk("Ctrl-C stops the server")

    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how the server ends
        if mcp is not None:
            asyncio.run(
                _serve_mcp(mcp, sessions, env, host=host, port=port, token=token, on_ready=on_ready)
            )
        else:
            server = EnvServer(
                sessions, env, host=host, port=port, token=token, owner_key=owner_key
            )
            asyncio.run(_serve(server, sessions, on_ready))


async def _serve(server: EnvServer, sessions: Sessions, on_ready: Callable[[str], None]) -> None:
    async with sessions, server:
        on_ready(server.url)
        await asyncio.Event().wait()


async def _serve_mcp(
    transport: str,
    sessions: Sessions,
    env: str,
    *,
    host: str,
    port: int,
    token: str | None,
    on_ready: Callable[[str], None],
) -> None:
    from areal_gym.envs.server.mcp_server import make_mcp_server, serve_http, serve_stdio

    server = make_mcp_server(sessions, env)
    async with sessions:
        if transport == "stdio":
            await serve_stdio(server)
        else:
            await serve_http(server, host=host, port=port, token=token, on_ready=on_ready)
