"""README and docs are followed page by page: tests type every command and compare the output.

Python, commands, YAML, TOML and JSON are run, or read by the program. `tables.NOT_RUN` lists
what is only parsed, with reasons.

    blocks.py    finds the code of a page
    tables.py    what stands for placeholders, what is made small, what is not run
    place.py     the reader's directory and servers
    commands.py  commands, servers, Ctrl-C
    reader.py    does what a block says
"""

import ast
import asyncio
import functools
import json
import re
import shutil
import sys
import webbrowser

import click
import pytest

from areal_gym.errors import GymError
from areal_gym.runs import speed
from areal_gym.warm_start import starter_policy
from tests._support.pages import tables
from tests._support.pages.blocks import PAGES, Block, blocks_of
from tests._support.pages.commands import SERVERS, call
from tests._support.pages.place import TAU2, BackgroundServers, Names, write_files
from tests._support.pages.reader import Reader
from tests._support.paths import ROOT

BLOCKS = {page: blocks_of(page) for page in PAGES}


def enter(directory, patch):
    """Make a directory the current one, and slow parts quick."""
    patch.chdir(directory)
    patch.syspath_prepend(directory)
    patch.setenv("AREAL_GYM_CACHE", str(directory.parent / "cache"))
    patch.setenv("AREAL_GYM_DATA", str(directory / "data"))
    patch.setenv("TAU2_DATA_DIR", str(TAU2))
    patch.setenv("OPENAI_API_KEY", "none")
    recipe = functools.partial(starter_policy.Recipe, **tables.WARM_START)
    patch.setattr(starter_policy, "Recipe", recipe)
    patch.setattr(speed, "_SOME_S", 0.0)
    patch.setattr(webbrowser, "open", lambda url: True)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A directory with the files and runs that pages take for granted."""
    home = tmp_path_factory.mktemp("docs")
    (home / "place").mkdir()
    write_files(home / "place")
    with pytest.MonkeyPatch.context() as patch:
        enter(home / "place", patch)
        for words, code in tables.RUNS:
            done = call(["areal-gym", "train", *words])
            assert done.code == code, done.err
    return home


@pytest.fixture
def reader(home, tmp_path, monkeypatch):
    place = shutil.copytree(home / "place", tmp_path / "place", symlinks=True)
    (tmp_path / "cache").symlink_to(home / "cache")
    enter(place, monkeypatch)
    with BackgroundServers() as servers:
        yield Reader(place, Names(place, servers))
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


# The OpenAI agents SDK makes a coroutine that it does not await when a turn is cancelled at once.
@pytest.mark.filterwarnings("ignore:coroutine .run_single_turn:RuntimeWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda p: p.name)
def test_page(page, reader, tmp_path):
    if "warm start: " in page.read_text():  # it is shown, so it must not come from the cache
        (tmp_path / "cache").unlink()
    blocks = BLOCKS[page]
    reader.write_files(blocks)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        try:
            reader.follow(block, following)
        except Exception as error:
            error.add_note(str(block))
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fenced_block_is_found(page):
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(), re.M)
    assert len(fences) == 2 * sum(block.kind == "fenced" for block in BLOCKS[page])


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("shell", "areal-gym lisst"),
        ("shell", "areal-gym train --env tir trainer.lrr=1 --dry-run"),
        ("shell", "no-such-program"),
        ("shell", "make tea"),
        ("shell", "pip install 'areal-gym[tea]'"),
        ("shell", "areal-gym play textarena:Hanoi-v0 --tea"),
        ("python", "assert 1 == 2"),
        ("yaml", "env: {id: tea}"),
        ("json", '{"prompt": "2+2?"}'),
        ("text", "tea is ready"),
        ("mermaid", "tea --> cup"),
        ("", "tea"),
    ],
)
def test_wrong_block_is_detected(language, text, reader):
    reader.type("areal-gym list envs")
    with pytest.raises((AssertionError, click.UsageError, GymError)):
        reader.follow(Block(ROOT / "README.md", 1, language, text))


def test_every_table_row_is_used():
    blocks = [block for page in BLOCKS.values() for block in page]
    commands = {command for b in blocks if b.language == "shell" for command in b.commands}
    python = {block.text for block in blocks if block.language == "python"}
    used, typed = set(), {"areal-gym train -c recipe.yaml"}
    for rows, texts in ((tables.SUBSTITUTIONS, commands), (tables.PYTHON_SUBSTITUTIONS, python)):
        for text in texts:
            for row in rows:
                if re.search(row[0], text):
                    used.add(row)
                    text = re.sub(*row, text)
            typed.add(text)
    texts = {*commands, *typed, *(block.text.lstrip() for block in blocks)}
    others = (*tables.EXTRA_ARGUMENTS, *tables.EXIT_CODES, *tables.NOT_RUN, *SERVERS)
    used.update(row for row in others if any(re.search(row[0], text) for text in texts))
    rows = (*tables.SUBSTITUTIONS, *tables.PYTHON_SUBSTITUTIONS, *others)
    assert [row[0] for row in rows if row not in used] == []
    files = re.findall(r"tests/[\w/]+(?:\.py)?", str(tables.NOT_RUN))
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_notebook(tiny_policy, tmp_path, monkeypatch):
    """The notebook's cells run in a running loop, and the last value of each has HTML."""
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
