"""The embedded engine: samples a policy in this process, on its own thread.

event loop:  generate() --inbox--> engine thread: [commands] -> step -> step -> ...
             futures <--call_soon_threadsafe, once per step, all ended turns--
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from areal_gym.config import EngineConfig
from areal_gym.engines.base import Generation, Piece, SamplingParams
from areal_gym.engines.embedded.cached_network import CacheLayout
from areal_gym.engines.embedded.network import checkpoint_network, decoder_network
from areal_gym.engines.embedded.prompt_scores import PromptScores
from areal_gym.engines.embedded.requests import EngineStats, Request
from areal_gym.engines.embedded.scheduler import Scheduler
from areal_gym.errors import ConfigError, EngineError, GrammarError
from areal_gym.message_types import ImageRef
from areal_gym.models.backend import Backend, ModelLoader
from areal_gym.models.tiny.decoder import Decoder

_anonymous = itertools.count()
_T = TypeVar("_T")


class EmbeddedEngine(PromptScores):
    """Samples a policy with torch, on CPU or CUDA; `docs/models.md` lists the supported models.

    It batches continuously over a preallocated cache: a row is refilled as soon as its turn ends. A
    session keeps its row between turns, so that a turn computes only new tokens; siblings with the
    same prompt compute it once.

    Args:
        decoder: the policy, whose weights are copied, or a scheduler that has a policy.
        num_slots: the number of sequences sampled at once.
        max_context: the most tokens of one sequence, including the prompt.
        dtype: "float32" or "bfloat16".
        device: the device; "auto" uses the accelerator if there is one.
        num_threads: CPU threads of the engine's thread.
    """

    takes_urls: ClassVar[bool] = False

    def __init__(
        self,
        decoder: Decoder | Scheduler,
        *,
        num_slots: int = 128,
        max_context: int = 512,
        dtype: str = "float32",
        device: str = "auto",
        num_threads: int = 1,
    ) -> None:
        if isinstance(decoder, Scheduler):
            scheduler = decoder
        else:
            weights = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
            layout = CacheLayout.named(num_slots, max_context, dtype, device)
            scheduler = Scheduler(decoder_network(decoder.config, weights, layout), num_slots)
        self._scheduler = scheduler
        self._num_threads = num_threads
        self.max_context = scheduler.network.scratch
        """The most tokens of one sequence; at most the model's positions."""
        self.policy_version = scheduler.version
        """The version of the weights that sample at the moment."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pieces: dict[Request, asyncio.Queue[Piece | EngineError]] = {}
        """The sampled tokens of the turns in flight; a turn that is not streamed is one piece."""
        self._waiting: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_stopping = False

    @classmethod
    def from_checkpoint(
        cls,
        directory: Path | str,
        *,
        num_slots: int = 128,
        max_context: int = 512,
        dtype: str = "float32",
        device: str = "auto",
        num_threads: int = 1,
        backend: Backend = "auto",
        trusts_code: bool = False,
    ) -> Self:
        """Make an engine for a Hugging Face checkpoint; arguments as the constructor's.

        `backend` and `trusts_code` are those of `ModelLoader`, except that with "auto" the tiny
        decoder samples all models that it knows, whatever trains them, because it is faster. Each
        tensor is converted while it is read, without a copy of the model in between.

        Raises:
            ConfigError: there is no checkpoint, or this engine cannot sample it.
        """
        loader = ModelLoader(backend=backend, trusts_code=trusts_code)
        layout = CacheLayout.named(num_slots, max_context, dtype, device)
        network = checkpoint_network(Path(directory), layout, loader)
        return cls(Scheduler(network, num_slots), num_threads=num_threads)

    @classmethod
    def from_settings(cls, policy: Path, settings: EngineConfig) -> Self:
        """Make the engine of a run's settings.

        Raises:
            ConfigError: there is no checkpoint, this engine cannot sample it, or `engine.kwargs`
                are given, of which it has none.
        """
        # `open_engine` adds it for `model.trust_remote_code`.
        if unknown := settings.kwargs.keys() - {"trusts_code"}:
            raise ConfigError(
                f"the embedded engine takes no engine.kwargs: {', '.join(sorted(unknown))}",
                hints=["leave them out: engine.kwargs={}", "its settings: engine.num_slots, ..."],
            )
        return cls.from_checkpoint(
            policy,
            num_slots=settings.num_slots,
            max_context=settings.max_context,
            dtype=settings.dtype,
            device=settings.device,
            num_threads=settings.num_threads,
            **settings.kwargs,
        )

    @property
    def stats(self) -> EngineStats:
        """The engine's counters; do not change them."""
        return self._scheduler.stats

    async def start(self) -> None:
        """Start the engine's thread. Idempotent."""
        if self._thread is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="areal-gym-engine", daemon=True)
        self._thread.start()

    @property
    def takes_images(self) -> bool:
        """Whether the policy accepts images."""
        return bool(getattr(self._scheduler.network, "takes_images", False))

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
            EngineError: the prompt is empty or fills the context, or the engine has stopped.
            GrammarError: a grammar is given.
        """
        request = self._request(prompt_ids, params, session, images)
        with self._sampling([request]):
            return await self._whole(request)

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> AsyncGenerator[Piece, None]:
        """Stream tokens as they are sampled; see `StreamingEngine.stream`.

        Raises:
            EngineError: as `generate`.
        """
        request = self._request(prompt_ids, params, session, images)
        request.is_streamed = True
        with self._sampling([request]):
            finish_reason = None
            while finish_reason is None:
                piece = await self._next(request)
                finish_reason = piece.finish_reason
                yield piece

    async def generate_together(
        self,
        turns: Sequence[
            tuple[Sequence[int], SamplingParams, str]
            | tuple[Sequence[int], SamplingParams, str, Sequence[ImageRef]]
        ],
    ) -> list[Generation]:
        """Sample all of these turns in one batch from the first step on.

        A turn is a prompt, its sampling parameters, the session, and the images if there are any.
        The results do not depend on timing: the same turns in the same order give the same numbers,
        to the last bit.

        Raises:
            EngineError: as `generate`.
        """
        requests = [self._request(*turn) for turn in turns]
        with self._sampling(requests):
            return list(await asyncio.gather(*map(self._whole, requests)))

    def _require_running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._is_stopping:
            raise EngineError("the engine is not running; call start() first")
        return self._loop

    def _request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        session: str | None,
        images: Sequence[ImageRef] = (),
    ) -> Request:
        self._require_running()
        room = self.max_context - len(prompt_ids)
        if not prompt_ids or room <= 0:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens; 1 to {self.max_context - 1} fit"
            )
        if params.grammar is not None:
            raise GrammarError(
                "the embedded engine cannot constrain its output",
                hints=["engines with grammars: engine.id=sglang, engine.id=vllm"],
            )
        if images and not self.takes_images:
            raise EngineError(
                "the prompt has pictures, and this policy cannot see",
                hints=["engine.model: a vision-language model of docs/vision.md"],
            )
        return Request(
            prompt_ids=tuple(prompt_ids),
            images=tuple(images),
            params=params,
            session=f"anonymous-{next(_anonymous)}" if session is None else session,
            max_new_tokens=min(params.max_new_tokens, room),
            is_anonymous=session is None,
        )

    @contextmanager
    def _sampling(self, requests: Sequence[Request]) -> Iterator[None]:
        """Submit turns; at the end, cancel those in flight and free anonymous sessions."""

        def submit() -> None:
            for request in requests:
                self._scheduler.submit(request)

        self._pieces |= {request: asyncio.Queue() for request in requests}
        self._inbox.put(submit)
        try:
            yield
        finally:
            for request in requests:
                del self._pieces[request]
                if request.is_anonymous or request.finish_reason is None:
                    self._inbox.put(partial(self._scheduler.cancel, request))

    async def _next(self, request: Request) -> Piece:
        piece = await self._pieces[request].get()
        if isinstance(piece, EngineError):
            raise piece
        return piece

    async def _whole(self, request: Request) -> Generation:
        piece = await self._next(request)
        assert piece.finish_reason is not None
        return Generation(
            token_ids=piece.token_ids,
            logprobs=piece.logprobs,
            versions=piece.versions,
            finish_reason=piece.finish_reason,
            routed_experts=piece.routed_experts,
        )

    def release(self, session: str) -> None:
        """Free the session's cache row for other sessions."""
        self._inbox.put(lambda: self._scheduler.release(session))

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights between two steps. Turns in flight continue; see `Scheduler.load`.

        Raises:
            EngineError: the weights are of another model; the old ones stay.
        """
        tensors = dict(weights)

        def load() -> None:
            self._scheduler.load(tensors, version)
            self.policy_version = version

        await self._between_steps(load)

    async def _between_steps(self, act: Callable[[], _T]) -> _T:
        """Run `act` on the engine's thread between two steps."""
        done: asyncio.Future[_T] = self._require_running().create_future()

        def run() -> None:
            try:
                settle = partial(done.set_result, act())
            except EngineError as error:
                settle = partial(done.set_exception, error)
            self._call_on_loop(lambda: done.done() or settle())

        self._waiting.add(done)
        self._inbox.put(run)
        try:
            return await done
        finally:
            self._waiting.discard(done)

    async def snapshot(self) -> EmbeddedEngine:
        """Return another engine with a copy of the current weights and version.

        It has its own thread and, like any engine, must be started and closed.

        Raises:
            EngineError: this engine is not running.
        """
        copy = await self._between_steps(self._scheduler.copy)
        return EmbeddedEngine(copy, num_threads=self._num_threads)

    async def aclose(self) -> None:
        """End the thread; turns in flight fail. Idempotent."""
        if self._thread is None:
            return
        self._is_stopping = True
        self._inbox.put(lambda: None)  # wakes the thread
        thread, self._thread = self._thread, None
        await asyncio.to_thread(thread.join)
        self._fail_all(EngineError("the engine was closed"))

    # ---- the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while not self._is_stopping:
                # Callers get an answer even if SystemExit is raised here.
                try:
                    self._serve()
                except BaseException as error:
                    self._scheduler.fail_all()
                    if not isinstance(error, EngineError):
                        error = EngineError(f"the embedded engine failed: {error!r}")
                    self._call_on_loop(self._fail_all, error)

    def _serve(self) -> None:
        """Compute and deliver until the engine stops or fails."""
        scheduler = self._scheduler
        while not self._is_stopping:
            if not scheduler.has_work:
                self._inbox.get()()  # waits for a caller
            while not self._inbox.empty():
                self._inbox.get()()
            if self._is_stopping or not scheduler.has_work:
                continue
            start_s = time.perf_counter()
            finished = scheduler.step()
            scheduler.stats.busy_s += time.perf_counter() - start_s
            pieces = [(request, request.piece()) for request in finished + scheduler.streamed]
            if pieces:
                self._call_on_loop(self._deliver, pieces)

    def _call_on_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    # ---- back on the event loop ---------------------------------------------------------------

    def _deliver(self, pieces: list[tuple[Request, Piece]]) -> None:
        for request, piece in pieces:
            if request in self._pieces:  # its caller still waits
                self._pieces[request].put_nowait(piece)

    def _fail_all(self, error: EngineError) -> None:
        for pieces in self._pieces.values():
            pieces.put_nowait(error)
        for future in self._waiting:
            if not future.done():
                future.set_exception(error)
