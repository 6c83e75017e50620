"""Does what a page says, block by block, and compares the results with those shown."""

import ast
import asyncio
import functools
import importlib
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import click

import areal_gym
from areal_gym.cli.app import app
from areal_gym.cli.options import Options
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.batch.dialogue_files import read_file
from tests._support.pages import tables
from tests._support.pages.commands import (
    SERVERS,
    Outcome,
    call,
    is_alike,
    serve,
    shell,
    talk_to_mcp,
)
from tests._support.pages.place import TAU2, install
from tests._support.paths import ROOT

GIVEN_NAMES = {"answer": "4", "gold": "4", "my_loss": ppo_clip, "my_estimator": grpo}
"""Names that Python in the docs uses without defining them."""

TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
typed_once = set()


class Reader:
    """A reader who follows one page in one directory."""

    def __init__(self, directory, names):
        self.directory = directory
        self.names = names
        self.namespace = {"__name__": "__main__", **GIVEN_NAMES}
        self.outcome = None
        self.done = set()

    def write_files(self, blocks):
        """Write Python blocks that begin with a file's name to that file."""
        for block in blocks:
            if header := re.match(r"# (\w+)/(\w+\.py)\n", block.text):
                package = self.directory / header[1]
                package.mkdir(exist_ok=True)
                (package / "__init__.py").touch()
                with (package / header[2]).open("a") as file:
                    file.write(block.text)
        importlib.invalidate_caches()

    def follow(self, block, following=None):
        os.chdir(self.directory)
        match block.language:
            case "shell":
                for command in block.commands:
                    self.type(command, following)
            case "python":
                self.execute(block)
            case "agent":
                run_in_an_agent(block.text.strip())
            case "toml":
                install(tomllib.loads(block.text), self.directory)
            case "yaml":
                (self.directory / "recipe.yaml").write_text(block.text)
                self.type("areal-gym train -c recipe.yaml")
            case "json" if block.kind == "inline":
                printed = json.loads(self.outcome.out.splitlines()[0])
                assert printed.keys() == json.loads(block.text).keys()
            case "json":
                self.read_examples(block.text.split("\n"))
            case "text" if block.lead == "*Theirs:*":
                ast.parse(block.text)
            case "text" if not reason_not_to_run(block.text):
                self.compare(block.text)
            case "tree":
                self.compare_tree(block.text)
            case _:
                assert reason_not_to_run(block.text), f"no rule for {block}"

    # ---- commands -------------------------------------------------------------------------------

    def type(self, command, following=None):
        if command in self.done:
            return
        self.done.add(command)
        typed = self.names.substitute(command)
        if reason_not_to_run(command):
            return parse(typed)
        if re.match(tables.ONCE, typed) and typed in typed_once:
            return
        typed_once.add(typed)
        words = shlex.split(typed, comments=True)
        for pattern, arguments in tables.EXTRA_ARGUMENTS:
            if re.search(pattern, typed):
                words += [self.names.fill(word) for word in arguments]
        stdin = "/quit\n"
        if following is not None and following.language == "text":
            stdin = "".join(re.findall(r"^> (.*\n)", following.text, re.M)) or stdin
        allowed = (codes for pattern, codes in tables.EXIT_CODES if re.search(pattern, typed))
        self.outcome = self.run(words, typed, stdin)
        message = f"{command}\n{shlex.join(words)}\n{self.outcome}"
        assert self.outcome.code in next(allowed, (0,)), message

    def run(self, words, typed, stdin):
        for pattern, ask, expected in SERVERS:
            if re.search(pattern, typed) and "--help" not in words:
                outcome, answer = serve(words, ask)
                assert expected in answer
                return outcome
        match words:
            case ["areal-gym", *_] if "stdio" in words:
                return talk_to_mcp(typed)
            case ["areal-gym", *_] if "|" not in words:
                return call(words, stdin)
            case [*_, ">", page] if page.startswith("docs/"):
                outcome = shell(typed.rpartition(">")[0])
                assert outcome.out == (ROOT / page).read_text()
                return outcome
            case ["cd", directory]:
                os.chdir(directory)
                return Outcome(0, "")
            case ["pip", "install", "-e", project, *_]:
                self.install(Path(project).resolve())
                return Outcome(0, "")
        return shell(typed)

    def install(self, project):
        """Make a package of the page importable where it lies."""
        facts = tomllib.loads((project / "pyproject.toml").read_text())
        install(facts, self.directory)
        package = facts["project"]["name"].replace("-", "_")
        (self.directory / package).symlink_to(project / package)

    # ---- output ---------------------------------------------------------------------------------

    def compare(self, shown):
        """Each shown line was printed, in this order."""
        printed = iter((self.outcome.out + self.outcome.err).splitlines())
        is_dialogue = "\n> " in shown
        for line in shown.splitlines():
            if not line.startswith("> "):
                matches = line.__eq__ if is_dialogue else functools.partial(is_alike, line)
                assert any(map(matches, printed)), f"not printed: {line}\n{self.outcome}"

    def compare_tree(self, shown):
        """Each file of the drawing is in the run's checkpoint."""
        (checkpoint,) = self.directory.glob("runs/ended/checkpoints/step-*")
        for name in re.findall(r"config\.json|model\.\w+|tokenizer|trainer/|trainer\.json", shown):
            assert list(checkpoint.glob(f"{name.rstrip('/')}*")), name
        assert (checkpoint.parent / "best").readlink().name == checkpoint.name

    # ---- data and Python ------------------------------------------------------------------------

    def read_examples(self, lines):
        for line in filter(str.strip, lines):
            file = self.directory / "rows.jsonl"
            file.write_text(line.strip() + "\n")
            (row,) = read_file(file, is_preference='"chosen"' in line)
            assert row.messages

    def execute(self, block):
        """Run Python in the page's namespace, then the tests that it defines."""
        code = self.names.substitute(block.text, tables.PYTHON_SUBSTITUTIONS)
        compiled = compile(code, str(block), "exec", flags=TOP_LEVEL_AWAIT)
        awaitable = eval(compiled, self.namespace)
        if awaitable is not None:
            asyncio.run(awaitable)
        for name in [name for name in self.namespace if name.startswith("test_")]:
            self.namespace.pop(name)()


