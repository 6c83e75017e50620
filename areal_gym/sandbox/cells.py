"""The parent's side of one cell: sends a snippet, collects its output, learns how it ended.

Three descriptors connect to a cell: a message socket, standard output and standard error. The fork
server, which a cell cannot reach, reports how the process ended.

Nothing that a cell writes can keep a call from ending: one function that never raises parses
messages, they are counted, output is read in chunks, and nothing is read between calls. A call ends
with the cell's answer, the end of its process, or its deadline; a fork server that does not report
the end of a killed process is abandoned.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from areal_gym.errors import SandboxError
from areal_gym.sandbox import calls
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.sandbox.calls import Call, Capture, Exit

_MESSAGES_PER_TURN = 16  # read at a time, before the event loop serves others
_START_S = 60.0
_LATE_S = 0.1  # a deadline that is noticed so much later was noticed late because the loop was busy
_MOST_WAIT_S = 1.0  # for as long, at most, news that came in time are read after such a deadline
_END_S = 60.0  # a fork server that has not reported the end of a killed process is abandoned


class CellControl(NamedTuple):
    """Orders to a cell's fork server; none of them waits."""

    kill: Callable[[], None]
    hold_soon: Callable[[], None]  # stops the cell's processes unless `resume` comes soon
    resume: Callable[[], None]
    give_up: Callable[[], None]  # closes the fork server, which does not follow orders


