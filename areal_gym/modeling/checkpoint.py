"""Checkpoints in Hugging Face's layout: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from areal_gym.errors import ConfigError, TrainError
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Decoder

__all__ = ["TOKENIZER_FILES", "load_checkpoint", "save_checkpoint"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What belongs to a checkpoint besides the weights, where it exists."""

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def load_checkpoint(
    directory: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Read a Qwen2-, Qwen3- or Llama-shaped checkpoint.

    Raises:
        ConfigError: no checkpoint there, another architecture, or tensors are missing, left over
            or of another shape; names them.
    """
    directory = Path(directory)
    config = DecoderConfig.from_hf(_read_config(directory))
    decoder = Decoder(config, device=device, dtype=dtype)
    wanted = decoder.state_dict()
    missing = set(wanted)
    unknown: list[str] = []
    for file in _weight_files(directory):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping, only named like one
                    if name in wanted:
                        source = tensors.get_tensor(name)
                        if source.shape != wanted[name].shape:
                            raise ConfigError(
                                f"{file}: {name} has the shape {tuple(source.shape)}, but "
                                f"config.json makes it {tuple(wanted[name].shape)}"
                            )
                        wanted[name].copy_(source)
                        missing.discard(name)
                    elif not _is_ignored(name, config):
                        unknown.append(name)
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged: {error}") from None
    if missing or unknown:
        raise ConfigError(
            f"{directory} does not fit its config.json: "
            + "; ".join(
                f"{len(names)} tensors {what} ({', '.join(sorted(names)[:3])}, ...)"
                for what, names in (("missing", missing), ("left over", unknown))
                if names
            )
        )
    return decoder


def save_checkpoint(
    decoder: Decoder,
    directory: Path | str,
    *,
    tokenizer_dir: Path | str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write what `transformers.AutoModelForCausalLM.from_pretrained` loads.

    The directory appears whole or not at all; one that exists is replaced.

    Args:
        decoder: the policy.
        directory: where to.
        tokenizer_dir: a checkpoint whose tokenizer files are copied along.
        extra_files: further contents by file name.

    Raises:
        TrainError: the disk is full or not writable.
    """
    directory = Path(directory)
    draft: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        draft.chmod(0o755)
        config = decoder.config.to_hf()
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: t.detach().cpu().contiguous() for name, t in decoder.state_dict().items()}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES:
            if tokenizer_dir is not None and (Path(tokenizer_dir) / name).exists():
                shutil.copyfile(Path(tokenizer_dir) / name, draft / name)
        for name, content in (extra_files or {}).items():
            (draft / name).write_bytes(content)
        for file in draft.iterdir():
            _sync(file)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
            os.rename(directory, old / "replaced")
            os.rename(draft, directory)
            shutil.rmtree(old)
        else:
            os.rename(draft, directory)
        _sync(directory.parent)
    except (OSError, SafetensorError) as error:
        raise TrainError(
            f"cannot write the checkpoint {directory}: {error}",
            hints=["free some space, or choose another place with --out DIR"],
        ) from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _read_config(directory: Path) -> dict[str, object]:
    file = directory / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} is no checkpoint: there is no config.json",
            hints=["name a directory that holds config.json and *.safetensors"],
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no settings")
    return config


def _weight_files(directory: Path) -> Iterator[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (directory / name).exists():
            raise ConfigError(
                f"{directory} has no {name}",
                hints=["only safetensors are read; save_pretrained() of transformers writes them"],
            )
        yield directory / name


def _is_ignored(name: str, config: DecoderConfig) -> bool:
    is_copy = name == "lm_head.weight" and config.tie_word_embeddings
    return is_copy or name.endswith(_IGNORED_SUFFIXES)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
