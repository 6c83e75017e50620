"""The page in a real browser: what people see, press and are safe from."""

import base64
import contextlib
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer

from areal_gym.errors import TrainError
from areal_gym.run_dir.evaluation_writer import EvaluationWriter
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.types import StopReason, Task, TokenSpan
from tests._support.evaluation_dirs import FACTS, write_evaluation
from tests._support.evaluation_dirs import add as add_sample
from tests._support.evaluation_dirs import sample as evaluation_sample
from tests._support.run_dirs import (
    add_step,
    evaluation,
    make_run,
    metrics,
    sampled,
    trajectory,
)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = os.environ.get("AREAL_GYM_CHROMIUM") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium, or AREAL_GYM_CHROMIUM"
)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser):
    """A page that fails its test when it complains."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(WAIT_MS)
    opened = context.new_page()
    complaints = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda said: complaints.append(said.text))
    yield opened
    context.close()
    assert complaints == []


@contextlib.contextmanager
def viewing(*paths):
    """The address of an `areal-gym view`."""
    command = [sys.executable, "-m", "areal_gym", "view", *map(str, paths)]
    with subprocess.Popen(
        [*command, "--no-browser", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            text = ""
            while not text.endswith("}\n"):
                line = process.stdout.readline()
                assert line, "the viewer has ended"
                text += line
            yield json.loads(text)["url"]
        finally:
            process.terminate()


@contextlib.contextmanager
def viewed(page, *paths):
    """The same for one page, which leaves before the server ends: it would ask on in vain."""
    with viewing(*paths) as url:
        yield url
        page.goto("about:blank")


def until(page, expression):
    """Wait until it is true; playwright's own way is what the page's policy forbids."""
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline_s, expression
        page.wait_for_timeout(30)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, which no test changes, and the address of their viewer."""
    root = tmp_path_factory.mktemp("viewed")
    make_run(root / "first")
    make_run(root / "second", num_steps=2, seed=7)
    for step, num_tasks in ((20, 5), (40, 6)):
        pairs = [(index, attempt) for index in range(num_tasks) for attempt in range(4)]
        scores = {"pass@1": step / 100, "pass@1_low": 0.1, "pass@1_high": 0.6, "pass@4": 0.75}
        facts = {"policy": {"model": "starter", "run": "first", "step": step}}
        path = root / "first" / "evaluations" / f"eval-{step}"
        write_evaluation(path, pairs, scores=scores, **facts)
    with viewing(root) as url:
        yield root, url


def places(page):
    """The rows in sight, from top to bottom, by their place in the file."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".space .row[data-place]")]
        .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
        .map((row) => Number(row.dataset.place))"""
    )


def test_keyboard_leads_from_run_list_to_trajectory(page, runs):
    page.goto(runs[1])
    page.wait_for_selector(".run.current")
    assert page.locator(".run").count() == 2
    page.keyboard.press("?")
    assert page.locator("dialog.help").is_visible()
    page.keyboard.press("Escape")
    while "first" not in page.locator(".run.current").inner_text():
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".chart path.line")
    assert "Reward" in page.locator(".charts").first.inner_text()
    page.keyboard.press("t")
    page.wait_for_selector(".space .row")
    page.keyboard.press("j")
    page.wait_for_selector(".right .message")
    page.keyboard.press("j")
    until(page, "document.querySelector('.right b.id').textContent === 'g0000-1'")
    page.keyboard.press("2")
    page.wait_for_selector(".token-text .t")
    assert page.url.endswith("#/run/first/trajectories/latest/1/tokens")
    page.keyboard.press("[")
    until(page, "document.querySelector('.steps').value === 'step-000002'")


def test_hovering_a_curve_shows_the_step_and_clicking_opens_it(page, runs):
    page.goto(runs[1] + "#/run/first/curves")
    chart = page.locator(".chart").first
    page.wait_for_selector(".chart path.line")
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
    page.wait_for_selector(".legend .at")
    assert {at.inner_text() for at in page.locator(".legend .at").all()} == {"step 3"}
    assert "0.35" in chart.locator(".legend").inner_text()
    page.mouse.click(box["x"] + box["width"] - 12, box["y"] + 60)
    page.wait_for_selector(".space .row")
    assert "trajectories/step-000003" in page.url


