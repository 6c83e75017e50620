"""Walls around an agent's place: the verifier's files, and the network."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile

from areal_gym.envs.checker.env_under_test import RuleViolation, Skipped
from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.archives import MOST_BYTES, is_complete
from areal_gym.envs.harbor.task_folder import HarborTask
from areal_gym.errors import SandboxError
from areal_gym.places import Place

_LEAST_BYTES = 32
"""Smaller files of tests are found in other folders by chance."""
_PORT = 8900
_LOOK = """\
for path in /tests /solution /cheat /logs/verifier; do
  if [ -e "$path" ]; then printf '%s ' "$path"; fi
done
"""
_ASK = """\
import socket
with socket.create_connection(("127.0.0.1", PORT), 5) as gateway:
    print(gateway.recv(7).decode())
for host in ("10.0.0.1", "192.0.2.1", "172.17.0.1"):
    try:
        socket.create_connection((host, 80), 2)
        print("reached " + host)
    except OSError as error:
        pass
"""


async def require_hidden(task: HarborTask, agent: AgentPlace) -> str:
    """Raise RuleViolation if tests or solution can be seen; return what was compared."""
    result = await agent.place.run(["/bin/sh", "-c", _LOOK], timeout_s=30.0)
    if seen := result.stdout.decode("utf-8", "replace").split():
        raise RuleViolation(f"the agent sees {', '.join(seen)}")
    hidden = {}
    for step in task.steps:
        for folder in (*step.tests, *([step.solution] if step.solution else [])):
            for file in folder.rglob("*"):
                if file.is_file() and file.stat().st_size >= _LEAST_BYTES:
                    digest = hashlib.sha256(file.read_bytes()).digest()
                    hidden[digest] = file.relative_to(task.folder)
    if agent.workdir == "/":
        return "paths only: the working directory is /"
    await agent.place.freeze()
    raw = await agent.place.take([agent.workdir], max_bytes=MOST_BYTES)
    if not is_complete(raw):
        return "paths only: the working directory is large"
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            if content is not None:
                name = hidden.get(hashlib.sha256(content.read()).digest())
                if name is not None:
                    raise RuleViolation(f"/{member.name} in the image is {name}")
    return f"{len(hidden)} files"


async def require_walls(place: Place) -> str:
    """Raise RuleViolation unless a port of the gateway is reached from inside, and nothing else."""
    try:
        listener = await place.listen(_PORT)
    except SandboxError as error:
        raise Skipped(str(error)) from None

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"gateway")
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    try:
        program = _ASK.replace("PORT", str(_PORT))
        result = await place.run(
            ["/bin/sh", "-c", 'exec python3 -I -c "$1"', "sh", program], timeout_s=60.0
        )
    finally:
        server.close()
    if result.exit_code == 127:
        raise Skipped("the image has no python3 to connect with")
    lines = result.stdout.decode("utf-8", "replace").split("\n")
    if result.exit_code != 0 or lines[0] != "gateway":
        raise RuleViolation(f"the gateway is not reached: {result.stderr.decode()[-200:]}")
    if reached := [line for line in lines if line.startswith("reached")]:
        raise RuleViolation("; ".join(reached))
    return ""
