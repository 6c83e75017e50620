"""Small task folders, written for tests."""

from pathlib import Path

TOML = """\
schema_version = "1.4"
artifacts = ["/app/answer.txt"]

[task]
name = "tests/NAME"

[environment]
network_mode = "no-network"
workdir = "/app"

[verifier]
timeout_sec = 30.0
environment_mode = "separate"
"""
DOCKERFILE = """\
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}
WORKDIR /app
COPY question.txt /app/question.txt
"""
TEST = """\
#!/bin/sh
if [ "$(cat /app/answer.txt 2>/dev/null)" = 42 ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
"""


def write_files(folder: Path, files: dict[str, str | bytes | None]) -> Path:
    """Write files below a folder; None removes one."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            file.unlink()
        elif isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content)
            file.chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder


def write_task(
    folder: Path, changes: dict[str, str | bytes | None] | None = None, *, more: str = ""
) -> Path:
    """Write a task whose answer is 42; `more` is appended to `task.toml`."""
    files: dict[str, str | bytes | None] = {
        "task.toml": TOML.replace("NAME", folder.name) + more,
        "instruction.md": "Write 42 to `/app/answer.txt`.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/question.txt": "6 * 7\n",
        "solution/solve.sh": "#!/bin/sh\necho 42 > /app/answer.txt\n",
        "tests/test.sh": TEST,
    }
    return write_files(write_files(folder, files), changes or {})
