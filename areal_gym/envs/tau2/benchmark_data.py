"""Finds and parses the benchmark's data, and tells which version of the tasks it is.

areal-gym does not contain it. It is found in the environment's argument `data_dir`, in
`TAU2_DATA_DIR` (the benchmark's own variable), or where `areal-gym data pull tau2` puts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from areal_gym.envs.tau2.airline import AirlineWorld, airline_tables
from areal_gym.envs.tau2.domain_state import Requestor, Tools, World, load_tools
from areal_gym.envs.tau2.retail import RetailWorld, retail_tables
from areal_gym.envs.tau2.telecom import TelecomWorld
from areal_gym.envs.tau2.telecom_tables import telecom_tables
from areal_gym.errors import DataError
from areal_gym.utils.cache import cache_directory

DOMAINS = ("retail", "airline", "telecom")
POLICIES = ("manual", "workflow")
"""Variants of the policy for telecom's technical support."""


class Action(NamedTuple):
    """A tool call of the task's gold solution."""

    requestor: Requestor
    name: str
    arguments: Mapping[str, Any]
    compare_args: Sequence[str] | None
    """Names of the arguments that an ACTION check compares; None: those of the compared call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One task of the benchmark, as its `tasks.json` describes it."""

    id: str
    domain: str
    instructions: Mapping[str, Any]
    """domain, reason_for_call, known_info, unknown_info, task_instructions; texts or None."""
    persona: str | None
    ticket: str | None
    """The text that a solo agent gets instead of a user."""
    initialization_actions: Sequence[Mapping[str, Any]]
    has_criteria: bool
    gold_actions: Sequence[Action]
    env_assertions: Sequence[Mapping[str, Any]]
    communicate_info: Sequence[str]
    nl_assertions: Sequence[str]
    reward_basis: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """One domain's data, shared by all episodes of the process and never changed."""

    name: str
    version: str
    """The benchmark's version of the tasks, or the hash of an unknown tasks.json."""
    make_world: Callable[[], World]
    tools: Tools
    """The tools as the models read them; what they do does not depend on their texts."""
    cases: Mapping[str, Case]
    splits: Mapping[str, Sequence[str]]
    """Split -> task ids."""
    policies: Mapping[str, str]
    """"manual" (of all domains), "workflow" and "solo" -> the policy the agent reads."""
    guidelines: str
    """Instructions for an LLM that plays the user."""
    gold_states: dict[str, tuple[object, ...]]
    """Final states of the gold solutions that were replayed before, by task id."""

    def initial_world(self, case: Case) -> World:
        """Return a world as the task finds it."""
        world = self.make_world()
        world.initialize(case.initialization_actions)
        return world

    def gold_state(self, case: Case) -> tuple[object, ...]:
        """Return the state that the gold solution leaves behind; computed once per task."""
        state = self.gold_states.get(case.id)
        if state is None:
            state = self.gold_states[case.id] = self.gold_world(case).state()
        return state

    def gold_world(self, case: Case) -> World:
        """Return a world after the gold solution: failing actions do nothing, and nothing is
        synced."""
        world = self.initial_world(case)
        for action in case.gold_actions:
            world.call(action.requestor, action.name, action.arguments, should_sync=False)
        return world


@cache
def manifest() -> Mapping[str, Any]:
    """Return `commit` and `files` (path, bytes, sha256) of the data that areal-gym was tested
    with."""
    text = resources.files(__package__).joinpath("manifest.json").read_text("utf-8")
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def pulled_data() -> Path:
    """Return the folder into which `areal-gym data pull tau2` downloads the data."""
    return cache_directory() / "data" / f"tau2-{manifest()['commit'][:12]}"


def find_data(data_dir: str | Path | None = None) -> Path:
    """Return the folder that holds `tau2/domains`.

    Args:
        data_dir: looked at first and alone, if given.

    Raises:
        DataError: there is none; the hints say how to get it.
    """
    from_environment = os.environ.get("TAU2_DATA_DIR")
    for place in (data_dir, from_environment):
        if place:
            folder = Path(place).expanduser()
            if (folder / "tau2" / "domains").is_dir():
                return folder
            raise DataError(f"{folder} holds no tau2/domains", hints=_WAYS)
    if (pulled_data() / "tau2" / "domains").is_dir():
        return pulled_data()
    raise DataError(
        "the data of tau2-bench is not here, and areal-gym does not contain it", hints=_WAYS
    )


_WAYS = (
    "get it: areal-gym data pull tau2",
    "or say where it is: export TAU2_DATA_DIR=DIR (DIR holds tau2/domains)",
    "or for one run: env.kwargs.data_dir=DIR",
    "without data there is the built-in domain: --env tau2",
)


