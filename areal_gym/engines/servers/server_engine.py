"""The common part of engines over servers, which sample a served policy token-exactly.

    generate:  [gate] -> a server -> its reply -> stop, length       the turn is complete
                  ^                     |
                  |                     +-- stop at another token     continue
                  |                     +-- abort by a publication    keep the tokens, continue
                  |                     +-- server lost, 5xx, timeout retry, within the budget
                  +---------------------+

    updating:  gate closes; generation is interrupted; weights change; each server must report
               the new version; gate opens (`publication`)

A publication interrupts generation in one of two ways. "abort": requests end with the tokens that
they have, and are sent again with these as part of the prompt. The other way, named by each kind of
server, holds requests in the server, which recomputes their caches under the new weights.

No token gets a version that it was not sampled under: servers report the version per token, or no
request is in flight while weights change.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import ClassVar, Self

from areal_gym.chat.vision import banned_ids_of
from areal_gym.config import EngineConfig
from areal_gym.engines.base import Generation, Piece, SamplingParams, WeightServer
from areal_gym.engines.checkpoint_config import num_layers_of, vocab_size_of
from areal_gym.engines.servers.chunked_stream import stream_in_chunks
from areal_gym.engines.servers.launch import LaunchedServer, ServerProcess, StartRecipe
from areal_gym.engines.servers.server_client import ServerClient, ServerFacts
from areal_gym.engines.servers.server_state import ServerState
from areal_gym.engines.servers.turn_sampler import TurnSampler
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.message_types import ImageRef

_STREAM_CHUNK = 16
"""Tokens per piece of a stream; the server's prefix cache makes continuing cheap."""


