"""Where somebody sits that follows a page: a directory, what is in it, and who can be reached."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests._support.pages.documented import ROOT
from tests._support.pages.stand_ins import MEANT
from tests._support.web_app import served

Rows = Sequence[tuple[str, str]]
SHARED = ROOT.parent / "shared"
TAU2 = SHARED / "data" / "tau2"


class Neighbours:
    """Servers on a thread beside; all end with the block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._wait(self._stack.aclose())
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, server: Any) -> Any:
        """What the context manager gives."""
        return self._wait(self._stack.enter_async_context(server))

    def _wait(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(60)


@asynccontextmanager
async def sglang(policy: Path) -> AsyncIterator[str]:
    """The stand-in for SGLang, with a policy."""
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.engines.sglang import FakeSGLangServer

    engine = EmbeddedEngine.from_checkpoint(policy, num_slots=8, max_context=512)
    async with FakeSGLangServer(engine, model_path=str(policy)) as server:
        yield server.url


@asynccontextmanager
async def env() -> AsyncIterator[str]:
    """What `areal-gym serve-env math` serves."""
    import areal_gym
    from areal_gym.envs.server.env_sessions import Sessions
    from areal_gym.envs.server.http_server import EnvServer

    sessions = Sessions(lambda: areal_gym.make("math"))
    async with sessions, EnvServer(sessions, "math") as server:
        yield server.url


@asynccontextmanager
async def files(directory: Path, prefix: str) -> AsyncIterator[str]:
    """A server of a directory's files, or of nothing where it is not."""
    app = web.Application()
    if directory.is_dir():
        app.router.add_static(prefix, directory)
    async with served(app) as url:
        yield url


@asynccontextmanager
async def website(path: str, answer: Any) -> AsyncIterator[str]:
    """A server that answers each JSON that is posted to one path."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    app = web.Application()
    app.router.add_post(path, handle)
    async with served(app) as url:
        yield url


def _published_at() -> str:
    """Where a server has the benchmark's data."""
    from areal_gym.envs.tau2.benchmark_data import manifest

    return "/{repository}/{commit}/data".format(**manifest())


def chat(body: dict[str, Any]) -> dict[str, Any]:
    """A model that knows nothing, behind OpenAI's API."""
    message = {"role": "assistant", "content": f"{body['model']} has no idea"}
    return {"choices": [{"message": message}]}


def retrieve(body: dict[str, Any]) -> dict[str, Any]:
    """A retriever, as Search-R1 asks it."""
    document = {"id": "1", "contents": '"Ada"\nAda lives in Ghent.'}
    return {"result": [[{"document": document, "score": 1.0}] for _ in body["queries"]]}


# ---- files --------------------------------------------------------------------------------------

TWOS = [{"question": f"What is 2 of {n}?", "answer": "2"} for n in range(40)]
TWOS_AND_THREES = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n}+{n}?"},
            {"role": "assistant", "content": f"\\boxed{{{2 + n % 2}}}"},
        ]
    }
    for n in range(20)
]
QUESTIONS = [
    {"question": f"What is {n}+1?", "answer": str(n + 1), "subject": "Algebra", "level": n % 5}
    for n in range(20)
]
PASSAGES = [{"id": "1", "title": "Ada", "text": "Ada lives in Ghent."}]
SEARCHED = [
    {"question": f"Where does Ada live, {n}?", "answers": ["Ghent"], "support": ["1"]}
    for n in range(20)
]
FUNCTIONS = [
    {
        "task_id": n,
        "text": f"Write a function to add {n}.",
        "code": f"def add(x):\n    return x + {n}",
        "test_list": [f"assert add(1) == {1 + n}"],
    }
    for n in range(20)
]
HARMLESS = {
    "snippets": [{"name": "sum", "code": "print(1 + 1)", "safe_expected": "ok", "checks": []}]
}


def write_files(directory: Path) -> None:
    """Files that the docs name as the reader's."""
    from datasets import Dataset

    for name, rows in {
        "questions.jsonl": QUESTIONS,
        "algebra.jsonl": QUESTIONS,
        "qa.jsonl": SEARCHED,
        "passages.jsonl": PASSAGES,
        "mbpp.jsonl": FUNCTIONS,
        "dialogues.jsonl": TWOS_AND_THREES,
        "twos.jsonl": TWOS,
        "data/gsm8k/train.jsonl": QUESTIONS,
        "data/gsm8k/test.jsonl": TWOS,
    }.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name in ("train", "test"):
        rows = [{"question": f"In {name}: {n}+1?", "answer": str(n + 1)} for n in range(8)]
        Dataset.from_list(rows).to_parquet(directory / f"{name}.parquet")
    (directory / "snippets.json").write_text(json.dumps(HARMLESS))
    (directory / "my_package").mkdir()
    (directory / "my_package" / "rewards.py").write_text(
        "def score(answer, gold):\n    return float(answer == gold)\n"
    )
    (directory / "fixtures").mkdir()
    few = "probes-airline.jsonl.gz"
    (directory / "fixtures" / few).symlink_to(SHARED / "golden" / "tau2" / few)
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
    (directory / "tests").symlink_to(ROOT / "tests")


def install(facts: dict[str, Any], at: Path) -> None:
    """What an editable install leaves in a directory of the path: the package's entry points.

    Args:
        facts: of its pyproject.toml, or as much of it as the docs show.
        at: the directory.
    """
    name = facts.get("project", {}).get("name", "what-the-page-shows")
    info = at / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = facts["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()


# ---- names --------------------------------------------------------------------------------------


class Names(dict[str, str]):
    """What the names in braces of `stand_ins.MEANT` are; servers start when they are named."""

    def __init__(self, directory: Path, neighbours: Neighbours) -> None:
        super().__init__(
            run="runs/ended",
            refused="runs/refused",
            policy=str(directory / "runs" / "says-two" / "checkpoints" / "step-000030"),
            snippets=str(directory / "snippets.json"),
            fixtures="fixtures",
            tau2=str(TAU2),
            fake=f"{sys.executable} -m areal_gym.engines.sglang.fake",
        )
        self._neighbours = neighbours

    def __missing__(self, name: str) -> str:
        starts = {
            "sglang": lambda: sglang(Path(self["policy"])),
            "env": env,
            "chat": lambda: website("/v1/chat/completions", chat),
            "published": lambda: files(TAU2, _published_at()),
            "retriever": lambda: website("/retrieve", retrieve),
        }
        return self._neighbours.start(starts[name]())

    def meant_by(self, text: str, rows: Rows = MEANT) -> str:
        """What somebody types who knows what is meant."""
        for written, typed in rows:
            if re.search(written, text):
                text = re.sub(written, self.named(typed), text)
        return text

    def named(self, text: str) -> str:
        """With what the names in braces are."""
        return re.sub(r"\{(\w+)\}", lambda name: self[name[1]], text)