class Cell:
    """One forked interpreter. `Zygote.spawn` makes it; it belongs to the running loop."""

    def __init__(
        self, channel: socket.socket, stdout: int, stderr: int, control: CellControl
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._outputs = (stdout, stderr)
        self._unsent: deque[bytes] = deque()
        self._control = control
        self.memory_mb = 0  # the limit of its processes together, as the fork server has it
        self._ready = self._loop.create_future()
        self._exit: Exit | None = None
        self.gone = asyncio.Event()  # set when the process and its children have ended
        self._call: Call | None = None
        self._watch()

    @property
    def is_alive(self) -> bool:
        """Whether the cell can still run a snippet."""
        return self._exit is None

    @property
    def was_lost(self) -> bool:
        """Whether the cell was lost with its fork server, so that no snippet is to blame."""
        return self._exit is not None and self._exit.status < 0

    async def execute(self, code: str, limits: SandboxLimits, *, is_fresh: bool) -> SandboxResult:
        """Execute `code`, after which a fresh cell ends; raise SandboxError if it is lost."""
        await self._wait_until_ready()
        call = self._call = Call(limits, is_fresh)
        started = time.monotonic()
        due_s = self._loop.time() + limits.wall_s
        call.deadline = self._loop.call_at(due_s, self._expire, call, due_s)
        try:
            self._control.resume()  # may discover that the fork server is gone
            if self._exit is not None:
                call.finished.set()
            else:
                self._watch()
                self._unsent.extend(call.request(code))
                self._send()
            await call.finished.wait()
        except BaseException:
            self.kill()
            raise
        finally:
            self._end_call(call)
        elapsed_s = time.monotonic() - started
        if self._exit is not None and call.stopped is None:
            is_lost = self.was_lost and (is_fresh or call.answer is None)
            if is_lost or not call.has_begun:
                raise SandboxError("a sandbox process was lost through no fault of its snippet")
        return call.result(self._exit, elapsed_s)

    def _end_call(self, call: Call) -> None:
        self._call = None
        for timer in (call.deadline, call.giving_up):
            if timer is not None:
                timer.cancel()
        if self._channel.fileno() < 0:
            return
        self._stop_sending()
        for fd, capture in zip(self._outputs, call.captures, strict=True):
            capture.drain(fd)
        if self._exit is not None:
            self.close()
        else:
            self._control.hold_soon()

    async def _wait_until_ready(self) -> None:
        if self._ready.done():
            self._ready.result()
            return
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self._control.give_up()  # so that a retry uses another fork server
            raise SandboxError(f"a sandbox process did not start within {_START_S:g} s") from None
        except asyncio.CancelledError:
            self.kill()
            raise

    def _send(self) -> None:
        """Send as much as the socket takes now, and the rest later."""
        try:
            while self._unsent:
                self._channel.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._channel, self._send)
            return
        except OSError:
            pass  # the cell died; the fork server will report how
        self._stop_sending()

    def _stop_sending(self) -> None:
        self._unsent.clear()
        self._loop.remove_writer(self._channel)

    def _watch(self) -> None:
        self._loop.add_reader(self._channel, self._on_message)
        for fd in self._outputs:
            self._loop.add_reader(fd, self._on_output, fd)

    def _on_message(self) -> None:
        # Messages that a session writes between calls wait for the next one.
        is_idle = self._call is None and self._ready.done()
        if is_idle or not self._read_messages(_MESSAGES_PER_TURN):
            self._loop.remove_reader(self._channel)

    def _read_messages(self, limit: int) -> bool:
        """Read up to `limit` messages, none after a session's answer; return False at the end."""
        for _ in range(limit):
            if self._call is not None and self._call.finished.is_set():
                return True
            try:
                data = self._channel.recv(calls.MESSAGE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                # The cell closed the channel, or wrote an empty message, which looks the same.
                poll = select.poll()
                poll.register(self._channel, select.POLLRDHUP)
                if poll.poll(0):
                    return False
            self._take_message(data)
        return True

    def _take_message(self, data: bytes) -> None:
        call = self._call
        if call is None:
            if data == calls.READY and not self._ready.done():
                self._ready.set_result(None)
            return
        if not call.admits(len(data)):
            self._stop(SandboxStatus.KILLED)
            return
        message = calls.parse_cell_message(data)
        if message is None or message.nonce != call.nonce:
            return  # written by the snippet
        if message.status == "begun":
            call.has_begun = True
        else:
            call.answer = message
            if not call.is_fresh:
                call.finished.set()

    def _on_output(self, fd: int) -> None:
        # Between calls nothing is read; the next call reads it.
        capture = None if self._call is None else self._call.captures[fd == self._outputs[1]]
        if capture is None or not capture.read(fd):
            self._loop.remove_reader(fd)
        elif capture.num_lost > calls.FLOOD_BYTES:
            self._stop(SandboxStatus.OUTPUT)

    def _expire(self, call: Call, due_s: float) -> None:
        late_s = self._loop.time() - due_s
        if late_s > _LATE_S:
            # The loop stood still, and what the cell said in time may not have been read yet.
            wait_s = min(late_s, _MOST_WAIT_S)
            call.deadline = self._loop.call_later(wait_s, self._stop, SandboxStatus.TIMEOUT)
        else:
            self._stop(SandboxStatus.TIMEOUT)

    def _stop(self, reason: SandboxStatus) -> None:
        call = self._call
        if call is None or call.stopped is not None or call.finished.is_set():
            return
        call.stopped = reason
        if self._exit is not None:
            call.finished.set()
            return
        self.kill()
        call.giving_up = self._loop.call_later(_END_S, self._control.give_up)

    def on_exit(self, exit: Exit) -> None:
        """Handle the fork server's report that the process and its children are gone."""
        self._exit = exit
        self.gone.set()
        if not self._ready.done():
            capture = Capture(4096)
            capture.drain(self._outputs[1])
            reason = exit.error or capture.text() or f"wait status {exit.status}"
            self._ready.set_exception(SandboxError(f"a sandbox process did not start: {reason}"))
            self._ready.exception()  # mark it as retrieved: no caller waits for an idle cell
        if self._call is None:
            self.close()
            return
        try:
            # At most what the socket holds: the writers are gone.
            self._read_messages(calls.MESSAGES_PER_CALL)
        finally:
            self._call.finished.set()

    def kill(self) -> None:
        """Kill the process and its children, without waiting."""
        if self._exit is None:
            self._control.kill()

    async def aclose(self) -> None:
        """Kill the process and its children, and wait until they are gone."""
        self.kill()
        await self.gone.wait()
        self.close()

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if self._channel.fileno() >= 0:
            if not self._loop.is_closed():
                for file in (self._channel, *self._outputs):
                    self._loop.remove_reader(file)
                self._loop.remove_writer(self._channel)
            self._channel.close()
            for fd in self._outputs:
                os.close(fd)