def test_rows_are_sorted_filtered_and_searched(page, runs):
    page.goto(runs[1] + "#/run/first/trajectories/step-000001?flat=1")
    page.wait_for_selector(".space .row")
    assert places(page) == list(range(16))
    page.click(".head [data-key=reward]")
    until(page, "document.querySelector('[data-key=reward]').dataset.sorted === 'down'")
    rewards = [trajectory(place).reward for place in places(page)]
    assert rewards == sorted(rewards, reverse=True)
    assert 0 < sum(rewards) < 16
    page.keyboard.press("/")
    page.keyboard.type("reward<1 stop:max_turns")
    until(page, "document.querySelector('.count').textContent.includes('of')")
    expected = [i for i in range(16) if i % 7 == 3 and not trajectory(i).reward]
    assert places(page) == expected
    assert "q=reward%3C1+stop%3Amax_turns" in page.url
    page.fill(".filter", "much is 11 +")
    page.wait_for_selector("[data-place='11']")
    assert places(page) == [11]
    page.fill(".filter", "")
    until(page, "document.querySelectorAll('.space .row[data-place]').length === 16")
    page.click(".chip:has-text('max_turns')")
    until(page, "document.querySelectorAll('.space .row[data-place]').length === 2")
    assert sorted(places(page)) == [3, 10]


def test_siblings_are_shown_in_folding_groups(page, runs):
    page.goto(runs[1] + "#/run/first/trajectories/step-000001")
    page.wait_for_selector(".row.group")
    assert page.locator(".row.group").count() == 4
    page.locator(".row.group").first.click()
    until(page, "document.querySelectorAll('.space .row[data-place]').length === 12")
    assert 0 not in places(page)
    page.goto(runs[1] + "#/run/first/trajectories/step-000001/5/siblings")
    page.wait_for_selector(".column.current")
    assert page.locator(".column").count() == 4
    assert "g0001-1" in page.locator(".column.current").inner_text()


def test_mean_of_a_group_counts_rows_that_the_filter_hides(page, runs):
    page.goto(runs[1] + "#/run/first/trajectories/step-000001?q=reward%3D1")
    page.wait_for_selector(".row.group")
    rewards = {}
    for place in range(16):
        one = trajectory(place)
        rewards.setdefault(one.group_id, []).append(one.reward)
    mixed = {group: values for group, values in rewards.items() if 0 < sum(values) < 4}
    assert mixed
    for group, values in mixed.items():
        text = page.locator(f".row.group:has-text('{group}') .mean").inner_text()
        mean = f"{sum(values) / 4:.3f}".rstrip("0")
        assert text == f"mean {mean} {sum(values):.0f} of 4 shown"


def test_legends_and_cards_show_what_was_measured(page, tmp_path):
    path = make_run(tmp_path / "odd", num_steps=1, num_trajectories=1, is_finished=False)
    with RunDir.open(path, "resume") as run:
        run.append_metrics({**metrics(2), "rollout/stop/max_turns": None, "train/loss": 0.5})
        row = {**metrics(3), "rollout/stop/completed": 1.0}
        run.append_metrics({k: v for k, v in row.items() if k != "rollout/stop/max_turns"})
        run.save_summary({})
    for name, accuracies in {"never": [0.0, 0.0], "once": [0.24]}.items():
        make_run(tmp_path / name, num_steps=1, num_trajectories=1)
        lines = [json.dumps(evaluation(i, value)) + "\n" for i, value in enumerate(accuracies)]
        (tmp_path / name / "evaluations.jsonl").write_text("".join(lines))
    with viewed(page, tmp_path) as url:
        page.goto(url)
        page.wait_for_selector(".run")
        shown = {
            run.locator(".name").inner_text(): run.locator(".heldout").inner_text().split()
            for run in page.locator(".run").all()
        }
        assert shown["never"] == ["held", "out", "0.000", "→", "0.000"]
        assert shown["once"] == ["held", "out", "0.240"]
        page.goto(url + "#/run/odd/curves")
        stops = page.locator(".chart:has(figcaption:text-is('Stop reasons'))")
        stops.wait_for()
        assert stops.locator(".key b").all_inner_texts() == ["100%", "0%"]
        loss = page.locator(".chart:has(figcaption:text-is('Loss')) .key")
        assert loss.inner_text().split() == ["loss", "0.5", "step", "2"]


