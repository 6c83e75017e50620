"""Known benchmarks: settings, data that are found or named, and the page."""

import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from areal_gym.cli.app import run
from areal_gym.config import load_config
from areal_gym.envs.benchmarks.benchmark import Benchmark, DataFile
from areal_gym.envs.benchmarks.benchmark_pull import pull_benchmark
from areal_gym.envs.benchmarks.benchmark_table import benchmarks_table
from areal_gym.errors import DataError, InfrastructureError
from areal_gym.plugins import registry
from tests._support.paths import ROOT

ENTRIES = registry().entries("benchmarks")
ROWS = {
    "math": {"question": "1+1?", "problem": "1+1?", "answer": "2"},
    "choice": {
        "Question": "Which?",
        "Correct Answer": "this",
        **{f"Incorrect Answer {n}": f"that {n}" for n in (1, 2, 3)},
    },
    "code": {
        **{"prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n"},
        "test": "def check(candidate):\n    assert candidate(2) == 2\n",
    },
}


def test_page_is_up_to_date():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    command = "python -m areal_gym.envs.benchmarks.benchmark_table"
    assert page.partition("## The benchmarks\n\n")[2] == benchmarks_table(), command


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_settings_are_valid_and_the_environment_takes_them(entry, tmp_path, monkeypatch):
    benchmark = entry.load()
    assert benchmark.id == entry.id
    if benchmark.data is not None:
        monkeypatch.setenv("AREAL_GYM_DATA", str(tmp_path / "D"))
        monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "C"))
        with pytest.raises(DataError, match="are not here") as caught:
            benchmark.settings()
        assert f"areal-gym data pull {entry.id}" in "\n".join(caught.value.hints)
        file = tmp_path / "D" / benchmark.data.place
        file.parent.mkdir(parents=True)
        text = json.dumps(ROWS[benchmark.env]) + "\n"
        file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    config = load_config(flags=benchmark.settings())
    assert config.eval.num_tasks == benchmark.num_tasks
    if benchmark.data is not None:
        env = registry().make("envs", config.env.id, **config.env.kwargs)
        assert (env.num_tasks("test"), env.num_tasks("train")) == (1, 0)
        env.reset(seed=0, options={"split": "test", "index": 0})
        assert env.step(env.gold_action())[1] == 1.0
        env.close()


@pytest.mark.parametrize("name", ["bfcl", "BFCL_v3", "livecodebench-v6", "lcb"])
@pytest.mark.parametrize(
    "command", [["eval", "--benchmark"], ["data", "pull"], ["show"]], ids=lambda words: words[0]
)
def test_benchmarks_that_are_left_out_say_why(command, name, capsys):
    assert run([*command, name]) == 2
    said = capsys.readouterr().err
    assert f"the benchmark '{name}' is not offered: " in said
    assert "areal-gym list benchmarks" in said


def test_unknown_benchmark_is_no_left_out_one(capsys):
    assert run(["eval", "--benchmark", "gsm8"]) == 2
    assert "did you mean 'gsm8k'?" in capsys.readouterr().err


def test_benchmark_without_a_model_asks_for_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AREAL_GYM_DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text(json.dumps(ROWS["math"]) + "\n")
    assert run(["eval", "--benchmark", "gsm8k", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "which policy? gsm8k has no training tasks" in said
    assert "--model Qwen/Qwen3-0.6B" in said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def server():
    content = b'{"question": "1+1?", "answer": "2"}\n'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", content
        served.shutdown()
        thread.join()


def test_data_are_pulled_with_a_checksum(server, tmp_path):
    base_url, content = server
    facts = {"place": "gsm8k/test.jsonl", "num_bytes": len(content)}
    facts["url"] = "https://raw.githubusercontent.com/o/r/c/test.jsonl"
    known = registry().load("benchmarks", "gsm8k")
    for sha256, is_right in ((hashlib.sha256(content).hexdigest(), True), ("0" * 64, False)):
        data = DataFile(**facts, sha256=sha256)
        names = [name for name in Benchmark.__dataclass_fields__ if name != "data"]
        benchmark = Benchmark(data=data, **{name: getattr(known, name) for name in names})
        if is_right:
            file = pull_benchmark(benchmark, tmp_path, base_url=base_url)
            assert file.read_bytes() == content
        else:
            with pytest.raises(InfrastructureError, match="checksum"):
                pull_benchmark(benchmark, tmp_path / "other", base_url=base_url)
