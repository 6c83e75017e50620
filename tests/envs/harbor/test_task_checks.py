"""`areal-gym check harbor:PATH`: sound tasks pass, and each kind of unsound one is named."""

import json

import pytest
from click.testing import CliRunner

from areal_gym.cli.app import app
from areal_gym.envs.checker.task_folders import check_task_folders
from areal_gym.plugins import registry
from tests._support.harbor_play import backend
from tests._support.harbor_tasks import write_task


@pytest.fixture(scope="module")
def local():
    return backend("local")


def check(path, num_concurrent=1):
    """Return which rules of each task are broken, with the reasons."""
    spec = registry().get("envs", f"harbor:{path}").spec
    report = check_task_folders(spec, {}, num_tasks=9, num_concurrent=num_concurrent)
    return {
        name: {result.rule: result.reason for result in results if not result.is_ok}
        for name, results in report.items()
    }


def test_a_new_task_folder_passes_every_rule(local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["new", "env", "--kind", "harbor", "fix-words"])
    assert made.exit_code == 0, made.output
    assert "fix-words/tests/grade.py" in made.output
    checked = CliRunner().invoke(app, ["check", "harbor:fix-words", "--concurrent", "3", "--json"])
    assert checked.exit_code == 0, checked.output
    report = json.loads(checked.stdout)
    rules = {result["rule"]: result for result in report["mine/fix-words"]}
    assert len(rules) == 10
    assert [rule for rule, result in rules.items() if "skipped" in result["reason"]] == []
    assert rules["forging_code"]["measured"] == "1 files"
    assert "3 at once" in report["harbor:fix-words"][0]["measured"]
    again = CliRunner().invoke(app, ["new", "env", "--kind", "harbor", "fix-words"])
    assert "exists already" in str(again.exception)
    odd = CliRunner().invoke(app, ["new", "loss", "--kind", "harbor", "x"])
    assert "goes with env" in str(odd.exception)


SHARED = """\
schema_version = "1.4"
[task]
name = "tests/NAME"
[environment]
workdir = "/app"
"""
IMPORTS = """\
#!/bin/sh
cd /app && python3 -c 'import answer; raise SystemExit(answer.value != 42)'
if [ $? = 0 ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""


def test_unsound_tasks_are_named(local, tmp_path):
    def write(name, changes):
        shared = {"task.toml": SHARED.replace("NAME", name)} if "tests/test.sh" in changes else {}
        write_task(tmp_path / name, {**shared, **changes})

    write("no-use", {"solution/solve.sh": "#!/bin/sh\necho 41 > /app/answer.txt\n"})
    write("free", {"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"})
    write(
        "imports",
        {
            "tests/test.sh": IMPORTS,
            "solution/solve.sh": "#!/bin/sh\necho 'value = 42' > /app/answer.py\n",
        },
    )
    solution = "#!/bin/sh\n# a solution that lies in the image\necho 42 > /app/answer.txt\n"
    write("leaks", {"solution/solve.sh": solution, "environment/question.txt": solution})
    write("outside", {"solution/solve.sh": "#!/bin/sh\necho 42 > /etc/answer.txt\n"})
    write("unbuilt", {"environment/Dockerfile": "FROM nothing-of-the-name\n"})
    write("broken", {"task.toml": "schema_version = 9\n"})
    broken = check(tmp_path)
    assert set(broken["tests/no-use"]) == {"oracle"}
    assert "the solution earns 0" in broken["tests/no-use"]["oracle"]
    assert broken["tests/free"] == {"nothing": "doing nothing earns 1"}
    assert set(broken["tests/imports"]) == {"forging_code"}
    assert "answer.py that forges the reward earns 1" in broken["tests/imports"]["forging_code"]
    assert set(broken["tests/leaks"]) == {"hidden"}
    assert "question.txt in the image is solution/solve.sh" in broken["tests/leaks"]["hidden"]
    assert "/etc/answer.txt" in broken["tests/outside"]["oracle"]
    assert "tests/unbuilt, build: " in broken["tests/unbuilt"]["image"]
    assert set(broken[str(tmp_path / "broken")]) == {"parses"}
