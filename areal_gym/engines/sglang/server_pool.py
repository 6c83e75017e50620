"""Several servers as one: who serves, who gets the next session, who has died, who came back.

lost --------> answers, reports the policy's version ----------> serves
 ^             (else the last checkpoint is sent again, or it      |
 |             waits for the next publication)                     |
 +--- refuses, fails three times in a row, has other weights <-----+
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_gym.engines.sglang.launch import ServerProcess
from areal_gym.engines.sglang.replies import INITIAL_WEIGHTS, version_of
from areal_gym.engines.sglang.server_client import ServerFacts, SGLangServer, is_refused
from areal_gym.errors import EngineError, EngineUnreachableError

_MAX_FAILURES = 3
"""In a row; then a server that still accepts connections is given up, too."""
_HEALTH_TIMEOUT_S = 30.0
"""A busy server takes its time; SGLang itself gives up after 20 s."""
_KNOCK_S = 5.0
"""A server that is out of service holds up a publication for so long at most."""
_MAX_RELAUNCHES = 3
"""In a row, of a server that we started."""


@dataclass(eq=False, slots=True)
class ServerState:
    """One server of the fleet."""

    server: SGLangServer
    process: ServerProcess | None = None
    """Where we started the server ourselves."""
    facts: ServerFacts | None = None
    """As of the start."""
    is_serving: bool = False
    is_paused: bool = False
    is_outdated: bool = False
    """It is back, and waits for weights that only the next publication brings."""
    num_sessions: int = 0
    num_in_flight: int = 0
    num_failures: int = 0
    num_relaunches: int = 0
    """Both: since something last went well."""
    last_answer_s: float = 0.0
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever the last request in flight ends."""

    async def reported_version(self) -> int:
        """The version that it says it serves.

        Raises:
            EngineError: it does not say.
        """
        return version_of(await self.server.weight_version())


