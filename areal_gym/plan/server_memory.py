"""Computes the room of servers: weights, and keys and values of tokens in flight."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from areal_gym.config import SERVED_ENGINES, RunConfig
from areal_gym.errors import ConfigError
from areal_gym.utils.command_words import command_words

CACHE_SHARE = 0.85
"""Share of a GPU's memory that a server takes for weights and cache."""
_SHARE_FLAGS = ("--mem-fraction-static", "--gpu-memory-utilization")

_SIZE_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMemory:
    """Bytes of each server of a run; none for an engine in the trainer's process."""

    num_servers: int
    gpus_per_server: int
    weight_bytes: int
    """Of one server, in bfloat16, on all its GPUs together."""
    cache_bytes_per_token: int
    """Keys and values of one token, on all GPUs of a server together."""
    cache_tokens: int
    """Tokens for which one server has room."""

    @property
    def num_gpus(self) -> int:
        """The GPUs of all servers."""
        return self.num_servers * self.gpus_per_server

    @property
    def weight_bytes_per_gpu(self) -> int:
        """Weights on each GPU; 0 without servers."""
        return self.weight_bytes // self.gpus_per_server if self.num_servers else 0

    @property
    def cache_bytes_per_gpu(self) -> int:
        """Keys and values on each GPU, when the cache is full."""
        return self.cache_tokens * self.cache_bytes_per_token // self.gpus_per_server


def servers_of(config: RunConfig) -> tuple[int, int, float]:
    """Return the number of servers, the GPUs of each, and the share of memory that they take.

    Servers at `engine.url` count, as if each had the GPUs that `server_args` say.
    """
    arguments = command_words(config.engine.kwargs.get("server_args"))
    pairs = [word.split("=", 1) if "=" in word else [word] for word in arguments]
    given = dict(pairwise([part for words in pairs for part in words]))
    share = float(next((given[flag] for flag in _SHARE_FLAGS if flag in given), CACHE_SHARE))
    if config.cluster.servers:
        return config.cluster.servers, max(1, config.cluster.gpus_per_server), share
    size = int(next((given[flag] for flag in _SIZE_FLAGS if flag in given), 1))
    started = config.engine.kwargs.get("num_servers", int(config.engine.id in SERVED_ENGINES))
    return len(config.engine.url) or int(started), size, share


def server_memory(
    config: RunConfig,
    *,
    gpu_bytes: float,
    num_parameters: int,
    cache_bytes_per_token: int,
    num_heads: int,
    num_key_value_heads: int,
) -> ServerMemory:
    """Return the room of the servers that the settings ask for.

    More GPUs than heads of keys and values hold copies of them.

    Raises:
        ConfigError: the GPUs of a server do not divide the model's heads.
    """
    num_servers, size, share = servers_of(config)
    if num_servers and num_heads % size:
        fitting = [n for n in (1, 2, 4, 8, 16) if num_heads % n == 0]
        raise ConfigError(
            f"a server of {size} GPUs cannot divide the model's {num_heads} heads of attention",
            hints=[f"use one of {', '.join(map(str, fitting))} GPUs: server_args --tp-size"],
        )
    copies = max(1, size // max(1, num_key_value_heads))
    weights = 2 * num_parameters
    per_token = cache_bytes_per_token * copies
    room = max(0.0, size * share * gpu_bytes - weights)
    return ServerMemory(
        num_servers=num_servers,
        gpus_per_server=size,
        weight_bytes=weights,
        cache_bytes_per_token=per_token,
        cache_tokens=int(room / per_token) if num_servers else 0,
    )
