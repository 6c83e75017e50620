"""`areal-gym play`: the person is the policy. The fastest way to see why a reward is 0."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, talk
from areal_gym.errors import UsageError, did_you_mean
from areal_gym.plugins import registry
from areal_gym.types import Message
from areal_gym.utils.markup import counted, visible

if TYPE_CHECKING:
    from areal_gym.envs.base import StepResult, TextEnv

_HELP = """\
a line of text             is your answer; \\n in it starts a new line
/call TOOL ARGUMENTS       calls a tool; ARGUMENTS are JSON, or the text of its first parameter
/gold                      writes what a perfect policy would write now
/raw TEXT                  sends TEXT as it is, as a policy would (tags and all)
/tools                     shows the tools again
/quit                      leaves"""


@click.command("play")
@click.argument("env", shell_complete=complete.ids("envs"))
@click.argument(
    "settings", nargs=-1, metavar="[key=value]...", shell_complete=complete.env_arguments
)
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the task.")
@click.option("--task", type=int, help="Number of the task in its split, instead of a draw.")
@click.option("--split", default="train", show_default=True, help="Where the task comes from.")
@common_options
def play_command(
    env: str, settings: tuple[str, ...], seed: int, task: int | None, split: str
) -> None:
    """You are the policy: read, answer, see the reward and its parts.

    ENV is an id (areal-gym list envs); key=value are its arguments (areal-gym show ENV).
    """
    from areal_gym.config import parse_override

    made: TextEnv = registry().make("envs", env, **dict(map(parse_override, settings)))
    options: dict[str, Any] = {"split": split}
    if task is not None:
        options["index"] = task
    try:
        _, info = made.reset(seed=seed, options=options)
        print_data(f"{env}, task {info['task_id']}, at most {counted(made.max_turns, 'turn')}")
        _print_tools(made)
        for message in info["messages"]:
            _print_message(message)
        _play(made)
    finally:
        made.close()


def _play(env: TextEnv) -> None:
    talk("your turn; /help shows what you can type")
    total = 0.0
    while (line := _read_line()) is not None:
        try:
            action = _action(env, line)
        except UsageError as error:
            talk("\n  ".join((str(error), *error.hints)))
            continue
        if action is None:
            continue
        result = env.step(action)
        total += result.reward
        _print_step(env, result)
        if result.terminated or result.truncated:
            why = (
                "the task's own end"
                if result.terminated
                else f"a limit ({result.info['truncated_by']})"
            )
            print_data(
                f"over after {counted(env.num_turns, 'turn')}: reward {total:g}, ended by {why}"
            )
            return
    print_data(f"left after {counted(env.num_turns, 'turn')}: reward {total:g}")


def _read_line() -> str | None:
    """The next line with something in it; None at the end or for /quit."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return None
        if line.strip():
            return line.strip()


def _action(env: TextEnv, line: str) -> str | Message | None:
    """What the line means for the environment; None when it was for us."""
    command, _, rest = line.partition(" ")
    match command:
        case "/help":
            talk(_HELP)
        case "/tools":
            _print_tools(env)
        case "/gold":
            try:
                gold = env.gold_action()
            except NotImplementedError:
                raise UsageError(
                    "this environment does not say what a perfect policy would do"
                ) from None
            _print_message({"role": "assistant", "content": gold})
            return gold
        case "/raw":
            return rest.replace("\\n", "\n")
        case "/call":
            return _tool_call(env, rest)
        case _ if command.startswith("/"):
            known = ["/help", "/tools", "/gold", "/raw", "/call", "/quit"]
            near = did_you_mean(command, known)
            raise UsageError(f"no {command!r} here", hints=[near or "what you can type: /help"])
        case _:
            return line.replace("\\n", "\n")
    return None


def _tool_call(env: TextEnv, text: str) -> Message:
    name, _, raw = text.strip().partition(" ")
    tools = {tool.name: tool for tool in env.tools}
    if name not in tools:
        there = f"there is: {', '.join(tools) or 'none'}"
        raise UsageError(f"no tool {name!r}", hints=[did_you_mean(name, tools) or there])
    arguments: Any = None
    if raw.lstrip().startswith("{"):
        try:
            arguments = json.loads(raw)
        except ValueError:
            # Python code may start with a brace, too.
            arguments = None
    if not isinstance(arguments, dict):
        first = next(iter(tools[name].parameters.get("properties", {})), None)
        arguments = {} if first is None else {first: raw.replace("\\n", "\n")}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call-{env.num_turns}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        ],
    }


def _print_tools(env: TextEnv) -> None:
    for tool in env.tools:
        parameters = ", ".join(tool.parameters.get("properties", {}))
        print_data(f"tool {tool.name}({parameters}): {tool.description}")


def _print_message(message: Message) -> None:
    print_data(visible(f"[{message['role']}] {message['content']}"))


def _print_step(env: TextEnv, result: StepResult) -> None:
    for message in result.info["messages"]:
        _print_message(message)
    parts = result.info.get("reward_parts", {})
    shown = "".join(f"  {name} {value:g}" for name, value in parts.items())
    print_data(f"turn {env.num_turns}: reward {result.reward:g}{shown}")
