"""Makes a task folder from a commit of a git repository: the agent repairs what it repaired.

    environment/repo/   the files before the change      -> /app in the image
    tests/files/        the tests and their settings as the change has them
    tests/grade.py      runs them as another user, and decides
    solution/files/     the files that the change wrote

The image holds no history, so the change cannot be read from it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from areal_gym.envs.harbor.task_folder import MOST_FILES
from areal_gym.errors import DataError, UsageError

_SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "conftest.py")
_PLAIN_BYTES = 60_000
_NAME = re.compile(r"[^a-z0-9]+")
_GRADER = Path(__file__).with_name("swe_grade.py")

_DOCKERFILE = """\
ARG BASE_IMAGE=python:3.12-slim
FROM ${{BASE_IMAGE}}
LABEL areal-gym.packages="{packages}"
# Local places have the packages of the label; elsewhere they are installed.
RUN python3 -c "import pytest" || python3 -m pip install --no-cache-dir {packages}
{commands}WORKDIR /app
COPY repo/ /app/
"""
_TASK = """\
schema_version = "1.4"
artifacts = ["/app"]

[task]
name = {name}
description = {description}
keywords = ["software-engineering"]

[metadata]
commit = {commit}
tests = {tests}

[environment]
network_mode = "no-network"
workdir = "/app"
memory_mb = {memory_mb}

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = {timeout_s}
environment_mode = "separate"
"""
_TEST = "#!/bin/sh\nexec python3 -I /tests/grade.py\n"


@dataclass(frozen=True, kw_only=True)
class SweImport:
    """Describes the task to make.

    Without a `patch`, the commit is the change: the agent starts from its parent, and the tests
    are as the commit has them. With one, the agent starts from the commit, and the patch is the
    change: of the program, and of the tests if they are not there yet.
    """

    repository: Path
    commit: str
    tests: tuple[str, ...]
    """Tests that fail before and pass after, as pytest names them: FILE or FILE::TEST."""
    patch: Path | None = None
    instruction: str | None = None
    """What the agent is told; None: the message of the commit."""
    name: str | None = None
    packages: tuple[str, ...] = ("pytest",)
    """Packages that the tests need."""
    commands: tuple[str, ...] = ()
    """Commands of the image's build, such as the installation of what is no Python package."""
    memory_mb: int = 2048
    timeout_s: float = 600.0


def import_swe(wanted: SweImport, target: Path) -> Path:
    """Write a task folder below `target`; return it.

    Raises:
        UsageError: a test, or the name, cannot be used; the folder is there.
        DataError: git, the commit or the patch fails; the change touches nothing but tests.
    """
    if not wanted.tests:
        raise UsageError("a task needs a test that fails", hints=["--test tests/test_x.py"])
    try:
        commit = _git(wanted.repository, "rev-parse", "--verify", f"{wanted.commit}^{{commit}}")
    except DataError as error:
        raise DataError(
            f"{wanted.repository} has no commit {wanted.commit!r}: {error.message}"
        ) from None
    commit = commit.strip()
    subject, _, body = _git(wanted.repository, "show", "-s", "--format=%B", commit).partition("\n")
    name = wanted.name or f"swe/{wanted.repository.resolve().name.lower()}-{commit[:10]}"
    folder = target / _NAME.sub("-", name.rpartition("/")[2].lower()).strip("-")
    if folder.exists():
        raise UsageError(f"{folder} is there already", hints=["choose another --to or --name"])
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch, "before"), Path(scratch, "after")
        base = commit if wanted.patch else f"{commit}^"
        _export(wanted.repository, base, before)
        if wanted.patch is None:
            _export(wanted.repository, commit, after)
        else:
            shutil.copytree(before, after, symlinks=True)
            _git(after, "apply", "-p1", str(wanted.patch.resolve()), is_repository=False)
        _write(wanted, folder, before, after, facts={"name": name, "commit": commit})
    text = wanted.instruction or f"{subject}\n\n{body.strip()}".strip()
    names = "\n".join(f"- `{test}`" for test in wanted.tests)
    (folder / "instruction.md").write_text(
        f"The repository in /app has a problem or lacks something:\n\n{text}\n\n"
        f"Change the program so that this holds. Tests will check it, like these:\n\n{names}\n"
    )
    return folder


