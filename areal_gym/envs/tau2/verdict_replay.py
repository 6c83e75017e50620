"""Replays a folder of recorded verdicts against this implementation: `areal-gym check tau2`.

The folder's format is that of the parity fixtures: one task or one probe per line, gzipped, with
the texts, hashes and verdicts that the benchmark gave. Nothing is compared by looking it up.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_gym.envs.tau2.actions import parse_action, to_functional
from areal_gym.envs.tau2.benchmark_data import DOMAINS, Case, Domain, load_domain
from areal_gym.envs.tau2.domain_state import World, load_tools
from areal_gym.envs.tau2.simulation import Call, Simulation, Transcript, Verdict
from areal_gym.envs.tau2.sources import without_descriptions
from areal_gym.envs.tau2.telecom import TelecomWorld
from areal_gym.envs.tau2.users.base import STOP, ScriptedUser, UserTurn
from areal_gym.errors import DataError, NothingToDoError
from areal_gym.tasks.opening import read_rows

Row = Mapping[str, Any]
_MAX_EXAMPLES = 20
_NO_LIMIT = 1_000_000


@dataclass(slots=True)
class Agreement:
    """Counts how far one domain (or "actions") agrees with the recordings."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    num_differences: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every comparison agrees."""
        return self.num_differences == 0

    def compare(self, what: str, where: str, expected: Any, got: Any) -> None:
        """Count one comparison."""
        self.counts[what] = self.counts.get(what, 0) + 1
        if expected != got:
            self.num_differences += 1
            if len(self.examples) < _MAX_EXAMPLES:
                self.examples.append(f"{where}: {what}: expected {expected!r}, got {got!r}")


def replay(
    folder: Path, *, domains: Sequence[str] = DOMAINS, data_dir: str | Path | None = None
) -> list[Agreement]:
    """Replay the recordings in the folder: NothingToDoError if none, DataError if one is broken."""
    agreements = []
    schemas_file = folder / "tool_schemas.json"
    schemas = _Row(schemas_file.name, _json(schemas_file)) if schemas_file.exists() else {}
    for name in domains:
        tasks, probes = folder / f"{name}.jsonl.gz", folder / f"probes-{name}.jsonl.gz"
        if not (tasks.exists() or probes.exists() or name in schemas):
            continue
        agreement = Agreement(name)
        domain = load_domain(name, data_dir)
        if name in schemas:
            _compare_domain(agreement, domain, schemas[name])
        with asyncio.Runner() as runner:
            for where, row in _rows(tasks):
                case = _case(domain, row["task_id"], where)
                runner.run(_compare_task(agreement, domain, case, row))
        for where, row in _rows(probes):
            _compare_probe(agreement, domain, where, row)
        agreements.append(agreement)
    actions = folder / "action_parser.json"
    if actions.exists():
        agreements.append(_compare_actions([row for _, row in _rows(actions)]))
    if not agreements:
        files = "retail.jsonl.gz, probes-retail.jsonl.gz, tool_schemas.json, ..."
        raise NothingToDoError(
            f"{folder} has no fixtures of {', '.join(domains)}", hints=[f"it should hold {files}"]
        )
    return agreements


class _Row(dict[str, Any]):
    """One line of a file, which names missing keys."""

    def __init__(self, where: str, row: Any) -> None:
        if not isinstance(row, dict):
            raise DataError(f"{where}: a fixture is a JSON object, not {type(row).__name__}")
        super().__init__(row)
        self._where = where

    def __missing__(self, key: str) -> Any:
        raise DataError(f"{self._where}: this fixture has no {key!r}")


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from None


def _rows(file: Path) -> Iterator[tuple[str, Row]]:
    for row in read_rows(file) if file.exists() else ():
        yield row.where, _Row(row.where, row.data)


