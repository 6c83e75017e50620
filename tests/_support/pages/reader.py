"""A reader who does what a page says, block by block, and compares what is printed."""

import ast
import asyncio
import contextlib
import functools
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from areal_gym.cli.app import run
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.batch.dialogue_files import read_file
from tests._support.pages import tables
from tests._support.pages.blocks import check_names
from tests._support.pages.home import install

TIMEOUT_S = 60
FILE_NAME = r"# (?:(\w+)/)?(\w+\.(?:py|yaml))\n"
GIVEN_NAMES = {"answer": "4", "gold": "4", "my_loss": ppo_clip, "my_estimator": grpo}
"""Names that Python in the docs uses without defining them."""


class Outcome(NamedTuple):
    code: int
    printed: str


class Reader:
    """A reader who follows one page in one directory; `names` fill the tables' braces."""

    def __init__(self, directory, names):
        self.directory = directory
        self.names = names
        self.namespace = {"__name__": "__main__", **GIVEN_NAMES}
        self.outcome = None

    def write_files(self, blocks):
        """Write blocks that begin with a file's name to that file."""
        for block in blocks:
            if header := re.match(FILE_NAME, block.text):
                folder = self.directory / (header[1] or ".")
                folder.mkdir(exist_ok=True)
                if header[1]:
                    (folder / "__init__.py").touch()
                with (folder / header[2]).open("a") as file:
                    file.write(block.text)
        importlib.invalidate_caches()

    def follow(self, block, following=None):
        os.chdir(self.directory)
        match block.language:
            case _ if is_listed(block.text, tables.DRAWINGS):
                pass
            case "shell":
                stdin = following.text if following and following.language == "text" else ""
                for command in block.commands:
                    self.type(command, stdin)
            case "python":
                self.execute(block)
            case "toml":
                install(tomllib.loads(block.text), self.directory)
            case "yaml" if re.match(FILE_NAME, block.text):
                pass  # a command names the file
            case "yaml":
                (self.directory / "recipe.yaml").write_text(block.text)
                self.type("areal-gym train -c recipe.yaml")
            case "json":
                self.read_examples(block.text)
            case "text" if block.lead == "*Theirs:*":
                ast.parse(block.text)
            case "text":
                self.compare(block.text)
            case _:
                raise AssertionError(f"no rule for {block}")

    def type(self, command, stdin=""):
        """Run a command with the tables' substitutions, or only check its names."""
        if is_listed(command, tables.NOT_RUN):
            return check_names(command)
        typed = self.substitute(command, tables.SUBSTITUTIONS)
        words = shlex.split(typed)
        for pattern, arguments in tables.EXTRA_ARGUMENTS:
            if re.search(pattern, typed):
                words += [self.fill(word) for word in arguments]
        codes = (code for pattern, code in tables.EXIT_CODES if re.search(pattern, typed))
        entered = "".join(re.findall(r"^> (.*\n)", stdin, re.M))
        self.outcome = self.run(words, typed, entered or "/quit\n")
        assert self.outcome.code == next(codes, 0), f"{command}\n{words}\n{self.outcome}"

    def run(self, words, typed, stdin):
        match words:
            case ["areal-gym", *_]:
                return call(words, stdin)
            case ["cd", directory]:
                os.chdir(directory)
                return Outcome(0, "")
            case ["pip", "install", "-e", project, *_]:
                facts = tomllib.loads((Path(project) / "pyproject.toml").read_text())
                install(facts, self.directory)
                package = facts["project"]["name"].replace("-", "_")
                (self.directory / package).symlink_to(Path(project).resolve() / package)
                return Outcome(0, "")
        done = subprocess.run(
            ["bash", "-ec", typed],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(),
        )
        return Outcome(done.returncode, done.stdout)

    def compare(self, shown):
        """Assert that each shown line was printed, in this order."""
        printed = iter(self.outcome.printed.splitlines())
        is_dialogue = "\n> " in shown
        for line in shown.splitlines():
            if not line.startswith("> "):
                matches = line.__eq__ if is_dialogue else functools.partial(is_alike, line)
                assert any(map(matches, printed)), f"not printed: {line}\n{self.outcome}"

    def read_examples(self, text):
        file = self.directory / "rows.jsonl"
        for line in filter(None, map(str.strip, text.splitlines())):
            file.write_text(f"{line}\n")
            (row,) = read_file(file, is_preference='"chosen"' in line)
            assert row.messages

    def execute(self, block):
        """Run Python in the page's namespace, then the tests that it defines."""
        code = self.substitute(block.text, tables.PYTHON_SUBSTITUTIONS)
        compiled = compile(code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaitable = eval(compiled, self.namespace)
        if awaitable is not None:
            asyncio.run(awaitable)
        for name in [name for name in self.namespace if name.startswith("test_")]:
            self.namespace.pop(name)()

    def substitute(self, text, rows):
        for pattern, replacement in rows:
            if re.search(pattern, text):
                text = re.sub(pattern, self.fill(replacement), text)
        return text

    def fill(self, text):
        """Replace the names in braces."""
        return re.sub(r"\{(\w+)\}", lambda name: self.names[name[1]], text)


def is_listed(text, rows):
    """Tell whether a row's pattern is in the text."""
    return any(re.search(row[0], text.lstrip()) for row in rows)


def is_alike(shown, printed):
    """Tell whether a line of the docs shows what was printed: `...` and numbers match any."""
    pattern = re.escape(re.sub(r"-?\d[\d.,]*", "\0", shown)).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern.replace("\0", r"-?\d[\d.,]*"), printed) is not None


def environment():
    """Return an environment in which this interpreter's programs and modules are found."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def call(words, stdin=""):
    """Run `areal-gym` in this process, which is quicker than in its own."""
    set_registry(Registry(PluginManager.installed()))  # as a new process would
    printed = io.StringIO()
    previous, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return Outcome(run(words[1:]), printed.getvalue())
    finally:
        sys.stdin = previous
