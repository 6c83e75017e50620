"""The vLLM engine: samples a policy that vLLM serves."""

from __future__ import annotations

from areal_gym.engines.servers.server_client import ServerClient, ServerFacts
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.vllm.vllm_client import RECIPE, VLLMClient
from areal_gym.errors import ConfigError


class VLLMEngine(ServerEngine):
    """Samples a policy that vLLM serves; `interrupt` is "abort" or "keep"."""

    client_class = VLLMClient
    recipe = RECIPE
    in_place = "keep"
    memory_flags = ("--enable-sleep-mode",)

    def _cannot_set_aside(self, client: ServerClient, facts: ServerFacts) -> ConfigError:
        return ConfigError(f"vLLM {facts.version} at {client.url} cannot let requests wait")