def _case(domain: Domain, task_id: str, where: str) -> Case:
    case = domain.cases.get(task_id)
    if case is None:
        raise DataError(
            f"{where}: {domain.name} {domain.version} has no task {task_id!r}",
            hints=["the fixtures and the data are of different versions"],
        )
    return case


# ---- tools, policies, fresh databases -----------------------------------------------------------


def _compare_domain(agreement: Agreement, domain: Domain, row: Row) -> None:
    tools = load_tools(domain.name)
    for side in ("assistant", "user"):
        expected = row.get(side) or {}
        agreement.compare("tool names", side, list(expected), list(tools[side]))
        for name, tool in expected.items():
            info = tools[side].get(name)
            recorded = _structure(tool["type"], tool["mutates_state"], tool["openai_schema"])
            own = info and _structure(info.kind, info.mutates, info.schema)
            agreement.compare("tool schemas (without descriptions)", name, recorded, own)
    policy = domain.policies["manual"]
    expected = (row["policy_sha256"], row["policy_chars"])
    agreement.compare("policies", domain.name, expected, (_sha256(policy), len(policy)))
    _compare_hashes(agreement, "fresh", row["fresh_hashes"], domain.make_world())


def _structure(kind: str, mutates: bool, schema: Mapping[str, Any]) -> str:
    """Return a text, because the order counts: models read it."""
    return json.dumps([kind, mutates, without_descriptions(schema)])


# ---- tasks --------------------------------------------------------------------------------------


async def _compare_task(agreement: Agreement, domain: Domain, case: Case, row: Row) -> None:
    agreement.counts["tasks"] = agreement.counts.get("tasks", 0) + 1
    _compare_hashes(agreement, f"{case.id} fresh", row["fresh"], domain.make_world())
    _compare_hashes(agreement, f"{case.id} initial", row["initial"], domain.initial_world(case))
    gold = _calls(row["gold_actions"])
    last = row["variants"]["gold"]["says"][-1]
    for name, variant in row["variants"].items():
        where = f"{case.id} {name}"
        if "calls" not in variant:  # the gold actions, and "Done." instead of the last text
            _, verdict = await _play(domain, case, gold, "Done.")
            _compare_verdict(agreement, where, variant, verdict)
            continue
        farewell = variant["says"][-1] if len(variant["says"]) > 1 else None
        simulation, verdict = await _play(domain, case, _calls(variant["calls"]), farewell)
        for call, result in zip(variant["calls"], simulation.results, strict=True):
            here = f"{where} {call['name']}"
            agreement.compare("tool results", here, (call["content"], call["error"]), result)
        counts = {"steps": simulation.num_steps, "num_errors": simulation.num_errors}
        texts = {"says": simulation.says, "termination": simulation.termination}
        for key, got in (texts | counts).items():
            agreement.compare("conversations", f"{where} {key}", variant[key], got)
        _compare_verdict(agreement, where, variant, verdict)
        for key in ("predicted", "live"):
            if key in variant:
                _compare_hashes(agreement, f"{where} {key}", variant[key], simulation.world)
        if "target" in variant:
            gold_world = domain.gold_world(case)
            _compare_hashes(agreement, f"{where} target", variant["target"], gold_world)
    for variant in row["drop_each"]:
        index = variant["index"]
        _, verdict = await _play(domain, case, gold[:index] + gold[index + 1 :], last)
        _compare_verdict(agreement, f"{case.id} without action {index}", variant, verdict)


def _calls(rows: Sequence[Row]) -> list[Call]:
    return [Call(row["requestor"], row["name"], row["arguments"]) for row in rows]


async def _play(
    domain: Domain, case: Case, calls: Sequence[Call], last: str | None
) -> tuple[Simulation, Verdict]:
    """Play a recorded conversation; `last` is the assistant's last text, None: it says nothing."""
    turns = []
    for call in calls:
        if call.requestor == "user":
            turns += [UserTurn(calls=[(call.name, call.arguments)]), UserTurn("I did it.")]
    opening = STOP if last is None else "Hello, I need help."
    user = ScriptedUser.factory(opening, turns)
    simulation = Simulation(domain, case, user, max_steps=_NO_LIMIT, max_errors=_NO_LIMIT)
    simulation.open()
    for call in calls:
        if call.requestor == "user":
            await simulation.say(f"Please do: {call.name}")
        else:
            simulation.call([call])
    if last is not None:
        await simulation.say(last)
    return simulation, await simulation.verdict(_Lenient())


