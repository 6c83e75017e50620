"""Find models of the Hugging Face hub by name, in the hub's cache or by downloading them into it.

Only data is fetched: configs, tokenizers, templates and safetensors. Weights in other formats, and
code, stay where they are.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from areal_gym.errors import ConfigError

_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")


def is_hub_name(model: str) -> bool:
    """Return whether `model` reads as OWNER/NAME or OWNER/NAME@REVISION, and is not a path here."""
    return _NAME.fullmatch(model) is not None and not Path(model).exists()


def model_from_hub(
    model: str, say: Callable[[str], None], *, wanted: Sequence[str] = _WANTED
) -> Path:
    """Return the directory of the files of OWNER/NAME or OWNER/NAME@REVISION.

    Files that the cache lacks are downloaded, after a line to `say`; `wanted` are patterns of
    their names.

    Raises:
        ConfigError: the hub has no such model, does not give it to us, or cannot be reached.
    """
    name, _, revision = model.partition("@")
    if find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"engine.model = {model!r} is a name on the Hugging Face hub, and huggingface_hub is "
            "not installed",
            hints=["pip install 'areal-gym[train]'", *_by_hand(name)],
        )
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
        files = {
            file.rfilename: file.size or 0
            for file in info.siblings or ()
            if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in wanted)
        }
        cached = _snapshot(name, info.sha, wanted)
        if cached is not None and all((cached / file).is_file() for file in files):
            return cached
        say(
            f"{model}: downloading {sum(files.values()) / 1e9:.2f} GB from the Hugging Face hub "
            f"into its cache, {_cache_folder()}; an interrupted download goes on where it stopped"
        )
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(wanted)))
    except GatedRepoError as error:
        raise ConfigError(
            f"the hub gives {name} only to those who have accepted its terms",
            hints=[f"accept them on its page ({name} on the hub), then: hf auth login"],
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{name} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"engine.model = {model!r} is neither a directory here nor a model on the Hugging Face "
            "hub that we may see",
            hints=["is the name spelled right?", "a private model needs: hf auth login"],
        ) from error
    except Exception as error:  # network errors are those of whichever package the client uses
        # Without the hub, what an earlier run has downloaded will do.
        kept = _snapshot(name, revision or None, wanted)
        has_weights = kept is not None and any(kept.glob("*.safetensors"))
        if kept is None or ("*.safetensors" in wanted and not has_weights):
            raise ConfigError(
                f"{model} is not in the cache, and the Hugging Face hub cannot be reached: {error}",
                hints=[*_cached_hints(name), *_by_hand(name)],
            ) from error
        say(f"{model}: from the cache, {kept}; the hub cannot be reached")
        return kept


def _cache_folder() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _cached_hints(name: str) -> list[str]:
    """Return a hint on the models that the cache holds with weights, near names first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except (CacheNotFound, OSError, ValueError):
        repositories = frozenset()
    names = [
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and any(
            file.file_name.endswith(".safetensors")
            for revision in repository.revisions
            for file in revision.files
        )
    ]
    if not names:
        return [f"the cache, {_cache_folder()}, holds no model"]
    close = difflib.get_close_matches(name, names, n=len(names), cutoff=0.5)
    names = [*close, *sorted(set(names) - set(close))]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [f"the cache, {_cache_folder()}, holds: {', '.join(names[:8])}{more}"]


def _snapshot(name: str, revision: str | None, wanted: Sequence[str]) -> Path | None:
    """Return the cached files of a revision; None if there are none, or not all."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(wanted), local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, OSError):
        return None


def _by_hand(name: str) -> list[str]:
    directory = name.rpartition("/")[2]
    return [
        f"where there is a network: hf download {name} --local-dir {directory}",
        f"then: engine.model={directory}",
    ]