def test_tokens_are_colored_by_recorded_values(page, runs):
    page.goto(runs[1] + "#/run/first/trajectories/step-000002/1/tokens")
    page.wait_for_selector(".token-text .t")
    kinds = page.evaluate(
        "[...document.querySelectorAll('.token-text .t')].map(t => t.classList[1])"
    )
    assert kinds == ["prompt"] * 3 + ["policy"] * 3 + ["env"] * 2 + ["policy"] * 3
    page.select_option("[aria-label='color by']", "ratio")
    assert page.locator(".token-text .t.likelier").count() == 6
    page.locator(".token-text .t").nth(4).click()
    readout = page.locator(".readout").inner_text()
    one = trajectory(1, 2)
    assert f"id {one.token_ids[4]}" in readout
    assert "ratio 1.105" in readout
    page.select_option("[aria-label='color by']", "advantage")
    assert page.locator(f".token-text .t.{'up' if one.reward else 'down'}").count() >= 6
    page.keyboard.press("Escape")
    page.goto(runs[1] + "#/run/first/trajectories/step-000002/1/timeline")
    page.wait_for_selector(".bar-of.tool")
    assert "200 ms" in page.locator(".timeline").inner_text()


def test_runs_are_compared(page, runs):
    page.goto(runs[1])
    page.wait_for_selector(".run")
    for name in ("first", "second"):
        page.check(f"[aria-label='compare {name}']")
    page.click("a.button")
    page.wait_for_selector(".differences")
    rows = page.locator(".differences tr").all_inner_texts()
    assert any(row.split() == ["seed", "0", "7"] for row in rows)
    page.wait_for_selector(".chart path.line.c1")


def names_shown(page):
    return page.evaluate("[...document.querySelectorAll('.run')].map((run) => run.dataset.name)")


def test_runs_are_searched_sorted_annotated_and_deleted(page, tmp_path):
    for i, name in enumerate(("alpha", "beta", "gamma")):
        path = make_run(tmp_path / name, num_steps=3 - i, num_trajectories=1, is_finished=i > 0)
        os.utime(path / "metrics.jsonl", (1e9, 2e9 + i))
        os.utime(path / "config.yaml", (1e9, 1e9))
    with (
        contextlib.suppress(TrainError),
        RunDir.open(tmp_path / "alpha", "resume") as failed,
    ):
        failed.report_start(step=3, steps=60)
        raise TrainError("out of memory <b>on</b> step 4")
    with viewed(page, tmp_path) as url:
        page.goto(url)
        page.wait_for_selector(".run")
        assert names_shown(page) == ["gamma", "beta", "alpha"]
        reason = page.locator("[data-name=alpha] .reason").inner_text()
        assert reason == "failed: out of memory <b>on</b> step 4"
        page.click(".run-heads [data-key=step]")
        until(page, "document.querySelector('.run-heads [data-key=step]').dataset.sorted")
        assert names_shown(page) == ["alpha", "beta", "gamma"]
        page.keyboard.press("/")
        page.keyboard.type("is:failed memory")
        until(page, "document.querySelectorAll('.run').length === 1")
        assert "q=is%3Afailed+memory" in page.url
        page.keyboard.press("Escape")
        page.keyboard.press("e")
        page.fill("[aria-label=tags]", "base line, <i>")
        page.fill("[aria-label=note]", "<script>1</script>")
        page.click("dialog.edit >> text=save")
        page.wait_for_selector(".run .chip.tag")
        row = page.locator("[data-name=alpha]")
        assert row.locator(".chip.tag").all_inner_texts() == ["base line", "<i>"]
        assert row.locator(".note").inner_text() == "<script>1</script>"
        page.fill(".filter", "")
        until(page, "document.querySelectorAll('.run').length === 3")
        page.click(".chips .chip:has-text('base line')")
        until(page, "document.querySelectorAll('.run').length === 1")
        page.click("[aria-label='edit alpha']")
        page.click("dialog.edit >> text=delete …")
        assert (tmp_path / "alpha").exists()
        page.click("dialog.edit >> text=/^delete$/")
        until(page, "document.querySelectorAll('.run').length === 0")
        page.fill(".filter", "")
        until(page, "document.querySelectorAll('.run').length === 2")
    assert not (tmp_path / "alpha").exists()
    assert len(list((tmp_path / ".trash").iterdir())) == 1


