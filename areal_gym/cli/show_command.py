"""`areal-gym show`."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.list_command import evaluation_card
from areal_gym.cli.options import common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.errors import GymError, UnknownIdError, UsageError, did_you_mean
from areal_gym.plugins import KINDS, BenchmarkSpec, Entry, EnvSpec, Spec, registry
from areal_gym.plugins.registry import as_kind
from areal_gym.run_dir.evaluations import EVALUATION_FILE, Evaluation
from areal_gym.types import readable
from areal_gym.utils.markup import visible

if TYPE_CHECKING:
    from areal_gym.envs.benchmarks import Benchmark

BENCHMARK_FACTS = (
    *("env", "env_kwargs", "split", "num_tasks", "prompt", "grader"),
    *("compares_with", "licence", "tested"),
)


@click.command("show")
@click.argument("id", shell_complete=complete.any_id)
@click.option(
    "--kind",
    shell_complete=complete.one_of(*KINDS),
    help="The kind, if several kinds have the id: envs, losses, ...",
)
@json_option()
@common_options
def show_command(id: str, kind: str | None, as_json: bool) -> None:
    """Show an environment, an agent, a loss, ..., a run or an evaluation in detail."""
    path = Path(id)
    is_run = kind is None and (path / "config.yaml").is_file()
    is_evaluation = kind is None and not is_run and (path / EVALUATION_FILE).is_file()
    entry = None if is_run or is_evaluation else _find(id, kind)
    if entry is not None:
        card = _card(entry)
    else:
        card = _run_card(path) if is_run else evaluation_card(Evaluation.open(path).info)
    if as_json:
        print_json(card)
    elif entry is None:
        print_columns([(name, _in_words(value)) for name, value in card.items()])
    else:
        _print_card(card, entry.spec)


def _find(id: str, kind: str | None) -> Entry:
    if kind is not None:
        return registry().get(as_kind(kind), id)
    if ":" in id:  # an adapter's environments are not listed
        return registry().get("envs", id)
    kinds = [name for name in KINDS if any(e.id == id for e in registry().entries(name))]
    if not kinds:
        _refuse_path(id)
        from areal_gym.envs.benchmarks.left_out import require_not_left_out

        require_not_left_out(id)
        known = {entry.id for name in KINDS for entry in registry().entries(name)}
        near = did_you_mean(id, sorted(known))
        hints = [near, "see all: areal-gym list", *registry().absences()]
        raise UnknownIdError(f"nothing has the id {id!r}", hints=hints)
    if len(kinds) > 1:
        talk(f"{id!r} is also in {', '.join(kinds[1:])}: areal-gym show {id} --kind {kinds[1]}")
    return registry().get(kinds[0], id)


def _refuse_path(id: str) -> None:
    """Raise UsageError for an id that looks like a path, but is not that of a run directory."""
    from areal_gym.run_dir.run_list import no_run_hints

    path = Path(id)
    if path.is_dir():
        raise UsageError(f"{path} is not a run directory", hints=no_run_hints(path))
    if path.parent != Path() and (path.parent.is_dir() or path.parts[0] == "runs"):
        raise UsageError(f"there is no run {path}", hints=no_run_hints(path))


def _card(entry: Entry) -> dict[str, Any]:
    card = entry.to_dict()
    if entry.missing:
        return card
    target = entry.load()
    card["description"] = _description(target)
    card["arguments"] = _arguments(entry, target)
    if isinstance(entry.spec, BenchmarkSpec):
        return card | _benchmark_facts(target)
    if isinstance(entry.spec, EnvSpec):
        from areal_gym._gymnasium import gymnasium_id

        card["gymnasium_id"] = gymnasium_id(entry.spec)
        card["tags"] = list(entry.spec.tags)
        try:
            card |= _sample(entry)
        except GymError as error:
            card["sample_error"] = str(error)
    return card


def _description(target: Any) -> str:
    """Return the docstring, with the arguments of the base class whose `__init__` is inherited."""
    own = inspect.getdoc(target) or ""
    base = next((cls for cls in getattr(target, "__mro__", ()) if "__init__" in vars(cls)), None)
    _, _, arguments = (inspect.getdoc(base) or "").partition("\nArgs:\n")
    if base in (None, target) or not arguments or "\nArgs:\n" in own:
        return own
    return f"{own}\n\nArgs:\n{arguments}"


def _benchmark_facts(benchmark: Benchmark) -> dict[str, Any]:
    """Return the attributes of a benchmark as JSON values."""
    facts = {name: getattr(benchmark, name) for name in (*BENCHMARK_FACTS, "sampling")}
    data = benchmark.data
    return {**facts, "description": "", "source": "" if data is None else data.source}


def _arguments(entry: Entry, target: Any) -> list[dict[str, Any]]:
    if not callable(target):
        return []
    given = dict(getattr(entry.spec, "kwargs", {}))
    rows = []
    for name, parameter in inspect.signature(target).parameters.items():
        is_required = parameter.default is parameter.empty and name not in given
        default = given.get(name, None if is_required else parameter.default)
        type_ = "" if parameter.annotation is parameter.empty else parameter.annotation
        if not isinstance(type_, str):
            type_ = getattr(type_, "__name__", str(type_))
        row = {"name": name, "type": type_, "default": _shown(default)}
        rows.append(row | {"is_required": is_required})
    return rows


def _shown(value: Any) -> Any:
    """Convert a default to a JSON value: a tuple becomes a list, an object its `repr`."""
    if isinstance(value, tuple | list):
        return [_shown(item) for item in value]
    is_plain = value is None or isinstance(value, str | int | float | bool)
    return value if is_plain else repr(value)


def _sample(entry: Entry) -> dict[str, Any]:
    env = registry().make("envs", entry.id)
    try:
        _, info = env.reset(seed=0)
        return {
            "max_turns": env.max_turns,
            **({"roles": list(env.roles)} if env.roles else {}),
            "tools": [tool.schema()["function"] for tool in env.tools],
            "sample_task": info["task"],
            "sample_messages": list(info["messages"]),
        }
    finally:
        env.close()


def _run_card(path: Path) -> dict[str, Any]:
    from areal_gym.run_dir.run_dir import RunDir
    from areal_gym.run_dir.run_list import run_info

    info = run_info(path)
    run = RunDir(path)
    status = run.status
    card: dict[str, Any] = {"status": status}
    if (record := run.read_status()) is not None and status != "finished":
        card |= {
            "error": record.error if status == "failed" else None,
            "next": "; ".join(record.advice(path)),
            "process": f"{record.pid} on {record.host}",
            "started": record.started_at,
            "last_sign": record.updated_at,
        }
    return {
        "run": str(path),
        "env": info.env_id,
        "steps": info.num_steps,
        **{name: value for name, value in card.items() if value},
        "is_finished": info.is_finished,
        "reward": info.reward,
        **info.summary,
    }


def _in_words(value: Any) -> str:
    match value:
        case None | [] | "":
            return "-"
        case dict() if not value:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list():
            return " to ".join(map(_in_words, value))  # an interval
        case dict():
            return ", ".join(
                f"{key} ({_in_words(v)})" if isinstance(v, dict) else f"{key} {_in_words(v)}"
                for key, v in value.items()
            )
    return str(value)


def _print_card(card: dict[str, Any], spec: Spec) -> None:
    print_data(f"{card['id']}: {card['summary']}")
    source = f", from {card['distribution']} {card['version']}" if card["version"] else ""
    print_data(f"{card['kind']} of plugin {card['plugin']}{source} ({card['entry_point']})")
    if card["missing"]:
        print_data(f"needs: {card['install_command']}")
    if "gymnasium_id" in card:
        print_data(f"gymnasium.make({card['gymnasium_id']!r})")
    if card.get("description"):
        print_data("\n" + card["description"])
    if isinstance(spec, BenchmarkSpec):
        names = (*BENCHMARK_FACTS, "sampling", "source")
        print_columns([(name.replace("_", " "), _in_words(card[name])) for name in names])
        print_data(f"\nmeasure it: areal-gym eval --benchmark {card['id']} --model MODEL")
    if card.get("arguments"):
        setting = spec.set_by.format(id=card["id"])
        print_data(f"\narguments{f', set by {setting}' if setting else ''}:")
        required = "from the run" if spec.takes_from_run else "required"
        rows = []
        for row in card["arguments"]:
            value = required if row["is_required"] else f"default {row['default']!r}"
            rows.append((row["name"], row["type"], value))
        print_columns(rows, indent="  ")
    if card.get("tools"):
        print_data("\ntools:")
        for tool in card["tools"]:
            parameters = ", ".join(tool["parameters"].get("properties", {}))
            print_data(f"  {tool['name']}({parameters}): {tool['description']}")
    if "sample_messages" in card:
        print_data(f"\na task ({card['sample_task']['id']}, split {card['sample_task']['split']}):")
        for message in card["sample_messages"]:
            text = visible(f"[{message['role']}] {readable(message['content'])}")
            print_data(textwrap.indent(text, "  "))
        print_data(f"\nplay it yourself: areal-gym play {card['id']}")
    if "sample_error" in card:
        print_data(f"\nno sample task: {card['sample_error']}")
