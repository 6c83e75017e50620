"""What README and docs tell people to type is typed, page by page and in the page's order.

    block -> what is meant by it (stand_ins.py) -> typed (typed.py) in a place (place.py) -> shown?

Python, commands, YAML, TOML and JSON are run or read by the program; what is shown as output is
compared with the output. `stand_ins.NOT_RUN` has all that is not run, with the reason.
"""

import ast
import asyncio
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
import webbrowser
from pathlib import Path

import click
import pytest
from documented import PAGES, ROOT, blocks_of
from place import TAU2, Names, Neighbours, install, write_files
from stand_ins import EXITS, FURNISHING, NOT_RUN, ONCE, SCALED, WARM_START, WITHOUT_SHARED
from typed import SERVERS, Said, call, is_alike, serve, shell, talk_to_mcp

import areal_gym
from areal_gym.cli.app import app
from areal_gym.cli.output import Options
from areal_gym.run import bench
from areal_gym.trainer.advantages import grpo
from areal_gym.trainer.dialogue_files import read_file
from areal_gym.trainer.losses import ppo_clip

ONES_OWN = {"answer": "4", "gold": "4", "my_loss": ppo_clip, "my_estimator": grpo}
"""What Python in the docs takes for given."""

typed_once = set()
PAGES_WITH_CODE = [page for page in PAGES if blocks_of(page)]


def settle(directory, patch):
    """Sit down in a directory, with a cache and warm starts that take a second."""
    from areal_gym.starter import warm_start

    patch.chdir(directory)
    patch.syspath_prepend(directory)
    patch.setenv("AREAL_GYM_CACHE", str(directory.parent / "cache"))
    patch.setenv("AREAL_GYM_DATA", str(directory / "data"))
    patch.setenv("TAU2_DATA_DIR", str(TAU2))
    patch.setenv("OPENAI_API_KEY", "none")
    patch.setattr(warm_start, "Recipe", functools.partial(warm_start.Recipe, **WARM_START))
    patch.setattr(bench, "_SOME_S", 0.0)
    patch.setattr(webbrowser, "open", lambda url: True)


@pytest.fixture(scope="session")
def furnished(tmp_path_factory):
    """A directory to begin with: files, a run, and one that ended in a step that was refused."""
    home = tmp_path_factory.mktemp("docs")
    (home / "place").mkdir()
    write_files(home / "place")
    with pytest.MonkeyPatch.context() as patch:
        settle(home / "place", patch)
        for words, code in FURNISHING:
            done = call(["areal-gym", "train", *words])
            assert done.code == code, done.err
    return home


@pytest.fixture
def reader(furnished, tmp_path, request, monkeypatch):
    """Somebody who follows a page."""
    shutil.copytree(furnished / "place", tmp_path / "place", symlinks=True)
    if "warm start: " not in request.node.callspec.params["page"].read_text():  # to be seen
        (tmp_path / "cache").symlink_to(furnished / "cache")
    settle(tmp_path / "place", monkeypatch)
    with Neighbours() as neighbours:
        yield Reader(tmp_path / "place", Names(tmp_path / "place", neighbours))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


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

    def follow(self, block, following):
        os.chdir(self.directory)
        match block.language:
            case "shell" | "bash":
                for command in block.commands:
                    self.type(command, following)
            case "python":
                self.execute(block)
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
            check_words(meant)
            return
        if re.search(ONCE, meant) and meant in typed_once:
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
        for pattern, ask, answer, code in SERVERS:
            if re.search(pattern, meant) and "--help" not in words:
                said = serve(words, ask)
                assert answer in said.err
                return Said(said.code - code, said.out)
        match words:
            case ["areal-gym", *_] if "stdio" in words:
                return talk_to_mcp(f"{sys.executable} -m {meant.replace('-', '_', 1)}")
            case ["areal-gym", *_]:
                return call(words, typed)
            case [*_, ">", page] if page.startswith("docs/"):
                said = shell(meant.rpartition(">")[0])
                assert said.out == (ROOT / page).read_text()
                return said
            case ["cd", place]:
                os.chdir(place)
                return Said(0, "")
            case ["pip", "install", "-e", place]:
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
        """One namespace for a page."""
        code = self.names.meant_by(block.text)
        if "episode.ask" in code and "episode" not in self.namespace and "def " not in code:
            return within_an_episode(code)
        compiled = compile(code, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaited = eval(compiled, self.namespace)
        if awaited is not None:
            asyncio.run(awaited)
        for name in [name for name in self.namespace if name.startswith("test_")]:
            self.namespace.pop(name)()


def within_an_episode(code):
    """Run a line of an agent's."""
    from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
    from areal_gym.rollout.episode import play_episode

    class Agent:
        async def play(self, episode):
            messages = list(episode.first_messages)
            await episode.ask(messages)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            names = {"episode": episode, "messages": messages}
            await eval(compile(code.strip(), "page", "exec", flags=flags), names)
            await episode.act(names["message"])

    engine, renderer = ScriptedEngine(["one", "two"]), byte_renderer()
    played = asyncio.run(
        play_episode(
            areal_gym.make("math"),
            Agent(),
            engine,
            renderer,
            trajectory_id="t",
            group_id="g",
            seed=0,
        )
    )
    assert played.num_forks == 1


def reason_not_to_run(text):
    reasons = NOT_RUN if TAU2.is_dir() else (*NOT_RUN, WITHOUT_SHARED)
    return next((reason for pattern, reason in reasons if re.search(pattern, text.lstrip())), None)


def check_words(meant):
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
            command.make_context(name, list(rest), resilient_parsing=True)
        case ["make", *targets]:
            done = shell(f"make --dry-run -C {ROOT} {' '.join(targets)}")
            assert done.code == 0, done.err
        case ["pip", "install", *wanted]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"(?:areal-gym|\.)\[([\w,-]+)\]", " ".join(wanted))
            named = {extra for some in extras for extra in some.split(",")}
            assert named <= project["optional-dependencies"].keys()
        case ["python", script, *_] if script != "-m":
            assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: page.name)
def test_page(page, reader):
    blocks = blocks_of(page)
    reader.write_files(blocks)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        try:
            reader.follow(block, following)
        except Exception as error:
            error.add_note(str(block))
            raise


def test_notebook(tiny_policy, tmp_path, monkeypatch):
    """Cell by cell in a running loop, as in a kernel; what ends a cell can be shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", str(tiny_policy))
    monkeypatch.setenv("STEPS", "1")
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    namespace = {"__name__": "__main__"}

    async def kernel():
        for cell in cells:
            *body, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
            assert isinstance(last, ast.Expr)
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
            if not isinstance(shown, tuple):
                assert shown._repr_html_().startswith('<div class="areal-gym">')

    asyncio.run(kernel())
