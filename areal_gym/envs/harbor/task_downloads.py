"""Downloads data sets that are git repositories, once, into the cache.

    OWNER/NAME@REF             a repository on GitHub; REF is a tag, a branch or a commit
    https://HOST/PATH@REF      any other that git can reach

Without @REF, the default branch counts. What a tag or a branch meant at first use is kept, so that
the same name stands for the same tasks until its file in the cache is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from areal_gym.errors import DataError
from areal_gym.utils.cache import cache_directory

_GIT_S = 600.0
_HOST = "https://github.com"
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(@(?P<ref>[\w][\w./-]*))?")
_URL = re.compile(
    r"(?P<url>(https?|ssh|file)://[^@\s]+(?:@[^@/\s]+[^@\s]*)?)@(?P<ref>[\w][\w./-]*)"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def downloaded(path: str) -> Path | None:
    """Return the folder of a repository that `path` names; None if it names none.

    A path that exists here is never a repository's name.

    Raises:
        DataError: the repository or the reference cannot be fetched.
    """
    if Path(path).expanduser().exists():
        return None
    if match := _URL.fullmatch(path):
        url, ref = match["url"], match["ref"]
    elif match := _NAME.fullmatch(path):
        url, ref = f"{_HOST}/{match['name']}", match["ref"] or "HEAD"
    else:
        return None
    if _COMMIT.fullmatch(ref):
        return checkout(url, ref)
    return checkout(url, _commit_of(url, ref))


def _commit_of(url: str, ref: str) -> str:
    """Return the commit that a tag or a branch stood for at its first use."""
    folder = cache_directory() / "harbor" / "refs"
    file = folder / hashlib.sha256(f"{url} {ref}".encode()).hexdigest()[:20]
    if file.is_file():
        return file.read_text("utf-8").split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    failure = f"the data set {url} cannot be fetched"
    rows = _git(("ls-remote", url, ref, f"{ref}^{{}}"), folder, failure).splitlines()
    # A tag with a text of its own is followed by the commit that it names.
    commits = {name: commit for commit, _, name in (row.partition("\t") for row in rows)}
    names = (f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}", ref)
    commit = next((commits[name] for name in names if name in commits), None)
    if commit is None:
        raise DataError(f"{url} has no tag and no branch {ref!r}")
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(f"{commit} {url} {ref}\n", "utf-8")
    draft.replace(file)
    return commit


def checkout(url: object, commit: object) -> Path:
    """Return a folder with that commit of a repository, which is fetched once; or DataError."""
    # A URL that begins with "-" would be an option, and "ext::" runs a command.
    is_safe = isinstance(url, str) and not url.startswith("-") and "::" not in url
    if not is_safe or not isinstance(commit, str) or not commit.isalnum():
        raise DataError(f"git_url {url!r} with git_commit_id {commit!r} cannot be fetched")
    key = hashlib.sha256(f"{url} {commit}".encode()).hexdigest()[:20]
    target = cache_directory() / "harbor" / key
    if target.is_dir():
        return target
    partial = target.with_name(f"{key}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        for command in (
            ("init", "-q"),
            ("fetch", "-q", "--depth=1", str(url), commit),
            ("checkout", "-q", "--force", "FETCH_HEAD"),
        ):
            _git(command, partial, f"commit {commit} of {url} cannot be fetched")
    except DataError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)
    return target


def _git(arguments: Sequence[str], folder: Path, failure: str) -> str:
    """Run git and return its output; `failure` begins the DataError if it fails."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        result = subprocess.run(
            ("git", *arguments),
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
        )
    except FileNotFoundError:
        raise DataError(f"{failure}: git is not installed") from None
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise DataError(
            f"{failure}: {lines[-1] if lines else error}",
            hints=[
                "is there a network, and does the repository exist? it is needed at first use only",
                "or clone it yourself and give the folder: --env harbor:FOLDER",
            ],
        ) from None
    return result.stdout
