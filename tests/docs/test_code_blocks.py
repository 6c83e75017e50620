"""What README and docs tell people to type is typed, page by page and in the page's order.

    page -> blocks     documented.py
            meant      stand_ins.py   what stands for what, what is made small, what is not run
            typed      typed.py       commands, servers, Ctrl-C
            in a place place.py       files, runs, servers elsewhere
            as shown?  reader.py

Python, commands, YAML, TOML and JSON are run, or read by the program; what is shown as output is
compared with the output. Nothing is left out but `stand_ins.NOT_RUN`, with the reason for each.
"""

import ast
import asyncio
import functools
import json
import re
import shutil
import sys
import webbrowser
from collections import Counter

import click
import pytest

from areal_gym.errors import GymError
from areal_gym.runs import speed as bench
from tests._support.pages import stand_ins
from tests._support.pages.documented import PAGES, ROOT, Block, blocks_of
from tests._support.pages.place import TAU2, Names, Neighbours, write_files
from tests._support.pages.reader import Reader, reason_not_to_run
from tests._support.pages.stand_ins import FURNISHING, MEANT, MEANT_IN_PYTHON, WARM_START
from tests._support.pages.typed import SERVERS, call

BLOCKS = {page: blocks_of(page) for page in PAGES}


def settle(directory, patch):
    """Sit down in a directory; what takes a minute takes a second there."""
    from areal_gym.warm_start import starter_policy as warm_start

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
    """A directory to begin with: files, and runs."""
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
def reader(furnished, tmp_path, monkeypatch):
    """Somebody in a copy of that directory."""
    shutil.copytree(furnished / "place", tmp_path / "place", symlinks=True)
    (tmp_path / "cache").symlink_to(furnished / "cache")
    settle(tmp_path / "place", monkeypatch)
    with Neighbours() as neighbours:
        yield Reader(tmp_path / "place", Names(tmp_path / "place", neighbours))
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
def test_no_block_is_overlooked(page):
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(), re.M)
    kinds = Counter(block.is_fenced for block in BLOCKS[page])
    assert len(fences) == 2 * kinds[True]


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("shell", "areal-gym lisst"),
        ("shell", "areal-gym train --env tir trainer.lrr=1 --dry-run"),
        ("shell", "nobody-has-this-program"),
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
def test_a_wrong_block_is_noticed(language, text, reader):
    reader.type("areal-gym list envs")
    with pytest.raises((AssertionError, click.UsageError, GymError)):
        reader.follow(Block(ROOT / "README.md", 1, language, text))


def test_no_row_of_the_tables_is_left_over():
    texts = [block for blocks in BLOCKS.values() for block in blocks]
    commands = {
        re.sub(r"\s+# .*", "", command)
        for block in texts
        if block.language == "shell"
        for command in block.commands
    }
    used, meant = set(), {"areal-gym train -c recipe.yaml"}
    for rows, written in (
        (MEANT, commands),
        (MEANT_IN_PYTHON, {block.text for block in texts if block.language == "python"}),
    ):
        for text in written:
            for row in rows:
                if re.search(row[0], text):
                    used.add(row)
                    text = re.sub(*row, text)
            meant.add(text)
    everything = {*commands, *meant, *(block.text.lstrip() for block in texts)}
    for row in (*stand_ins.SCALED, *stand_ins.EXITS, *stand_ins.NOT_RUN, *SERVERS):
        if any(re.search(row[0], text) for text in everything):
            used.add(row)
    tables = MEANT, MEANT_IN_PYTHON, stand_ins.SCALED, stand_ins.EXITS, stand_ins.NOT_RUN, SERVERS
    assert [row[0] for table in tables for row in table if row not in used] == []
    named = re.findall(r"tests/[\w/]+(?:\.py)?", str(stand_ins.NOT_RUN))
    assert [test for test in named if not (ROOT / test).exists()] == []


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


def overview():
    """What there is, and what of it is not run: PYTHONPATH=.:tests python THIS_FILE"""
    found = [
        (block.language or "drawing", text.strip())
        for blocks in BLOCKS.values()
        for block in blocks
        for text in (block.commands if block.language == "shell" else [block.text])
    ]
    print(*Counter(language for language, _ in found).items(), sep="\n")
    reasons = {}
    for _, text in found:
        if reason := reason_not_to_run(text):
            reasons.setdefault(reason, {})[text.splitlines()[0]] = None
    print(f"\n{sum(map(len, reasons.values()))} different ones are not run:")
    for reason, texts in reasons.items():
        print(f"- {reason}", *texts, sep="\n    ")


if __name__ == "__main__":
    overview()