def test_graded_rewards_are_shown_as_mean_rewards(page, tmp_path):
    make_run(tmp_path / "graded", num_steps=2, num_trajectories=1)
    rows = []
    for step, reward in enumerate((0.3125, 0.5, 2.5)):
        scores = {"reward": reward, "reward_low": reward - 0.125, "reward_high": reward + 0.125}
        row = evaluation(step, 0.0)
        row["sampled"] |= scores
        rows.append({**row, "started_at": "2026-01-02T03:04:05+00:00"})
    file = tmp_path / "graded" / "evaluations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with viewed(page, tmp_path) as url:
        page.goto(url + "#/")
        page.wait_for_selector(".run")
        text = page.locator(".run .heldout").inner_text()
        assert text.split() == ["held-out", "reward", "0.313", "→", "2.500"]
        page.goto(url + "#/run/graded/curves")
        reward = page.locator(".chart:has(figcaption:text-is('Reward'))")
        reward.wait_for()
        keys = [" ".join(key.split()) for key in reward.locator(".key").all_inner_texts()]
        assert keys[1:] == ["held-out reward 2.5", "solved 0"]
        page.goto(url + "#/evals")
        row = page.locator("[data-name='graded:step-1']")
        row.wait_for()
        assert row.locator(".of-reward").inner_text() == "reward 0.5 0.38–0.63"
        assert row.locator(".when").inner_text().split()[0] != "–"
        row.locator("a.name").click()
        page.wait_for_selector(".score-table tr")
        first = page.locator(".score-table tr").first.inner_text()
        assert first.split() == ["mean", "reward", "0.5", "0.375", "to", "0.625"]


def test_running_run_is_followed(page, tmp_path):
    make_run(tmp_path / "live", num_steps=1, is_finished=False)
    with viewed(page, tmp_path / "live") as url:
        with RunDir.open(tmp_path / "live", "resume") as run:
            page.goto(url + "#/run/live/trajectories/latest")
            page.wait_for_selector(".state.running")
            until(page, "document.querySelector('.steps').value === 'step-000001'")
            add_step(run, 2, [trajectory(i, 2) for i in range(24)])
            until(page, "document.querySelector('.steps').value === 'step-000002'")
            until(page, "document.querySelector('.count').textContent === '24'")
            page.keyboard.press("c")
            page.wait_for_selector(".chart path.line")
            add_step(run, 3, [trajectory(i, 3) for i in range(4)])
            until(page, "document.querySelector('.progress').textContent.includes('3')")
            run.save_summary({"num_steps": 3})
        page.wait_for_selector(".state.finished")


def test_running_evaluation_is_followed_to_its_last_sample(page, tmp_path):
    make_run(tmp_path / "run", num_steps=1, num_trajectories=1)
    path = tmp_path / "eval-live"
    with viewed(page, tmp_path) as url:
        page.goto(url + "#/evals")
        page.wait_for_selector("[data-name='run:step-0']")
        with EvaluationWriter(path, FACTS, settings="env: {}\n", mode="new") as writer:
            writer.begin(8)
            for index in range(3):
                add_sample(writer, index, 0)
            page.click("[data-name='eval-live'] a.name")
            until(page, "document.querySelectorAll('.samples .space .row').length === 3")

            def ends_between_requests(route):
                if path in ended:
                    return route.continue_()
                ended.append(path)
                add_sample(writer, 3, 0)
                writer.finish({"pass@1": 0.5})
                return route.continue_()

            ended = []
            page.route("**/api/evaluations/eval-live", ends_between_requests)
            until(page, "document.querySelectorAll('.samples .space .row').length === 4")
            assert ended
            assert page.locator(".score-table tr").all_inner_texts()[0].split()[0] == "pass@1"
        page.unroute("**/api/evaluations/eval-live")


def tasks_shown(page):
    return page.evaluate(
        """() => [...document.querySelectorAll(".space .row[data-task]")]
        .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
        .map((row) => row.dataset.task)"""
    )


