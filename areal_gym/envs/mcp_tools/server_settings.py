"""The settings of MCP servers: parsed, validated, and their secrets read from variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from areal_gym.errors import ConfigError, UsageError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


class McpServerSettings(BaseModel):
    """One server: a command that speaks over its standard streams, or a URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    transport: Literal["stdio", "sse", "streamable-http"]
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Variables of the command; `${NAME}` is replaced by this process's variable."""
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    """Headers of requests; each value has a `${NAME}`, so that no secret is in the settings."""
    shared: bool = False
    """Whether all episodes use one connection: for servers without state."""
    images: bool = False
    """Whether the policy is shown the images of results; one that cannot see needs false."""
    where: Literal["walls", "host"] = "walls"
    """Where a command runs if the environment has no place: see docs/mcp.md."""
    timeout_s: float = Field(default=60.0, gt=0)
    """The longest time of one call."""
    open_timeout_s: float = Field(default=30.0, gt=0)
    """The longest time until the server has listed its tools."""

    @model_validator(mode="before")
    @classmethod
    def _infer_transport(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        kind = given.get("transport", given.get("type"))
        if kind is None:
            kind = "streamable-http" if "url" in given else "stdio"
        rest = {name: value for name, value in given.items() if name != "type"}
        return {**rest, "transport": "streamable-http" if kind == "http" else kind}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("a name has up to 40 letters, digits, _ and -")
        return name

    @model_validator(mode="after")
    def _check_address(self) -> McpServerSettings:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("transport 'stdio' needs a command")
            if self.url or self.headers:
                raise ValueError("url and headers go with transports over HTTP")
        elif not (self.url or "").startswith(("http://", "https://")):
            raise ValueError(f"transport {self.transport!r} needs a url, http:// or https://")
        elif self.command or self.args or self.env or self.cwd:
            raise ValueError("command, args, env and cwd go with transport 'stdio'")
        for header, value in self.headers.items():
            if not _VARIABLE.search(value):
                raise ValueError(
                    f"header {header!r} has no ${{VARIABLE}}: secrets are read from variables of "
                    "the environment, for example 'Bearer ${TOKEN}'"
                )
        return self

    def header_values(self) -> dict[str, str]:
        """Return the headers with their variables; raise ConfigError for one that is not set."""
        return {name: self._expanded(value) for name, value in self.headers.items()}

    def command_variables(self) -> dict[str, str]:
        """Return `env` with its variables; raise ConfigError for one that is not set."""
        return {name: self._expanded(value) for name, value in self.env.items()}

    def _expanded(self, text: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise ConfigError(
                    f"MCP server {self.name!r} needs the variable {match[1]}, which is not set",
                    hints=[f"export {match[1]}=..."],
                )
            return value

        return _VARIABLE.sub(value_of, text)


def parse_servers(given: Any) -> tuple[McpServerSettings, ...]:
    """Return the settings of `mcp_servers`: a list of tables, or a table by name.

    Raises:
        UsageError: a table is wrong, or two servers have one name.
    """
    if isinstance(given, Mapping):
        given = [given] if "name" in given else [_named(*item) for item in given.items()]
    if not isinstance(given, list | tuple):
        raise UsageError(
            f"mcp_servers is {given!r}, not a list of servers",
            hints=["for example [{name: time, command: mcp-server-time}, {name: wiki, url: ...}]"],
        )
    servers = tuple(_parsed(entry) for entry in given)
    names = [server.name for server in servers]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two MCP servers are called {name!r}; give one another name")
    return servers


def _named(name: str, entry: Any) -> Any:
    return {"name": name, **entry} if isinstance(entry, Mapping) else entry


def _parsed(entry: Any) -> McpServerSettings:
    if isinstance(entry, McpServerSettings):
        return entry
    try:
        return McpServerSettings.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        name = entry.get("name", "?") if isinstance(entry, Mapping) else "?"
        fields = ", ".join(McpServerSettings.model_fields)
        raise UsageError(
            f"MCP server {name!r}: {field + ': ' if field else ''}{first['msg']}",
            hints=[f"a server has: {fields}"],
        ) from None
