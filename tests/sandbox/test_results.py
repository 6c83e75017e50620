"""Results of a call: status, output, value, errors and limits."""

import asyncio
import time

import pytest

from areal_gym.sandbox import SandboxLimits, SandboxStatus
from areal_gym.sandbox.calls import Call, CellMessage, Exit

OK, ERROR, TIMEOUT = SandboxStatus.OK, SandboxStatus.ERROR, SandboxStatus.TIMEOUT
MEMORY, OUTPUT, KILLED = SandboxStatus.MEMORY, SandboxStatus.OUTPUT, SandboxStatus.KILLED


def test_output_and_value(execute):
    result = execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\n[1, 2]")
    assert (result.status, result.is_ok) == (OK, True)
    assert (result.stdout, result.stderr, result.value) == ("out\n", "err\n", "[1, 2]")
    assert result.elapsed_s > 0


@pytest.mark.parametrize("code", ["x = 1", "None", "", "# nothing", "print(1)"])
def test_statements_have_no_value(execute, code):
    assert execute(code).value is None


def test_traceback_shows_only_the_snippet(execute):
    result = execute("import json\ndef f():\n    json.loads('{')\nf()")
    assert result.status is ERROR
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "File" in line] == [
        '  File "<snippet>", line 4, in <module>',
        '  File "<snippet>", line 3, in f',
    ]
    assert lines[-1].startswith("json.decoder.JSONDecodeError: Expecting property name")


def test_last_line_of_stderr_names_the_error(execute):
    assert execute("1/0").stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "SyntaxError" in execute("def f(:").stderr.splitlines()[-1]
    assert execute("a\0b").status is ERROR


def test_chained_exceptions_are_printed_whole(execute):
    code = "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e"
    stderr = execute(code).stderr
    assert "ZeroDivisionError" in stderr
    assert stderr.splitlines()[-1] == "KeyError: 'k'"


def test_cyclic_exception_chain_is_printed_once(execute):
    code = "a = ValueError('a')\nb = ValueError('b', a)\na.__cause__, b.__cause__ = b, a\nraise a"
    assert "ValueError" in execute(code).stderr


@pytest.mark.parametrize(
    ("code", "status", "last_line"),
    [
        ("import sys; sys.exit(0)", OK, ""),
        ("exit()", OK, ""),
        ("import sys; sys.exit(42)", ERROR, "SystemExit: 42"),
        ("import sys; sys.exit('why')", ERROR, "why"),
        ("import os; os._exit(7)", ERROR, "SystemExit: 7"),
        ("import os; os._exit(0)", OK, ""),
        ("import ctypes; ctypes.string_at(0)", KILLED, "Killed: SIGSEGV"),
    ],
)
def test_exit_codes_and_signals(execute, code, status, last_line):
    result = execute("print('before', flush=True)\n" + code)
    assert (result.status, result.stdout) == (status, "before\n")
    assert "".join(result.stderr.splitlines()[-1:]) == last_line


def test_call_waits_for_threads_and_exit_handlers(execute):
    code = "import atexit, threading, time\natexit.register(print, 'handler')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
    assert execute(code).stdout == "thread\nhandler\n"


def test_names_do_not_persist_between_calls(execute):
    execute("import builtins\nx = 1\nbuiltins.print = None")
    assert execute("print('x' in globals())").stdout == "False\n"


def test_unicode_and_binary_output(execute):
    assert execute("print('π≈3.14 数学')").stdout == "π≈3.14 数学\n"
    assert execute(r"print('\ud800')").stdout == "\\ud800\n"
    assert execute("import os; os.write(1, b'a\\x00b\\xff')").stdout == "a\0b\ufffd"
    assert execute("'\\udfff'").value == "'\\udfff'"
    assert execute("print('\ud800')").status in (OK, ERROR)
    assert execute("x='" + "a" * 300_000 + "'\nlen(x)").value == "300000"


def test_stdin_is_empty(execute):
    assert execute("input()").stderr.splitlines()[-1] == "EOFError: EOF when reading a line"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)", "3**10**9"])
def test_wall_clock_limit(execute, code):
    result = execute("print('first', flush=True)\n" + code, wall_s=0.5)
    assert (result.status, result.stdout) == (TIMEOUT, "first\n")
    assert result.stderr == "TimeoutError: no result after 0.5 s\n"


def test_processor_time_limit(execute):
    result = execute("while True: pass", cpu_s=1)
    assert result.status is TIMEOUT
    assert result.stderr == "TimeoutError: more than 1 s of processor time\n"


def test_memory_limit(execute):
    for code in ("x = bytearray(64 << 30)", "x = []\nwhile True: x.append(bytearray(16 << 20))"):
        result = execute(code, memory_mb=128)
        assert (result.status, result.stderr.splitlines()[-1]) == (MEMORY, "MemoryError")
    assert execute("len(bytearray(64 << 20))", memory_mb=128).value == str(64 << 20)


