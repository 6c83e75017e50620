"""The HTTP requests around a broadcast, for each kind of server."""

from __future__ import annotations

from typing import Any, Protocol

from areal_gym.errors import ConfigError, EngineError
from areal_gym.trainer.weight_sync.flat_buckets import FlatBucket
from areal_gym.trainer.weight_sync.rank_posts import request, server_info

_QUICK_S = 30.0


class BroadcastWire(Protocol):
    """The routes and request bodies of a kind of server."""

    @property
    def join_route(self) -> str:
        """The route that lets workers join a group."""

    @property
    def update_route(self) -> str:
        """The route that lets workers take part in a broadcast and load its tensors."""

    @property
    def leave_route(self) -> str:
        """The route that lets workers leave the group."""

    def num_workers(self, url: str) -> int:
        """Return how many processes of a server take part.

        Raises:
            EngineError: a broadcast does not reach all of them.
        """

    def invitation(
        self, place: dict[str, Any], name: str, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Return the body that invites a server's workers to a group."""

    def announcement(self, bucket: FlatBucket, name: str, version: int) -> dict[str, Any]:
        """Return the body that announces the next broadcast."""


class SGLangWire:
    """Broadcasts to SGLang's workers."""

    join_route = "/init_weights_update_group"
    update_route = "/update_weights_from_distributed"
    leave_route = "/destroy_weights_update_group"

    def num_workers(self, url: str) -> int:
        """Return the number of tensor-parallel workers, the only ones that SGLang gives weights.

        Raises:
            EngineError: the server's layers are spread over processes.
        """
        info = server_info(url)
        num_tensor, num_stages = (int(info.get(key) or 1) for key in ("tp_size", "pp_size"))
        if num_stages > 1:
            raise EngineError(
                f"{url} runs {num_stages} pipeline stages, whose workers a broadcast does not "
                "reach one by one",
                hints=["trainer.weight_sync=disk"],
            )
        return num_tensor

    def invitation(
        self, place: dict[str, Any], name: str, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Return the body that invites a server's workers to a group."""
        return {**place, "group_name": name, "backend": backend}

    def announcement(self, bucket: FlatBucket, name: str, version: int) -> dict[str, Any]:
        """Return the body that announces the next broadcast; the last one has the version."""
        body = bucket.description() | {"group_name": name, "flush_cache": bucket.is_last}
        return body | ({"weight_version": str(version)} if bucket.is_last else {})


class VLLMWire:
    """Broadcasts to vLLM's workers, which run areal-gym's worker extension."""

    join_route = "/init_weight_transfer_engine"
    update_route = "/update_weights"
    leave_route = "/shutdown_weight_transfer_engine"

    def num_workers(self, url: str) -> int:
        """Return the number of all workers; each takes its part of the weights."""
        answer = request("GET", url, "/get_world_size", timeout_s=_QUICK_S)
        return int(answer["world_size"])

    def invitation(
        self, place: dict[str, Any], name: str, backend: str, timeout_s: float
    ) -> dict[str, Any]:
        """Return the body that invites a server's workers to a group."""
        group = {"group_name": name, "group_backend": backend, "timeout_s": timeout_s}
        return {"init_info": {**place, **group}}

    def announcement(self, bucket: FlatBucket, name: str, version: int) -> dict[str, Any]:
        """Return the body that announces the next broadcast."""
        description = bucket.description()
        fields = {"names": "names", "dtype_names": "dtypes", "shapes": "shapes"}
        return {"update_info": {theirs: description[ours] for theirs, ours in fields.items()}}


_WIRES: dict[str, BroadcastWire] = {"sglang": SGLangWire(), "vllm": VLLMWire()}


def wire_of(protocol: str) -> BroadcastWire:
    """Return the requests for servers with this protocol.

    Raises:
        ConfigError: broadcasts are not supported for such servers.
    """
    if protocol not in _WIRES:
        raise ConfigError(
            f"trainer.weight_sync=distributed does not reach servers of {protocol!r}",
            hints=[f"it reaches those of {', '.join(_WIRES)}", "trainer.weight_sync=disk"],
        )
    return _WIRES[protocol]
