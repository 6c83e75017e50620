"""The SGLang engine: samples a policy that SGLang serves."""

from __future__ import annotations

from areal_gym.engines.servers.launch import StartRecipe
from areal_gym.engines.servers.server_client import ServerClient, ServerFacts
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.errors import ConfigError


class SGLangEngine(ServerEngine):
    """Samples a policy that SGLang serves.

    Args:
        policy: the checkpoint directory that the servers start with.
        urls: running servers; without any, `num_servers` are started here and ended by `aclose`.
        max_context: tokens of one sequence; lowered to the limit of the servers.
        interrupt: how a publication interrupts generation, "abort" or "retract".
        max_retries: retries of one call after failures of servers.
        request_timeout_s: the time limit of one request; there is no other.
        grace_s: how long calls wait when no server serves.
        health_interval_s: seconds between two health checks of each server.
        take_over: servers may hold other weights at the start; training publishes its own.
        is_guest: another process publishes to these servers, and their versions count. It must
            pause generation ("retract"), because guests do not wait for publications.
        has_adapters: as a guest, whether the servers' versions are LoRA adapters on the same
            weights, which requests must name.
        num_servers: servers to start.
        command: starts a server; `python -m sglang.launch_server` by default.
        server_args: further arguments of `command`.
        gpus: CUDA_VISIBLE_DEVICES of each started server.
        log_dir: keeps their logs; by default logs are removed when all went well.
        start_timeout_s: a started server must serve by then.
        processes: servers placed elsewhere, which this engine starts and ends.

    Raises:
        ConfigError: arguments that do not fit together.
    """

    client_class = SGLangClient
    recipe = StartRecipe(
        name="sglang",
        python_arguments=("-m", "sglang.launch_server"),
        model_flag="--model-path",
    )
    in_place = "retract"
    memory_flags = ("--enable-memory-saver",)  # needs torch-memory-saver
    experts_flags = ("--enable-return-routed-experts",)

    def _cannot_set_aside(self, client: ServerClient, facts: ServerFacts) -> ConfigError:
        return ConfigError(
            f"SGLang {facts.version} at {client.url} cannot set requests aside while weights "
            "change, or while a trainer uses its GPU",
            hints=[
                "SGLang 0.5.21 and later can",
                "engine.kwargs.interrupt=abort works with every version, where only one "
                "process samples",
                "with trainer.colocate=true: trainer.colocate=false",
            ],
        )
