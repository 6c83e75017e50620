"""Reads a task folder: `task.toml`, instructions, image, tests and solution.

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh  cheat/solve.sh
    steps/NAME/{instruction.md, tests/, solution/, workdir/setup.sh}    instead, with [[steps]]

Every problem of a folder is found before one is reported. Folders come from other people: a link
that leads out of the folder and a file that is not a regular one are refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pydantic import ValidationError

from areal_gym.envs.harbor.task_toml import (
    MAIN_SERVICE,
    Agent,
    Artifact,
    Environment,
    Healthcheck,
    TaskToml,
    Verifier,
)
from areal_gym.errors import DataError, did_you_mean
from areal_gym.utils.files import path_hints

TASK_FILE = "task.toml"
MOST_TEXT = 2**20
"""The limit of an instruction and of `task.toml`, in bytes."""
MOST_FILES = 20_000
"""The limit of files and folders in a task."""
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
T = TypeVar("T", Agent, Verifier)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


@dataclass(frozen=True, kw_only=True)
class TaskStep:
    """One instruction and its tests; a task without `[[steps]]` has exactly one, without a name."""

    name: str
    instruction: str
    agent: Agent
    verifier: Verifier
    tests: tuple[Path, ...]
    """Folders that become `/tests`, in this order: the task's own, then the step's."""
    solution: Path | None
    """The folder with the `solve.sh` that earns the full reward."""
    workdir: Path | None = None
    """A folder that is copied to the working directory before the step; `setup.sh` is run there."""
    artifacts: tuple[Artifact, ...] = ()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task folder that was read and can be played."""

    id: str
    folder: Path
    toml: TaskToml = field(repr=False)
    steps: tuple[TaskStep, ...] = field(repr=False)
    digest: str
    """A hash of all files of the folder, their names and modes."""
    notes: tuple[str, ...] = ()
    """What a user should know about how the task is played."""

    @property
    def environment(self) -> Environment:
        """The table `[environment]`."""
        return self.toml.environment

    @property
    def image_folder(self) -> Path:
        """The folder with the Dockerfile."""
        return self.folder / "environment"

    @property
    def cheat(self) -> Path | None:
        """The folder with a `solve.sh` that earns a reward without work if it can; or None."""
        folder = self.folder / "cheat"
        return folder if (folder / "solve.sh").is_file() else None


def load_task(folder: str | Path) -> HarborTask:
    """Read and check a task folder.

    Raises:
        DataError: it cannot be used; the hints name each problem with its file and key.
    """
    folder = Path(folder).resolve()  # an episode may start in another directory
    problems: list[str] = []
    if not (folder / TASK_FILE).is_file():
        raise DataError(
            f"{folder} is not a task: it has no {TASK_FILE}",
            hints=path_hints(folder) or [_closest_name(folder)],
        )
    digest = _digest(folder, problems)
    toml = _read_toml(folder, problems) if not problems else None
    steps: list[TaskStep] = []
    if toml is not None:
        problems += unsupported(toml, folder)
        steps = list(_steps(folder, toml, problems))
    if problems or toml is None:
        count = f"{len(problems)} problems" if len(problems) > 1 else "one problem"
        raise DataError(f"the task {folder} has {count}: {problems[0]}", hints=problems[1:])
    return HarborTask(
        id=toml.task.name if toml.task else folder.resolve().name,
        folder=folder,
        toml=toml,
        steps=tuple(steps),
        digest=digest,
        notes=tuple(_notes(toml)),
    )


def resolved_env(values: Mapping[str, str], where: str) -> dict[str, str]:
    """Return environment variables with `${VAR}` and `${VAR:-default}` taken from this process.

    Raises:
        DataError: a variable without a default is not set.
    """
    resolved = {}
    for name, value in values.items():
        template = _TEMPLATE.fullmatch(value)
        if template is not None:
            variable, default = template.groups()
            taken = os.environ.get(variable, default)
            if taken is None:
                raise DataError(
                    f"{where}: {name} is taken from the variable {variable}, which is not set",
                    hints=[f"export {variable}=..., or write ${{{variable}:-a default}}"],
                )
            value = taken
        resolved[name] = value
    return resolved