class ServerPool:
    """Keeps the servers that serve apart from those that do not, all the time.

    Args:
        members: the servers; none serves yet.
        grace_s: how long to wait, when none serves, before that is an error.
        interval_s: seconds between two looks at each server.
        policy_version: what a server must report to serve.
        is_guest: these servers get their weights from somebody else, who may be ahead of what is
            known here.
    """

    def __init__(
        self,
        members: Sequence[ServerState],
        *,
        grace_s: float,
        interval_s: float,
        policy_version: Callable[[], int],
        is_guest: bool = False,
    ) -> None:
        self.members = list(members)
        self.lock = asyncio.Lock()
        """Held while weights change: by a publication, or by a server's return."""
        self.num_lost = 0
        self.num_outages = 0
        """How often the last server that served was lost."""
        self.num_relaunches = 0
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._policy_version = policy_version
        self._is_guest = is_guest
        self._sessions: dict[str, ServerState] = {}
        self._someone_serves = asyncio.Event()
        self._deserted_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> list[ServerState]:
        """Who takes requests now."""
        return [member for member in self.members if member.is_serving]

    @property
    def outage_s(self) -> float:
        """For how long no server has served, though one did before."""
        if self._someone_serves.is_set() or not self.num_outages:
            return 0.0
        return asyncio.get_running_loop().time() - self._deserted_s

    @property
    def needs_weights(self) -> bool:
        """Whether nobody serves for want of weights that only a publication brings."""
        return not self.serving and any(member.is_outdated for member in self.members)

    async def start(self) -> None:
        """Look at every server, and go on looking.

        Raises:
            EngineError: one does not answer, or is no SGLang server.
        """
        await asyncio.gather(*(self._claim(member) for member in self.members))
        for member in self.members:
            self._spawn(self._watch(member))

    async def _claim(self, member: ServerState) -> None:
        """Whatever an earlier run has left behind, its weights are our version 0 now."""
        server = member.server
        if self._is_guest:
            member.facts = await server.look()
            self.admit(member)
            return
        with suppress(EngineError):  # `look` says it better
            # A run that was killed inside a publication has left the server paused.
            await server.post("/continue_generation", {})
        member.facts = await server.look()
        if version_of(member.facts.weight_version) != 0:
            # A number from elsewhere would look like one of ours.
            body = {"new_version": INITIAL_WEIGHTS, "abort_all_requests": False}
            await server.post("/update_weight_version", body)
        self.admit(member)

    async def aclose(self) -> None:
        """Stop looking; end connections and the servers that we started. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.server.aclose() for member in self.members))
        await asyncio.gather(*(m.process.aclose() for m in self.members if m.process is not None))

    # ---- who takes a request ------------------------------------------------------------------

    async def choose(self, session: str | None) -> ServerState:
        """A session stays where its prefix is cached; a new one goes to the least loaded server.

        Raises:
            EngineUnreachableError: nobody has served for the whole grace period.
        """
        while not self._someone_serves.is_set():
            await self._wait_for_service()
        member = self._sessions.get(session) if session is not None else None
        if member is not None and member.is_serving:
            return member
        chosen = min(self.serving, key=_load)
        if session is not None:
            if member is not None:
                member.num_sessions -= 1
            self._sessions[session] = chosen
            chosen.num_sessions += 1
        return chosen

    def release(self, session: str) -> None:
        """The session needs no cache any more. Unknown ones are ignored."""
        member = self._sessions.pop(session, None)
        if member is not None:
            member.num_sessions -= 1

    async def _wait_for_service(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(max(loop.time(), self._deserted_s + self._grace_s)):
                await self._someone_serves.wait()
        except TimeoutError:
            raise self.unreachable() from None

    def unreachable(self) -> EngineUnreachableError:
        """Nobody serves: which servers there are, and what to type."""
        urls = ", ".join(member.server.url for member in self.members)
        hints = [f"start the server: {member.server.start_command}" for member in self.members[:1]]
        for member in self.members:
            if member.process is not None:
                hints = [f"its log: {member.process.log}", *member.process.last_lines()]
            if member.is_outdated:
                hints.insert(0, f"{member.server.url} was restarted, and has other weights")
        return EngineUnreachableError(
            f"for {self._grace_s:g} s no server had version {self._policy_version()}: {urls}",
            hints=hints,
        )

    async def reachable(self) -> list[ServerState]:
        """Who answers, serving or not.

        Raises:
            EngineUnreachableError: nobody, for the whole grace period.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._grace_s
        while True:
            answers = await asyncio.gather(*(self._answers(member) for member in self.members))
            answering = [m for m, does in zip(self.members, answers, strict=True) if does]
            if answering:
                return answering
            if loop.time() >= deadline_s:
                raise self.unreachable()
            await asyncio.sleep(min(self._interval_s, 1.0))

    async def _answers(self, member: ServerState) -> bool:
        if member.is_serving:
            return True
        try:
            await member.server.weight_version(timeout_s=_KNOCK_S)
        except EngineError:
            return False
        return True

    # ---- who serves ---------------------------------------------------------------------------

    def admit(self, member: ServerState) -> None:
        """The server takes requests from now on."""
        member.is_serving = True
        member.is_outdated = False
        member.num_failures = 0
        member.last_answer_s = asyncio.get_running_loop().time()
        self._someone_serves.set()

    def lose(self, member: ServerState) -> None:
        """The server takes no more requests; those in flight there fail now, to be moved."""
        if not member.is_serving:
            return
        member.is_serving = False
        self.num_lost += 1
        if not self.serving:
            self.num_outages += 1
            self._someone_serves.clear()
            self._deserted_s = asyncio.get_running_loop().time()
        self._spawn(member.server.aclose())

    def succeeded(self, member: ServerState) -> None:
        """The server has answered as it should."""
        member.num_failures = member.num_relaunches = 0
        member.last_answer_s = asyncio.get_running_loop().time()

    def failed(self, member: ServerState, error: EngineError) -> None:
        """The server has not answered as it should."""
        member.num_failures += 1
        if is_refused(error) or member.num_failures >= _MAX_FAILURES:
            self.lose(member)

    async def _watch(self, member: ServerState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            is_quiet = loop.time() - member.last_answer_s >= self._interval_s
            try:
                if not member.is_serving:
                    await self._bring_back(member)
                elif is_quiet and not self.lock.locked():
                    await member.server.check_health(timeout_s=_HEALTH_TIMEOUT_S)
                    self.succeeded(member)
            except EngineError as error:
                # A look at SGLang's health samples a token, which a publication holds back.
                if member.is_serving and not self.lock.locked():
                    self.failed(member, error)

    async def _bring_back(self, member: ServerState) -> None:
        """Raises EngineError while the server cannot serve the policy's version."""
        if member.process is not None and not member.process.is_running:
            if member.num_relaunches >= _MAX_RELAUNCHES:
                return
            member.num_relaunches += 1
            self.num_relaunches += 1
            await member.process.start()
        await member.server.check_health(timeout_s=_HEALTH_TIMEOUT_S)
        async with self.lock:
            version = self._policy_version()
            if self._is_guest:
                if await member.reported_version() >= version:
                    self.admit(member)
                return
            if await member.reported_version() != version:
                directory = self._checkpoint_of(version)
                member.is_outdated = directory is None
                if directory is None:
                    return
                await member.server.load_from_disk(directory, version)
            if await member.reported_version() == version:
                self.admit(member)

    def _checkpoint_of(self, version: int) -> Path | None:
        for member in self.members:
            if member.server.loaded_from is not None:
                directory, loaded = member.server.loaded_from
                if loaded == version and directory.is_dir():
                    return directory
        return None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _load(member: ServerState) -> int:
    return member.num_sessions + member.num_in_flight
