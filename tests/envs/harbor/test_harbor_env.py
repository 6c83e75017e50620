"""Tasks played in containers, by honest, idle and hostile agents.

Skipped where neither a Docker engine nor local places can start.
"""

import asyncio
import json
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.harbor.harbor_env import HarborEnv
from areal_gym.errors import EnvError, SandboxError, TaskError
from areal_gym.rollout.episode import play_episode
from areal_gym.types import StopReason
from tests import _support
from tests._support.copied_packages import copy_packages
from tests._support.harbor_play import GOLD, backend, bash, call, play, play_async
from tests._support.harbor_tasks import write_files, write_task
from tests._support.paths import SHARED

EXAMPLES = SHARED / "harbor_tasks"


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=pytest.mark.long)])
def where(request):
    """The arguments of HarborEnv for a backend."""
    return backend(request.param)


@pytest.fixture(scope="module", params=["local", "docker"])
def everywhere(request):
    """As `where`, for tests that run on every backend each time."""
    return backend(request.param)


SHARED_TOML = """\
schema_version = "1.4"
[task]
name = "tests/shared"
[environment]
workdir = "/app"
[verifier]
timeout_sec = 30.0
"""
"""A task without artifacts, whose author wanted a verifier in the agent's container."""


def test_the_oracle_earns_the_reward_and_nothing_earns_none(everywhere, tmp_path):
    task = write_task(tmp_path / "answer")
    gold = play(task, GOLD, GOLD, **everywhere)
    assert (gold.reward, gold.last.terminated) == (1.0, True)
    assert gold.info["reward_parts"] == {"reward": 1.0}
    assert gold.metrics == {"tool_calls": 1, "tool_errors": 0, "steps": 1, "left_out": 0}
    assert "+42" in gold.texts[-1]  # the diff, for people
    assert play(task, "I give up.", **everywhere).reward == 0.0
    # With what the agent changes in its working directory, also where the author meant "shared".
    write_files(task, {"task.toml": SHARED_TOML})
    assert play(task, GOLD, GOLD, spare=2, **everywhere).reward == 1.0  # places started ahead
    assert (
        play(task, bash("rm -f question.txt; echo 41 > answer.txt"), "x", **everywhere).reward
        == 0.0
    )


SMALL_TOML = """\
schema_version = "1.4"
artifacts = ["/app"]
[task]
name = "tests/small"
[environment]
workdir = "/app"
storage_mb = 8
[verifier]
timeout_sec = 30.0
"""
FILL = bash("for name in /app/a /app/b /tmp/c; do head -c 100M /dev/zero > $name; done")


@pytest.mark.parametrize(("actions", "reward"), [((GOLD, FILL), 1.0), ((FILL, GOLD), 0.0)])
def test_agent_that_fills_its_disk_leaves_the_verifier_room(actions, reward, tmp_path):
    """Else an agent could void the episodes that it loses."""
    task = write_task(tmp_path / "small", {"task.toml": SMALL_TOML})
    assert play(task, *actions, "done", **backend("local")).reward == reward


def test_the_shell_keeps_its_directory_cuts_output_and_tells_codes_and_deadlines(where, tmp_path):
    played = play(
        write_task(tmp_path / "answer"),
        bash("mkdir deep 2>/dev/null || python3 -c 'import os; os.mkdir(\"deep\")'; cd deep; A=1"),
        bash("pwd; echo to-stderr >&2; exit 3"),
        bash("python3 -c \"print('x' * 30000)\""),
        bash("echo begun; sleep 60", timeout_s=1),
        bash("echo still here"),
        bash("x\0y"),
        bash("echo 1", timeout_s=-1),
        call("edit", path="note.txt", old="", new="one\ntwo\nthree\n"),
        call("edit", path="note.txt", old="two", new="zwei"),
        call("edit", path="note.txt", old="none", new="x"),
        call("edit", path="note.txt", old="", new="again"),
        call("view", path="/app/deep/note.txt", first_line=2, num_lines=1),
        call("view", path="nothing"),
        call("view", path="/app"),
        "done",
        max_output=1_000,
        **where,
    )
    texts = played.texts
    assert texts[1] == "/app/deep\nto-stderr\n(exit code 3)"
    assert len(texts[2]) < 1_200
    assert "characters left out" in texts[2]
    assert texts[3].startswith("begun\n(ended after 1 s")
    assert texts[4] == "still here"
    assert "zero byte" in texts[5]
    assert "timeout_s" in texts[6]
    assert texts[7:9] == ["wrote note.txt", "edited note.txt"]
    assert "not in note.txt" in texts[9]
    assert "exists" in texts[10]
    assert texts[11] == "2\tzwei\n(1 more lines)"
    assert "nothing" in texts[12]
    assert "is a folder" in texts[13]
    assert played.metrics["tool_errors"] == 6


