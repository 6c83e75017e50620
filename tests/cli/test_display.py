"""What a person sees while a run goes on: the panel, its lines, and plain lines elsewhere."""

import asyncio
import contextlib
import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from areal_gym.cli import train_command
from areal_gym.rollout.stats import RolloutStats
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.incidents import INCIDENTS, IncidentCounter, describe_incidents
from areal_gym.runs.live_display import (
    LiveDisplay,
    PlainDisplay,
    duration,
    example_lines,
    make_display,
    sparkline,
    step_line,
)
from areal_gym.runs.waiting import ProgressLine
from areal_gym.sandbox import shared_calls, shared_sandbox
from tests._support.paths import ROOT
from tests._support.run_dirs import make_run, metrics, trajectory

WIDTH = 100


@pytest.fixture
def live():
    """A panel on a terminal that is recorded, and what is on it now."""
    console = Console(file=io.StringIO(), force_terminal=True, width=WIDTH, color_system=None)
    display = LiveDisplay(console, lambda step: [("best", trajectory(0).to_dict())] * (step == 2))
    yield display, lambda: shown(display._panel())
    display.close()


def shown(renderable):
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(renderable)
    return console.file.getvalue()


def test_panel_shows_progress(live):
    display, panel = live
    display.phase("train", 200)
    display.watch(lambda: "64 in flight: engine 61, sandbox 3; 12 of 16 groups ready")
    for step in range(1, 13):
        display.step(step, 200, metrics(step))
    text = panel()
    assert all(len(line) == WIDTH for line in text.splitlines())
    assert "12/200" in text
    assert "eta 9 min 43 s" in text  # 188 steps of 3.1 s
    assert re.search(r"reward [▁-█]{12} 0\.800  \+0\.500 in 10 steps", text)
    assert "stale 0.5" in text
    assert "overlap 70%  limited by training" in text
    assert "engine 61, sandbox 3; 12 of 16 groups ready" in text
    display.watch(None)
    assert "in flight" not in panel()
    display.phase("held-out", 64)
    display.advance(3, "reward 0.41")
    assert re.search(r"held-out .* 3/64 .*\n.* reward 0\.41", panel())


def test_every_tenth_step_and_examples_stay_above_the_panel(live):
    display, _ = live
    display.phase("train", 20)
    for step in range(1, 13):
        display.step(step, 20, metrics(step))
    written = display._console.file.getvalue()
    assert "step 10/20  reward 0.700" in written
    assert "step  9/20" not in written
    assert written.count("step 2, best: reward") == 1


def test_control_characters_of_the_policy_are_escaped(live):
    """Escape sequences, a carriage return, marks of direction: letters, and one line each."""
    display, _ = live
    nasty = "\x1b[2J\x1b]0;title\x07 over\rwritten\n\u202egnp.exe [bold]not bold[/bold]"
    messages = ({"role": "user", "content": nasty}, {"role": "assistant", "content": nasty * 99})
    row = trajectory(0, messages=messages).to_dict()
    row["task"]["id"] = "\x1b[31mred"
    lines = [line.plain for line in example_lines("worst", 7, row)]
    assert not any(ord(letter) < 32 or letter == "\u202e" for line in lines for letter in line)
    assert "[U+001B][2J" in lines[1]
    assert "[bold]not bold[/bold]" in lines[1]
    assert max(map(len, lines)) < 500
    display._examples = lambda step: [("worst", row)]
    before = len(display._console.file.getvalue())
    display.step(1, 3, metrics(1))
    written = display._console.file.getvalue()[before:]
    said = [line for line in written.splitlines() if "assistant:" in line]
    assert len(said) == 1
    assert len(re.sub(r"\x1b\[\d[AK]", "", said[0])) <= WIDTH  # the panel's own movements
    assert "\x1b]0;" not in written


def test_long_dialogues_are_shortened():
    messages = [{"role": "user", "content": f"line {i}"} for i in range(40)]
    lines = [
        line.plain for line in example_lines("best", 1, trajectory(0, messages=messages).to_dict())
    ]
    assert lines[1:] == [
        "  user: line 0",
        "  ... 35 messages ...",
        *(f"  user: line {i}" for i in range(36, 40)),
    ]


def test_plain_display_prints_one_line_per_step():
    stream = io.StringIO()
    display = make_display(stream=stream, examples=lambda step: [("best", {})])
    assert type(display) is PlainDisplay
    display.phase("train", 3)
    display.watch(lambda: "nobody asks")
    for step in range(1, 4):
        display.step(step, 3, metrics(step))
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[0] == step_line(1, 3, metrics(1), 6.2)
    assert lines[0].endswith("limited by training  eta 6 s")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (200, "3 min 20 s"), (7512, "2 h 05 min")]
)
def test_duration_format(seconds, text):
    assert duration(seconds) == text


def test_sparklines():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 1.0]) == "▁█"
    assert len(sparkline([0.5] * 100)) == 40
    assert sparkline([]) == ""


