"""`areal-gym play`: a person plays in place of the policy, to see why a reward is 0."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli.options import Options, common_options
from areal_gym.cli.output import print_data, talk
from areal_gym.cli.own_task import env_with_arguments
from areal_gym.errors import UsageError, choices, did_you_mean
from areal_gym.message_types import images_of
from areal_gym.plugins import registry
from areal_gym.types import Message, ToolCall, readable
from areal_gym.utils.markup import counted, visible

if TYPE_CHECKING:
    from areal_gym.envs.base import StepResult, TextEnv

_HELP = """\
TEXT                       send your answer; \\n in it starts a new line
/call TOOL ARGUMENTS       call a tool; ARGUMENTS are JSON, or the text of its first parameter
/gold                      send what a perfect policy would send now
/raw TEXT                  send TEXT unchanged, with its tags, as a policy would
/tools                     show the tools again
/quit                      leave"""


@click.command("play")
@env_with_arguments()
@click.option("--seed", type=int, default=0, help="Seed of the task.")
@click.option("--task", type=int, help="Index of the task in its split, instead of a random one.")
@click.option("--split", default="train", help="The split of the task.")
@common_options
def play_command(
    env: str, settings: Mapping[str, Any], seed: int, task: int | None, split: str
) -> None:
    """Play an environment in place of the policy: read, answer, see the reward and its parts.

    ENV is an id (areal-gym list envs); key=value are its arguments (areal-gym show ENV).
    """
    instance: TextEnv = registry().make("envs", env, **settings)
    options = {"split": split} if task is None else {"split": split, "index": task}
    try:
        _, info = instance.reset(seed=seed, options=options)
        print_data(f"{env}, task {info['task_id']}, at most {counted(instance.max_turns, 'turn')}")
        _print_tools(instance)
        for message in info["messages"]:
            _print_message(message)
        _play(instance)
    finally:
        instance.close()


def _play(env: TextEnv) -> None:
    talk("your turn; /help lists the commands")
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
            limit = f"a limit ({result.info['truncated_by']})" if result.truncated else ""
            turns, cause = counted(env.num_turns, "turn"), limit or "the environment"
            print_data(f"over after {turns}: reward {total:g}, ended by {cause}")
            return
    print_data(f"left after {counted(env.num_turns, 'turn')}: reward {total:g}")


def _read_line() -> str | None:
    """Read the next line that is not empty; None at the end of input or for /quit."""
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
    """Turn the line into an action; None if it was a command for this program."""
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
                raise UsageError("this environment has no gold actions") from None
            _print_message({"role": "assistant", "content": gold})
            return gold
        case "/raw":
            return rest.replace("\\n", "\n")
        case "/call":
            return _tool_call(env, rest)
        case _ if command.startswith("/"):
            known = ["/help", "/tools", "/gold", "/raw", "/call", "/quit"]
            hint = did_you_mean(command, known) or "see all: /help"
            raise UsageError(f"no command {command!r}", hints=[hint])
        case _:
            return line.replace("\\n", "\n")
    return None


def _tool_call(env: TextEnv, text: str) -> Message:
    name, _, raw = text.strip().partition(" ")
    tools = {tool.name: tool for tool in env.tools}
    if name not in tools:
        raise UsageError(f"no tool {name!r}", hints=choices(name, tools))
    arguments: Any = None
    with contextlib.suppress(ValueError):  # a text, perhaps code that starts with a brace
        arguments = json.loads(raw)
    if not isinstance(arguments, dict):
        first = next(iter(tools[name].parameters.get("properties", {})), None)
        arguments = {} if first is None else {first: raw.replace("\\n", "\n")}
    call: ToolCall = {
        "id": f"call-{env.num_turns}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _print_tools(env: TextEnv) -> None:
    for tool in env.tools:
        parameters = ", ".join(tool.parameters.get("properties", {}))
        print_data(f"tool {tool.name}({parameters}): {tool.description}")


def _print_message(message: Message) -> None:
    content = message["content"]
    print_data(visible(f"[{message['role']}] {readable(content)}"))
    if pictures := images_of(content):
        from areal_gym.cli.terminal_pictures import print_pictures

        options = click.get_current_context().ensure_object(Options)
        print_pictures(pictures, is_plain=options.is_plain)


def _print_step(env: TextEnv, result: StepResult) -> None:
    for message in result.info["messages"]:
        _print_message(message)
    parts = result.info.get("reward_parts", {})
    shown = "".join(f"  {name} {value:g}" for name, value in parts.items())
    print_data(f"turn {env.num_turns}: reward {result.reward:g}{shown}")
