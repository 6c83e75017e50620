"""Reads Hugging Face checkpoints into `HFPolicy`; errors say why one cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as transformers_version
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from areal_gym.config import Layout
from areal_gym.errors import ConfigError, did_you_mean
from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.hf.hf_reward_model import HEAD, HFRewardModel, classifier_of
from areal_gym.models.hf.hf_vision import HFVision
from areal_gym.models.hf.layout_plans import require_divided, require_layout, sum_gradients_per_pass
from areal_gym.models.hf.token_mixing import NAME
from areal_gym.models.stored_types import read_stored_types
from areal_gym.models.tiny.checkpoint_files import is_reward_model as holds_reward_model
from areal_gym.models.tiny.checkpoint_files import read_config as read_config_json
from areal_gym.models.tiny.checkpoint_files import weight_files

_FLOAT32 = {"attn_implementation": NAME, "dtype": torch.float32}
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """Says how the ranks of the process group share a model's weights."""

    layout: Layout
    computes_in_bfloat16: bool = False
    """Layers are gathered and computed in bfloat16, gradients are summed in float32."""
    offloads: bool = False
    """Weights and optimizer states lie in host memory."""


def load_policy(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    sharding: Sharding | None = None,
    trusts_code: bool = False,
) -> HFPolicy:
    """Read the checkpoint in `directory`; weights are converted to `dtype`.

    With `sharding`, every rank of the process group calls this, and reads its shard only: the model
    is made without memory, laid out, and filled tensor by tensor.

    Raises:
        ConfigError: the architecture is unknown or needs code of its own, the weights are
            quantised, a file or a weight is missing, or it has no plan for expert parallelism.
    """
    directory = Path(directory)
    config = read_config(directory, trusts_code=trusts_code)
    network = _read_network(
        directory, config, network_class(config), device=device, dtype=dtype, sharding=sharding
    )
    policy = HFPolicy(network, _trunk_reader(directory, device, sharding, trusts_code))
    policy.trusts_code = trusts_code
    policy.vision = HFVision.from_checkpoint(directory, network)
    policy.stored_types = read_stored_types(weight_files(directory))
    return policy


def load_reward_model(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    sharding: Sharding | None = None,
    trusts_code: bool = False,
) -> HFRewardModel:
    """Read a reward model, or make one from a policy, with a head of zeros; else as `load_policy`.

    Raises:
        ConfigError: as `load_policy`; or the checkpoint has other than one label, or code of its
            own.
    """
    directory = Path(directory)
    config = read_config(directory, trusts_code=trusts_code)
    is_scored = holds_reward_model(read_config_json(directory))
    _require_one_reward(directory, config, is_scored)
    network = _read_network(
        directory,
        config,
        classifier_class(config),
        device=device,
        dtype=dtype,
        sharding=sharding,
        may_lack=() if is_scored else (HEAD,),
    )
    weight_1C = network.score.weight.detach()
    if isinstance(weight_1C, DTensor):
        weight_1C = weight_1C.full_tensor()
    if not is_scored:
        weight_1C = torch.zeros_like(weight_1C)
    read_trunk = _trunk_reader(directory, device, sharding, trusts_code)
    model = HFRewardModel(network, weight_1C.to(device), read_trunk)
    model.stored_types = read_stored_types(weight_files(directory))
    return model


def load_trunk(
    directory: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    sharding: Sharding,
    trusts_code: bool = False,
) -> HFPolicy:
    """Read a sharded policy for its hidden states; its output projection is left in the files.

    Raises:
        ConfigError: as `load_policy`.
    """
    config = read_config(directory, trusts_code=trusts_code)
    has_own_code = needs_own_code(config)  # no other class can be made of it
    network = _read_network(
        directory,
        config,
        network_class(config) if has_own_code else classifier_class(config),
        device=device,
        dtype=dtype,
        sharding=sharding,
        may_lack=(HEAD,),
    )
    if not has_own_code:
        network.score = nn.Identity()
    return HFPolicy(network, _trunk_reader(directory, device, sharding, trusts_code))


def _trunk_reader(
    directory: Path, device: torch.device | str, sharding: Sharding | None, trusts_code: bool
) -> Callable[..., HFPolicy] | None:
    """Return what reads a sharded model's weights again; others are copied."""
    if sharding is None:
        return None
    return partial(load_trunk, directory, device=device, sharding=sharding, trusts_code=trusts_code)


def _read_network(
    directory: Path,
    config: PretrainedConfig,
    network_class: Any,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    sharding: Sharding | None,
    may_lack: Collection[str] = (),
) -> PreTrainedModel:
    require_all_shards(directory)
    if sharding is not None:
        require_layout(config, sharding.layout)
    options = {"trust_remote_code": True} if needs_own_code(config) else {}
    try:
        with without_progress_bars():
            network, report = network_class.from_pretrained(
                directory,
                config=config,
                attn_implementation=NAME,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                distributed_config=distributed_config(sharding),
                **options,
            )
    except SafetensorError as error:
        raise ConfigError(
            f"a file of weights in {directory} is damaged: {error}",
            hints=["download the checkpoint again"],
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"{directory} cannot be read by transformers {transformers_version}: {error}"
        ) from error
    if missing := sorted(set(report["missing_keys"]) - {*may_lack}):
        raise ConfigError(
            f"{directory} lacks {len(missing)} weights of its architecture, such as {missing[0]}",
            hints=["download the checkpoint again"],
        )
    if sharding is not None:
        require_divided(network, sharding.layout)
    placed: PreTrainedModel = network if sharding is not None else network.to(device)
    return placed