WRITE_NOW = """\
python3 - <<'PY'
import os
for folder in ("/logs/verifier", "/tests"):
    os.makedirs(folder, exist_ok=True)
for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
    open("/logs/verifier/" + name, "w").write(text)
open("/tests/test.sh", "w").write("echo 1 > /logs/verifier/reward.txt")
PY"""
WRITER = """\
python3 - <<'PY'
import subprocess, sys
code = '''import os, time
while True:
    try:
        os.makedirs("/logs/verifier", exist_ok=True)
        open("/logs/verifier/reward.json", "w").write('{"reward": 1}')
    except OSError: pass
    time.sleep(0.01)
'''
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **quiet)
PY"""
PLANT = """\
python3 - <<'PY'
import os, sysconfig
evil = '''import os
try: open("/logs/verifier/reward.json", "w").write('{"reward": 1}')
except OSError: pass
'''
library = [sysconfig.get_path(name) for name in ("purelib", "stdlib")]
for folder in ("/app", "/", "/tests", *library):
    for name in ("conftest.py", "sitecustomize.py", "usercustomize.py"):
        try:
            os.makedirs(folder, exist_ok=True)
            open(os.path.join(folder, name), "w").write(evil)
        except OSError: pass
fake = "#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\nexit 0\\n"
for path in ("/app/python3", "/usr/local/bin/python3", "/usr/bin/python3", "/app/sh"):
    try:
        if os.path.lexists(path): os.remove(path)
        open(path, "w").write(fake)
        os.chmod(path, 0o755)
    except OSError: pass
PY"""
# As careless as tests are: the working directory is on every path.
CARELESS = (
    "#!/bin/sh\nexport PYTHONPATH=/app PATH=/app:$PATH\ncd /app\n"
    'python3 -c \'import sys; sys.exit(open("answer.txt").read().strip() != "42")\' 2>/dev/null\n'
    "if [ $? = 0 ]; then reward=1; else reward=0; fi\necho $reward > /logs/verifier/reward.txt\n"
)


def test_forged_rewards_earn_what_doing_nothing_earns(everywhere, tmp_path):
    task = write_task(tmp_path / "careless", {"task.toml": SHARED_TOML, "tests/test.sh": CARELESS})
    assert play(task, bash("echo 42 > answer.txt"), "done", **everywhere).reward == 1.0
    for cheat in (WRITE_NOW, WRITER, PLANT):
        played = play(task, bash(cheat), "done", **everywhere)
        assert played.steps[0].info["metrics"]["tool_errors"] == 0
        assert "exit code 1" not in played.texts[0], played.texts[0]
        assert played.reward == 0.0, played.texts[-1]
    assert "conftest.py" in played.texts[-1]  # named in the report
    # The reason for a fresh place: in the agent's own place the last of them wins.
    assert play(task, bash(PLANT), "done", verifier="shared", **everywhere).reward == 1.0