def run_in_an_agent(code):
    """Run a line of an agent that has asked the policy once, and asks again."""
    from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
    from areal_gym.rollout.episode import play_episode

    class Agent:
        async def play(self, episode):
            names = {"episode": episode, "messages": list(episode.first_messages)}
            await episode.ask(names["messages"])
            await eval(compile(code, "page", "exec", flags=TOP_LEVEL_AWAIT), names)
            await episode.act(names["message"])

    env, engine = areal_gym.make("math"), ScriptedEngine(["one", "two"])
    ids = {"trajectory_id": "t", "group_id": "g", "seed": 0}
    trajectory = asyncio.run(play_episode(env, Agent(), engine, byte_renderer(), **ids))
    assert len(trajectory.turns) == 2


# ---- commands that are not run ------------------------------------------------------------------


def reason_not_to_run(text):
    rows = tables.NOT_RUN if TAU2.is_dir() else (*tables.NOT_RUN, tables.WITHOUT_SHARED)
    return next((reason for pattern, reason in rows if re.search(pattern, text.lstrip())), None)


def parse(typed):
    """Check the names, options, settings, targets and extras of a command."""
    words = shlex.split(typed, comments=True)
    match words:
        case ["areal-gym", *_] if "train" in words or "--help" in words:
            outcome = call(words if "--help" in words else [*words, "--dry-run"])
            assert outcome.code == 0, outcome.err
        case ["areal-gym", name, *rest]:
            context = app.make_context("areal-gym", [], resilient_parsing=True, obj=Options())
            command = app.get_command(context, name)
            if isinstance(command, click.Group):  # data pull
                command, rest = command.commands[rest[0]], rest[1:]
            command.make_context(name, list(rest))
        case ["make", *targets]:
            outcome = shell(f"make --dry-run -C {ROOT} {' '.join(targets)}")
            assert outcome.code == 0, outcome.err
        case ["pip", "install", *requirements]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"(?:areal-gym|\.)\[([\w,-]+)\]", " ".join(requirements))
            assert {*",".join(extras).split(",")} <= {*project["optional-dependencies"], ""}
        case ["python", "-m", module, *_]:
            assert shell(f"python -m {module} --help").code == 0
        case ["python", script, *options]:
            source = (ROOT / script).read_text()
            assert all(option in source for option in options if option.startswith("--"))
