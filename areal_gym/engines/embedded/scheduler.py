"""Continuous batching: assigns sequences to cache rows, and composes the steps of the network.

    request -> pending -> [a row: its own, a sibling's copy, a free one, an idle one's] -> prefill
            -> decode, one token a step -> finished; the row stays with the session -> released

It is used from one thread and does not use asyncio: `step` takes and returns plain objects.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from areal_gym.engines.embedded.cached_network import CachedNetwork, Family, Prompt, Step
from areal_gym.engines.embedded.requests import EngineStats, Request
from areal_gym.engines.embedded.sampling import filter_logits, sample
from areal_gym.errors import EngineError
from areal_gym.message_types import ImageRef
from areal_gym.types import FinishReason

_T = TypeVar("_T")
_MAX_SPREAD = 1.25
"""The most decoded rows per working row; swapping two rows costs about as much as decoding one idle
row for twenty steps."""


@dataclass(slots=True, eq=False)
class _Row:
    index: int
    tokens: list[int] = field(default_factory=list)
    """The cached tokens, from position 0, by their `Request.cache_keys`."""
    images: tuple[ImageRef, ...] = ()
    """The images of the sequence that is being sampled."""
    session: str | None = None
    """None if the row is free; its cache may still serve siblings."""
    request: Request | None = None
    """The turn that is being sampled; None if the session is idle or the row is free."""
    last_used: int = 0
    is_stale: bool = False
    """Whether old weights computed some of `tokens`, which only the current turn may use."""
    family: int = 0
    num_shared: int = 0
    """Leading tokens that all rows of its family share; 0 without a family."""

    @property
    def misses_one_token(self) -> bool:
        """Whether all of its turn's prompt is cached but the last token, which is text."""
        assert self.request is not None
        keys = self.request.cache_keys
        return 0 < len(self.tokens) == len(keys) - 1 and keys[-1] >= 0

    def end_turn(self) -> None:
        self.request = None
        if self.is_stale:
            self.forget()

    def forget(self) -> None:
        self.tokens, self.num_shared, self.is_stale = [], 0, False