def test_code_of_the_agent_that_tests_run_as_another_user_reaches_no_reward(where, tmp_path):
    grade = """\
import os, subprocess, sys
def drop():
    os.setgid(65534)
    os.setuid(65534)
code = 'import sys; sys.path.insert(0, "/app"); import answer; print(answer.value)'
child = subprocess.run([sys.executable, "-I", "-c", code], preexec_fn=drop, env={}, cwd="/",
    capture_output=True, text=True, timeout=10)
sys.exit(child.stdout.strip() != "42")
"""
    test = (
        "#!/bin/sh\nif python3 -I /tests/grade.py; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\n"
    )
    task = write_task(
        tmp_path / "module",
        {"task.toml": SHARED_TOML, "tests/test.sh": test, "tests/grade.py": grade},
    )
    assert play(task, bash("echo 'value = 42' > answer.py"), "done", **where).reward == 1.0
    evil = (
        "import os, time\nvalue = 41\nif os.fork() == 0:\n    os.setsid()\n"
        "    for _ in range(1000):\n        for name in ('reward.json', 'reward.txt'):\n"
        "            try: open('/logs/verifier/' + name, 'w').write('{\"reward\": 1}')\n"
        "            except OSError: pass\n        time.sleep(0.01)\n    os._exit(0)\n"
    )
    played = play(task, call("edit", path="answer.py", old="", new=evil), "done", **where)
    assert played.reward == 0.0


def test_tests_solution_and_verdicts_are_not_seen_by_the_agent(where, tmp_path):
    toml = (
        'schema_version = "1.4"\nmulti_step_reward_strategy = "mean"\n[task]\nname = "tests/two"\n'
        '[environment]\nworkdir = "/app"\n[verifier]\ntimeout_sec = 30.0\n'
        '[[steps]]\nname = "first"\nmin_reward = 0.5\n[[steps]]\nname = "second"\n'
    )
    test = (
        '#!/bin/sh\nif [ "$(cat /app/{0} 2>/dev/null)" = {0} ]; then reward=1; else reward=0; fi\n'
        'echo "{{\\"reward\\": $reward, \\"seen\\": 1}}" > /logs/verifier/reward.json\n'
    )
    files = {"task.toml": toml, "instruction.md": None, "solution/solve.sh": None}
    files["tests/test.sh"] = None
    for name in ("first", "second"):
        files[f"steps/{name}/instruction.md"] = f"Write {name} to {name}."
        files[f"steps/{name}/tests/test.sh"] = test.format(name)
        files[f"steps/{name}/solution/solve.sh"] = f"#!/bin/sh\necho {name} > /app/{name}\n"
    files["steps/second/workdir/setup.sh"] = "pwd > made-by-setup\n"
    files["steps/second/workdir/given.txt"] = "given\n"
    task = write_task(tmp_path / "two", files)
    look = bash("ls /tests /solution /logs/verifier; cat made-by-setup given.txt")
    played = play(task, look, GOLD, GOLD, look, GOLD, GOLD, **where)
    assert played.reward == 1.0
    assert played.info["reward_parts"] == {
        **{"first/reward": 1.0, "first/seen": 1.0},
        **{"second/reward": 1.0, "second/seen": 1.0},
    }
    assert [step.reward for step in played.steps[:-1]] == [0.0] * 5
    assert played.texts[2] == "Write second to second."
    for seen in (played.texts[0], played.texts[3]):
        assert seen.count("No such file") >= 3, seen
    assert "/app\ngiven" in played.texts[3]
    # A step below its min_reward ends the episode, and a turn limit grades the step as it stands.
    stopped = play(task, "done", "done", **where)
    assert (len(stopped.steps), stopped.reward, stopped.last.terminated) == (1, 0.0, True)
    cut = play(task, GOLD, GOLD, GOLD, max_turns=3, **where)
    assert (cut.reward, cut.info["truncated_by"]) == (1.0, "max_turns")


def test_limits_grade_what_is_there(where, tmp_path):
    task = write_task(tmp_path / "answer", more="[agent]\ntimeout_sec = 2.0\n")
    played = play(task, bash("echo 42 > answer.txt; sleep 30"), "never", **where)
    assert (played.reward, played.last.truncated) == (1.0, True)
    assert played.metrics["agent_timeout"] == 1
    assert "ended after" in played.info["messages"][0]["content"]
    # A full context: the policy's two calls fit, and no third prompt does.
    engine = ScriptedEngine(
        [bash("echo 42 > answer.txt")] + [bash("echo x")] * 50, max_context=2048
    )
    untimed = write_task(tmp_path / "untimed")
    env = HarborEnv(str(untimed), heldout=0, system_prompt="", **where)
    trajectory = asyncio.run(
        play_episode(
            env,
            ChatAgent(),
            engine,
            byte_renderer(),
            options={"split": "train", "index": 0},
            params=SamplingParams(max_new_tokens=400),
        )
    )
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.reward == 1.0
    assert trajectory.num_forks == 0


