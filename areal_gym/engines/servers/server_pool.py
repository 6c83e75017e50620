"""A pool of servers: routes sessions to serving servers, drops dead ones and takes them back.

lost ------> answers with the policy's version ----------------> serving
 ^           (otherwise the last checkpoint is sent again, or it    |
 |           waits for the next publication)                        |
 +--- refuses connections, fails three times in a row, <------------+
      reports other weights
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_gym.engines.base import BROKEN_WEIGHTS, ReferenceScores
from areal_gym.engines.servers.replies import INITIAL_WEIGHTS, version_of
from areal_gym.engines.servers.server_client import ServerClient, is_refused
from areal_gym.engines.servers.server_state import ServerState, ServerStats
from areal_gym.engines.servers.weight_check import WrongWeightsError, require_reference_scores
from areal_gym.errors import EngineError, EngineUnreachableError

_MAX_FAILURES = 3
"""After this many failures in a row, a server is lost even if it accepts connections."""
_HEALTH_TIMEOUT_S = 30.0
"""Generous, because a busy server is slow; SGLang's own limit is 20 s."""
_ANSWER_TIMEOUT_S = 5.0
"""The longest time by which a lost server can delay a publication."""
_MAX_RELAUNCHES = 3
"""The most restarts in a row of a server that this process started."""


