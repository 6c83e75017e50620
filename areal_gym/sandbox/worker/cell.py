"""Executes snippets in the isolated child.

The parent sends a header (JSON) followed by the source, in chunks; the cell answers with one
message per snippet, in the form of `areal_gym/sandbox/calls.py`. A snippet can forge answers:
the parent trusts them no more than the snippet's own output.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import errno
import gc
import io
import json
import linecache
import os
import resource
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any, NoReturn

from .limits import lower_limit, note_num_processes

CHUNK_BYTES = 32 * 1024
"""The longest message on the socket."""
_NAME = "<snippet>"
_MAX_TEXT = 8_000
_MAX_LINE = 2_000
_HEADROOM = 64 << 20
_THREADS_S = 0.01


def serve(channel: socket.socket, base_memory: int, *, counts_processes: bool) -> NoReturn:
    """Execute snippets until the channel to the parent closes or a snippet is the last one.

    Args:
        channel: the message socket to the parent.
        base_memory: bytes of address space that this process has before any snippet.
        counts_processes: whether the kernel counts processes for this cell alone.
    """
    _open_streams()
    namespace = _fresh_namespace()
    gc.enable()
    channel.send(b"ready")
    while True:
        message = channel.recv(CHUNK_BYTES)
        if not message:
            os._exit(0)
        header, _, source = message.partition(b"\n")
        request = json.loads(header)
        while len(source) < request["size"]:
            chunk = channel.recv(CHUNK_BYTES)
            if not chunk:
                os._exit(0)
            source += chunk
        # From here on the snippet is responsible if the process ends.
        channel.send(f"{request['nonce']} begun".encode())
        is_last = request["is_fresh"]
        if threading.active_count() > 1:
            # Threads were stopped since the last call; let them catch up before this snippet.
            time.sleep(_THREADS_S)
        if counts_processes:
            lower_limit(resource.RLIMIT_NPROC, request["limits"]["num_processes"])
        else:
            note_num_processes(request["limits"]["num_processes"])
        _apply_limits(request["limits"], base_memory, is_last=is_last)
        outcome, exit_code = _execute(source, namespace)
        _flush()
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kind = next((kind for kind in ("value", "traceback") if outcome.get(kind) is not None), "")
        head = f"{request['nonce']} {outcome['status']} {peak_kb} {kind or 'nothing'}\n"
        channel.send((head + outcome.get(kind, "")).encode("utf-8", "replace"))
        if is_last:
            _exit(exit_code)


def _open_streams() -> None:
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(fd, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw, 8192), "utf-8", "backslashreplace", write_through=fd == 2
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")


def _fresh_namespace() -> dict[str, Any]:
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [""]
    # The site module, which defines them, is not loaded.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    return module.__dict__


def _apply_limits(limits: dict[str, Any], base_memory: int, *, is_last: bool) -> None:
    memory = base_memory + (limits["memory_mb"] << 20)
    # A session's next call may have a higher limit, and a hard limit cannot be raised again: only
    # the first call sets it, a little higher, so that a MemoryError can still be reported.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if is_last or hard == resource.RLIM_INFINITY:
        hard = memory + _HEADROOM
    lower_limit(resource.RLIMIT_AS, memory, hard)
    lower_limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    if is_last:  # in a session CPU time adds up over calls: the wall-clock limit applies instead
        lower_limit(resource.RLIMIT_CPU, max(1, -(-int(limits["cpu_s"] * 1000) // 1000)))


def _execute(source: bytes, namespace: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the message for the parent, and Python's exit code."""
    try:
        text = source.decode("utf-8", "surrogatepass")
        linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
        tree = ast.parse(text, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            result = eval(compile(ast.Expression(last.value), _NAME, "eval"), namespace)
            value = None if result is None else _cut(repr(result), _MAX_TEXT)
        return {"status": "ok", "value": value}, 0
    except SystemExit as stop:
        return _exited(stop.code)
    except BaseException as error:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        is_memory = isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno == errno.ENOMEM
        )
        status = "memory" if is_memory else "error"
        return {"status": status, "traceback": _describe(error)}, 1


def _exited(code: object) -> tuple[dict[str, Any], int]:
    if code is None or code == 0:
        return {"status": "ok", "value": None}, 0
    if isinstance(code, int):
        return {"status": "error", "traceback": f"SystemExit: {code}\n"}, code & 0xFF
    return {"status": "error", "traceback": _cut(f"{code}\n", _MAX_TEXT)}, 1


def _describe(error: BaseException) -> str:
    """Return the traceback with the snippet's own frames only."""
    try:
        report = traceback.TracebackException(type(error), error, error.__traceback__)
        _keep_own_frames(report)
        lines = [_cut(line.rstrip("\n"), _MAX_LINE) + "\n" for line in report.format()]
    except BaseException as failure:
        return f"{type(error).__name__} (its text cannot be shown: {type(failure).__name__})\n"
    return _cut("".join(lines), _MAX_TEXT)


def _keep_own_frames(report: traceback.TracebackException | None) -> None:
    while report is not None:
        own = [frame for frame in report.stack if frame.filename == _NAME]
        report.stack = traceback.StackSummary.from_list(own)
        report = report.__cause__ or report.__context__


def _cut(text: str, limit: int) -> str:
    """Return `text`, without its middle if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue  # the snippet replaced or closed it


def _exit(code: int) -> NoReturn:
    # The shutdown of an interpreter, without tearing down modules.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
    except BaseException:
        code = code or 1
    os._exit(code)
