"""The commands as a page: `python -m areal_gym.cli.command_reference > docs/cli.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import click

from areal_gym.cli.app import COMMANDS, app
from areal_gym.cli.output import EXIT_CODES

_HEAD = """# Commands

`--help` behind a command says the same in the terminal. Everywhere:

- **stdout is data, stderr is talk**: `areal-gym list envs --json | jq` needs no cleaning. What goes
  on is said on stderr; errors are, too, with what to type next, and no traceback without `-v`.
- Read commands take `--json`; the keys are [below](#json).
- Live displays and tables are for terminals. Pipes, `--plain`, `NO_COLOR=1` and `TERM=dumb` get
  plain lines, of a training run one for each step.
- `key=value` sets one setting ([Settings](settings.md)) or one argument of an environment
  (`areal-gym show ENV`).
- TAB completes commands, options, ids, runs and settings: `areal-gym completion bash`.

This page is written by `python -m areal_gym.cli.command_reference > docs/cli.md`; a test compares.
"""

_VARIABLES = {
    "AREAL_GYM_PLUGINS": "load only these plugins, by name: `a,b`",
    "AREAL_GYM_CACHE": "where small policies are kept [`~/.cache/areal-gym`]",
    "AREAL_GYM_DATA": "a folder of data sets that environments look into first",
    "AREAL_GYM_API_KEY": "the key of `serve`'s APIs, instead of one that is made up",
    "AREAL_GYM_CONTROL_KEY": "the key of the gateway's control routes",
    "AREAL_GYM_ENV_TOKEN": "the token of `serve-env`, on both sides",
    "AREAL_GYM_ENV_OWNER_KEY": "the key for gold actions of `serve-env`, on both sides",
    "AREAL_GYM_SANDBOX_MIN_LEVEL": "the weakest level of the sandbox that is accepted",
    "AREAL_GYM_DOCKER_RUNTIME": "the runtime of the docker sandbox's containers, such as `runsc`",
    "OPENAI_API_KEY": "the key for a server that is named by its URL: `eval --model URL`",
    "TAU2_DATA_DIR": "the data of `tau2`, where it is not in the cache",
    "NO_COLOR": "plain output, as `--plain`",
}
"""What the program reads from its environment."""

_ENTRY = "id kind summary entry_point plugin distribution version missing install_command"

JSON_KEYS: Mapping[str, tuple[str, str]] = {
    "list envs": ("list", _ENTRY),
    "list algorithms": ("list", "id summary advantage loss filters"),
    "list runs": (
        "list",
        "path env steps is_finished status error reward heldout_before heldout_after",
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
        "num_failed pass@1 pass@1_low pass@1_high pass^1 reward reward_parts metrics mean_turns "
        "mean_policy_tokens stop_reasons errors wall_s by_env",
    ),
    "replay RUN": (
        "object",
        "num_steps checkpoint max_difference first_difference is_identical",
    ),
}
"""What `--json` prints: a list of objects or one, and keys that are always there."""


def commands_page() -> str:
    """Markdown: a section for each command, in the order of `areal-gym --help`."""
    parts = [_HEAD, "## Exit codes\n", "| code | |\n|---|---|"]
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
    parts += ["## JSON\n", "Keys that are always there; there may be more.\n"]
    parts += ["| command | prints | keys |\n|---|---|---|"]
    parts += [
        f"| `areal-gym {name} --json` | {shape} | {', '.join(f'`{key}`' for key in keys.split())} |"
        for name, (shape, keys) in JSON_KEYS.items()
    ]
    parts += ["", "## Environment variables\n", "| variable | |\n|---|---|"]
    parts += [f"| `{name}` | {meaning} |" for name, meaning in _VARIABLES.items()]
    return "\n".join(parts).rstrip() + "\n"


def every_command() -> Iterator[tuple[str, click.Command]]:
    """All of ours by name, those of groups among them (`data show`)."""
    context = app.make_context("areal-gym", [], resilient_parsing=True)
    for section in COMMANDS.values():
        for name in section:
            command = app.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                for inner, one in command.commands.items():
                    yield f"{name} {inner}", one
            else:
                yield name, command


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
        default = f"`{option.default}`" if option.show_default and not option.is_flag else ""
        yield f"| {flags}{value} | {_text(option.help or '')} | {default} |"


def _value(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return " \\| ".join(map(str, option.type.choices))
    metavar = option.metavar or _KINDS.get(option.type.name, option.type.name.upper())
    return metavar.replace("|", "\\|")


_KINDS = {"integer": "N", "integer range": "N", "float range": "X", "directory": "DIR"}


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    print(commands_page(), end="")
