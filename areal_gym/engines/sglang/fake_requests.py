"""Request bodies of the control routes that only the fake SGLang server has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from areal_gym.engines.server_requests import Name, Request


class AbortRequest(Request):
    """The body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseGeneration(Request):
    """The body of `/pause_generation`."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class WeightsOnDisk(Request):
    """The body of `/update_weights_from_disk`."""

    model_path: Name
    weight_version: Name | None = None


class SerializedTensors(Request):
    """The body of `/update_weights_from_tensor`."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1)]
    load_format: str | None = None
    weight_version: Name | None = None


class InitGroup(Request):
    """The body of `/init_weights_update_group`."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=0, lt=2**15)]
    world_size: Annotated[int, Field(ge=1, lt=2**15)]
    group_name: Name
    backend: str


class DistributedTensors(Request):
    """The body of `/update_weights_from_distributed`."""

    names: list[Name]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, lt=2**40)]]]
    group_name: Name
    weight_version: Name | None = None


class DestroyGroup(Request):
    """The body of `/destroy_weights_update_group`."""

    group_name: Name


class NewVersion(Request):
    """The body of `/update_weight_version`."""

    new_version: Name


class LoadAdapter(Request):
    """The body of `/load_lora_adapter`."""

    lora_name: Name
    lora_path: Name


class UnloadAdapter(Request):
    """The body of `/unload_lora_adapter`."""

    lora_name: Name
