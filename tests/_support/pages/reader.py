"""Somebody who does what a page says, block by block, and looks whether it goes as it is shown."""

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
from areal_gym.cli.output import Options
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.batch.dialogue_files import read_file
from tests._support.pages.documented import ROOT
from tests._support.pages.place import TAU2, install
from tests._support.pages.stand_ins import (
    EXITS,
    MEANT_IN_PYTHON,
    NOT_RUN,
    ONCE,
    SCALED,
    WITHOUT_SHARED,
)
from tests._support.pages.typed import SERVERS, Said, call, is_alike, shell, talk_to_mcp

ONES_OWN = {"answer": "4", "gold": "4", "my_loss": ppo_clip, "my_estimator": grpo}
"""What Python in the docs takes for given."""

TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
typed_once = set()


class Reader:
    """Does what a page says, block by block."""

    def __init__(self, directory, names):
        self.directory = directory
        self.names = names
        self.namespace = {"__name__": "__main__", **ONES_OWN}
        self.said = None
        self.done = set()

    def write_files(self, blocks):
        """Python that begins with the name of a file is that file, before anything is typed."""
        for block in blocks:
            if named := re.match(r"# (\w+)/(\w+\.py)\n", block.text):
                package = self.directory / named[1]
                package.mkdir(exist_ok=True)
                (package / "__init__.py").touch()
                with (package / named[2]).open("a") as file:
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
                within_an_episode(block.text.strip())
            case "toml":
                install(tomllib.loads(block.text), self.directory)
            case "yaml":
                (self.directory / "recipe.yaml").write_text(block.text)
                self.type("areal-gym train -c recipe.yaml")
            case "json" if block.is_named:
                self.compare_json(block.text)
            case "json":
                self.learn_from(block.text.split("\n"))
            case "text" if block.lead == "*Theirs:*":
                ast.parse(block.text)
            case "text":
                self.compare(block.text)
            case "tree":
                self.compare_tree(block.text)
            case _:
                assert reason_not_to_run(block.text), f"nobody knows what to do with {block}"

    # ---- commands -------------------------------------------------------------------------------

    def type(self, command, following=None):
        command = re.sub(r"\s+# .*", "", command)
        if command in self.done:
            return
        self.done.add(command)
        meant = self.names.meant_by(command)
        if reason_not_to_run(command):
            return read(meant)
        if re.match(ONCE, meant) and meant in typed_once:
            return
        typed_once.add(meant)
        words = shlex.split(meant, comments=True)
        for pattern, besides in SCALED:
            if re.search(pattern, meant):
                words += [self.names.named(word) for word in besides]
        typed = "/quit\n"
        if following is not None and following.language == "text":
            typed = "".join(re.findall(r"^> (.*\n)", following.text, re.M)) or typed
        codes = next((codes for pattern, codes in EXITS if re.search(pattern, meant)), (0,))
        self.said = self.run(words, meant, typed)
        assert self.said.code in codes, f"{command}\n{shlex.join(words)}\n{self.said}"

    def run(self, words, meant, typed):
        for pattern, start, ask, answer in SERVERS:
            if re.search(pattern, meant) and "--help" not in words:
                said, answered = start(words, ask)
                assert answer in answered
                return said
        match words:
            case ["areal-gym", *_] if "stdio" in words:
                return talk_to_mcp(meant)
            case ["areal-gym", *_] if "|" not in words:
                return call(words, typed)
            case [*_, ">", page] if page.startswith("docs/"):
                said = shell(meant.rpartition(">")[0])
                assert said.out == (ROOT / page).read_text()
                return said
            case ["cd", place]:
                os.chdir(place)
                return Said(0, "")
            case ["pip", "install", "-e", place, *_]:
                self.install(Path(place).resolve())
                return Said(0, "")
        return shell(meant)

    def install(self, project):
        """A package of one's own, so that it is found where it is."""
        facts = tomllib.loads((project / "pyproject.toml").read_text())
        install(facts, self.directory)
        package = facts["project"]["name"].replace("-", "_")
        (self.directory / package).symlink_to(project / package)

    # ---- what is shown --------------------------------------------------------------------------

    def compare(self, shown):
        """Each line of it was said, in this order."""
        said = iter((self.said.out + self.said.err).splitlines())
        is_dialogue = "\n> " in shown
        for line in shown.splitlines():
            if not line.startswith("> "):
                alike = line.__eq__ if is_dialogue else functools.partial(is_alike, line)
                assert any(map(alike, said)), f"not said: {line}\n{self.said}"

    def compare_json(self, shown):
        assert json.loads(self.said.out.splitlines()[0]).keys() == json.loads(shown).keys()

    def compare_tree(self, shown):
        """What the drawing of a directory names is in the run's."""
        (checkpoint,) = self.directory.glob("runs/ended/checkpoints/step-*")
        for name in re.findall(r"config\.json|model\.\w+|tokenizer|trainer/|trainer\.json", shown):
            assert list(checkpoint.glob(f"{name.rstrip('/')}*")), name
        assert (checkpoint.parent / "best").readlink().name == checkpoint.name

    # ---- data and Python ------------------------------------------------------------------------

    def learn_from(self, lines):
        for line in filter(str.strip, lines):
            file = self.directory / "rows.jsonl"
            file.write_text(line.strip() + "\n")
            (row,) = read_file(file, is_preference='"chosen"' in line)
            assert row.messages

    def execute(self, block):
        """One namespace for a page; tests that it defines are run."""
        code = self.names.meant_by(block.text, MEANT_IN_PYTHON)
        compiled = compile(code, str(block), "exec", flags=TOP_LEVEL_AWAIT)
        awaited = eval(compiled, self.namespace)
        if awaited is not None:
            asyncio.run(awaited)
        for name in [name for name in self.namespace if name.startswith("test_")]:
            self.namespace.pop(name)()


def within_an_episode(code):
    """Run a line of an agent that has asked once, and asks again."""
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
    played = asyncio.run(play_episode(env, Agent(), engine, byte_renderer(), **ids))
    assert len(played.turns) == 2


# ---- what is not run ----------------------------------------------------------------------------


def reason_not_to_run(text):
    reasons = NOT_RUN if TAU2.is_dir() else (*NOT_RUN, WITHOUT_SHARED)
    return next((reason for pattern, reason in reasons if re.search(pattern, text.lstrip())), None)


def read(meant):
    """What cannot be run here can be read: names, options, settings, targets, extras."""
    words = shlex.split(meant, comments=True)
    match words:
        case ["areal-gym", "train", *_]:
            said = call([*words, "--dry-run"])
            assert said.code == 0, said.err
        case ["areal-gym", name, *rest]:
            context = app.make_context("areal-gym", [], resilient_parsing=True, obj=Options())
            command = app.get_command(context, name)
            if isinstance(command, click.Group):  # data pull
                command, rest = command.commands[rest[0]], rest[1:]
            command.make_context(name, list(rest))
        case ["make", *targets]:
            done = shell(f"make --dry-run -C {ROOT} {' '.join(targets)}")
            assert done.code == 0, done.err
        case ["pip", "install", *wanted]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            named = re.findall(r"(?:areal-gym|\.)\[([\w,-]+)\]", " ".join(wanted))
            assert {*",".join(named).split(",")} <= {*project["optional-dependencies"], ""}
        case ["python", "-m", module, *_]:
            assert shell(f"python -m {module} --help").code == 0
        case ["python", script, *options]:
            written = (ROOT / script).read_text()
            assert all(option in written for option in options if option.startswith("--"))