def test_a_link_in_place_of_an_artifact_is_absent_and_named(where, tmp_path):
    task = write_task(tmp_path / "answer", {"tests/expected.txt": "42\n"})
    link = 'python3 -c \'import os; os.symlink("/tests/expected.txt", "/app/answer.txt")\''
    played = play(task, bash(link), "done", **where)
    assert played.reward == 0.0
    assert played.metrics["left_out"] == 1
    assert "/app/answer.txt: a link to /tests/expected.txt" in played.texts[-1]


def test_an_image_of_the_verifiers_own_has_the_tests(where, tmp_path):
    dockerfile = "ARG BASE_IMAGE=python:3.12-slim\nFROM ${BASE_IMAGE}\nWORKDIR /app\n"
    task = write_task(tmp_path / "baked", {"tests/Dockerfile": dockerfile + "COPY . /tests\n"})
    assert play(task, GOLD, GOLD, **where).reward == 1.0
    assert play(task, "done", **where).reward == 0.0


def test_the_working_directory_is_that_of_the_image_whatever_the_agent_says(where, tmp_path):
    toml = SHARED_TOML.replace('workdir = "/app"', "")
    task = write_task(tmp_path / "own", {"task.toml": toml, "tests/test.sh": CARELESS})
    lie = (
        'echo 41 > answer.txt; python3 -c "import os, sysconfig\n'
        "os.remove('/bin/sh'); library = sysconfig.get_path('stdlib')\n"
        "open('/bin/sh', 'w').write('#!' + os.path.realpath('/usr/local/bin/python3') + chr(10) +"
        " 'print(%r)' % library)\nos.chmod('/bin/sh', 0o755)\n"
        "open(library + '/json/__init__.py', 'w').write('raise SystemExit(0)')\"; exit 0"
    )
    played = play(task, bash(lie), "done", **where)
    assert played.reward == 0.0
    assert "+41" in played.texts[-1]  # of /app, where the image begins