def unsupported(toml: TaskToml, folder: Path) -> list[str]:
    """Return what the task asks for and areal-gym does not do, each with file and key."""
    refusals = [
        f"environment/{name}: tasks of several containers are not supported; "
        "put everything into one Dockerfile"
        for name in _COMPOSE
        if (folder / "environment" / name).exists()
    ]
    if (folder / "trajectory.json").exists():
        refusals.append("trajectory.json: tasks that begin in a dialogue are not supported")
    tables = {"environment": toml.environment}
    verifiers = {"verifier": toml.verifier}
    artifacts = {"artifacts": toml.artifacts}
    for index, step in enumerate(toml.steps):
        verifiers[f"steps.{index}.verifier"] = step.verifier
        artifacts[f"steps.{index}.artifacts"] = step.artifacts
    for key, verifier in verifiers.items():
        if verifier.environment is not None:
            tables[f"{key}.environment"] = verifier.environment
        refusals += [
            f"{TASK_FILE}: {key}.collect.{index}.service = {hook.service!r}: there is only "
            f"{MAIN_SERVICE!r}; tasks of several containers are not supported"
            for index, hook in enumerate(verifier.collect)
            if hook.service != MAIN_SERVICE
        ]
    for key, entries in artifacts.items():
        refusals += [
            f"{TASK_FILE}: {key}.{index}.service = {entry.service!r}: there is only "
            f"{MAIN_SERVICE!r}; tasks of several containers are not supported"
            for index, entry in enumerate(entries)
            if entry.service not in (None, MAIN_SERVICE)
        ]
    for key, environment in tables.items():
        refusals += [f"{TASK_FILE}: {key}.{reason}" for reason in _refused_keys(environment)]
    return refusals


def _refused_keys(environment: Environment) -> Iterator[str]:
    if environment.os == "windows":
        yield "os = 'windows': only Linux containers are supported"
    if environment.gpus:
        yield f"gpus = {environment.gpus}: containers have no GPU; remove the key to go without"
    if environment.gpu_types and environment.gpus is None:
        yield "gpu_types: containers have no GPU; remove the key to go without"
    if environment.tpu is not None:
        yield "tpu: containers have no TPU; remove the table to go without"


def _notes(toml: TaskToml) -> Iterator[str]:
    mode = toml.environment.network_mode
    if mode in ("public", "allowlist"):
        yield f"environment.network_mode = {mode!r}: it is played without a network"
    if toml.environment.skills_dir is not None:
        yield "environment.skills_dir is for agents that are programs: the shell agent ignores it"


# ---- files ---------------------------------------------------------------------------------------


def _digest(folder: Path, problems: list[str]) -> str:
    """Return the hash of the files; note links out of the folder and special files."""
    root = folder.resolve()
    digest = hashlib.sha256()
    num_entries = 0
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(names + files):
            path = Path(directory, name)
            place = path.relative_to(root)
            num_entries += 1
            if num_entries > MOST_FILES:
                problems.append(f"it has more than {MOST_FILES:,} files")
                return ""
            mode = path.lstat().st_mode
            digest.update(f"{os.fsencode(place)!r} {stat.S_IMODE(mode):o} ".encode())
            if stat.S_ISLNK(mode):
                target = os.readlink(path)
                if not path.resolve().is_relative_to(root):
                    problems.append(f"{place}: a link out of the task's folder, to {target!r}")
                digest.update(f"link {os.fsencode(target)!r}".encode())
            elif stat.S_ISREG(mode):
                try:
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
                except OSError as error:
                    problems.append(f"{place}: cannot be read ({error.strerror})")
            elif not stat.S_ISDIR(mode):
                problems.append(f"{place}: neither a file, nor a folder, nor a link")
    return digest.hexdigest()


def _text(file: Path, folder: Path, problems: list[str]) -> str | None:
    """Return the text of a small UTF-8 file; else note why it has none."""
    place = file.relative_to(folder)
    if not file.is_file():
        problems.append(f"{place}: the file is missing")
        return None
    if file.stat().st_size > MOST_TEXT:
        problems.append(f"{place}: larger than {MOST_TEXT:,} bytes")
        return None
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        problems.append(f"{place}: not UTF-8 at byte {error.start}")
        return None
    if not text.strip():
        problems.append(f"{place}: the file is empty")
        return None
    return text


def _read_toml(folder: Path, problems: list[str]) -> TaskToml | None:
    text = _text(folder / TASK_FILE, folder, problems)
    if text is None:
        return None
    try:
        return TaskToml.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{TASK_FILE}: not valid TOML: {error}")
    except RecursionError:
        problems.append(f"{TASK_FILE}: nested too deeply")
    except ValidationError as error:
        problems += [f"{TASK_FILE}: {_readable(entry)}" for entry in error.errors()]
    return None


