"""A run on one page: what it says, what it keeps to itself, and that it fails nobody."""

import json
import re
from html.parser import HTMLParser

import pytest
import yaml

from areal_gym.cli.app import run as run_program
from areal_gym.errors import UsageError
from areal_gym.report import collect, keep_report, write_report
from areal_gym.report.chart_table import Chart, Line
from areal_gym.report.charts import WIDTH, draw
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.markup import number, visible
from tests._support.run_dirs import add_step, make_run, trajectory

VOID = {"meta", "link", "img", "br", "input"}
HOSTILE = "<script>alert(1)</script>| a | `x` \u202e [y](z) ```"


class Checked(HTMLParser):
    """Whether every element that begins ends, in order; and which elements there are."""

    def __init__(self):
        super().__init__()
        self.open, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser.tags


@pytest.fixture
def run(tmp_path):
    return RunDir(make_run(tmp_path / "run", trainer={"lr": 1e-4}))


def test_report_describes_the_run(run):
    report = collect(run)
    assert report.title == "run"
    assert report.lead == "grpo in tir, 3 of 3 steps"
    assert report.facts["held out, sampled"] == "0.25 → 0.75"
    assert report.facts["limited by"] == "training"
    reward = report.charts[0]
    assert reward.title == "Reward"
    assert [line.name for line in reward.lines] == ["batch", "held out", "greedy"]
    assert reward.lines[0].values == pytest.approx([0.25, 0.3, 0.35])
    assert "pass@k" in [chart.title for chart in report.charts]
    assert "KL" in [chart.title for chart in report.charts]
    assert "Accuracy" not in [chart.title for chart in report.charts]
    kinds = [kind for kind, _ in report.examples]
    rewards = [row["reward"] for _, row in report.examples]
    assert kinds == ["best", "best", "worst", "worst"]
    assert rewards == [1, 1, 0, 0]


def test_non_default_settings_are_marked(run):
    report = collect(run)
    assert report.changed["trainer.lr"] == "0.0001"
    assert "trainer.warmup_steps" not in report.changed
    assert "trainer.warmup_steps" in report.settings


def test_settings_of_another_version_are_shown_verbatim(run):
    run.save_config(yaml.safe_dump({"objective": "rl", "trainer": {"algorithm": "gone"}}))
    assert collect(run).changed["trainer.algorithm"] == "gone"


def test_report_contains_no_local_paths(run, tmp_path):
    settings = yaml.safe_load(run.config_file.read_text())
    settings["engine"]["model"] = "/home/somebody/models/qwen"
    settings["data"] = {"file": "~/secret/place/rows.jsonl"}
    run.save_config(yaml.safe_dump(settings))
    run.add_provenance(note="loaded from /srv/private/store/file.bin and http://host/a/b")
    write_report(run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "…/qwen" in text
    assert "…/rows.jsonl" in text
    assert "…/file.bin" in text
    assert "http://host/a/b" in text
    for private in ("somebody", "secret", "private", str(tmp_path)):
        assert private not in text


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_markup_in_a_report_is_escaped(tmp_path, suffix):
    path = make_run(tmp_path / "run", num_steps=1, is_finished=False)
    messages = (
        {"role": HOSTILE, "content": HOSTILE},
        {"role": "assistant", "content": "x" * 1_000_000},
    )
    with RunDir.open(path, "resume") as run:
        add_step(run, 2, [trajectory(i, messages=messages) for i in range(4)])
        run.add_provenance(note=HOSTILE)
        files = write_report(run, tmp_path / f"page{suffix}")
    text = files[0].read_text()
    assert "\u202e" not in text
    assert "U+202E" in text
    assert len(text) < 500_000
    if suffix == ".html":
        assert "script" not in checked(text)
        assert "default-src 'none'" in text
    else:
        outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert "<script>" not in outside
        assert f"![curves]({files[1].name})" in outside
        checked(files[1].read_text())


def test_html_page_is_complete_with_the_runs_numbers(run, tmp_path):
    (file,) = write_report(run, tmp_path / "page.html")
    text = file.read_text()
    tags = checked(text)
    assert tags.count("svg") == len(collect(run).charts)
    assert 'src="' not in text
    assert "0.25 → 0.75" in text


def test_run_without_steps_has_a_report(tmp_path):
    with RunDir.open(tmp_path / "run") as run:
        run.save_config("steps: 3\n")
        report = collect(run)
    assert (report.charts, report.examples, report.facts) == ([], [], {})
    assert report.lead.endswith("0 of 3 steps, not finished")
    write_report(run, tmp_path / "page.html")
    write_report(run, tmp_path / "page.md")


def test_failing_report_does_not_fail_the_run(run):
    run.metrics_file.write_text('no JSON\n{"step": 1}\n')
    assert str(keep_report(run)).startswith("none: DataError")
    assert "report: none" in run.log_file.read_text()
    run.metrics_file.write_text("")
    assert keep_report(run) == run.report_file


def test_chart_line_breaks_at_missing_values():
    line = Line(name="x", steps=[1, 2, 3, 4, 5], values=[1.0, 2.0, None, 1.0, 0.5])
    picture = draw(Chart(title="a < b", unit="", lines=[line]))
    checked(picture)
    assert len(re.findall("M", re.search(r'path d="([^"]*)"', picture)[1])) == 2
    assert "a &lt; b" in picture


def test_a_legend_that_is_too_long_for_a_row_goes_on_in_the_next():
    names = ["agent error", "cancelled", "engine error", "reward error", "task error"]
    lines = [Line(name=name, steps=[1, 2], values=[0, 1]) for name in names]
    picture = draw(Chart(title="Failures", unit="episodes", lines=lines))
    texts = re.findall(r'<text x="(\d+)" y="(\d+)" fill-opacity="0.8">([^<]+)', picture)
    assert [text.rpartition(" ")[0] for *_, text in texts] == names
    assert max(int(left) + 6 * len(text) for left, _, text in texts) < WIDTH
    lowest = max(int(y) for _, y, _ in texts)
    assert lowest > 30
    highest_mark = min(float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", picture))
    assert highest_mark > lowest


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3.0, -1.0], [1e-12, 2e-12], [1e9, 2e9]])
def test_axes_for_arbitrary_numbers(values):
    steps = list(range(len(values)))
    checked(draw(Chart(title="t", unit="", lines=[Line(name="x", steps=steps, values=values)])))


def test_number_and_text_formats():
    assert [number(v) for v in (None, float("nan"), 3.0, 12345.6, 0.123456, "word")] == [
        "–",
        "–",
        "3",
        "12,346",
        "0.123",
        "word",
    ]
    assert visible("a\x1bb\u200bc\n") == "a[U+001B]b[U+200B]c\n"


def test_report_command_writes_and_prints_the_path(run, tmp_path, capsys):
    assert run_program(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.report_file)
    assert run_program(["report", str(run.path), "--out", str(tmp_path / "a.md")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "a.md"), str(tmp_path / "a.svg")]
    assert run_program(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["held out, sampled"] == "0.25 → 0.75"
    assert run_program(["report", str(tmp_path / "nothing")]) == 2
    with pytest.raises(UsageError):
        collect(RunDir(tmp_path))