class ServerEngine(TurnSampler):
    """Samples a policy from servers of one kind, which a subclass names.

    Args:
        policy: the checkpoint directory that the servers start with.
        urls: running servers; without any, `num_servers` are started here and ended by `aclose`.
        max_context: the most tokens of a sequence; lowered to the limit of the servers.
        interrupt: how a publication interrupts generation: "abort", or the way that holds requests
            in the server (`in_place`).
        max_retries: retries of one call after failures of servers.
        request_timeout_s: the time limit of one request, the only one.
        grace_s: how long calls wait if no server serves.
        health_interval_s: seconds between two health checks of each server.
        take_over: whether servers may have other weights at the start, which training replaces.
        is_guest: whether another process publishes to these servers, and determines the versions.
            It must hold requests in the server, because guests do not wait for publications.
        has_adapters: as a guest, whether the servers' versions are LoRA adapters on the same
            weights, which requests must name.
        num_servers: the number of servers to start.
        command: starts a server; by default a module of this Python does.
        server_args: further arguments of `command`.
        gpus: CUDA_VISIBLE_DEVICES of each started server.
        log_dir: the directory for logs; by default logs are removed if all goes well.
        start_timeout_s: how many seconds a started server may take until it serves.
        processes: servers placed elsewhere, which this engine starts and ends.

    Raises:
        ConfigError: the arguments do not fit together.
    """

    client_class: ClassVar[type[ServerClient]]
    """The protocol of the servers."""
    recipe: ClassVar[StartRecipe]
    """How servers are started."""
    in_place: ClassVar[str]
    """The name of the interruption that holds requests in the server."""
    memory_flags: ClassVar[tuple[str, ...]] = ()
    """Arguments of servers on GPUs whose memory can be released."""
    experts_flags: ClassVar[tuple[str, ...]] = ()
    """Arguments of servers that report the experts of tokens."""

    def __init__(
        self,
        policy: Path,
        *,
        urls: Sequence[str] = (),
        max_context: int = 4096,
        interrupt: str = "abort",
        max_retries: int = 3,
        request_timeout_s: float = 3600.0,
        grace_s: float = 60.0,
        health_interval_s: float = 5.0,
        take_over: bool = False,
        is_guest: bool = False,
        has_adapters: bool = False,
        num_servers: int = 1,
        command: str | Sequence[str] | None = None,
        server_args: str | Sequence[str] = (),
        gpus: Sequence[str] = (),
        log_dir: str | Path | None = None,
        start_timeout_s: float = 600.0,
        processes: Sequence[ServerProcess] = (),
    ) -> None:
        if interrupt not in ("abort", self.in_place):
            raise ConfigError(f"unknown interrupt {interrupt!r}; available: abort, {self.in_place}")
        if gpus and len(gpus) != num_servers:
            raise ConfigError(
                f"gpus lists devices of {len(gpus)} servers, but num_servers = {num_servers}"
            )
        self.max_context = max_context
        self.context_hint = f"more fit with a larger engine.max_context, which is {max_context}"
        """A hint for longer sequences."""
        self.takes_grammars = True
        self.takes_images = bool(banned_ids_of(policy))
        self.take_over = take_over
        self._policy = policy
        self._must_set_aside = is_guest or interrupt == self.in_place
        started = list(processes)
        for index in range(0 if urls or started else num_servers):
            started.append(
                LaunchedServer(
                    policy,
                    recipe=self.recipe,
                    command=command,
                    server_args=server_args,
                    gpus=str(gpus[index]) if gpus else None,
                    log=None
                    if log_dir is None
                    else Path(log_dir, f"{self.recipe.name}-{index}.log"),
                    start_timeout_s=start_timeout_s,
                )
            )
        super().__init__(
            [ServerState(self.client_class(url, policy=policy)) for url in dict.fromkeys(urls)]
            + [ServerState(self.client_class(p.url, policy=policy), p) for p in started],
            max_retries=max_retries,
            request_timeout_s=request_timeout_s,
            may_set_aside=interrupt == self.in_place,
            follows_adapters=is_guest and has_adapters,
            num_layers=num_layers_of(policy),
            banned_ids=banned_ids_of(policy),
            grace_s=grace_s,
            interval_s=health_interval_s,
            is_guest=is_guest,
        )

    @classmethod
    def from_settings(cls, policy: Path, settings: EngineConfig) -> Self:
        """Make the engine of a run's settings; `engine.kwargs` are the constructor's arguments.

        Raises:
            ConfigError: the arguments do not fit together.
            TypeError: an argument is unknown.
        """
        return cls(policy, urls=settings.url, max_context=settings.max_context, **settings.kwargs)

    async def start(self) -> None:
        """Start servers if no URLs were given, and probe all servers.

        Raises:
            EngineError: a server does not answer, or ended while starting.
            ConfigError: a server is of another kind, or does not support the settings.
        """
        processes = (state.process for state in self.servers)
        await asyncio.gather(*(process.start() for process in processes if process is not None))
        try:
            await super().start()
        except EngineUnreachableError:
            raise
        except EngineError as error:
            raise ConfigError(error.message, hints=error.hints) from error
        vocab_size = vocab_size_of(self._policy)
        for state in self.servers:
            if state.facts is not None:
                self._check(state.client, state.facts, vocab_size)
                self._lower_context(state.client, state.facts.max_context)

    def _lower_context(self, client: ServerClient, max_context: int) -> None:
        if max_context < self.max_context:
            self.max_context = max_context
            self.context_hint = (
                f"the limit is that of {client.url}: start it with a larger {client.context_flag}"
            )

    def _check(self, client: ServerClient, facts: ServerFacts, vocab_size: int | None) -> None:
        """Raise ConfigError if the server does not support the settings or the policy."""
        if self._must_set_aside and not facts.can_set_aside:
            raise self._cannot_set_aside(client, facts)
        if None not in (vocab_size, facts.vocab_size) and vocab_size != facts.vocab_size:
            raise ConfigError(
                f"{client.url} serves {facts.model_path}, whose vocabulary has "
                f"{facts.vocab_size} tokens; that of {self._policy} has {vocab_size}",
                hints=[f"start the server with the policy: {client.start_command}"],
            )

    # ---- generation ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Sample a continuation; see `Engine.generate` and `ImageEngine.generate`.

        Raises:
            EngineError: the prompt does not fit, or the retry budget is spent.
            EngineUnreachableError: no server served within the grace period.
        """
        room = min(params.max_new_tokens, self.max_context - len(prompt_ids))
        if not prompt_ids or room <= 0:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens; 1 to {self.max_context - 1} fit",
                hints=[self.context_hint] if prompt_ids else [],
            )
        return await self._sample(prompt_ids, params, room, session, tuple(images))

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> AsyncGenerator[Piece, None]:
        """Sample in pieces; see `StreamingEngine.stream`.

        With a grammar there is one piece, because a grammar cannot be resumed in the middle.

        Raises:
            EngineError: as `generate`.
        """
        return stream_in_chunks(
            self,
            prompt_ids,
            params,
            session=session,
            chunk_tokens=_STREAM_CHUNK if params.grammar is None else self.max_context,
            images=images,
        )

    # ---- publication --------------------------------------------------------------------------

    @property
    def server_urls(self) -> Sequence[str]:
        """The base URLs of all servers, including lost ones."""
        return [state.client.url for state in self.servers]

    def updating(
        self, version: int, *, must_abort: bool = False
    ) -> AbstractAsyncContextManager[Sequence[WeightServer]]:
        """Interrupt generation for new weights; see `RemoteEngine.updating`.

        Raises:
            EngineError: no server took the new weights.
            EngineUnreachableError: no server answered within the grace period.
        """
        return self._gate.updating(version, must_abort=must_abort)

    # ---- colocation ---------------------------------------------------------------------------

    @abstractmethod
    def _cannot_set_aside(self, client: ServerClient, facts: ServerFacts) -> ConfigError:
        """Return the error for a server that cannot hold requests."""

    def require_sleep(self) -> None:
        """Check that the servers can release their memory; on CPUs there is none to release.

        Raises:
            ConfigError: a server cannot; the message names it and the required flags.
        """
        for state in self.servers:
            facts = state.facts
            if facts is None:
                continue
            if not facts.can_set_aside:
                raise self._cannot_set_aside(state.client, facts)
            if facts.device != "cpu" and not facts.frees_memory:
                flags = " ".join(self.memory_flags)
                raise ConfigError(
                    f"{state.client.url} cannot release its memory for trainer.colocate=true",
                    hints=[f"start it so: {state.client.start_command} {flags}"],
                )

    async def sleep(self, *, keeps_weights: bool = False) -> None:
        """Let the servers release their memory; see `SleepingEngine.sleep`."""
        await self._gate.sleep(keeps_weights=keeps_weights)

    async def wake_up(self) -> None:
        """Let the servers continue; see `SleepingEngine.wake_up`."""
        await self._gate.wake_up()