def stats(**facts):
    names = {f: 0 for f in RolloutStats.__dataclass_fields__}
    names |= {"num_groups_rejected": {}, "num_failures": {}}
    return RolloutStats(**{**names, **facts})


def test_panel_shows_what_episodes_wait_for():
    snapshots = iter(
        [
            stats(episodes_in_flight=9, waiting_on_engine=4, waiting_on_env=5, elapsed_s=1.0),
            stats(
                episodes_in_flight=9,
                waiting_on_agent=9,
                groups_ready=2,
                elapsed_s=6.0,
                num_tokens=1000,
                num_groups_rejected={"a/b": 1, "a/c": 2},
                num_failures={"timeout": 4},
            ),
        ]
    )
    waiting = ProgressLine(lambda: next(snapshots), 16, lambda: 3)
    assert waiting() == "9 in flight: engine 4, sandbox 3, environment 2; 0 of 16 groups ready"
    assert waiting() == (
        "9 in flight: agent 9; 2 of 16 groups ready; 200 tok/s sampled; "
        "3 groups rejected by filters; 4 failures"
    )


def test_shared_sandbox_calls_are_counted():
    async def main():
        loop = asyncio.get_running_loop()
        assert shared_calls(loop) == 0
        calls = [asyncio.ensure_future(shared_sandbox().run("1 + 1")) for _ in range(5)]
        await asyncio.sleep(0)
        assert shared_calls(loop) == 5
        await asyncio.gather(*calls)
        assert shared_calls(loop) == 0

    asyncio.run(main())


def test_examples_are_read_from_the_run_directory(tmp_path):
    make_run(tmp_path, num_steps=4)
    examples = train_command._examples(RunDir(tmp_path), 2)
    found = examples(2)
    assert [kind for kind, _ in found] == ["best", "worst"]
    assert found[0][1]["turns"][-1]["reward"] > found[1][1]["turns"][-1]["reward"]
    assert "spans" not in found[0][1]
    assert examples(3) == ()
    assert examples(6) == ()  # no such file: it has other worries than examples
    assert train_command._examples(RunDir(tmp_path), 0)(2) == ()


SCRIPT = """
import sys
from pathlib import Path
from tests._support.run_dirs import metrics
from areal_gym.runs.live_display import make_display
display = make_display()
print(type(display).__name__)
display.phase("train", 4)
for step in range(1, 5):
    display.step(step, 4, metrics(step))
display.close()
print("end")
"""


@pytest.mark.parametrize(("term", "kind"), [("xterm", "LiveDisplay"), ("dumb", "PlainDisplay")])
def test_display_on_a_real_terminal(term, kind):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": term, "COLUMNS": "80"}
    env.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # its end
            while chunk := os.read(ours, 65536):
                written += chunk
        assert process.wait(60) == 0
    os.close(ours)
    text = written.decode()
    assert kind in text
    assert text.rstrip().endswith("end")
    assert text.count("step ") == (1 if kind == "LiveDisplay" else 4)
    if kind == "LiveDisplay":  # the cursor is given back
        assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    else:
        assert "\x1b" not in text


def test_no_color_gives_the_plain_display(monkeypatch, capsys, tmp_path):
    from areal_gym.cli import app

    seen = []
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(app.app, "main", lambda **given: seen.append(given["obj"].is_plain))
    app.run(["list"])
    monkeypatch.delenv("NO_COLOR")
    app.run(["list"])
    assert seen == [True, False]


def test_step_line_shows_incidents():
    healthy = {**metrics(3), "rollout/retries": 4.0, "rollout/failures/env_error": 2.0}
    counter = IncidentCounter()
    row = {**healthy, **counter.count(healthy)}
    assert step_line(3, 10, row, 5.0).endswith("  ! 2 episodes failed, 4 episodes retried")
    # Counters are since the start: what has not grown is not said again.
    row = {**healthy, **counter.count(healthy)}
    assert "!" not in step_line(4, 10, row, 5.0)
    worse = {
        **healthy,
        "rollout/failures/engine_error": 1.0,
        "rollout/failed_groups": 1.0,
        "rollout/shrunken_groups": 3.0,
        "engine/num_servers_lost": 1.0,
    }
    row = {**worse, **counter.count(worse)}
    told = "  ! 1 episode failed, 1 group dropped, 3 groups shrunken, 1 server lost"
    assert step_line(5, 10, row, 5.0).endswith(told)


def test_panel_shows_incidents_of_the_last_step(live):
    display, panel = live
    display.phase("train", 20)
    display.step(1, 20, {**metrics(1), "incidents/lost_servers": 2.0})
    assert "! 2 servers lost" in panel()
    display.step(2, 20, {**metrics(2), "incidents/lost_servers": 0.0})
    assert "servers lost" not in panel()


def test_every_incident_has_a_label_and_documentation():
    page = (ROOT / "docs" / "metrics.md").read_text()
    for incident in INCIDENTS:
        assert describe_incidents({f"incidents/{incident.name}": 1.0}).startswith("1 ")
        assert describe_incidents({f"incidents/{incident.name}": 2.0}).startswith("2 ")
        assert f"`incidents/{incident.name}`" in page
