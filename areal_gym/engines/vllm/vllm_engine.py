"""The vLLM engine: samples a policy that vLLM serves."""

from __future__ import annotations

from areal_gym.engines.servers.server_client import ServerClient, ServerFacts
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.vllm.vllm_client import RECIPE, VLLMClient
from areal_gym.errors import ConfigError


class VLLMEngine(ServerEngine):
    """Samples a policy that vLLM serves.

    Args:
        policy: the checkpoint directory that the servers start with.
        urls: running servers; without any, `num_servers` are started here and ended by `aclose`.
        max_context: tokens of one sequence; lowered to the limit of the servers.
        interrupt: how a publication interrupts generation, "abort" or "keep".
        max_retries: retries of one call after failures of servers.
        request_timeout_s: the time limit of one request; there is no other.
        grace_s: how long calls wait when no server serves.
        health_interval_s: seconds between two health checks of each server.
        take_over: servers may hold other weights at the start; training publishes its own.
        is_guest: another process publishes to these servers, and their versions count. It must
            pause generation ("keep"), because guests do not wait for publications.
        has_adapters: as a guest, whether the servers' versions are LoRA adapters on the same
            weights, which requests must name.
        num_servers: servers to start.
        command: starts a server; `python -m vllm.entrypoints.cli.main serve` by default.
        server_args: further arguments of `command`.
        gpus: CUDA_VISIBLE_DEVICES of each started server.
        log_dir: keeps their logs; by default logs are removed when all went well.
        start_timeout_s: a started server must serve by then.
        processes: servers placed elsewhere, which this engine starts and ends.

    Raises:
        ConfigError: arguments that do not fit together.
    """

    client_class = VLLMClient
    recipe = RECIPE
    in_place = "keep"
    memory_flags = ("--enable-sleep-mode",)

    def _cannot_set_aside(self, client: ServerClient, facts: ServerFacts) -> ConfigError:
        return ConfigError(f"vLLM {facts.version} at {client.url} cannot let requests wait")
