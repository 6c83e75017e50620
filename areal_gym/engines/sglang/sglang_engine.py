"""The SGLang engine: samples a policy that SGLang serves."""

from __future__ import annotations

from areal_gym.engines.servers.launch import StartRecipe
from areal_gym.engines.servers.server_client import ServerClient, ServerFacts
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.errors import ConfigError


class SGLangEngine(ServerEngine):
    """Samples a policy that SGLang serves; `interrupt` is "abort" or "retract"."""

    client_class = SGLangClient
    recipe = StartRecipe(
        name="sglang",
        python_arguments=("-m", "sglang.launch_server"),
        model_flag="--model-path",
        # Features of an image under old weights outlive updates and `/flush_cache`.
        environment={"SGLANG_VLM_CACHE_SIZE_MB": "0"},
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
