"""The reader's directory: its files, its runs, and the servers that can be reached from it."""

import asyncio
import importlib
import json
import re
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web

import areal_gym
from areal_gym.envs.server.env_sessions import Sessions
from areal_gym.envs.server.http_server import EnvServer
from areal_gym.envs.tau2.benchmark_data import manifest
from tests._support.pages.tables import SUBSTITUTIONS
from tests._support.paths import ROOT, SHARED
from tests._support.web_app import served

TAU2 = SHARED / "data" / "tau2"


class BackgroundServers:
    """Async context managers on the loop of another thread; all are closed at the end."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._wait(self._stack.aclose())
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, server):
        return self._wait(self._stack.enter_async_context(server))

    def _wait(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


@asynccontextmanager
async def sglang(policy):
    """The stand-in for SGLang, with a policy."""
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.engines.sglang import FakeSGLangServer

    engine = EmbeddedEngine.from_checkpoint(policy, num_slots=8, max_context=512)
    async with FakeSGLangServer(engine, model_path=str(policy)) as server:
        yield server.url


@asynccontextmanager
async def math_env():
    """The server that `areal-gym serve-env math` starts."""
    sessions = Sessions(lambda: areal_gym.make("math"))
    async with sessions, EnvServer(sessions, "math") as server:
        yield server.url


def files(directory, prefix):
    """A server of a directory's files, or of nothing where the directory is missing."""
    app = web.Application()
    if directory.is_dir():
        app.router.add_static(prefix, directory)
    return served(app)


def website(path, answer):
    """A server that answers each JSON value that is posted to one path."""

    async def handle(request):
        return web.json_response(answer(await request.json()))

    app = web.Application()
    app.router.add_post(path, handle)
    return served(app)


def chat(body):
    """Answer as a model that knows nothing, in OpenAI's format."""
    message = {"role": "assistant", "content": f"{body['model']} has no idea"}
    return {"choices": [{"message": message}]}


def retrieve(body):
    """Answer as a retriever, in Search-R1's format."""
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


def write_files(directory):
    """Write the files that the docs name as the reader's."""
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
    fixture = "probes-airline.jsonl.gz"
    (directory / "fixtures" / fixture).symlink_to(SHARED / "golden" / "tau2" / fixture)
    for name in ("examples", "benchmarks", "tests"):
        (directory / name).symlink_to(ROOT / name)


def install(facts, directory):
    """Leave what an editable install of a pyproject.toml leaves in a directory: entry points."""
    name = facts.get("project", {}).get("name", "package-of-the-page")
    info = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in facts["project"]["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()


# ---- names --------------------------------------------------------------------------------------


class Names(dict):
    """Values of the names in braces in `tables`; servers start when they are named."""

    def __init__(self, directory, servers):
        super().__init__(
            run="runs/ended",
            refused="runs/refused",
            policy=str(directory / "runs" / "says-two" / "checkpoints" / "step-000030"),
            snippets=str(directory / "snippets.json"),
            fixtures="fixtures",
            tau2=str(TAU2),
            fake=f"{sys.executable} -m areal_gym.engines.sglang.fake",
        )
        self._servers = servers

    def __missing__(self, name):
        starts = {
            "sglang": lambda: sglang(Path(self["policy"])),
            "env": math_env,
            "chat": lambda: website("/v1/chat/completions", chat),
            "published": lambda: files(TAU2, "/{repository}/{commit}/data".format(**manifest())),
            "retriever": lambda: website("/retrieve", retrieve),
        }
        return self._servers.start(starts[name]())

    def substitute(self, text, rows=SUBSTITUTIONS):
        """Replace placeholders by what is typed."""
        for pattern, replacement in rows:
            if re.search(pattern, text):
                text = re.sub(pattern, self.fill(replacement), text)
        return text

    def fill(self, text):
        """Replace the names in braces."""
        return re.sub(r"\{(\w+)\}", lambda name: self[name[1]], text)