def policy_without_weights(
    directory: str | Path, *, trusts_code: bool = False, is_reward_model: bool = False
) -> HFPolicy:
    """Return the model of a checkpoint on the meta device: its names and shapes, in no memory."""
    config = read_config(Path(directory), trusts_code=trusts_code)
    if is_reward_model:
        with torch.device("meta"):
            network = classifier_class(config)._from_config(config, **_FLOAT32)
            return HFRewardModel(network, network.score.weight)
    with torch.device("meta"):
        own_code = needs_own_code(config)
        return HFPolicy(
            network_class(config).from_config(config, **_FLOAT32, trust_remote_code=own_code)
        )


def classifier_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of reward models of this architecture."""
    return classifier_of(network_class(config)._model_mapping[type(config)], config)


def _require_one_reward(directory: Path, config: PretrainedConfig, is_scored: bool) -> None:
    if needs_own_code(config):
        raise ConfigError(
            f"{directory} brings code of its own for its architecture ({config.model_type}), of "
            "which no reward model can be made",
            hints=["begin with a checkpoint of an architecture that transformers has itself"],
        )
    if is_scored and config.num_labels != 1:
        raise ConfigError(
            f"{directory} holds a classifier with {config.num_labels} labels; rewards have one",
            hints=["name the checkpoint of a reward model, or of a policy to make one of"],
        )


def distributed_config(sharding: Sharding | None) -> DistributedConfig | None:
    """Return what transformers calls this sharding."""
    if sharding is None:
        return None
    layout = sharding.layout
    if layout.tensor > 1:
        sum_gradients_per_pass()
    return DistributedConfig(
        dp_replicate_size=layout.replicate,
        fsdp_size=layout.fsdp_size,
        tp_size=layout.tensor,
        ep_size=layout.expert,
        fsdp_mixed_precision=sharding.computes_in_bfloat16,
        fsdp_cpu_offload=sharding.offloads,
    )


def build_policy(config: PretrainedConfig, *, seed: int) -> HFPolicy:
    """Return a policy with fresh float32 weights that depend on `seed` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: PreTrainedModel = network_class(config).from_config(config, **_FLOAT32)
    return HFPolicy(network)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars, and tables of weights, into the display of a run."""
    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # weights that are missing are an error of ours
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def network_class(config: PretrainedConfig) -> Any:
    """Return the auto class that makes networks of this config: of text, or of text and images."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or needs_own_code(config):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def needs_own_code(config: PretrainedConfig) -> bool:
    """Return whether only code of the checkpoint itself knows the architecture."""
    return config.model_type not in CONFIG_MAPPING_NAMES


def read_config(directory: Path, *, trusts_code: bool = False) -> PretrainedConfig:
    """Return the config of a checkpoint that can be trained, without dropout.

    With `trusts_code`, code in the checkpoint may run, where transformers does not know the
    architecture.

    Raises:
        ConfigError: says what stands in the way.
    """
    facts = read_config_json(directory)
    if "model_type" not in facts:
        raise ConfigError(
            f"{directory / 'config.json'} names no model_type, so that its architecture is unknown"
        )
    model_type = str(facts["model_type"])
    has_own_code = model_type not in CONFIG_MAPPING_NAMES and "auto_map" in facts
    if has_own_code and not trusts_code:
        raise ConfigError(
            f"{directory} brings code of its own for its architecture ({model_type}), which is "
            "not run: it could do anything that you can",
            hints=[
                "if you have read it and trust it: model.trust_remote_code=true",
                "or use a checkpoint of an architecture that transformers has itself",
            ],
        )
    if model_type not in CONFIG_MAPPING_NAMES and not has_own_code:
        near = did_you_mean(model_type, CONFIG_MAPPING_NAMES)
        raise ConfigError(
            f"transformers {transformers_version} does not know the architecture {model_type!r} of "
            f"{directory}{': ' + near if near else ''}",
            hints=["a newer version may: pip install --upgrade transformers"],
        )
    if not has_own_code and not {model_type} & {
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }:
        raise ConfigError(
            f"{directory} is a {model_type} model, which does not write text token by token"
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=has_own_code
    )
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"the weights in {directory} are quantised ({method}); training needs whole ones",
            hints=["use the checkpoint in bfloat16 of the same model"],
        )
    for part in (config, config.get_text_config()):
        for name in _DROPOUTS:
            if getattr(part, name, 0):
                setattr(part, name, 0.0)
    return config


def require_all_shards(directory: Path) -> None:
    """Refuse a checkpoint whose index names files that are not there.

    Raises:
        ConfigError: names them; or there are no weights, or files outside of the checkpoint.
    """
    if not any(directory.glob("*.safetensors*")):
        raise ConfigError(
            f"{directory} holds no weights in safetensors",
            hints=["weights in other formats are not read: they may run code"],
        )
    files = weight_files(directory)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of {len(files)} files of weights: "
            f"{', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}",
            hints=["download the checkpoint again"],
        )
