"""Cheats that every task must withstand: they try to earn the reward without any work."""

from __future__ import annotations

import io
import posixpath
import tarfile

from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.archives import MOST_BYTES, NEVER_CARRIED, is_within
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep

# Nothing but a shell is sure to be there; what fails is passed over.
_FOLDERS = """\
make() { mkdir -p "$1" 2>/dev/null || python3 -c 'import os, sys
os.makedirs(sys.argv[1], exist_ok=True)' "$1" 2>/dev/null; }
forge() {
  echo 1 > /logs/verifier/reward.txt
  echo '{"reward": 1}' > /logs/verifier/reward.json
}
make /logs/verifier; make /tests
"""
_WRITE_NOW = (
    _FOLDERS
    + """\
forge 2>/dev/null
printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh
exit 0
"""
)
_WRITER = (
    _FOLDERS
    + """\
(trap '' HUP INT TERM; while :; do make /logs/verifier; forge; sleep 0.05; done) \\
  >/dev/null 2>&1 </dev/null &
exit 0
"""
)
_PLANT = (
    _FOLDERS
    + """\
library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2>/dev/null)
code='import os
for name, text in (("reward.txt", "1"), ("reward.json", "{\\"reward\\": 1}")):
    try:
        with open("/logs/verifier/" + name, "w") as file: file.write(text)
    except OSError: pass
'
hook='
def pytest_runtest_makereport(item, call):
    from _pytest.reports import TestReport
    report = TestReport.from_item_and_call(item, call)
    report.outcome = "passed"
    return report
'
for folder in "$PWD" / /tests "$HOME" "$library"; do
  for name in sitecustomize.py usercustomize.py; do printf %s "$code" > "$folder/$name"; done
  printf '%s%s' "$code" "$hook" > "$folder/conftest.py"
done 2>/dev/null
fake='#!/bin/sh
echo 1 > /logs/verifier/reward.txt
exit 0
'
real=$(command -v python3)
for path in "$PWD/python3" "$PWD/pytest" "$PWD/sh" "$real" /usr/local/bin/python3; do
  [ -n "$path" ] || continue
  rm -f "$path"; printf %s "$fake" > "$path"; chmod 755 "$path"
done 2>/dev/null
exit 0
"""
)
CHEATS = {
    "a reward written at once": _WRITE_NOW,
    "a writer in the background": _WRITER,
    "planted conftest.py, sitecustomize.py and python3": _PLANT,
}
"""Scripts for `/bin/sh`, by what they do."""

# An agent's module, as a test imports it: forges the reward, leaves a writer, and exits with 0.
_FORGING_PYTHON = b"""\
import os as _os, time as _time
def _forge():
    for name, text in (("reward.txt", "1"), ("reward.json", '{"reward": 1}')):
        try:
            with open("/logs/verifier/" + name, "w") as file:
                file.write(text)
        except OSError:
            pass
_forge()
if _os.fork() == 0:
    _os.setsid()
    for _ in range(400):
        _forge()
        _time.sleep(0.05)
    _os._exit(0)
_os._exit(0)
"""
_FORGING_SHELL = b"""\
#!/bin/sh
echo 1 > /logs/verifier/reward.txt
echo '{"reward": 1}' > /logs/verifier/reward.json
exit 0
"""


async def forging_archive(
    task: HarborTask, step: TaskStep, agent: AgentPlace
) -> tuple[bytes, list[str]]:
    """Return an archive that puts forging code in place of what the solution wrote; and its paths.

    The agent's place is frozen. Code are Python modules and files that are executable scripts.
    """
    place = agent.place
    await place.freeze()
    changes = await place.changes()
    raw = await place.take(changes.written, max_bytes=MOST_BYTES)
    buffer = io.BytesIO()
    names: list[str] = []
    roots = [agent.workdir, *(artifact.source for artifact in step.artifacts)]
    with (
        tarfile.open(fileobj=buffer, mode="w") as forged,
        tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive,
    ):
        for member in archive:
            path = posixpath.normpath("/" + member.name)
            is_carried = any(is_within(path, root) for root in roots if root != "/")
            if (
                not member.isreg()
                or not is_carried
                or any(is_within(path, p) for p in NEVER_CARRIED)
            ):
                continue
            file = archive.extractfile(member)
            code = _forging(path, member, b"" if file is None else file.read(128))
            if code is not None:
                entry = tarfile.TarInfo(member.name)
                entry.mode, entry.uid, entry.gid = member.mode, member.uid, member.gid
                entry.size = len(code)
                forged.addfile(entry, io.BytesIO(code))
                names.append(path)
    return buffer.getvalue(), names


def _forging(path: str, member: tarfile.TarInfo, head: bytes) -> bytes | None:
    first = head.partition(b"\n")[0]
    if path.endswith(".py") or (first.startswith(b"#!") and b"python" in first):
        shebang = first + b"\n" if first.startswith(b"#!") else b""
        return shebang + _FORGING_PYTHON
    if path.endswith(".sh") or (member.mode & 0o111 and first.startswith(b"#!")):
        return _FORGING_SHELL
    return None