def load_domain(name: str, data_dir: str | Path | None = None) -> Domain:
    """Parse the data of one of `DOMAINS`; once per process and folder.

    Raises:
        DataError: a missing file, or one that cannot be parsed.
    """
    return _load(name, find_data(data_dir).resolve())


@cache
def _load(name: str, folder: Path) -> Domain:
    root = folder / "tau2"
    files = root / "domains" / name
    raw_tasks = _read(files / "tasks.json")
    rows = _parse(files / "tasks.json", raw_tasks)
    cases = {}
    for number, row in enumerate(rows):
        try:
            case = _case(row, name)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{files / 'tasks.json'}, task {number}: {error!r}") from None
        cases[case.id] = case
    return Domain(
        name=name,
        version=_version_of(f"tau2/domains/{name}/tasks.json", raw_tasks),
        make_world=_world_maker(name, files),
        tools=load_tools(name),
        cases=cases,
        splits=_splits(files / "split_tasks.json", cases),
        policies=_policies(name, files),
        guidelines=_text(
            root
            / "user_simulator"
            / f"simulation_guidelines{'_tools' if name == 'telecom' else ''}.md"
        ),
        gold_states={},
    )


def _world_maker(name: str, files: Path) -> Callable[[], World]:
    if name == "telecom":
        telecom = telecom_tables(
            _parse(files / "db.toml", _read(files / "db.toml")),
            _parse(files / "user_db.toml", _read(files / "user_db.toml")),
        )
        return lambda: TelecomWorld(telecom)
    raw = _parse(files / "db.json", _read(files / "db.json"))
    if name == "retail":
        retail = retail_tables(raw)
        return lambda: RetailWorld(retail)
    airline = airline_tables(raw)
    return lambda: AirlineWorld(airline)


def _policies(name: str, files: Path) -> Mapping[str, str]:
    if name != "telecom":
        return {"manual": _text(files / "policy.md")}
    return {
        policy: _telecom_policy(_text(files / main), _text(files / support))
        for policy, main, support in (
            ("manual", "main_policy.md", "tech_support_manual.md"),
            ("workflow", "main_policy.md", "tech_support_workflow.md"),
            ("solo", "main_policy_solo.md", "tech_support_workflow_solo.md"),
        )
    }


def _telecom_policy(main: str, support: str) -> str:
    return (
        f"<main_policy>\n{main}\n</main_policy>\n"
        f"<tech_support_policy>\n{support}\n</tech_support_policy>"
    )


def _splits(file: Path, cases: Mapping[str, Case]) -> Mapping[str, Sequence[str]]:
    splits = {split: tuple(ids) for split, ids in _parse(file, _read(file)).items()}
    for split, ids in splits.items():
        unknown = [task_id for task_id in ids if task_id not in cases]
        if unknown:
            raise DataError(f"{file}: split {split!r} names the unknown task {unknown[0]!r}")
    return splits


def _case(row: Mapping[str, Any], domain: str) -> Case:
    criteria = row.get("evaluation_criteria") or {}
    initial = row.get("initial_state") or {}
    scenario = row.get("user_scenario") or {}
    return Case(
        id=row["id"],
        domain=domain,
        instructions=scenario.get("instructions") or {},
        persona=scenario.get("persona"),
        ticket=row.get("ticket"),
        initialization_actions=tuple(initial.get("initialization_actions") or ()),
        has_criteria=bool(criteria),
        gold_actions=tuple(
            Action(
                action.get("requestor") or "assistant",
                action["name"],
                action["arguments"],
                action.get("compare_args"),
            )
            for action in criteria.get("actions") or ()
        ),
        env_assertions=tuple(criteria.get("env_assertions") or ()),
        communicate_info=tuple(criteria.get("communicate_info") or ()),
        nl_assertions=tuple(criteria.get("nl_assertions") or ()),
        reward_basis=tuple(criteria.get("reward_basis") or ("DB", "COMMUNICATE")),
    )


def _version_of(path: str, raw: bytes) -> str:
    digest = hashlib.sha256(raw).hexdigest()
    known = {row["path"]: row["sha256"] for row in manifest()["files"]}
    return str(manifest()["version"]) if known.get(path) == digest else f"sha256-{digest[:12]}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hints=_WAYS) from None


def _text(file: Path) -> str:
    return _read(file).decode("utf-8")


def _parse(file: Path, raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except ValueError as error:  # also UnicodeDecodeError, JSONDecodeError, TOMLDecodeError
        raise DataError(f"{file}: {error}") from None