def _readable(entry: Any) -> str:
    """Return a problem of pydantic's in our words: the key, then what is wrong."""
    key = ".".join(str(part) for part in entry["loc"] if part not in ("str", "int", "float"))
    if entry["type"] != "extra_forbidden":
        message = entry["msg"].removeprefix("Value error, ")
        return f"{key}: {message[:1].lower()}{message[1:]}" if key else message
    table: Any = TaskToml
    for part in entry["loc"][:-1]:
        table = _table_below(table, part)
    known = list(table.model_fields)
    close = did_you_mean(str(entry["loc"][-1]), known)
    return f"{key}: there is no such key; {close or 'known: ' + ', '.join(known)}"


def _table_below(table: Any, part: object) -> Any:
    """Return the model of a key of a table; an index of a list stays in its model."""
    if not isinstance(part, str) or part not in table.model_fields:
        return table
    annotation = table.model_fields[part].annotation
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if hasattr(candidate, "model_fields"):
            return candidate
    return table


def _steps(folder: Path, toml: TaskToml, problems: list[str]) -> Iterator[TaskStep]:
    """Yield the steps, the only one of a task without `[[steps]]` included."""
    _check_image(folder, toml.environment, problems)
    shared = folder / "tests"
    if not toml.steps:
        instruction = _text(folder / "instruction.md", folder, problems)
        _check_tests((shared,), folder, problems)
        yield TaskStep(
            name="",
            instruction=instruction or "",
            agent=toml.agent,
            verifier=toml.verifier,
            tests=(shared,),
            solution=_solution(folder, folder, problems),
            artifacts=_artifacts(toml.artifacts, toml, problems),
        )
        return
    if (folder / "instruction.md").exists():
        problems.append("instruction.md: a task with steps has one in each folder of steps/")
    for step in toml.steps:
        place = folder / "steps" / step.name
        tests = tuple(tests for tests in (shared, place / "tests") if tests.is_dir())
        _check_tests(tests or (place / "tests",), folder, problems)
        instruction = _text(place / "instruction.md", folder, problems)
        yield TaskStep(
            name=step.name,
            instruction=instruction or "",
            agent=_overridden(toml.agent, step.agent),
            verifier=_overridden(toml.verifier, step.verifier),
            tests=tests,
            solution=_solution(place, folder, problems),
            workdir=place / "workdir" if (place / "workdir").is_dir() else None,
            artifacts=_artifacts([*toml.artifacts, *step.artifacts], toml, problems),
            min_reward=step.min_reward,
            healthcheck=step.healthcheck,
        )


def _overridden(table: T, step: T) -> T:
    """Return the task's table with what the step says instead."""
    return table.model_copy(update={name: getattr(step, name) for name in step.model_fields_set})


def _check_image(folder: Path, environment: Environment, problems: list[str]) -> None:
    file = folder / "environment" / "Dockerfile"
    if environment.docker_image is None and not file.is_file():
        problems.append(
            f"environment/Dockerfile: the file is missing, and {TASK_FILE} names no "
            "environment.docker_image"
        )


def _check_tests(folders: Sequence[Path], folder: Path, problems: list[str]) -> None:
    if not any((tests / "test.sh").is_file() for tests in folders):
        place = folders[-1].relative_to(folder)
        is_windows = any((tests / "test.bat").is_file() for tests in folders)
        reason = "; test.bat is for Windows" if is_windows else ""
        problems.append(f"{place}/test.sh: the file is missing{reason}")


def _solution(place: Path, folder: Path, problems: list[str]) -> Path | None:
    solution = place / "solution"
    if not solution.exists():
        return None
    if not (solution / "solve.sh").is_file():
        problems.append(f"{solution.relative_to(folder)}/solve.sh: the file is missing")
    return solution


def _artifacts(
    artifacts: Sequence[Artifact], toml: TaskToml, problems: list[str]
) -> tuple[Artifact, ...]:
    """Return the artifacts with absolute sources; relative ones are below the working directory."""
    absolute = []
    for artifact in artifacts:
        source = PurePosixPath(artifact.source)
        if not source.is_absolute():
            if toml.environment.workdir is None:
                problems.append(
                    f"{TASK_FILE}: artifacts: {artifact.source!r} is a relative path, and there is "
                    "no environment.workdir"
                )
                continue
            source = PurePosixPath(toml.environment.workdir) / source
        absolute.append(artifact.model_copy(update={"source": str(source)}))
    return tuple(absolute)


def _closest_name(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    close = did_you_mean(TASK_FILE, (path.name for path in folder.iterdir()))
    return close or f"a task has {TASK_FILE}, instruction.md, environment/ and tests/"
