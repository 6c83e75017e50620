"""The tools of the shell agent: `bash`, `edit` and `view`, in a place.

Every command is a process of its own. What lasts between commands is files and the working
directory, which the shell keeps in a file of the place (`/logs/agent/cwd`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_gym.envs.harbor.phases import phase
from areal_gym.envs.harbor.step_verification import cut_middle
from areal_gym.errors import ToolError
from areal_gym.places import CommandResult, Place

CWD_FILE = "/logs/agent/cwd"
_MOST_ARGUMENT = 100_000
"""Bytes of one argument of a program: the kernel takes 128 kB."""
_MOST_FILE = 1_000_000
_FILE_S = 30.0
_CD = f'if [ -r {CWD_FILE} ]; then read -r dir < {CWD_FILE} && cd -- "$dir" 2>/dev/null; fi\n'
# bash where the image has it; `sh -c` of a script that is an argument, so that nothing is quoted.
_BASH = _CD + f"trap 'pwd > {CWD_FILE}' EXIT\n" + 'exec 2>&1 </dev/null\neval "$1"\n'
_RUN = (
    'if command -v bash >/dev/null 2>&1; then exec bash -c "$1" bash "$2"; fi\n'
    'exec sh -c "$1" sh "$2"\n'
)
_READ = _CD + 'if [ -d "$1" ]; then echo "$1 is a folder" >&2; exit 21; fi\nexec cat -- "$1"\n'
_EXISTS = _CD + '[ -e "$1" ]\n'
_WRITE = (
    _CD
    + 'path=$1; shift\ncase $path in */*) [ -d "${path%/*}" ] || mkdir -p -- "${path%/*}";; esac\n'
    + 'printf %s "$@" > "$path"\n'
)


class Shell:
    """Runs the agent's commands in its place, as its user."""

    def __init__(
        self,
        place: Place,
        *,
        task_id: str,
        user: str | int | None,
        max_output: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._place = place
        self._task_id = task_id
        self._user = user
        self._max_output = max_output
        self._env = dict(env or {})

    async def bash(self, command: str, timeout_s: float) -> str:
        """Run a command and return its output, its exit code and whether its time was over."""
        argv = ["/bin/sh", "-c", _RUN, "sh", _BASH, _argument(command, "the command")]
        result = await self._run(argv, timeout_s)
        text = cut_middle(_text(result.stdout + result.stderr).strip("\n"), self._max_output)
        if result.is_timed_out:
            return _joined(
                text,
                f"(ended after {timeout_s:g} s; run long commands with a larger timeout_s, and "
                "servers as: COMMAND >log 2>&1 &)",
            )
        if result.exit_code:
            return _joined(text, f"(exit code {result.exit_code})")
        return text or "(exit code 0, no output)"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace the only occurrence of a text in a file; an empty text writes a new file."""
        path = _argument(path, "the path")
        if not old:
            if (await self._script(_EXISTS, path)).exit_code == 0:
                raise ToolError(f"{path} exists: give the text to replace as `old`")
            await self._write(path, new)
            return f"wrote {path}"
        text = await self._read(path)
        count = text.count(old)
        if count != 1:
            where = "not in" if count == 0 else f"{count} times in"
            more = "view the file first" if count == 0 else "give more of the text around it"
            raise ToolError(f"the text is {where} {path}: {more}")
        await self._write(path, text.replace(old, new))
        return f"edited {path}"

    async def view(self, path: str, first_line: int, num_lines: int) -> str:
        """Return numbered lines of a file."""
        path = _argument(path, "the path")
        if first_line < 1 or num_lines < 1:
            raise ToolError("first_line and num_lines begin at 1")
        lines = (await self._read(path)).splitlines()
        shown = lines[first_line - 1 : first_line - 1 + num_lines]
        if not shown:
            return f"{path} has {len(lines)} lines"
        numbered = [f"{number}\t{line}" for number, line in enumerate(shown, first_line)]
        more = len(lines) - (first_line - 1 + len(shown))
        text = cut_middle("\n".join(numbered), self._max_output)
        return f"{text}\n({more} more lines)" if more else text

    async def _read(self, path: str) -> str:
        result = await self._script(_READ, path)
        if result.exit_code != 0:
            raise ToolError(_text(result.stderr).strip() or f"{path} cannot be read")
        if len(result.stdout) >= _MOST_FILE:
            raise ToolError(f"{path} is larger than {_MOST_FILE:,} bytes: use bash")
        if b"\0" in result.stdout:
            raise ToolError(f"{path} is not a text: use bash")
        try:
            return result.stdout.decode("utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{path} is not UTF-8: use bash") from None

    async def _write(self, path: str, text: str) -> None:
        if len(text) > _MOST_FILE:
            raise ToolError(f"the text is longer than {_MOST_FILE:,} characters")
        size = _MOST_ARGUMENT // 4  # characters; four bytes each at most
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [_argument(part, "the text") for part in parts]
        result = await self._script(_WRITE, path, *parts)
        if result.exit_code != 0:
            raise ToolError(_text(result.stderr).strip() or f"{path} cannot be written")

    async def _script(self, script: str, *arguments: str) -> CommandResult:
        return await self._run(["/bin/sh", "-c", script, "sh", *arguments], _FILE_S)

    async def _run(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        async with phase(self._task_id, "command"):
            return await self._place.run(argv, user=self._user, env=self._env, timeout_s=timeout_s)


def _argument(text: str, what: str) -> str:
    """Return a text that can be an argument of a program, or raise ToolError."""
    if "\0" in text:
        raise ToolError(f"{what} has a zero byte")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ToolError(f"{what} holds half of a surrogate pair, which is no text") from None
    if not text or size > _MOST_ARGUMENT:
        raise ToolError(f"{what} has {size:,} bytes; 1 to {_MOST_ARGUMENT:,} are possible")
    return text


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _joined(*parts: str) -> str:
    return "\n".join(filter(None, parts))
