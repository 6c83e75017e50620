"""Checkpoints in Hugging Face's format: a directory of `config.json` and safetensors files."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from areal_gym.errors import ConfigError, DataError, TrainError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.stored_types import read_stored_types
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.hf_config import config_from_hf
from areal_gym.utils.files import read_json

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt"),
    *("preprocessor_config.json", "processor_config.json"),
)
"""Files that `save_checkpoint` copies from `tokenizer_dir`, if they exist."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 2**30
"""The size of a file of weights, which a writer holds in memory; a larger tensor has its own."""


def load_checkpoint(
    path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Read a checkpoint directory; `families.FAMILIES` lists the supported models.

    Weights of any type are converted one by one, without more memory than the decoder's own.

    Raises:
        ConfigError: no such directory, an unsupported architecture, a tensor that is missing,
            unknown or of another shape, or a damaged file.
    """
    config, weights = read_checkpoint(path)
    decoder = Decoder(config, device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights[name])
    decoder.stored_types = read_stored_types(weight_files(Path(path)))
    return decoder


def read_checkpoint(path: Path | str) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return a checkpoint's config, and its weights as stored: mapped, not read yet.

    Raises:
        ConfigError: as `load_checkpoint`.
    """
    path = Path(path)
    facts = read_config(path)
    if is_reward_model(facts):
        raise ConfigError(
            f"{path} holds a reward model, which scores dialogues and writes none",
            hints=["name the checkpoint of a policy; a reward model grades: docs/objectives.md"],
        )
    config = config_from_hf(facts)
    return config, read_weights(path, Decoder(config, device="meta"))


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a checkpoint's `config.json`.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    return _read_json(path / "config.json")


def is_reward_model(facts: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` belongs to a model that classifies sequences."""
    return any("SequenceClassification" in name for name in facts.get("architectures") or ())


def read_weights(
    path: Path, decoder: Decoder, *, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Yield the decoder's tensors in `path`, memory-mapped; the files are not changed.

    `without` are names that only one of the two has.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape, or a file is damaged.
    """
    config = decoder.config
    parameters = decoder.named_parameters()
    shapes = {name: tuple(p.shape) for name, p in parameters if name not in without}
    weights: dict[str, Tensor] = {}
    unknown: list[str] = []
    # Those that follow from others.
    redundant = {*without, *(["lm_head.weight"] if config.tie_word_embeddings else [])}
    for file in weight_files(path):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in shapes:
                    weights[name] = tensors.get_tensor(name)
                    if (shape := tuple(weights[name].shape)) != shapes[name]:
                        raise ConfigError(
                            f"{name} in {file} has shape {shape}; "
                            f"config.json makes it {shapes[name]}"
                        )
                elif name not in redundant and not name.endswith("rotary_emb.inv_freq"):
                    unknown.append(name)
    missing = [name for name in shapes if name not in weights]
    if missing or unknown:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            for what, names in (("missing tensors", missing), ("unknown tensors", unknown))
            if names
        ]
        raise ConfigError(
            f"the weights in {path} do not fit its config.json ({'; '.join(parts)})",
            hints=[f"config.json says model_type {config.architecture!r}"],
        )
    return weights


def require_whole_weights(path: Path) -> None:
    """Check that a checkpoint's files exist and are complete.

    Raises:
        ConfigError: one is missing or damaged; the message names it.
    """
    read_config(path)
    for file in weight_files(path):
        with _opened(file):
            pass


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None


def save_checkpoint(
    policy: PolicyModel,
    path: Path | str,
    *,
    tokenizer_dir: Path | str | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a checkpoint that `from_pretrained` of transformers loads.

    It appears whole (`fresh_directory`), with the tokenizer files of the checkpoint `tokenizer_dir`
    and the contents of `extra_files` by name.

    Raises:
        TrainError: the disk is full or cannot be written; nothing half-written is left.
    """
    with fresh_directory(Path(path)) as fresh:
        write_checkpoint(policy, policy.published(), fresh, tokenizer_dir=tokenizer_dir)
        for name, content in (extra_files or {}).items():
            write_file(fresh / name, content)
    return Path(path)


def write_checkpoint(
    decoder: PolicyModel,
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    tokenizer_dir: Path | str | None = None,
) -> None:
    """Write the files of `save_checkpoint` into an existing directory.

    `weights` are the decoder's own, or copies of earlier ones.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    dtype = write_weights(weights, directory)
    write_config(decoder, dtype, directory, tokenizer_dir=tokenizer_dir)


def write_config(
    decoder: PolicyModel,
    dtype: torch.dtype,
    directory: Path,
    *,
    tokenizer_dir: Path | str | None = None,
) -> None:
    """Write what stands beside weights of type `dtype`: `config.json` and tokenizer files.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    name = str(dtype).removeprefix("torch.")
    config = _with_dtype(decoder.hf_config(), name) | {"torch_dtype": name}
    write_file(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    if tokenizer_dir is not None:
        for name in TOKENIZER_FILES:
            source = Path(tokenizer_dir) / name
            if source.is_file():
                write_file(directory / name, source.read_bytes())


def _with_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the config with `name` where it, or a part of it, has a type."""
    parts = {k: _with_dtype(v, name) if isinstance(v, dict) else v for k, v in config.items()}
    return parts | {key: name for key in ("dtype", "torch_dtype") if parts.get(key)}


def write_weights(
    weights: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> torch.dtype:
    """Write safetensors: one file, or several and an index; return the type of the first tensor.

    Tensors are taken one by one and held until `max_bytes` of them make a file. They are converted
    to `dtype` if it is given.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    num_held = num_bytes = 0
    first: torch.dtype | None = None

    def write() -> None:
        file = directory / f"model-{len(files) + 1:05d}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        _sync(file)
        files.append([*held])

    for name, tensor in weights:
        tensor = tensor.detach().to("cpu", dtype).contiguous()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # safetensors refuses tensors that share memory
        first = first or tensor.dtype
        size = tensor.numel() * tensor.element_size()
        if held and num_held + size > max_bytes:
            write()
            held, num_held = {}, 0
        held[name] = tensor
        num_held += size
        num_bytes += size
    write()
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = _SINGLE
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        (directory / f"model-{number:05d}.safetensors").rename(directory / file)
        places |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
        write_file(directory / _INDEX, (json.dumps(index, indent=2) + "\n").encode())
    return first or torch.float32


@contextmanager
def fresh_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory beside `path`, which is renamed to it at the end of the block.

    The old content of `path` is there until then; when the block fails, nothing else remains. A
    caller that writes a file in it waits until that is on disk.

    Raises:
        TrainError: the disk is full or cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    old = fresh.with_suffix(".old")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        for folder in (*filter(Path.is_dir, fresh.rglob("*")), fresh):
            _sync(folder)
        if path.exists():
            path.rename(old)
        fresh.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        if old.exists() and not path.exists():
            old.rename(path)
        reason = error.strerror if isinstance(error, OSError) else None
        hints = [
            "free some space; nothing half-written is left",
            "a run goes on from its newest checkpoint: the same command with --resume",
        ]
        if isinstance(error, FileNotFoundError):
            hints = ["was its directory deleted or moved meanwhile?"]
        raise TrainError(
            f"cannot write the checkpoint {path}: {reason or error}", hints=hints
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_file(file: Path, content: bytes) -> None:
    """Write a file, and wait until it is on disk."""
    with file.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def weight_files(path: Path) -> list[Path]:
    """Return a checkpoint's files of weights, all inside of it; they need not exist.

    Raises:
        ConfigError: there are no weights in safetensors, or the index is damaged.
    """
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    if (path / _INDEX).is_file():
        weight_map = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{path / _INDEX} has no weight_map")
        outside = [n for n in weight_map.values() if not isinstance(n, str) or Path(n).name != n]
        if outside:
            raise ConfigError(f"{path / _INDEX} names {outside[0]!r}, no file of this checkpoint")
        return [path / name for name in sorted(set(weight_map.values()))]
    others = sorted(file.name for file in path.glob("*.bin"))
    raise ConfigError(
        f"{path} holds neither {_SINGLE} nor {_INDEX}",
        hints=[f"it holds {', '.join(others)}: convert it to safetensors"] if others else [],
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        return read_json(file)
    except OSError as error:
        raise ConfigError(
            f"{file.parent} is not a checkpoint directory: cannot read {file.name} "
            f"({error.strerror})",
            hints=["a checkpoint directory holds config.json and model.safetensors"],
        ) from None
    except DataError as error:
        raise ConfigError(error.message) from None


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