def test_memory_limit_covers_all_processes(execute, runner, sandbox):
    if "memory sum" not in runner.run(sandbox.report()).protections:
        pytest.skip("snippets may not fork here")
    code = "import os, time\nfor i in range(6):\n    if os.fork() == 0:\n"
    code += "        x = bytearray(40 << 20)\n        time.sleep(60)\ntime.sleep(60)"
    result = execute(code, memory_mb=128)
    assert (result.status, result.stderr) == (
        MEMORY,
        "MemoryError: its processes held more than 128 MB together\n",
    )


def test_short_lived_processes_do_not_hide_memory(execute, runner, sandbox):
    if "memory sum" not in runner.run(sandbox.report()).protections:
        pytest.skip("snippets may not fork here")
    code = "import os, time\nfor i in range(6):\n    if os.fork() == 0:\n"
    code += "        x = bytearray(40 << 20)\n        time.sleep(60)\n"
    code += "while True:\n    if os.fork() == 0: os._exit(0)\n    os.wait()"
    assert execute(code, memory_mb=128).status is MEMORY


def test_shared_memory_of_forks_counts_once(execute, runner, sandbox):
    if "memory sum" not in runner.run(sandbox.report()).protections:
        pytest.skip("snippets may not fork here")
    code = "import os, time\nx = bytearray(80 << 20)\nfor i in range(6):\n"
    code += "    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)\n"
    code += "for i in range(6): os.wait()\n'done'"
    assert execute(code, memory_mb=128).value == "'done'"


def test_peak_memory(execute):
    idle, busy = execute("1"), execute("len(bytearray(64 << 20))")
    assert 60 < busy.peak_memory_mb - idle.peak_memory_mb < 70


def test_output_limit(execute):
    result = execute("print('a' * 5000)\n1", output_bytes=1000)
    assert (result.status, result.stdout, result.value) == (OUTPUT, "a" * 1000, None)
    assert result.stderr == "OutputLimit: more than 1000 bytes were printed\n"


def test_endless_output_ends_the_snippet(execute):
    result = execute("while True: print('spam' * 1000)", output_bytes=1000)
    assert (result.status, len(result.stdout)) == (OUTPUT, 1000)


def test_huge_errors_and_values_are_truncated(execute):
    result = execute("raise ValueError('x' * 50_000_000)")
    assert result.status is ERROR
    assert len(result.stderr) < 20_000
    assert len(execute("'y' * 50_000_000").value) < 20_000


def test_exception_with_broken_str(execute):
    code = "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E"
    assert execute(code).status is ERROR


def test_status_cannot_be_forged_through_descriptors(execute):
    code = 'import os\nfor fd in range(64):\n    try: os.write(fd, b\'{"status": "ok"}\')\n'
    code += "    except OSError: pass\nraise SystemExit(3)"
    assert execute(code).status is ERROR


def test_numpy_and_sympy(execute):
    code = "import numpy as np, sympy\nprint(np.arange(10).sum(), sympy.sqrt(8))"
    result = execute(code)
    if "ModuleNotFoundError" in result.stderr:
        pytest.skip("numpy or sympy is not installed")
    assert result.stdout == "45 2*sqrt(2)\n"


def test_set_order_is_deterministic(execute):
    assert len({execute("list({'a', 'b', 'c', 'd', 'e'})").value for _ in range(3)}) == 1


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("import time; time.sleep(0.5)", OK), ("while True: pass", TIMEOUT)]
)
def test_a_loop_that_stands_still_makes_no_timeout(runner, sandbox, code, status, in_session):
    """A snippet that answers in time is OK, even if the loop reads this after the deadline."""

    async def play():
        runner = await sandbox.session() if in_session else sandbox
        try:
            running = asyncio.create_task(runner.run(code, limits=SandboxLimits(wall_s=1.0)))
            await asyncio.sleep(0.2)  # it has begun
            time.sleep(1.5)  # as a thousand episodes that begin at once on a busy machine
            return await running
        finally:
            if in_session:
                await runner.aclose()

    assert runner.run(play()).status is status


def test_a_call_that_ends_while_it_is_stopped_says_both():
    call = Call(SandboxLimits(num_processes=16), is_fresh=True)
    call.answer = CellMessage("nonce", "error", traceback="RuntimeError: can't start new thread\n")
    result = call.result(Exit(0, excess="processes"), 0.1)
    assert result.status is SandboxStatus.KILLED
    assert result.stderr.splitlines() == [
        "RuntimeError: can't start new thread",
        "Killed: more than 16 threads and processes",
    ]
    assert call.result(None, 0.1).stderr == "RuntimeError: can't start new thread\n"
