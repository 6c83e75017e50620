"""README and docs are followed page by page: code blocks are run, and their output is compared.

Commands within sentences are not run; their options, settings, targets and files must exist.
"""

import ast
import asyncio
import functools
import json
import os
import re
import shutil
import sys
import webbrowser
from pathlib import Path

import click
import pytest

from areal_gym.errors import GymError
from areal_gym.warm_start import starter_policy
from tests._support.pages import tables
from tests._support.pages.blocks import (
    PAGES,
    Block,
    blocks_of,
    check_names,
    inline_commands,
    is_setting,
)
from tests._support.pages.home import write_files
from tests._support.pages.reader import Reader, call
from tests._support.paths import ROOT

BLOCKS = {page: blocks_of(page) for page in PAGES if page.name != "cli.md"}  # cli.md is generated


def enter(directory, patch):
    """Make a directory the current one, and the warm start quick."""
    patch.chdir(directory)
    patch.syspath_prepend(directory)
    patch.setenv("AREAL_GYM_CACHE", str(directory.parent / "cache"))
    patch.setenv("AREAL_GYM_DATA", str(directory / "data"))
    patch.setenv("OPENAI_API_KEY", "none")
    patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # activated
    recipe = functools.partial(starter_policy.Recipe, **tables.WARM_START)
    patch.setattr(starter_policy, "Recipe", recipe)
    patch.setattr(starter_policy, "VisionRecipe", tables.VisionWarmStart)
    patch.setattr(webbrowser, "open", lambda url: True)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A directory with the files and runs that pages take for granted."""
    home = tmp_path_factory.mktemp("docs")
    (home / "place").mkdir()
    write_files(home / "place")
    with pytest.MonkeyPatch.context() as patch:
        enter(home / "place", patch)
        for out, words, code in tables.RUNS:
            done = call(["areal-gym", "train", *words, "--out", out])
            assert done.code == code, done.printed
    return home


@pytest.fixture
def reader(home, tmp_path, monkeypatch):
    place = shutil.copytree(home / "place", tmp_path / "place", symlinks=True)
    (tmp_path / "cache").symlink_to(home / "cache")
    enter(place, monkeypatch)
    policy = str(place / "runs" / "says-two" / "checkpoints" / "step-000030")
    yield Reader(place, {"policy": policy})
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [page for page in BLOCKS if BLOCKS[page]], ids=lambda p: p.name)
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
def test_names_in_the_text_of_a_page_exist(page):
    sections = "trainer|rollout|engine|eval|cluster|teacher|data|model"
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+[a-z])(?=[`=\[])", page.read_text())
    assert [path for path in {*named} - {"trainer.json"} if not is_setting(path)] == []
    for command in inline_commands(page):
        check_names(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fenced_block_is_found(page):
    text = page.read_text()
    fences = re.findall(r"^```", text, re.M)
    fenced = [block for block in blocks_of(page) if f"\n{block.text}```" in text]
    assert len(fences) == 2 * len(fenced)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("shell", "areal-gym lisst"),
        ("shell", "areal-gym train --env tir trainer.lrr=1 --dry-run"),
        ("shell", "no-such-program"),
        ("shell", "make tea"),
        ("shell", "pip install 'areal-gym[tea]'"),
        ("shell", "areal-gym play textarena:Hanoi-v0 --tea"),
        ("shell", "areal-gym train --env online trainer.tea=1"),
        ("python", "assert 1 == 2"),
        ("yaml", "env: {id: tea}"),
        ("json", '{"prompt": "2+2?"}'),
        ("text", "tea is ready"),
        ("", "tea"),
    ],
)
def test_wrong_block_is_detected(language, text, reader):
    reader.type("areal-gym list envs")
    with pytest.raises((AssertionError, click.UsageError, GymError)):
        reader.follow(Block(ROOT / "README.md", 1, language, text))


def test_every_table_row_is_used():
    texts = [block.text for blocks in BLOCKS.values() for block in blocks]
    texts += [c for blocks in BLOCKS.values() for b in blocks for c in b.commands]
    rows = (
        *(*tables.SUBSTITUTIONS, *tables.PYTHON_SUBSTITUTIONS, *tables.EXTRA_ARGUMENTS),
        *(*tables.EXIT_CODES, *tables.NOT_RUN, *tables.DRAWINGS),
    )
    unused = [row[0] for row in rows if not any(re.search(row[0], t.lstrip()) for t in texts)]
    assert unused == []
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
