"""The tables of a task's `task.toml`, as Harbor 1.4 defines them.

Unknown keys are errors except in `[metadata]`, because the task would not be what its author
wrote. What areal-gym knows and does not do is refused in `task_folder`, by name.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

MAIN_SERVICE = "main"
_STEP_NAME = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]+')
_HOST = re.compile(r"(\*\.)?[a-z0-9:]([a-z0-9.:-]*[a-z0-9])?(/\d{1,3})?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG])B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _variable_names(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} cannot be the name of an environment variable")
        if "\0" in value:
            raise ValueError(f"the value of {name} has a zero byte")
    return values


def _hosts(hosts: list[str] | None) -> list[str] | None:
    for host in hosts or ():
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host!r} is not a host name or an address (no URLs, ports or paths)")
    return hosts


def _in_container(path: str) -> str:
    """Return the path, which must be one inside of a container: absolute, without `..`."""
    if "\0" in path or not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is not an absolute path without '..'")
    return path


Seconds = Annotated[float, Field(gt=0, le=1e7)]
Delay = Annotated[float, Field(ge=0, le=1e7)]
Variables = Annotated[dict[str, str], AfterValidator(_variable_names)]
Hosts = Annotated[list[str] | None, AfterValidator(_hosts)]
ContainerPath = Annotated[str, AfterValidator(_in_container)]
User = str | int | None


class Table(BaseModel):
    """A table of `task.toml`: no unknown keys, and no guesses about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Network(Table):
    """The keys of every table that say which hosts may be reached."""

    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: Hosts = None

    @model_validator(mode="after")
    def _hosts_need_allowlist(self) -> Network:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts goes with network_mode = 'allowlist' only")
        return self


class Author(Table):
    """A person."""

    name: str
    email: str | None = None


class Package(Table):
    """The table `[task]`: what the task is called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*$")
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _no_dots(cls, name: str) -> str:
        if ".." in name:
            raise ValueError(f"{name!r} has '..'")
        return name


class Healthcheck(Table):
    """A command that ends with 0 once the container is ready; as Docker's HEALTHCHECK."""

    command: str = Field(min_length=1)
    interval_sec: Delay = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Delay = 0.0
    start_interval_sec: Delay = 5.0
    retries: int = Field(default=3, ge=1)


class McpServer(Table):
    """An MCP server whose tools the agent may call."""

    name: str = Field(min_length=1)
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @field_validator("transport", mode="before")
    @classmethod
    def _short_name(cls, transport: Any) -> Any:
        return "streamable-http" if transport == "http" else transport

    @model_validator(mode="after")
    def _has_address(self) -> McpServer:
        if self.transport == "stdio":
            if not self.command:
                raise ValueError("transport 'stdio' needs a command")
            if self.headers:
                raise ValueError("headers go with transports over HTTP only")
        elif not self.url:
            raise ValueError(f"transport {self.transport!r} needs a url")
        return self


class Tpu(Table):
    """A slice of TPUs."""

    type: str
    topology: str


class Environment(Network):
    """The table `[environment]`: the container of the agent, or of the verifier."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = Field(default=None, min_length=1)
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpServer] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: ContainerPath | None = None
    allow_internet: bool | None = None

    @field_validator("os", mode="before")
    @classmethod
    def _lower(cls, name: Any) -> Any:
        return name.lower() if isinstance(name, str) else name

    @model_validator(mode="before")
    @classmethod
    def _old_names(cls, table: Any) -> Any:
        """Read `memory`, `storage` and `allow_internet`, which older tasks have."""
        if not isinstance(table, dict):
            return table
        table = dict(table)
        for name in ("memory", "storage"):
            if name in table:
                size = _SIZE.fullmatch(str(table.pop(name)).strip())
                if size is None:
                    raise ValueError(f"{name} is a size such as '2G' or '512M'")
                megabytes = max(1, int(float(size[1]) * _MB[size[2].upper()]))
                if table.setdefault(f"{name}_mb", megabytes) != megabytes:
                    raise ValueError(f"{name} and {name}_mb differ")
        allow = table.get("allow_internet")
        if isinstance(allow, bool) and "allowed_hosts" not in table:
            table.setdefault("network_mode", "public" if allow else "no-network")
        return table


class Agent(Network):
    """The table `[agent]`."""

    timeout_sec: Seconds | None = None
    user: User = None


class Collect(Table):
    """A command that writes state into files after the agent has ended."""

    command: str = Field(min_length=1)
    service: str = MAIN_SERVICE
    timeout_sec: Seconds = 60.0
    user: User = None


class Verifier(Network):
    """The table `[verifier]`."""

    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = []

    @model_validator(mode="after")
    def _own_environment_is_separate(self) -> Verifier:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError(
                "environment_mode = 'shared' and [verifier.environment] exclude each other"
            )
        return self

    @property
    def is_separate(self) -> bool:
        """Whether the task itself asks for a container of the verifier's own."""
        return self.environment_mode == "separate" or self.environment is not None


class Artifact(Table):
    """Files of the agent that the verifier reads."""

    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_path(cls, given: Any) -> Any:
        return {"source": given} if isinstance(given, str) else given

    @field_validator("source", "destination")
    @classmethod
    def _inside(cls, path: str | None) -> str | None:
        if path is not None and ("\0" in path or ".." in PurePosixPath(path).parts):
            raise ValueError(f"{path!r} has '..', which an artifact may not have")
        return path

    @field_validator("destination")
    @classmethod
    def _relative(cls, path: str | None) -> str | None:
        if path is not None and (path.startswith("/") or "\\" in path):
            raise ValueError(f"destination {path!r} is not a relative path")
        return path


class Step(Table):
    """One of `[[steps]]`."""

    name: str
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Artifact] = []

    @field_validator("name")
    @classmethod
    def _folder_name(cls, name: str) -> str:
        is_portable = _STEP_NAME.fullmatch(name) and not name.endswith((".", " "))
        if not is_portable or not name.strip() or len(name.encode()) > 255:
            raise ValueError(f"{name!r} cannot be the name of a folder below steps/")
        return name


class Solution(Table):
    """The table `[solution]`."""

    env: Variables = {}


class TaskToml(Table):
    """All of `task.toml`."""

    schema_version: str = Field(default="1.4", pattern=r"^1\.\d+(\.\d+)?$")
    source: str | None = None
    task: Package | None = None
    metadata: dict[str, Any] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] = []
    artifacts: list[Artifact] = []

    @model_validator(mode="before")
    @classmethod
    def _old_version(cls, table: Any) -> Any:
        if isinstance(table, dict) and "version" in table:
            table = dict(table)
            table.setdefault("schema_version", table.pop("version"))
        return table

    @field_validator("steps")
    @classmethod
    def _distinct(cls, steps: list[Step]) -> list[Step]:
        keys = [unicodedata.normalize("NFC", step.name).casefold() for step in steps]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ValueError(f"two steps are called {steps[index].name!r}")
        return steps