def test_evaluation_shows_scores_samples_and_attempts(page, runs):
    page.goto(runs[1])
    page.wait_for_selector(".run")
    page.keyboard.press("v")
    page.wait_for_selector("[data-name='first:eval-40']")
    assert page.locator("[data-name='first:eval-40'] .of-reward").inner_text() == "0.4 0.1–0.6"
    page.click("[data-name='first:eval-40'] a.name")
    page.wait_for_selector(".samples .space .row")
    table = page.locator(".score-table tr").all_inner_texts()
    assert [row.split() for row in table] == [
        ["pass@1", "0.4", "0.1", "to", "0.6"],
        ["pass@4", "0.75"],
    ]
    assert tasks_shown(page) == [f"test/{index}" for index in range(6)]
    rewards = [[evaluation_sample(i, a).reward for a in range(4)] for i in range(6)]
    marks = page.evaluate(
        """() => [...document.querySelectorAll(".space .row")].map((row) =>
        [...row.querySelectorAll(".mark")].map((mark) => Number(mark.matches(".solved"))))"""
    )
    assert sorted(marks) == sorted([int(r) for r in row] for row in rewards)
    page.click(".head [data-key=disagreement]")
    until(page, "document.querySelector('[data-key=disagreement]').dataset.sorted === 'down'")
    order = sorted(range(6), key=lambda i: (abs(sum(rewards[i]) - 2), i))
    assert tasks_shown(page) == [f"test/{index}" for index in order]
    page.fill(".filter", "is:mixed disagreement<0.45")
    mixed = [i for i in order if sum(rewards[i]) in (1, 3)]
    assert 0 < len(mixed) < 6
    until(page, f"document.querySelectorAll('.space .row').length === {len(mixed)}")
    row = page.locator(f"[data-task='test/{mixed[0]}']")
    row.locator(".mark").nth(2).click()
    page.wait_for_selector(".right .message")
    assert page.locator(".right b.id").inner_text() == f"eval-{mixed[0]:06d}-2"
    page.keyboard.press("2")
    page.wait_for_selector(".token-text .t")
    assert "/tokens?" in page.url
    page.keyboard.press("4")
    page.wait_for_selector(".column.current")
    assert page.locator(".column").count() == 4
    page.keyboard.press("g")
    until(page, f"document.querySelectorAll('.space .row').length === {4 * len(mixed)}")


def test_same_sample_is_shown_across_checkpoints(page, runs):
    page.goto(runs[1] + "#/eval/first%3Aeval-40")
    page.click("a.button:has-text('checkpoints')")
    page.wait_for_selector(".beside .space .row")
    text = page.locator(".score-table").inner_text()
    assert "first, step 20" in text
    assert "over 5 samples" in text  # both have the same attempts at the same tasks
    assert "0 ± 0" in text
    assert len(tasks_shown(page)) == 6
    page.click("[data-task='test/2']")
    page.wait_for_selector(".column .mark.on")
    assert page.locator(".column").count() == 2
    page.locator(".column").nth(1).locator(".mark").nth(3).click()
    until(page, "document.querySelectorAll('.column .mark.on')[1]?.title.startsWith('attempt 4')")
    page.click("[data-task='test/5']")
    until(page, "document.body.textContent.includes('does not have the sample')")
    page.locator(".column").nth(1).locator("text=tokens").click()
    page.wait_for_selector(".token-text .t")