MCP_SERVER = """\
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"],
                  "capabilities": {"tools": {}}, "serverInfo": {"name": "six", "version": "1"}}
    elif asked["method"] == "tools/list":
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        tool = {"name": "write_42", "description": "Write 42.", "inputSchema": schema}
        result = {"tools": [tool]}
    elif asked["method"] == "tools/call":
        with open(asked["params"]["arguments"]["path"], "w") as file:
            file.write("42\\n")
        result = {"content": [{"type": "text", "text": "written"}]}
    else:
        result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def test_mcp_servers_of_a_task_run_in_the_agents_place(where, tmp_path):
    pytest.importorskip("mcp")
    toml = SHARED_TOML + (
        '[[environment.mcp_servers]]\nname = "six"\ntransport = "stdio"\n'
        'command = "python3"\nargs = ["/app/question.txt"]\n'
    )
    task = write_task(
        tmp_path / "served", {"task.toml": toml, "environment/question.txt": MCP_SERVER}
    )
    played = play(task, call("write_42", path="/app/answer.txt"), "done", **where)
    assert played.texts[0] == "written"
    assert played.reward == 1.0
    assert play(task, "done", **where).reward == 0.0


def test_server_that_ends_at_once_is_named_with_what_it_wrote(where, tmp_path):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    toml = SHARED_TOML + (
        '[[environment.mcp_servers]]\nname = "gone"\ntransport = "stdio"\n'
        'command = "sh"\nargs = ["-c", "echo no database >&2; exit 3"]\n'
    )
    task = write_task(tmp_path / "gone", {"task.toml": toml})
    with pytest.raises(EnvError, match=r"'gone'.*exit code 3: no database"):
        play(task, "done", **where)


SERVED_TOML = SHARED_TOML + (
    '[[environment.mcp_servers]]\nname = "served"\ntransport = "stdio"\n'
    'command = "python3"\nargs = {args}\n'
)
SERVED_DOCKERFILE = (
    "ARG BASE_IMAGE=python:3.12-slim\nFROM ${BASE_IMAGE}\nWORKDIR /app\n"
    "COPY packages /opt/packages\nENV PYTHONPATH=/opt/packages PYTHONDONTWRITEBYTECODE=1\n"
)


def served_task(folder, package, args, *, paths, files=()):
    """Write a task whose MCP server is a package that is copied into the image."""
    task = write_task(
        folder,
        {
            "task.toml": SERVED_TOML.format(args=json.dumps(args)),
            "environment/Dockerfile": SERVED_DOCKERFILE,
        },
    )
    try:
        copy_packages(package, task / "environment/packages", paths=paths)
    except SandboxError:
        pytest.skip(f"{package} is not installed for this Python (AREAL_GYM_MCP_SERVERS)")
    for file in files:
        shutil.copy(file, task / "environment/packages")
    return task


def test_server_of_the_official_sdk_runs_in_the_place_of_a_task(everywhere, tmp_path):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    server = Path(_support.__file__).parent / "mcp_tools_server.py"
    task = served_task(
        tmp_path / "sdk", "mcp", ["-m", "mcp_tools_server"], paths=sys.path, files=[server]
    )
    actions = call("add", a=40, b=2), call("fail", text="no"), bash("echo 42 > answer.txt"), "done"
    played = play(task, *actions, **everywhere)
    assert played.texts[0] == "42"
    assert played.texts[1].startswith("error: Error executing tool fail")
    assert played.reward == 1.0


PUBLISHED = {
    "mcp-server-time": (
        ["-c", "import mcp_server_time as s; s.main()", "--local-timezone", "UTC"],
        call(
            "convert_time",
            source_timezone="Europe/Berlin",
            time="12:00",
            target_timezone="Asia/Tokyo",
        ),
        "Asia/Tokyo",
    ),
    "mcp-server-sqlite": (
        ["-c", "import mcp_server_sqlite as s; s.main()", "--db-path", "/app/shop.db"],
        call("create_table", query="CREATE TABLE prices (price INTEGER)"),
        "created successfully",
    ),
}


@pytest.mark.parametrize("package", PUBLISHED)
def test_server_of_the_package_index_runs_in_the_place_of_a_task(package, everywhere, tmp_path):
    pytest.importorskip("mcp", reason="needs the extra mcp")
    args, action, expected = PUBLISHED[package]
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    folders = os.environ.get("AREAL_GYM_MCP_SERVERS", "").split(os.pathsep)
    paths = [Path(folder).parent / library for folder in folders if folder]
    having = [str(path) for path in paths if (path / args[1].split()[1]).is_dir()]
    task = served_task(tmp_path / "published", package, args, paths=having[:1] or sys.path)
    looking = (
        "import glob; files = glob.glob('/proc/*/cmdline'); "
        "words = [open(file).read().split(chr(0)) for file in files]; "
        f"print(['python3', '-c', '{args[1]}'] in [each[:3] for each in words], glob.glob('*.db'))"
    )
    actions = action, bash(f'python3 -c "{looking}"'), bash("echo 42 > answer.txt"), "done"
    played = play(task, *actions, **everywhere)
    assert expected in played.texts[0]
    # The agent's commands see the server's process, and its file.
    files = ["shop.db"] if "sqlite" in package else []
    assert played.texts[1].startswith(f"True {files}")
    assert played.reward == 1.0


def test_failures_name_task_and_phase_and_are_never_rewards(where, tmp_path):
    def failing(name, changes, more="", *actions, error=(SandboxError, EnvError)):
        task = write_task(tmp_path / name, changes, more=more)
        with pytest.raises(error) as raised:
            play(task, *(actions or (bash("echo 42 > answer.txt"), "done")), **where)
        assert str(raised.value).startswith(f"tests/{name}, "), raised.value
        return str(raised.value)

    text = failing("unbuilt", {"environment/Dockerfile": "FROM ${BASE\nNONSENSE\n"})
    assert "unbuilt, start: " in text
    text = failing(
        "huge",
        {
            "task.toml": SHARED_TOML.replace("shared", "huge").replace(
                "[verifier]", "memory_mb = 99999999\n[verifier]"
            )
        },
    )
    assert "huge, start: " in text
    assert "memory" in text
    text = failing("mute", {"tests/test.sh": "#!/bin/sh\necho nothing to say\nexit 3\n"})
    assert "mute, reward: " in text
    assert "code 3: nothing to say" in text
    text = failing(
        "linked",
        {
            "tests/test.sh": "#!/bin/sh\npython3 -c 'import os; os.symlink("
            '"/app/answer.txt", "/logs/verifier/reward.txt")\'\n'
        },
    )
    assert "not a regular file" in text
    slow = {"tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\nsleep 60\n"}
    slow["task.toml"] = SHARED_TOML.replace("30.0", "1.0").replace("shared", "slow")
    text = failing("slow", slow, error=TaskError)
    assert "slow, verifier: test.sh took more than 1 s" in text
    sick = (
        '[environment.healthcheck]\ncommand = "echo sick; exit 4"\n'
        "interval_sec = 0.1\nretries = 2\n"
    )
    text = failing("sick", {}, sick)
    assert "sick, healthcheck: " in text
    assert "failed 2 times, at last with code 4: sick" in text


def test_places_that_die_and_images_without_a_shell_are_named(where, tmp_path):
    remove = "import os; os.remove('/bin/sh')"
    dockerfile = (
        f'ARG BASE_IMAGE=python:3\nFROM ${{BASE_IMAGE}}\nWORKDIR /app\nRUN python3 -c "{remove}"\n'
    )
    task = write_task(tmp_path / "shell-less", {"environment/Dockerfile": dockerfile})
    with pytest.raises(SandboxError, match=r"^tests/shell-less, (start|command): .*no shell"):
        play(task, bash("true"), "done", **where)

    async def dying():
        env = HarborEnv(str(write_task(tmp_path / "dying")), heldout=0, **where)
        try:
            await env.areset(seed=0, options={"split": "train", "index": 0})
            await env.astep(bash("true"))
            place = env._agent_place.place
            if where["places"] == "docker":
                await place._call(place._container.kill)
            else:
                place._server._process.kill()
            await asyncio.sleep(0.5)
            with pytest.raises(SandboxError, match=r"^tests/dying, command: "):
                await env.astep(bash("true"))
        finally:
            await env.aclose()

    asyncio.run(asyncio.wait_for(dying(), 120))


def test_a_cancelled_episode_leaves_no_place(tmp_path):
    from areal_gym.places.docker_places import LABEL, DockerPlaces
    from areal_gym.sandbox.containers import connect

    task = write_task(tmp_path / "answer")
    places = DockerPlaces(**backend("docker")["places_kwargs"])
    mine = {"label": f"{LABEL}={places._owner}"}

    def num_places():
        with closing(connect()) as client:
            return len(client.containers.list(all=True, sparse=True, filters=mine))

    async def until(wanted):
        while num_places() != wanted:
            await asyncio.sleep(0.1)

    async def cancelled():
        episode = asyncio.create_task(play_async(task, [bash("sleep 50")], places=places))
        await until(1)
        await asyncio.sleep(0.5)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        await until(0)

    asyncio.run(asyncio.wait_for(cancelled(), 60))


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the example tasks are not here")
@pytest.mark.parametrize("name", ["fix-median", "log-tally", "ledger-merge", "codec-steps"])
def test_example_tasks(where, name):
    folder = EXAMPLES / name
    gold = play(folder, *[GOLD] * 4, **where)
    assert gold.reward == 1.0
    assert play(folder, "done", **where).reward == 0.0
    cheat = folder / "cheat" / "solve.sh"
    if cheat.is_file():
        assert play(folder, bash(cheat.read_text().partition("\n")[2]), "x", **where).reward == 0.0
