import os

import pytest

from areal_gym.envs.harbor.task_folder import load_task, resolved_env
from areal_gym.errors import DataError
from tests._support.harbor_tasks import TOML, write_files, write_task
from tests._support.paths import SHARED

EXAMPLES = SHARED / "harbor_tasks"

STEPS = """
multi_step_reward_strategy = "final"
[[steps]]
name = "one"
min_reward = 1.0
[steps.agent]
timeout_sec = 20
[[steps]]
name = "two"
artifacts = [{source = "out/log.txt", exclude = ["*.tmp"]}]
[steps.verifier]
timeout_sec = 5.0
[steps.healthcheck]
command = "true"
"""


def problems_of(folder) -> str:
    with pytest.raises(DataError) as caught:
        load_task(folder)
    return "\n".join([str(caught.value), *caught.value.hints])


def test_task_folder_is_read(tmp_path):
    task = load_task(write_task(tmp_path / "answer"))

    assert task.id == "tests/answer"
    (step,) = task.steps
    assert step.name == ""
    assert step.instruction.startswith("Write 42")
    assert step.tests == (tmp_path / "answer" / "tests",)
    assert step.solution == tmp_path / "answer" / "solution"
    assert [artifact.source for artifact in step.artifacts] == ["/app/answer.txt"]
    assert step.verifier.timeout_sec == 30
    assert step.verifier.is_separate
    assert task.cheat is None
    assert task.notes == ()


def test_steps_override_the_task(tmp_path):
    files = {
        "instruction.md": None,
        "steps/one/instruction.md": "First.",
        "steps/two/instruction.md": "Second.",
        "steps/two/tests/extra.py": "",
        "steps/two/workdir/setup.sh": "#!/bin/sh\n",
        "steps/two/solution/solve.sh": "#!/bin/sh\n",
    }
    toml = TOML.replace("NAME", "steps").replace('.txt"]\n', '.txt"]' + STEPS.split("[[")[0], 1)
    folder = write_task(tmp_path / "steps", files)
    (folder / "task.toml").write_text(toml + "[[" + STEPS.partition("[[")[2])

    task = load_task(folder)

    one, two = task.steps
    assert (one.name, one.instruction, one.min_reward) == ("one", "First.", 1.0)
    assert one.agent.timeout_sec == 20
    assert one.solution is None
    assert one.workdir is None
    assert two.verifier.timeout_sec == 5
    assert two.verifier.is_separate
    assert [artifact.source for artifact in two.artifacts] == [
        "/app/answer.txt",
        "/app/out/log.txt",
    ]
    assert [tests.parent.name for tests in two.tests] == ["steps", "two"]
    assert two.workdir is not None
    assert two.healthcheck is not None
    assert task.toml.multi_step_reward_strategy == "final"


def test_old_keys_are_read(tmp_path):
    old = '[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    toml = 'version = "1.0"\n' + old
    task = load_task(write_task(tmp_path / "old", {"task.toml": toml}))

    environment = task.environment
    assert (environment.memory_mb, environment.storage_mb) == (2048, 512)
    assert environment.network_mode == "no-network"
    assert task.id == "old"
    assert task.toml.schema_version == "1.0"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            "[agent]\ntimeout = 3\n",
            "agent.timeout: there is no such key; did you mean",
        ),
        ('[agent]\ntimeout_sec = "3"\n', "agent.timeout_sec: input should be a valid number"),
        ("[agent]\ntimeout_sec = nan\n", "agent.timeout_sec: input should be"),
        ("[agent]\ntimeout_sec = -1\n", "agent.timeout_sec: input should be greater than 0"),
        ('[[steps]]\nname = "../x"\n', "steps.0.name: '../x' cannot be the name of a folder"),
        ("[solution.env]\nA = 1\n", "solution.env.A: input should be a valid string"),
        ('[solution.env]\n"A=B" = "1"\n', "solution.env: 'A=B' cannot be the name of an env"),
        ("[[[", "task.toml: not valid TOML"),
        ("[[verifier.collect]]\ncommand='x'\nservice='db'\n", "verifier.collect.0.service = 'db'"),
        ("[verifier.environment]\nos='Windows'\n", "verifier.environment.os = 'windows': only"),
        ("[verifier.environment]\ngpus=2\n", "verifier.environment.gpus = 2: containers have no"),
        ("[verifier.environment.tpu]\ntype='v4'\ntopology='2x2'\n", "environment.tpu: containers"),
        ("[[environment.mcp_servers]]\nname='m'\n", "mcp_servers.0: transport 'sse' needs a url"),
        ("[agent]\nallowed_hosts=['http://x/y']\n", "'http://x/y' is not a host name"),
    ],
)
def test_wrong_keys_are_named(tmp_path, more, reason):
    assert reason in problems_of(write_task(tmp_path / "wrong", more=more))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instruction.md": None}, "instruction.md: the file is missing"),
        ({"instruction.md": " \n"}, "instruction.md: the file is empty"),
        ({"instruction.md": b"caf\xe9"}, "instruction.md: not UTF-8 at byte 3"),
        ({"instruction.md": "x" * (2**20 + 1)}, "instruction.md: larger than 1,048,576 bytes"),
        ({"task.toml": b"a = '\xff'"}, "task.toml: not UTF-8"),
        ({"environment/Dockerfile": None}, "environment/Dockerfile: the file is missing"),
        ({"tests/test.sh": None}, "tests/test.sh: the file is missing"),
        ({"tests/test.sh": None, "tests/test.bat": "x"}, "test.bat is for Windows"),
        ({"solution/solve.sh": None}, "solution/solve.sh: the file is missing"),
        ({"environment/docker-compose.yaml": "x"}, "tasks of several containers are not"),
        ({"trajectory.json": "{}"}, "tasks that begin in a dialogue are not supported"),
        ({"task.toml": "artifacts = ['../../etc/passwd']"}, "'../../etc/passwd' has '..'"),
        ({"task.toml": "artifacts = ['out']"}, "'out' is a relative path, and there is no"),
        ({"task.toml": "[[steps]]\nname='a'\n[[steps]]\nname='A'"}, "two steps are called 'A'"),
    ],
)
def test_wrong_files_are_named(tmp_path, changes, reason):
    assert reason in problems_of(write_task(tmp_path / "wrong", changes))


