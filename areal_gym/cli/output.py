"""Output of the command line: data on stdout, messages on stderr, errors in one format."""

from __future__ import annotations

import errno
import itertools
import json
import os
import select
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import click

from areal_gym.errors import GymError, UsageError, did_you_mean
from areal_gym.utils.markup import visible

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_CODES = {
    0: "done",
    1: "ran, and the result is negative: a broken rule in `check`, a missed `--fail-under`",
    2: "usage or settings: unknown id, flag or key; a bad recipe; the run directory is taken",
    3: "infrastructure: engine, sandbox, disk; too many failed episodes",
    4: "plugin: two claim one id, or one cannot be imported",
    5: "nothing to do: no tasks, no runs",
    EXIT_BUG: "a bug in areal-gym",
    EXIT_INTERRUPTED: "interrupted; the run is saved, and `--resume` continues it",
}

_REFUSED = {errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of paths that the user named and the system does not allow."""


class ReaderLeftError(Exception):
    """The reader of stdout (`| head`) closed the pipe."""


def harmless(text: str) -> str:
    """Return the text without terminal control codes, because names and errors may be untrusted."""
    return "\n".join(
        "\t".join(visible(part) for part in line.split("\t")) for line in text.split("\n")
    )


def has_reader_left() -> bool:
    """Return whether the reader of stdout has closed the pipe."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


class Group(click.Group):
    """A group of commands that suggests a name for a mistyped one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or raise UsageError; completion of an unfinished line never raises."""
        name = args[0]
        is_typed = not ctx.resilient_parsing and not name.startswith("-")
        if is_typed and self.get_command(ctx, name) is None:
            near = did_you_mean(name, self.list_commands(ctx))
            raise UsageError(
                f"no command {name!r}", hints=[near, f"see all: {ctx.command_path} --help"]
            )
        return super().resolve_command(ctx, args)


def print_data(text: str) -> None:
    """Print a line of data and flush it, because the reader of a pipe may wait for it."""
    print(harmless(text), flush=True)


def print_json(value: Any) -> None:
    """Print data for programs, as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_columns(rows: Sequence[Sequence[str]], *, indent: str = "") -> None:
    """Print rows with aligned columns; on a terminal, cells that are too wide are wrapped."""
    rows = [[visible(cell).replace("\n", " ") for cell in row] for row in rows]
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns - len(indent) - 2 * (len(widths) - 1)
        words = [max(map(len, " ".join(column).split(" "))) for column in columns]
        while sum(widths) > room and (spare := [i for i, w in enumerate(widths) if w > words[i]]):
            widths[max(spare, key=widths.__getitem__)] -= 1
    for row in rows:
        folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*folded, fillvalue=""):
            cells = [part.ljust(width) for part, width in zip(line, widths, strict=True)]
            print(indent + "  ".join(cells).rstrip())


def _fold(cell: str, width: int) -> list[str]:
    """Split a cell into lines of at most `width`; words stay whole, so that paths can be copied."""
    if len(cell) <= width:
        return [cell]
    margin = len(cell) - len(cell.lstrip())
    return textwrap.wrap(
        cell,
        width,
        subsequent_indent=" " * (margin + 2) if margin else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def talk(text: str) -> None:
    """Print a message for people on stderr; never data."""
    print(harmless(text), file=sys.stderr)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    talk(f"areal-gym: warning: {text}")


def render_error(error: BaseException, *, is_verbose: bool = False) -> int:
    """Print an error on stderr and return the exit code."""
    if is_verbose and not isinstance(error, click.exceptions.Exit | SystemExit):
        traceback.print_exception(error)
    hints: Iterable[str] = ()
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        case ReaderLeftError():
            # The interpreter flushes stdout at exit, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        case KeyboardInterrupt() | click.Abort():
            talk("areal-gym: interrupted")
            return EXIT_INTERRUPTED
        case click.exceptions.NoArgsIsHelpError():
            talk(error.format_message())
            return 2
        case GymError():
            code, message, hints = error.exit_code, error.message, error.hints
        case click.ClickException():
            code, (message, hints) = 2, _from_click(error)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            code, message = 3, f"the disk is full: {error}"
            hints = ["free some space: runs use it in checkpoints/ and trajectories/"]
        case OSError() if error.errno in _REFUSED:
            code, hints = 2, ["choose another path"]
            message = f"cannot use {error.filename2 or error.filename}: {error.strerror}"
        case MemoryError():
            code, message = 3, "out of memory"
            hints = ["use less at once: rollout.max_in_flight=32 ..."]
        case _:
            code, message = EXIT_BUG, f"a bug, sorry: {type(error).__name__}: {error}"
            if not is_verbose:
                hints = ["for a traceback to report: repeat the command with -v"]
    talk(f"areal-gym: error: {message}")
    for line in "\n".join(hints).splitlines():
        talk(f"  {line}")
    return code


def _from_click(error: click.ClickException) -> tuple[str, list[str]]:
    ctx = getattr(error, "ctx", None)
    message = error.format_message()
    near = None
    if isinstance(error, click.NoSuchOption):
        message = f"no option {error.option_name!r}"
        known = [flag for parameter in ctx.command.params for flag in parameter.opts] if ctx else []
        flags = [flag for flag in (*known, "--help") if flag.startswith("--")]
        near = did_you_mean(error.option_name, flags)
    command_help = None if ctx is None else f"help: {ctx.command_path} --help"
    message = message[:1].lower() + message[1:].rstrip(".")
    return message, [hint for hint in (near, command_help) if hint]
