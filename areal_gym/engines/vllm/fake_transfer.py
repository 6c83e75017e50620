"""The fake vLLM server's weight transfer, which works like areal-gym's worker extension."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from areal_gym.engines.servers.fake_server import FakeServer
from areal_gym.engines.servers.fake_tensors import read_weights, receive


class RefusedWeightsError(ValueError):
    """The weights are not those of the served model, which is unchanged."""


class FakeTransfer:
    """A session of updates, and the process group that tensors come from."""

    def __init__(self, server: FakeServer) -> None:
        self.is_torn = False
        """Whether a session ended without all weights; the next request then ends the server."""
        self._server = server
        self._group: Any = None
        self._tensors: dict[str, Any] | None = None

    async def load_directory(self, directory: str) -> int:
        """Load a checkpoint; return its number of tensors."""
        tensors = await asyncio.to_thread(read_weights, Path(directory))
        if not tensors:
            raise RefusedWeightsError(f"no *.safetensors in {directory}")
        self._require_same(tensors, is_whole=True)
        await self._server.load(tensors)
        self.is_torn = False
        return len(tensors)

    async def join(self, info: dict[str, Any]) -> None:
        """Join the trainer's group."""
        from areal_gym.models.process_groups import join_group

        await self.leave()
        if info.get("master_address"):
            self._group = await asyncio.to_thread(
                join_group,
                info["master_address"],
                info["master_port"],
                rank=info["rank_offset"],
                world_size=info["world_size"],
                name=info["group_name"],
                backend=info["group_backend"],
                timeout_s=info["timeout_s"],
            )

    async def leave(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(dist.destroy_process_group, group)

    def start(self) -> None:
        """Begin a session."""
        if self._tensors is not None:
            raise ValueError("start_weight_update called while a weight update is already active.")
        self._tensors = {}

    async def update(self, info: dict[str, Any]) -> None:
        """Take the tensors of a directory, or of one broadcast; a failure ends the session."""
        if self._tensors is None:
            raise ValueError("start_weight_update must be called before update_weights.")
        before, self._tensors = self._tensors, None
        is_open, self.is_torn = bool(before), self.is_torn or bool(before)
        if info.get("directory") is not None:
            new = await asyncio.to_thread(read_weights, Path(info["directory"]))
            if not new:
                raise RefusedWeightsError(f"no *.safetensors in {info['directory']}")
        else:
            facts = (info["names"], info["dtype_names"], info["shapes"], "flattened_bucket")
            new = await asyncio.to_thread(receive, self._group, *facts)
        self._require_same(new, is_whole=info.get("directory") is not None)
        self._tensors = {**before, **new}
        self.is_torn = self.is_torn and not is_open

    async def finish(self) -> None:
        """Load the tensors that have been received."""
        tensors, self._tensors = self._tensors, None
        if tensors is None:
            raise ValueError("finish_weight_update called without a matching start_weight_update.")
        if tensors:
            self.is_torn = True
            self._require_same(tensors, is_whole=True)
            await self._server.load(tensors)
            self.is_torn = False

    def _require_same(self, tensors: dict[str, Any], *, is_whole: bool) -> None:
        served = read_weights(Path(self._server.model_path))
        names = tensors.keys() | served.keys() if is_whole else tensors.keys()
        for name in sorted(names if served else ()):
            new = tuple(tensors[name].shape) if name in tensors else "missing"
            old = tuple(served[name].shape) if name in served else "missing"
            if new != old:
                raise RefusedWeightsError(
                    f"the served model has other tensors: {name}: {new} instead of {old}"
                )