def test_all_problems_are_reported_at_once(tmp_path):
    folder = write_task(tmp_path / "bad", {"instruction.md": None, "tests/test.sh": None})

    text = problems_of(folder)

    assert "has 2 problems" in text
    assert "instruction.md" in text
    assert "tests/test.sh" in text


def test_links_and_special_files_are_refused(tmp_path):
    (tmp_path / "secret").write_text("key")
    folder = write_task(tmp_path / "links", {"instruction.md": None})
    (folder / "instruction.md").symlink_to("../secret")
    (folder / "tests" / "up").symlink_to("/")
    (folder / "tests" / "beside").symlink_to("test.sh")
    os.mkfifo(folder / "environment" / "pipe")

    text = problems_of(folder)

    assert "instruction.md: a link out of the task's folder, to '../secret'" in text
    assert "tests/up: a link out of the task's folder, to '/'" in text
    assert "environment/pipe: neither a file, nor a folder, nor a link" in text
    assert "beside" not in text


def test_digest_follows_contents_names_and_modes(tmp_path):
    folder = write_task(tmp_path / "digest")
    digests = [load_task(folder).digest]
    for change in (
        lambda: (folder / "environment" / "question.txt").write_text("1 + 1\n"),
        lambda: (folder / "tests" / "test.sh").chmod(0o700),
        lambda: write_files(folder, {"tests/more.py": ""}),
    ):
        change()
        digests.append(load_task(folder).digest)

    assert len(set(digests)) == 4
    assert load_task(folder).digest == digests[-1]


def test_variables_of_the_host(monkeypatch):
    monkeypatch.setenv("SEED_OF_TEST", "7")
    values = {"A": "${SEED_OF_TEST}", "B": "${NOT_SET_AT_ALL:-x y}", "C": "a ${B}", "D": "${X:-}"}

    assert resolved_env(values, "task t") == {"A": "7", "B": "x y", "C": "a ${B}", "D": ""}
    with pytest.raises(DataError, match="task t: A is taken from the variable NOT_SET_AT_ALL"):
        resolved_env({"A": "${NOT_SET_AT_ALL}"}, "task t")


def test_not_a_task(tmp_path):
    (tmp_path / "taks.toml").write_text("")

    with pytest.raises(DataError, match=r"it has no task\.toml") as caught:
        load_task(tmp_path)

    assert "did you mean" in caught.value.hints[0]


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example tasks are not in ../shared")
def test_example_tasks_are_read():
    tasks = {folder.name: load_task(folder) for folder in EXAMPLES.iterdir()}

    assert [step.name for step in tasks["codec-steps"].steps] == ["encode", "decode"]
    assert tasks["fix-median"].cheat is not None
    assert tasks["ledger-merge"].environment.env == {"LEDGER_CURRENCY": "EUR"}