class _Lenient:
    """The judge of the recorded verdicts: every assertion is met."""

    async def judge(self, transcript: Transcript, assertions: Sequence[str]) -> list[bool] | None:
        return [True] * len(assertions)


_CHECKS = ("env_assertions", "action_checks", "communicate_checks")
_VERDICT_KEYS = ("reward", "breakdown", "db_match", *_CHECKS)


def _compare_verdict(agreement: Agreement, where: str, row: Row, verdict: Verdict) -> None:
    # Where the benchmark draws a random bill id, only the comparison without it says anything.
    expected = {key: row[key] for key in _VERDICT_KEYS if key in row}
    if "db_match_canonical" in row:
        expected["db_match"] = row["db_match_canonical"]
    got = {key: getattr(verdict, key) for key in expected}
    agreement.compare("verdicts", where, expected, got)


# ---- probes -------------------------------------------------------------------------------------


def _compare_probe(agreement: Agreement, domain: Domain, where: str, row: Row) -> None:
    agreement.counts["probes"] = agreement.counts.get("probes", 0) + 1
    task_id = row.get("initial_state_of_task")
    case = _case(domain, task_id, where) if task_id else None
    world = domain.initial_world(case) if case else domain.make_world()
    for number, call in enumerate(row["calls"]):
        result = world.call(call["requestor"], call["name"], call["arguments"])
        here = f"{row['probe_id']} call {number} {call['name']}"
        text = _rename_new_bills(world, result.text)
        # Python's own words about wrong arguments are no part of the benchmark.
        expected = (text if call.get("python_text") else call["content"], call["error"])
        agreement.compare("tool results", here, expected, (text, result.is_error))
        hashes = {"db_canonical": call["db"], "user_db_canonical": call.get("user_db")}
        _compare_hashes(agreement, here, hashes, world)


# ---- hashes, with new bills renamed --------------------------------------------------------------


def _compare_hashes(agreement: Agreement, where: str, row: Row, world: World) -> None:
    """Compare canonical hashes, which do not depend on random ids."""
    got = [text and _sha256(_rename_new_bills(world, text)) for text in world.texts()]
    expected = [row["db_canonical"], row.get("user_db_canonical")]
    agreement.compare("hashes", where, expected, got)


@lru_cache(maxsize=8)  # most hashes are those of an unchanged database
def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _rename_new_bills(world: World, text: str) -> str:
    if isinstance(world, TelecomWorld):
        for number, bill_id in enumerate(world.carrier.new_bill_ids, start=1):
            text = text.replace(bill_id, f"B_NEW{number}")
    return text


# ---- action strings ------------------------------------------------------------------------------


def _compare_actions(rows: Sequence[Row]) -> Agreement:
    agreement = Agreement("actions")
    for row in rows:
        where = repr(row["action"])
        try:
            parsed = parse_action(row["action"])
        except ValueError as error:
            expected = row.get("message", "no error")
            agreement.compare("action strings", where, expected, str(error))
            continue
        if row.get("tool_calls"):
            # Who calls is not compared: an action must not choose it (see `actions`).
            (call,) = row["tool_calls"]
            got = (parsed.name, json.loads(json.dumps(parsed.arguments)))
            agreement.compare("action strings", where, (call["name"], call["arguments"]), got)
            functional = to_functional(parsed.name, parsed.arguments)
            agreement.compare("action strings", where, row["functional"], functional)
        else:
            agreement.compare("action strings", where, row.get("content"), parsed.content)
    return agreement