def _write(
    wanted: SweImport, folder: Path, before: Path, after: Path, *, facts: dict[str, str]
) -> None:
    roots = _test_roots(wanted.tests, after)
    changed = sorted(_changed(before, after))
    program = [path for path in changed if not _is_test(path, roots)]
    if not program:
        raise DataError(
            f"{facts['commit'][:12]} changes nothing but tests: {', '.join(changed) or 'nothing'}",
            hints=["name the commit that repairs the program, or give its change by --patch"],
        )
    tests = {path for root in roots for path in _files(after, root)}
    tests |= {path for path in _files(after, ".") if Path(path).name in _SETTINGS}
    environment, solution = folder / "environment", folder / "solution"
    shutil.copytree(before, environment / "repo", symlinks=True)
    for path in sorted(tests):
        _copy(after / path, folder / "tests" / "files" / path)
    removed = [path for path in program if not (after / path).is_file()]
    written = [path for path in program if path not in removed]
    lines = ["#!/bin/sh", "set -e", *_solution(after, written, solution)]
    lines += [f"rm -f '/app/{path}'" for path in removed]
    (solution / "solve.sh").write_text("\n".join(line for line in lines if line) + "\n")
    packages = " ".join(wanted.packages)
    commands = "".join(f"RUN {command}\n" for command in wanted.commands)
    (environment / "Dockerfile").write_text(
        _DOCKERFILE.format(packages=packages, commands=commands)
    )
    (folder / "tests" / "test.sh").write_text(_TEST)
    shutil.copyfile(_GRADER, folder / "tests" / "grade.py")
    expected = {"tests": list(wanted.tests), "roots": roots, "settings": list(_SETTINGS)}
    (folder / "tests" / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    subject = f"A change of {wanted.repository.resolve().name} at {facts['commit'][:12]}."
    (folder / "task.toml").write_text(
        _TASK.format(
            name=json.dumps(facts["name"]),
            description=json.dumps(subject),
            commit=json.dumps(facts["commit"]),
            tests=json.dumps(list(wanted.tests)),
            memory_mb=wanted.memory_mb,
            timeout_s=wanted.timeout_s,
        )
    )
    num_files = sum(1 for path in folder.rglob("*"))
    if num_files > MOST_FILES:
        shutil.rmtree(folder)
        raise DataError(f"the repository has too many files for a task: {num_files}")


def _solution(after: Path, written: Sequence[str], target: Path) -> list[str]:
    """Write the files of the solution; return the commands that bring them to /app.

    A solution is played by one command of bounded length, so many files are packed.
    """
    target.mkdir(parents=True)
    if sum((after / path).stat().st_size for path in written) > _PLAIN_BYTES:
        with tarfile.open(target / "files.tar.gz", "w:gz") as tar:
            for path in written:
                tar.add(after / path, path)
        return ["python3 -m tarfile -e /solution/files.tar.gz /app"]
    for path in written:
        _copy(after / path, target / "files" / path)
    return ["cp -R /solution/files/. /app/"] if written else []


def _test_roots(tests: Sequence[str], after: Path) -> list[str]:
    """Return the folders of tests, or files at the top, that are restored for the verification."""
    roots = set()
    for test in tests:
        path = test.partition("::")[0]
        if not (after / path).is_file():
            raise UsageError(
                f"{test}: the change has no file {path}",
                hints=["name tests as pytest does, from the top of the repository: FILE::TEST"],
            )
        parts = Path(path).parts
        # The outermost folder that is called tests, else the file alone.
        depth = next((n for n, part in enumerate(parts) if part in ("tests", "test")), None)
        roots.add(str(Path(*parts[: depth + 1])) if depth is not None else path)
    return sorted(roots)


def _is_test(path: str, roots: Sequence[str]) -> bool:
    is_below = any(path == root or path.startswith(f"{root}/") for root in roots)
    return is_below or Path(path).name == "conftest.py"


def _changed(before: Path, after: Path) -> Iterator[str]:
    """Yield the files that differ between two trees."""
    names = {*_files(before, "."), *_files(after, ".")}
    for name in names:
        pair = [before / name, after / name]
        if not all(path.is_file() for path in pair) or len({p.read_bytes() for p in pair}) > 1:
            yield name


def _files(tree: Path, root: str) -> Iterator[str]:
    top = tree / root
    paths = [top] if top.is_file() else sorted(top.rglob("*"))
    for path in paths:
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(tree))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _export(repository: Path, commit: str, target: Path) -> None:
    """Write the files of a commit below a folder."""
    archive = _run(["git", "-C", str(repository), "archive", "--format=tar", commit])
    target.mkdir()
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")


def _git(folder: Path, *arguments: str, is_repository: bool = True) -> str:
    if is_repository and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder with a git repository")
    return _run(["git", "-C", str(folder), *arguments]).decode("utf-8", "replace")


def _run(command: Sequence[str]) -> bytes:
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise DataError("git is not installed", hints=["install git"]) from None
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode("utf-8", "replace").strip()
        raise DataError(f"{' '.join(command[:4])}: {text[-500:]}") from None