class Scheduler:
    """Continuous batching over the rows of a `CachedDecoder`."""

    def __init__(self, network: CachedNetwork, num_rows: int) -> None:
        self.network = network
        self.stats = EngineStats()
        self.version = 0
        self._rows = [_Row(index) for index in range(num_rows)]
        self._by_session: dict[str, _Row] = {}
        self._by_prompt: dict[tuple[int, ...], _Row] = {}
        self._pending: deque[Request] = deque()
        self._clock = itertools.count(1)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._pending) or any(row.request is not None for row in self._rows)

    @property
    def streamed(self) -> list[Request]:
        """Streamed turns in flight that have sampled tokens."""
        working = (row.request for row in self._rows)
        return [r for r in working if r is not None and r.is_streamed and r.token_ids]

    def submit(self, request: Request) -> None:
        """Queue a turn."""
        self._pending.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a turn; its row is free at once."""
        request.is_cancelled = True
        for row in self._rows:
            if row.request is request:
                row.end_turn()
        self.release(request.session)

    def release(self, session: str) -> None:
        """Free the session's row after its current turn.

        Its cache serves siblings until it is overwritten.
        """
        row = self._by_session.pop(session, None)
        if row is not None:
            row.session = None

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with new weights from now on.

        Turns in flight keep the keys and values of the old weights (recomputing them would cost a
        prefill each), which are dropped when the turn ends. All other caches are dropped now: no
        later turn or episode uses results of old weights, which makes staleness 0 exact.
        """
        self.network.load(weights)
        self.version = version
        self._by_prompt.clear()
        for row in self._rows:
            if row.request is None:
                row.forget()
            else:
                row.is_stale = True

    def copy(self) -> Scheduler:
        """Return an idle scheduler with a copy of the weights and the same version."""
        scheduler = Scheduler(self.network.copy(), len(self._rows))
        scheduler.version = self.version
        return scheduler

    def fail_all(self) -> None:
        """Drop all turns and caches."""
        self._pending.clear()
        self._by_session.clear()
        self._by_prompt.clear()
        for row in self._rows:
            row.session = row.request = None
            row.forget()
        self.network.clear()

    def step(self) -> list[Request]:
        """Admit pending turns, sample one token for every turn, and return the finished turns."""
        entering = self._admit()
        self._compact()
        decoding = [row for row in self._rows if row.request is not None and row not in entering]
        if not decoding and not entering:
            return []
        # One token attends together with those of the rows that decode, a prompt by itself.
        decoding += [row for row in entering if row.misses_one_token]
        entering = [row for row in entering if not row.misses_one_token]
        num_decoding = max((row.index + 1 for row in decoding), default=0)
        ids, positions = [0] * num_decoding, [self.network.scratch] * num_decoding
        num_keys = 1
        for row in decoding:
            assert row.request is not None
            sampled = row.request.token_ids
            ids[row.index] = sampled[-1] if sampled else row.request.prompt_ids[-1]
            positions[row.index] = len(row.tokens)
            row.tokens.append(ids[row.index])
            num_keys = max(num_keys, len(row.tokens))
        rows = list(range(num_decoding))
        prompts = []
        for row in entering:
            assert row.request is not None
            start, prompt_ids = len(row.tokens), row.request.prompt_ids
            prompts.append(Prompt(row.index, start, len(prompt_ids)))
            ids += prompt_ids[start:]
            positions += range(start, len(prompt_ids))
            rows += [row.index] * (len(prompt_ids) - start)
            row.tokens += row.request.cache_keys[start:]
        device = self.network.device
        step = Step(
            token_ids_N=torch.tensor(ids, device=device),
            positions_N=torch.tensor(positions, device=device),
            rows_N=torch.tensor(rows, device=device),
            num_decoding=num_decoding,
            num_keys=num_keys,
            prompts=prompts,
            families=_families(decoding),
            images={row.index: row.images for row in [*decoding, *entering] if row.images},
        )
        logits, experts = self.network.forward(step), self.network.routed_experts
        places = [row.index for row in decoding] + [num_decoding + i for i in range(len(entering))]
        if places != list(range(len(logits))):
            places_B = torch.tensor(places, device=device)
            logits = logits[places_B]
            experts = None if experts is None else experts[places_B]
        self.stats.num_steps += 1
        self.stats.occupancy += len(places)
        working = decoding + entering
        if experts is not None:
            _record_experts([row.request for row in working if row.request is not None], experts)
        return self._take_tokens(working, logits)

    def lend_row(self, use: Callable[[int], _T]) -> _T | None:
        """Call `use` with the index of a free row, whose cache it may overwrite.

        Returns None while all rows work.
        """
        row = self._free_row(avoid=None)
        if row is None:
            return None
        self._empty(row)
        return use(row.index)

    # ---- rows ---------------------------------------------------------------------------------

    def _admit(self) -> list[_Row]:
        """Give rows to pending turns in the order of their arrival."""
        entering: list[_Row] = []
        started: set[tuple[int, ...]] = set()
        postponed: list[Request] = []
        while self._pending:
            request = self._pending.popleft()
            if request.is_cancelled:
                continue
            prompt = request.cache_keys
            row = self._by_session.get(request.session)
            # Turns of one session run one after another; a prompt that a sibling computes in this
            # step is copied in the next one.
            if prompt in started if row is None else row.request is not None:
                postponed.append(request)
                continue
            if row is None:
                row = self._free_row(avoid=self._by_prompt.get(prompt))
                if row is None:
                    postponed.append(request)
                    break
                self._adopt(row, request)
            # The last token is computed even if it is cached, because its logits are needed.
            num_cached = min(_common_prefix(row.tokens, prompt), len(prompt) - 1)
            for image in request.images:  # an image is computed as a whole
                if image.start < num_cached < image.start + image.length:
                    num_cached = image.start
            row.images = request.images
            if num_cached < len(row.tokens) and not self.network.can_cut:
                num_cached = 0  # recurrent states are those of all cached tokens
            row.tokens = row.tokens[:num_cached]
            row.num_shared = min(row.num_shared, num_cached)
            self.stats.reused += num_cached
            self.stats.prefilled += len(prompt) - num_cached
            row.request = request
            row.last_used = next(self._clock)
            if prompt not in self._by_prompt:
                self._by_prompt[prompt] = row
                started.add(prompt)
            entering.append(row)
        self._pending.extendleft(reversed(postponed))
        return entering

    def _adopt(self, row: _Row, request: Request) -> None:
        """Assign a free row to the session, with a sibling's cached prompt if there is one."""
        prompt = request.cache_keys
        source = self._by_prompt.get(prompt)
        if source is not row:
            self._empty(row)
            if source is not None and self.network.can_cut:
                num_tokens = _common_prefix(source.tokens, prompt)
                self.network.copy_row(source.index, row.index, num_tokens)
                row.tokens = source.tokens[:num_tokens]
                if not source.num_shared:  # the two are siblings from now on
                    source.family, source.num_shared = next(self._clock), num_tokens
                row.family, row.num_shared = source.family, min(source.num_shared, num_tokens)
        row.session = request.session
        self._by_session[request.session] = row

    def _empty(self, row: _Row) -> None:
        """Forget what a free row has cached, so that no sibling is given it."""
        for held in [p for p, holder in self._by_prompt.items() if holder is row]:
            del self._by_prompt[held]
        row.forget()

    def _free_row(self, avoid: _Row | None) -> _Row | None:
        """Return a free row, else that of the longest idle session; None if all rows work.

        A row that already holds the prompt (`avoid`) is the first choice if it is free, and the
        last to be taken from an idle session.
        """

        def rank(row: _Row) -> tuple[bool, bool, int]:
            if row.session is not None:
                return True, row is avoid, row.last_used
            # The first one, not the oldest, so that working rows stay together at the front.
            return False, row is not avoid, row.index

        idle = (row for row in self._rows if row.request is None)
        row = min(idle, key=rank, default=None)
        if row is not None and row.session is not None:
            self.release(row.session)
        return row

    def _compact(self) -> None:
        """Move working rows to the front if too many rows among them are idle.

        The network decodes rows 0 to R - 1 in one product, including idle ones.
        """
        working = [row for row in self._rows if row.request is not None]
        if not working or working[-1].index < _MAX_SPREAD * len(working) + 4:
            return
        idle = [row for row in self._rows[: len(working)] if row.request is None]
        for low, high in zip(idle, reversed(working), strict=False):
            if low.index >= high.index:
                break
            num_tokens = max(len(low.tokens), len(high.tokens))
            self.network.swap_rows(low.index, high.index, num_tokens)
            low.index, high.index = high.index, low.index
        self._rows.sort(key=lambda row: row.index)

    # ---- tokens -------------------------------------------------------------------------------

    def _take_tokens(self, rows: Sequence[_Row], logits_BV: Tensor) -> list[Request]:
        requests = [row.request for row in rows if row.request is not None]
        on_device = partial(torch.tensor, device=self.network.device)
        temperature_B = on_device([r.params.temperature for r in requests], dtype=torch.float32)
        uniforms = [request.uniforms[len(request.token_ids)] for request in requests]
        u_B = on_device(uniforms, dtype=torch.float32)
        if any(r.params.top_p < 1 or r.params.top_k > 0 for r in requests):
            top_k_B = on_device([r.params.top_k for r in requests])
            top_p_B = on_device([r.params.top_p for r in requests])
            logits_BV = filter_logits(logits_BV, temperature_B, top_k_B, top_p_B)
        ids_B, logprobs_B = sample(logits_BV, temperature_B, u_B)
        logprobs = logprobs_B.tolist()
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                f"the policy's logits are not finite (weights of version {self.version})",
                hints=["the last training step diverged: try a lower trainer.lr"],
            )
        finished = []
        sampled = zip(rows, requests, ids_B.tolist(), logprobs, strict=True)
        for row, request, token_id, logprob in sampled:
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            if token_id in request.params.stop_token_ids:
                request.finish_reason = FinishReason.STOP
            elif len(request.token_ids) >= request.max_new_tokens:
                request.finish_reason = FinishReason.LENGTH
            else:
                continue
            finished.append(request)
            row.end_turn()
        self.stats.generated += len(requests)
        return finished


def _common_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Count the common leading tokens. Turns extend their session, so one comparison is common."""
    size = min(len(cached), len(prompt))
    if tuple(cached[:size]) == tuple(prompt[:size]):
        return size
    return next(i for i in range(size) if cached[i] != prompt[i])


def _record_experts(requests: Sequence[Request], experts_BLK: Tensor) -> None:
    """Add the experts of one more token to each request."""
    num_layers, top_k = experts_BLK.shape[1:]
    for request, experts in zip(requests, experts_BLK.short().cpu().numpy(), strict=True):
        request.routed_experts.append(experts.tobytes())
        request.experts_shape = num_layers, top_k


def _families(decoding: Sequence[_Row]) -> list[Family]:
    """Group the decoding rows into families that share their first tokens."""
    members: dict[int, list[_Row]] = {}
    for row in decoding:
        members.setdefault(row.family if row.num_shared else -row.index - 1, []).append(row)
    return [
        Family(
            rows=tuple(row.index for row in rows),
            num_shared=min(row.num_shared for row in rows) if len(rows) > 1 else 0,
        )
        for rows in members.values()
    ]
