"""Writes docs/cli.md: `python -m areal_gym.cli.command_reference > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from areal_gym.cli.app import BUILT_IN, COMMANDS, app
from areal_gym.cli.output import EXIT_CODES

_HEAD = """# Commands

`areal-gym COMMAND --help` prints the same in the terminal. For all commands:

- **stdout is data, stderr is messages**: `areal-gym list envs --json | jq` just works. Progress and
  errors go to stderr; an error says what to type next, and shows a traceback only with `-v`.
- Commands that read take `--json`; the keys are [below](#json).
- Live displays and tables are for terminals. Pipes, `--plain`, `NO_COLOR=1` and `TERM=dumb` get
  plain lines, for a training run one per step.
- `key=value` sets one setting ([Settings](settings.md)) or one argument of an environment
  (`areal-gym show ENV`).
- TAB completes commands, options, ids, runs and settings: `areal-gym completion bash`.

This page is written by `python -m areal_gym.cli.command_reference > docs/cli.md`; a test compares.
"""

_VARIABLES = {
    "AREAL_GYM_PLUGINS": "load only these plugins, by name: `a,b`",
    "AREAL_GYM_CACHE": "the directory where small policies are cached [`~/.cache/areal-gym`]",
    "AREAL_GYM_DATA": "a directory of data sets that environments search first",
    "AREAL_GYM_IMAGES": "the directory of images by hash; a run sets it for its own processes",
    "AREAL_GYM_VERIFIERS_PYTHON": "the interpreter that has verifiers, for `--env verifiers:ID`",
    "AREAL_GYM_API_KEY": "the key of `serve`'s APIs, instead of a random one",
    "AREAL_GYM_CONTROL_KEY": "the key of the gateway's control routes",
    "AREAL_GYM_ENV_TOKEN": "the token of `serve-env`, on both sides",
    "AREAL_GYM_ENV_OWNER_KEY": "the key for gold actions of `serve-env`, on both sides",
    "AREAL_GYM_SANDBOX_MIN_LEVEL": "the weakest sandbox level that is accepted",
    "AREAL_GYM_DOCKER_RUNTIME": "the runtime of the docker sandbox's containers, such as `runsc`",
    "OPENAI_API_KEY": "the key for a server named by its URL: `eval --model URL`",
    "TAU2_DATA_DIR": "the data of `tau2`, if it is not in the cache",
    "NO_COLOR": "plain output, as `--plain`",
}
"""The environment variables that the program reads."""

_ENTRY = "id kind summary entry_point plugin distribution version missing install_command"

JSON_KEYS: Mapping[str, tuple[str, str]] = {
    "list envs": ("list", _ENTRY),
    "list algorithms": ("list", "id summary advantage loss filters"),
    "list evals": (
        "list",
        "path name env benchmark split policy sampling status started_at duration_s num_samples",
    ),
    "list runs": (
        "list",
        "path env steps is_finished status error reward heldout_before heldout_after "
        "heldout_reward_before heldout_reward_after heldout_reward_interval",
    ),
    "show ID": ("object", f"{_ENTRY} description arguments"),
    "show RUN": ("object", "run env steps status is_finished reward"),
    "plugins": ("list", "name distribution version module status hooks problems offers"),
    "compare RUN RUN": ("object", "runs settings heldout training cost steps remarks"),
    "report RUN": (
        "object",
        "title lead facts evaluations charts changed settings examples used environment",
    ),
    "doctor": ("list", "subject is_ok detail advice is_required"),
    "plan": (
        "object",
        "gpu num_gpus num_ranks rank_bytes num_servers seconds limit fits",
    ),
    "bench": ("list", "part what value unit reference is_more_better speed"),
    "view RUN --export FILE": ("object", "file bytes runs"),
    "data show ENV": (
        "object",
        "env num_tasks num_skipped num_filtered num_contaminated split tasks",
    ),
    "data check ENV": ("object", "num_train num_heldout overlaps"),
    "check ENV": ("object: a list for each environment", "rule summary is_ok reason measured"),
    "eval": (
        "object",
        "env split task_versions policy_versions temperature num_tasks num_samples num_episodes "
        "num_failed pass@1 pass@1_low pass@1_high pass^1 reward reward_low reward_high "
        "reward_parts metrics mean_turns mean_policy_tokens stop_reasons errors wall_s by_env "
        "by_role",
    ),
    "replay RUN": ("object", "num_steps checkpoint max_difference first_difference is_identical"),
}
"""What `--json` prints: one object or a list, and the keys that are always present."""


def commands_page() -> str:
    """Return the page as Markdown, with commands in the order of `areal-gym --help`."""
    parts = [_HEAD, "| command | what it does |\n|---|---|"]
    parts += [
        f"| [`areal-gym {name}`](#areal-gym-{name.replace(' ', '-')}) "
        f"| {_first_sentence(command)} |"
        for name, command in every_command()
    ]
    parts += ["", "## Exit codes\n", "| code | |\n|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    parts += ["", "## Options of every command\n", *_options(app), ""]
    titles = {name: title for title, section in COMMANDS.items() for name in section}
    before = ""
    for name, command in every_command():
        title = titles[name.split()[0]]
        if title != before:
            parts.append(f"## {title}\n")
        before = title
        parts += [f"### areal-gym {name}\n", *_command(name, command), ""]
    parts += ["## JSON\n", "Keys that are always present; there may be more.\n"]
    parts += ["| command | prints | keys |\n|---|---|---|"]
    parts += [
        f"| `areal-gym {name} --json` | {shape} | {', '.join(f'`{key}`' for key in keys.split())} |"
        for name, (shape, keys) in JSON_KEYS.items()
    ]
    parts += ["", "## Environment variables\n", "| variable | |\n|---|---|"]
    parts += [f"| `{name}` | {meaning} |" for name, meaning in _VARIABLES.items()]
    return "\n".join(parts).rstrip() + "\n"


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Yield the name of each built-in command, or subcommand (`data show`), and the command."""
    context = app.make_context("areal-gym", [], resilient_parsing=True)
    for name in BUILT_IN:
        command = app.get_command(context, name)
        assert command is not None
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        yield from ((f"{name} {word}", subcommand) for word, subcommand in inner)
        if not inner:
            yield name, command


def _first_sentence(command: click.Command) -> str:
    paragraph = inspect.cleandoc(command.help or "").split("\n\n")[0]
    return _text(paragraph).split(". ")[0].rstrip(".").replace("|", "\\|")


def _command(name: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"    areal-gym {name} {usage}\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield _text(paragraph) + "\n"
    yield from _options(command)


def _options(command: click.Command) -> Iterator[str]:
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if not options:
        return
    yield "| option | | default |\n|---|---|---|"
    for option in options:
        flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
        value = "" if option.is_flag else f" {_value(option)}"
        has_default = isinstance(option.default, str | int | float | Path) and not option.is_flag
        default = f"`{option.default}`" if has_default and option.show_default is not False else ""
        yield f"| {flags}{value} | {_text(option.help or '')} | {default} |"


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return " \\| ".join(map(str, option.type.choices))
    metavar = option.metavar or _METAVARS.get(option.type.name, option.type.name.upper())
    return metavar.replace("|", "\\|")


_METAVARS = {"integer": "N", "integer range": "N", "float range": "X", "directory": "DIR"}


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    print(commands_page(), end="")