class ServerPool:
    """Tracks which servers serve, and assigns sessions to them.

    Args:
        servers: the servers, none of which serves yet.
        grace_s: how long to wait for a serving server before raising an error.
        interval_s: seconds between two health checks of each server.
        is_guest: whether another process publishes to these servers, so that their versions may be
            ahead.
    """

    def __init__(
        self, servers: Sequence[ServerState], *, grace_s: float, interval_s: float, is_guest: bool
    ) -> None:
        self.servers = list(servers)
        self.is_guest = is_guest
        self.policy_version = 0
        """The version of the weights that sample at the moment; a serving server must report it."""
        self.adapter: str | None = None
        """The name of the policy's LoRA adapter on the servers."""
        self.reference: ReferenceScores | None = None
        """The scores that servers are compared with; see `VerifyingEngine`."""
        self.stats = ServerStats()
        self.lock = asyncio.Lock()
        """Held while weights change: during a publication, or when a server comes back."""
        self.is_asleep = False
        """Whether the servers have released their memory, and requests wait."""
        self.num_outages = 0
        """The number of times that the last serving server was lost."""
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._sessions: dict[str, ServerState] = {}
        self._has_serving = asyncio.Event()
        self._outage_since_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> list[ServerState]:
        """The servers that take requests now."""
        return [state for state in self.servers if state.is_serving]

    @property
    def outage_s(self) -> float:
        """Seconds since the last serving server was lost; 0 while one serves."""
        if self._has_serving.is_set() or not self.num_outages:
            return 0.0
        return asyncio.get_running_loop().time() - self._outage_since_s

    @property
    def needs_weights(self) -> bool:
        """Whether no server serves and at least one waits for the next publication."""
        return not self.serving and any(state.is_outdated for state in self.servers)

    async def start(self) -> None:
        """Probe every server, and check them periodically from then on.

        A guest starts with the servers that answer, because the others may be coming back.
        """
        results = await asyncio.gather(
            *(self._connect(state) for state in self.servers), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            is_lost = self.is_guest and isinstance(error, EngineUnreachableError)
            if not is_lost or len(errors) == len(results):
                raise error
        for state in self.servers:
            self._spawn(self._watch(state))

    async def _connect(self, state: ServerState) -> None:
        """Make a server's current weights version 0, whatever an earlier run left behind."""
        if not self.is_guest:
            with suppress(EngineError):  # `probe` gives the better error
                # A run that was killed during a publication leaves the server paused.
                await state.client.resume()
        state.facts = facts = await state.client.probe()
        if not self.is_guest:
            await state.client.wake_forgotten(facts.model_path)
        if not self.is_guest and version_of(state.facts.weight_version) != 0:
            # A version number from another run would look like one of this run.
            await state.client.set_version(INITIAL_WEIGHTS)
        if self.is_guest:
            self.learn(version_of(state.facts.weight_version))
        self.admit(state)

    async def aclose(self) -> None:
        """Stop checking, close connections, and end the servers started here. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(state.client.aclose() for state in self.servers))
        processes = (state.process for state in self.servers)
        await asyncio.gather(*(process.aclose() for process in processes if process is not None))

    # ---- routing requests ---------------------------------------------------------------------

    async def choose(self, session: str | None) -> ServerState:
        """Return the server that has the session's prefix cached, else the least loaded one.

        Raises:
            EngineUnreachableError: no server served within the grace period.
        """
        loop = asyncio.get_running_loop()
        while not self._has_serving.is_set():
            deadline_s = max(loop.time(), self._outage_since_s + self._grace_s)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._has_serving.wait()
            except TimeoutError:
                raise self._unreachable() from None
        state = self._sessions.get(session) if session is not None else None
        if state is not None and state.is_serving:
            return state
        chosen = min(self.serving, key=lambda state: state.num_sessions + state.num_in_flight)
        if session is not None:
            if state is not None:
                state.num_sessions -= 1
            self._sessions[session] = chosen
            chosen.num_sessions += 1
        return chosen

    def release(self, session: str) -> None:
        """Forget the session's server. Unknown sessions are ignored."""
        state = self._sessions.pop(session, None)
        if state is not None:
            state.num_sessions -= 1

    def _unreachable(self) -> EngineUnreachableError:
        urls = ", ".join(state.client.url for state in self.servers)
        hints = [f"start the server: {state.client.start_command}" for state in self.servers[:1]]
        for state in self.servers:
            if state.process is not None:
                hints = [f"its log: {state.process.log}", *state.process.last_lines()]
            if state.is_outdated:
                hints.insert(0, f"{state.client.url} was restarted and has other weights")
        return EngineUnreachableError(
            f"for {self._grace_s:g} s no server had version {self.policy_version}: {urls}",
            hints=hints,
        )

    async def reachable(self) -> list[ServerState]:
        """Return the servers that answer, serving or not.

        Raises:
            EngineUnreachableError: no server answered within the grace period.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._grace_s
        while True:
            answers = await asyncio.gather(*map(_answers, self.servers))
            if any(answers):
                return list(itertools.compress(self.servers, answers))
            if loop.time() >= deadline_s:
                raise self._unreachable()
            await asyncio.sleep(min(self._interval_s, 1.0))

    def learn(self, version: int) -> None:
        """Expect servers to have at least this version, because one of them has reported it."""
        self.policy_version = max(self.policy_version, version)

    # ---- the state of servers -----------------------------------------------------------------

    def admit(self, state: ServerState) -> None:
        """Let the server take requests from now on."""
        state.is_serving = True
        state.is_outdated = False
        state.wrong_version = None
        state.num_failures = 0
        state.last_answer_s = asyncio.get_running_loop().time()
        self._has_serving.set()

    def lose(self, state: ServerState) -> None:
        """Take the server out of service; its requests in flight fail and move elsewhere."""
        if not state.is_serving:
            return
        state.is_serving = False
        self.stats.num_servers_lost += 1
        if not self.serving:
            self.num_outages += 1
            self._has_serving.clear()
            self._outage_since_s = asyncio.get_running_loop().time()
        self._spawn(state.client.aclose())

    async def verify(self, state: ServerState) -> EngineError | None:
        """Compare a server's log-probabilities with the trainer's; it is lost if they differ.

        Returns the reason; None if they agree, or if there is nothing to compare with.
        """
        reference = self.reference
        if reference is None or reference.version != self.policy_version:
            return None
        try:
            await require_reference_scores(state.client, state.facts, reference, self.adapter)
        except EngineError as error:
            self.lose(state)
            if isinstance(error, WrongWeightsError):
                state.wrong_version = reference.version
            return error
        return None

    def succeeded(self, state: ServerState) -> None:
        """Record a success of the server."""
        state.num_failures = state.num_relaunches = 0
        state.last_answer_s = asyncio.get_running_loop().time()

    def failed(self, state: ServerState, error: EngineError) -> None:
        """Record a failure of the server; repeated failures take it out of service."""
        state.num_failures += 1
        if is_refused(error) or state.num_failures >= _MAX_FAILURES:
            self.lose(state)

    async def _watch(self, state: ServerState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            is_idle = loop.time() - state.last_answer_s >= self._interval_s
            try:
                if not state.is_serving:
                    await self._bring_back(state)
                elif is_idle and not self.lock.locked():
                    await state.client.get("/health", timeout_s=_HEALTH_TIMEOUT_S)
                    self.succeeded(state)
            except EngineError as error:
                # SGLang's health check samples a token, which a publication delays.
                if state.is_serving and not self.lock.locked():
                    self.failed(state, error)

    async def _bring_back(self, state: ServerState) -> None:
        """Relaunch a lost server that this process started, update its weights, and admit it."""
        if self.is_asleep:  # the trainer uses the GPU that a new process would need
            return
        if state.process is not None and not state.process.is_running:
            if state.num_relaunches >= _MAX_RELAUNCHES:
                return
            state.num_relaunches += 1
            self.stats.num_relaunches += 1
            await state.process.start()
        await state.client.get("/health", timeout_s=_HEALTH_TIMEOUT_S)
        if await self._is_beyond_repair(state):
            state.wrong_version = None
            if state.process is not None:  # the next call starts it again
                await state.process.aclose()
            return
        async with self.lock:
            if state.is_serving:  # a publication has admitted it while this waited
                return
            version = self.policy_version
            if self.is_guest:
                if await state.reported_version() >= version:
                    state.facts = state.facts or await state.client.probe()
                    self.admit(state)
                return
            await state.wake_forgotten()
            if await state.reported_version() != version:
                state.is_outdated = not await self.give_newest(state.client)
            if await state.reported_version() != version:
                return
            await state.client.resume()  # a publication may have paused it when it was lost
            if not await self.verify(state):
                self.admit(state)

    async def _is_beyond_repair(self, state: ServerState) -> bool:
        if self.is_guest:
            return False
        if state.wrong_version is not None and state.process is not None:
            return True
        if state.client.survives_torn_updates:
            return False
        return await state.client.weight_version() == BROKEN_WEIGHTS

    async def give_newest(self, client: ServerClient) -> bool:
        """Bring the policy's version to a server; return False if only a publication can."""
        version = self.policy_version
        clients = [state.client for state in self.servers]
        if checkpoint := _directory_of(version, (other.loaded_from for other in clients)):
            await client.load_from_disk(checkpoint, version)
        elif adapter := _directory_of(version, (other.loaded_adapter for other in clients)):
            await client.load_adapter(adapter, version)
            await client.set_version(str(version))
        else:
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _directory_of(version: int, loaded: Iterable[tuple[Path, int] | None]) -> Path | None:
    places = (place[0] for place in loaded if place is not None and place[1] == version)
    return next((directory for directory in places if directory.is_dir()), None)


async def _answers(state: ServerState) -> bool:
    if not state.is_serving:
        try:
            await state.client.weight_version(timeout_s=_ANSWER_TIMEOUT_S)
        except EngineError:
            return False
    return True
