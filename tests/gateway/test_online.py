"""Online runs: outside programs open sessions, chat and post rewards while it trains."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.errors import ConfigError, UsageError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.evaluation import evaluate
from areal_gym.runs.train import train

SMALL = [
    "env.id=online",
    "rollout.group_size=2",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=8",
    "engine.num_slots=8",
    "engine.max_context=256",
]


def config_of(policy, *more):
    return load_config(None, [*SMALL, f"engine.model={policy}", *more])


def post(url, body, key):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def wait_for(file, is_over=lambda: False):
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline and not is_over():
        time.sleep(0.05)
    return json.loads(file.read_text())


class Program(threading.Thread):
    """An outside program that knows only the gateway's address and key."""

    def __init__(self, run_dir, *, task_of=lambda number: None, fails_at=()):
        super().__init__(daemon=True)
        self.file = run_dir / "gateway.json"
        self.task_of, self.fails_at = task_of, fails_at
        self.num_sessions = 0
        self.num_refused = 0
        self.problems = []
        self.is_stopped = False

    def run(self):
        address = wait_for(self.file, lambda: self.is_stopped)
        url, key = address["base_url"], address["control_key"]
        while not self.is_stopped:
            try:
                self.play(url, key)
            except (urllib.error.URLError, ConnectionError):
                return  # the run is over
            except Exception as error:
                self.problems.append(repr(error))
                return

    def play(self, url, key):
        number = self.num_sessions
        status, session = post(f"{url}/rl/sessions", {"task": self.task_of(number)}, key)
        if status == 429:  # wait until training catches up
            self.num_refused += 1
            time.sleep(0.02)
            return
        assert status == 201, session
        self.num_sessions += 1
        body = {"messages": [{"role": "user", "content": f"Count to {number}."}]}
        status, answer = post(f"{url}/chat/completions", body, session["api_key"])
        if status == 401:
            return  # the run has ended meanwhile
        assert status == 200, answer
        end = {"error": "the tool broke"} if number in self.fails_at else {"reward": number % 3}
        status, _ = post(f"{url}/rl/sessions/{session['id']}/end", end, key)
        assert status in (200, 404)


def run_with(policy, out, programs, *more, steps=2):
    torch.set_num_threads(1)
    for program in programs:
        program.start()
    try:
        return train(config_of(policy, f"steps={steps}", *more), run_dir=out)
    finally:
        for program in programs:
            program.is_stopped = True
        for program in programs:
            program.join(timeout=30)


def test_online_run_trains_as_sessions_complete(tiny_policy, tmp_path):
    out = tmp_path / "run"
    programs = [Program(out, fails_at=(2,)) for _ in range(3)]
    summary = run_with(tiny_policy, out, programs)
    assert [program.problems for program in programs] == [[], [], []]
    assert summary["num_steps"] == 2
    assert "heldout_after" not in summary
    directory = RunDir(out)
    rows = list(directory.read_metrics())
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["rollout/failures/agent_error"] >= 1  # "the tool broke": counted, never a 0
    trajectories = [t for step in (1, 2) for t in directory.read_trajectories(step)]
    assert len(trajectories) == 8
    assert all(len(t.turns) == 1 and t.num_policy_tokens for t in trajectories)
    assert {t.reward for t in trajectories} <= {0.0, 1.0, 2.0}
    assert {t.agent_id for t in trajectories} == {"online"}
    mode = (out / "gateway.json").stat().st_mode & 0o777
    assert mode == 0o600  # only the owner may read the control key


def test_sessions_of_one_task_are_one_group(tiny_policy, tmp_path):
    out = tmp_path / "run"
    program = Program(out, task_of=lambda number: "even" if number % 2 == 0 else "odd")
    run_with(tiny_policy, out, [program], steps=1)
    assert program.problems == []
    groups = {}
    for trajectory in RunDir(out).read_trajectories(1):
        number = int(trajectory.messages[0]["content"].removeprefix("Count to ")[:-1])
        groups.setdefault(trajectory.group_id, set()).add(number % 2)
    assert sorted(map(tuple, groups.values())) == [(0,), (1,)]


def interrupt_after_two_steps(policy, out):
    """Train online in a child process and interrupt it; return the number of its steps."""
    command = [sys.executable, "-m", "areal_gym", "train", "--out", str(out), "--plain"]
    settings = [*SMALL, f"engine.model={policy}", "trainer.save_every=1", "steps=40"]
    program = Program(out)
    process = subprocess.Popen(
        [*command, *settings], stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    program.start()
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors.decode()
    assert program.problems == []
    program.is_stopped = True
    program.join(timeout=30)
    return len(list(RunDir(out).read_metrics()))


def resume_with_program(config, out):
    """Resume the run beside a program that waits for the new address of the gateway."""
    program = Program(out)
    # The old file still names the address of the process that is gone.
    stale = (out / "gateway.json").read_text()

    def follow():
        while (out / "gateway.json").read_text() == stale and not program.is_stopped:
            time.sleep(0.05)
        program.run()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        train(config, run_dir=out, mode="resume")
    finally:
        program.is_stopped = True
        follower.join(timeout=30)
    assert program.problems == []


def test_resumed_online_run_keeps_its_control_key(tiny_policy, tmp_path):
    out = tmp_path / "run"
    done = interrupt_after_two_steps(tiny_policy, out)
    key = json.loads((out / "gateway.json").read_text())["control_key"]
    resume_with_program(config_of(tiny_policy, f"steps={done + 1}"), out)
    assert json.loads((out / "gateway.json").read_text())["control_key"] == key
    assert len(list(RunDir(out).read_metrics())) == done + 1


def test_unsupported_online_settings_are_refused(tiny_policy):
    for wrong in (
        ["agent.id=chat"],
        ["deterministic=true"],
        ["gateway=nowhere"],
        ["gateway=127.0.0.1:99999"],
    ):
        with pytest.raises(ConfigError):
            config_of(tiny_policy, *wrong)
    with pytest.raises(ConfigError, match="starter"):
        load_config(None, SMALL)
    with pytest.raises(ConfigError, match="'online'"):
        load_config(None, ["agent.id=online"])
    with pytest.raises(UsageError, match="no held-out tasks"):
        evaluate(config_of(tiny_policy))


def test_serve_command(tiny_policy):
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_gym", "serve", "--model", str(tiny_policy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AREAL_GYM_API_KEY": "mine-and-yours"},
    )
    try:
        address = json.loads(process.stdout.readline())
        assert address["api_key"] == "mine-and-yours"
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 5}
        for _ in range(2):
            status, answer = post(
                f"{address['base_url']}/chat/completions", body, address["api_key"]
            )
            assert status == 200
            assert answer["usage"]["completion_tokens"] <= 5
        status, answer = post(f"{address['base_url']}/rl/task", {}, address["api_key"])
        assert status == 405
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()


def test_missing_agent_arguments_are_a_config_error(tiny_policy, tmp_path):
    config = load_config(None, ["agent.id=openai", "env.id=math", f"engine.model={tiny_policy}"])
    with pytest.raises(ConfigError, match="the arguments of 'openai' do not fit"):
        train(config, run_dir=tmp_path / "run")