def hostile_trajectory(place):
    return trajectory(
        place,
        id=f"g0000-{place}{HOSTILE}",
        task=Task(id=f"train/{HOSTILE}", data={"answer": HOSTILE, HOSTILE: "1"}),
        env_id=HOSTILE,
        messages=(
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": "a\u202egnp.exe\u2066b \x1b[31m " + HOSTILE},
            {"role": "tool", "name": HOSTILE, "content": "x" * 1_000_000 + "END"},
            {"role": HOSTILE, "content": "</script></textarea>" + HOSTILE},
        ),
        stop_reason=StopReason.ENV_ERROR,
        error=HOSTILE,
        metrics={HOSTILE: 1.0},
    )


@pytest.fixture
def hostile_run(tmp_path):
    path = tmp_path / "hostile"
    make_run(path, num_steps=1, num_trajectories=1, is_finished=False)
    with RunDir.open(path, "resume") as run:
        add_step(run, 2, [hostile_trajectory(i) for i in range(4)])
    return path


def look_at_hostile(page):
    page.wait_for_selector(".right .message")
    shown = page.locator(".body").inner_text()
    assert HOSTILE in shown
    assert "U+202E" in shown
    assert "U+001B" in shown
    assert "\u202e" not in shown
    assert "END" not in shown
    page.click(".more:has-text('1,000,003')")
    until(page, "document.querySelector('.body').textContent.includes('END')")
    for key in "2345":
        page.keyboard.press(key)
        page.wait_for_timeout(150)
    assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert "owned" not in page.title()


def test_markup_in_the_viewer_is_escaped(page, hostile_run):
    with viewed(page, hostile_run) as url:
        page.goto(url + "#/run/hostile/trajectories/step-000002/1")
        look_at_hostile(page)
        page.keyboard.press("s")
        page.wait_for_selector(".pairs")


def export(*paths, out):
    command = [sys.executable, "-m", "areal_gym", "view", *map(str, paths), "--export", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out.as_uri()


def test_exported_page_opens_from_a_file_without_network(page, runs, hostile_run, tmp_path):
    address = export(runs[0], hostile_run, out=tmp_path / "page.html")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    page.wait_for_selector(".run")
    assert page.locator(".run").count() == 3
    page.goto(address + "#/run/first/curves")
    page.wait_for_selector(".chart path.line")
    page.goto(address + "#/run/first/trajectories/step-000002/1/tokens")
    page.wait_for_selector(".token-text .t")
    page.fill(".filter", "much is 11 +")
    until(page, "document.querySelectorAll('.space .row[data-place]').length === 1")
    page.goto(address + "#/run/hostile/trajectories/step-000002/1")
    look_at_hostile(page)
    page.goto(address + "#/eval/first%3Aeval-20/5/tokens")
    page.wait_for_selector(".token-text .t")
    assert page.locator(".right b.id").inner_text() == "eval-000001-1"
    assert page.locator(".samples .space .row").count() == 5
    page.goto(address + "#/run/first/trajectories/step-000009")
    page.wait_for_selector(".trouble:visible")
    assert "first has no trajectories 'step-000009'" in page.locator(".trouble").inner_text()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_ten_thousand_trajectories_render_only_visible_rows(page, tmp_path):
    path = tmp_path / "large"
    make_run(path, num_steps=1, num_trajectories=10_000)
    with viewed(page, path) as url:
        page.goto(url)
        page.wait_for_selector(".run")
        start_s = time.perf_counter()
        page.goto(url + "#/run/large/trajectories/step-000001")
        until(page, "document.querySelector('.count')?.textContent === '10,000'")
        print(f"10,000 trajectories in {time.perf_counter() - start_s:.2f} s")
        assert page.locator(".space .row").count() < 120
        page.evaluate("document.querySelector('.scroller').scrollTop = 1e9")
        page.wait_for_selector("[data-place='9999']")
        assert page.locator(".space .row").count() < 120
        page.fill(".filter", "how much is 9876 +")
        page.wait_for_selector("[data-place='9876']")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_screen(browser, runs, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    for place in (
        "",
        "#/run/first/curves",
        "#/run/first/settings",
        "#/run/first/trajectories/step-000001",
        *(f"#/run/first/trajectories/step-000001/1/{tab}" for tab in ("tokens", "siblings", "raw")),
        "#/compare?runs=first,second",
        "#/evals",
        "#/eval/first%3Aeval-20",
        "#/eval/first%3Aeval-20/5",
        "#/evals/compare?ids=%5B%22first%3Aeval-20%22%2C%22first%3Aeval-40%22%5D",
    ):
        page.goto(runs[1] + place)
        page.wait_for_selector("main > *")
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
        assert page.evaluate("document.querySelector('main').scrollWidth") <= 390, place
        # Nothing is cut off at the right edge: scores with intervals, differences.
        cells = ".run > *, .score-table td"
        assert (
            page.evaluate(
                f"Math.max(0, ...[...document.querySelectorAll('{cells}')].map(e => "
                "Math.max(e.getBoundingClientRect().left + e.scrollWidth, "
                "e.getBoundingClientRect().right)))"
            )
            <= 390
        ), place
    context.close()


def test_tokenizer_decodes_token_ids(page, tmp_path, tiny_policy):
    path = tmp_path / "texts"
    make_run(path, num_steps=1, num_trajectories=2, is_finished=False)
    with RunDir.open(path, "resume") as run:
        run.save_tokenizer(tiny_policy)
        ids = tuple(Tokenizer.from_file(str(run.tokenizer_file)).encode("1+2=3\nyes").ids)
        spans = (
            TokenSpan(origin="prompt", token_ids=ids),
            sampled(random.Random(0), 4, 0, 0),
        )
        add_step(run, 2, [trajectory(0, spans=spans)])
    with viewed(page, path) as url:
        page.goto(url + "#/run/texts/trajectories/step-000002/0/tokens")
        page.wait_for_selector(".token-text .t.prompt")
        text = "".join(page.locator(".t.prompt").all_text_contents())
        assert re.sub("↵", "", text) == "1+2=3\nyes"


def test_chunks_of_an_export_are_compressed(runs, tmp_path):
    export(runs[0], out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    chunk = re.search(r'id="chunk-0">([^<]+)<', text)[1]
    first = json.loads(gzip.decompress(base64.b64decode(chunk)))
    assert first[0]["id"] == "g0000-0"
