"""Which sequence sits in which cache row, and what each step of the network computes.

    request -> pending -> [a row: its own, a sibling's copy, a free one, an idle one's] -> prefill
            -> decode, one token a step -> finished; the row stays with the session -> released

Used from one thread, and knows nothing of asyncio: `step` takes and returns plain objects.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from areal_gym.engines.base import Generation, Piece, SamplingParams
from areal_gym.engines.embedded.cache_attention import Family, Prompt
from areal_gym.engines.embedded.network import CachedDecoder
from areal_gym.engines.embedded.sampling import filter_logits, sample, uniforms
from areal_gym.errors import EngineError
from areal_gym.types import FinishReason

_MAX_SPREAD = 1.25
"""Rows decoded per working row; exchanging two rows costs about as much as one wasted row does
in twenty steps."""


@dataclass(slots=True)
class EngineStats:
    """What the engine has done so far."""

    num_steps: int = 0
    generated: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens that a session's own earlier turn, or a sibling's prompt, had computed."""
    occupancy: int = 0
    """Sum over the steps of the rows that decoded: divided by `num_steps`, the mean batch."""
    busy_s: float = 0.0
    """Wall seconds in the network and the sampler."""


@dataclass(slots=True, eq=False)
class Request:
    """One turn to sample."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_cancelled: bool = False
    is_streamed: bool = False
    """Somebody wants to hear of each token."""
    num_told: int = 0
    """How many of its tokens have been told."""

    def __post_init__(self) -> None:
        seed = self.params.seed if self.params.seed is not None else random.getrandbits(48)
        start = len(self.prompt_ids)
        self.uniforms = uniforms(seed, start, start + self.max_new_tokens).tolist()

    def piece(self) -> Piece:
        """What was sampled since the last piece."""
        start, self.num_told = self.num_told, len(self.token_ids)
        return Piece(
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            versions=tuple(self.versions[start:]),
            finish_reason=self.finish_reason,
        )

    def generation(self) -> Generation:
        """What was sampled."""
        assert self.finish_reason is not None
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish_reason,
        )


@dataclass(slots=True, eq=False)
class _Row:
    """One row of the cache."""

    index: int
    tokens: list[int] = field(default_factory=list)
    """What is cached, from position 0."""
    session: str | None = None
    request: Request | None = None
    """The turn that is being sampled; None while the session is idle or the row is free."""
    last_used: int = 0
    is_stale: bool = False
    """Old weights computed some of `tokens`; only the turn in flight may go on with them."""
    family: int = 0
    num_shared: int = 0
    """So many first tokens are a copy of what all rows of its family cache; 0 without a family."""

    @property
    def is_free(self) -> bool:
        """Nobody's: what it caches may still serve siblings."""
        return self.session is None and self.request is None

    def end_turn(self) -> None:
        """Nobody is sampled here any more."""
        self.request = None
        if self.is_stale:
            self.forget()

    def forget(self) -> None:
        """Nothing is cached here any more."""
        self.tokens, self.num_shared, self.is_stale = [], 0, False


class Scheduler:
    """Continuous batching over the rows of a `CachedDecoder`."""

    def __init__(self, network: CachedDecoder, num_rows: int) -> None:
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
        """Turns of which somebody wants to hear each token, and which have sampled one."""
        working = (row.request for row in self._rows)
        return [r for r in working if r is not None and r.is_streamed and r.token_ids]

    def submit(self, request: Request) -> None:
        """Queue a turn."""
        self._pending.append(request)

    def cancel(self, request: Request) -> None:
        """Nobody waits for it any more: its row is free at once."""
        request.is_cancelled = True
        for row in self._rows:
            if row.request is request:
                row.end_turn()
        self.release(request.session)

    def release(self, session: str) -> None:
        """The session's row is free, once a turn in flight has ended.

        What it cached serves siblings until it is overwritten.
        """
        row = self._by_session.pop(session, None)
        if row is not None:
            row.session = None

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with new weights from now on.

        Turns in flight go on with the keys and values that the old weights computed (recomputing
        them would cost a prefill each), which are forgotten when the turn ends. All other caches
        are forgotten now: no later turn, and no new episode, sees old weights' work, which makes
        staleness 0 exact.
        """
        self.network.weights.load(weights)
        self.version = version
        self._by_prompt.clear()
        for row in self._rows:
            if row.request is None:
                row.forget()
            else:
                row.is_stale = True

    def copy(self) -> Scheduler:
        """An idle scheduler with the same weights under the same version."""
        network = self.network
        other = CachedDecoder(
            network.config,
            num_rows=len(self._rows),
            max_context=network.scratch,
            dtype=network.dtype,
            device=network.device,
        )
        other.weights.load_from(network.weights)
        scheduler = Scheduler(other, len(self._rows))
        scheduler.version = self.version
        return scheduler

    def fail_all(self) -> list[Request]:
        """Drop everything; returns the turns that were waited for."""
        lost = [row.request for row in self._rows if row.request is not None] + [*self._pending]
        self._pending.clear()
        self._by_session.clear()
        self._by_prompt.clear()
        for row in self._rows:
            row.session = row.request = None
            row.forget()
        self.network.clear()
        return lost

    def step(self) -> list[Request]:
        """Admit what fits, compute one token for every turn; returns the turns that ended."""
        entering = self._admit()
        self._compact()
        decoding = [row for row in self._rows if row.request is not None and row not in entering]
        if not decoding and not entering:
            return []
        num_decoding = max((row.index + 1 for row in decoding), default=0)
        ids, positions = [0] * num_decoding, [self.network.scratch] * num_decoding
        num_keys = 1
        for row in decoding:
            assert row.request is not None
            ids[row.index] = row.request.token_ids[-1]
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
            row.tokens += prompt_ids[start:]
        device = self.network.device
        logits = self.network.forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(rows, device=device),
            num_decoding=num_decoding,
            num_keys=num_keys,
            prompts=prompts,
            families=self._families(decoding),
        )
        places = [row.index for row in decoding] + [num_decoding + i for i in range(len(entering))]
        if places != list(range(len(logits))):
            logits = logits[torch.tensor(places, device=device)]
        self.stats.num_steps += 1
        self.stats.occupancy += len(places)
        return self._take_tokens(decoding + entering, logits)

    # ---- rows ---------------------------------------------------------------------------------

    def _admit(self) -> list[_Row]:
        """Give rows to pending turns, first come, first served."""
        entering: list[_Row] = []
        started: set[tuple[int, ...]] = set()
        postponed: list[Request] = []
        while self._pending:
            request = self._pending.popleft()
            if request.is_cancelled:
                continue
            prompt = request.prompt_ids
            row = self._by_session.get(request.session)
            if row is not None and row.request is not None:
                # Turns of one session follow one another.
                postponed.append(request)
                continue
            if row is None and prompt in started:
                # A sibling's prompt is computed in this very step: copy it in the next one.
                postponed.append(request)
                continue
            if row is None:
                row = self._free_row(avoid=self._by_prompt.get(prompt))
                if row is None:
                    postponed.append(request)
                    break
                self._adopt(row, request)
            num_cached = _common_prefix(row.tokens, prompt)
            # The last token is computed again where all are cached: its logits are needed.
            num_cached = min(num_cached, len(prompt) - 1)
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
        """Make a free row the session's, with a sibling's cached prompt where there is one."""
        prompt = request.prompt_ids
        source = self._by_prompt.get(prompt)
        if source is not row:
            self._forget(row)
            row.forget()
            if source is not None:
                self._copy(source, row, _common_prefix(source.tokens, prompt))
        row.session = request.session
        self._by_session[request.session] = row

    def _copy(self, source: _Row, row: _Row, num_tokens: int) -> None:
        """Give an empty row the first cached tokens of another one: now they are siblings."""
        self.network.copy_row(source.index, row.index, num_tokens)
        row.tokens = source.tokens[:num_tokens]
        if not source.num_shared:
            source.family, source.num_shared = next(self._clock), num_tokens
        row.family, row.num_shared = source.family, min(source.num_shared, num_tokens)

    def _families(self, decoding: Sequence[_Row]) -> list[Family]:
        """The rows that decode, by the least that any two siblings among them share."""
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

    def _free_row(self, avoid: _Row | None) -> _Row | None:
        """A row without a session, else the idle session's that waits longest; None if all work.

        A row that holds the prompt already (`avoid`) is the best of all when it is free, and the
        last to be taken from an idle session.
        """
        if avoid is not None and avoid.is_free:
            return avoid
        # The first, not the oldest: working rows stay together at the front.
        free = next((row for row in self._rows if row.is_free), None)
        if free is not None:
            return free
        idle = [row for row in self._rows if row.request is None]
        if not idle:
            return None
        row = min(idle, key=lambda row: (row is avoid, row.last_used))
        assert row.session is not None
        del self._by_session[row.session]
        row.session = None
        return row

    def _forget(self, row: _Row) -> None:
        for prompt in [p for p, holder in self._by_prompt.items() if holder is row]:
            del self._by_prompt[prompt]

    def _compact(self) -> None:
        """Bring working rows to the front when too many rows before the last one idle.

        The network decodes rows 0 to R - 1 in one product, whoever of them takes part.
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
        heats = [request.params.temperature for request in requests]
        drawn = [request.uniforms[len(request.token_ids)] for request in requests]
        device = self.network.device
        # Through numpy: twice as fast as torch.tensor for lists of floats.
        temperature_B = torch.from_numpy(np.asarray(heats, dtype=np.float32)).to(device)
        u_B = torch.from_numpy(np.asarray(drawn, dtype=np.float32)).to(device)
        if any(r.params.top_p < 1 or r.params.top_k > 0 for r in requests):
            top_k_B = torch.tensor([r.params.top_k for r in requests], device=device)
            top_p_B = torch.tensor([r.params.top_p for r in requests], device=device)
            logits_BV = filter_logits(logits_BV, temperature_B, top_k_B, top_p_B)
        ids_B, logprobs_B = sample(logits_BV, temperature_B, u_B)
        logprobs = logprobs_B.tolist()
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                f"the policy's logits are not finite (weights of version {self.version})",
                hints=["the last training step diverged: try a lower trainer.lr"],
            )
        finished = []
        for row, request, token_id, logprob in zip(
            rows, requests, ids_B.tolist(), logprobs, strict=True
        ):
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
    """How many leading tokens agree. Turns extend their session's: one comparison settles it."""
    size = min(len(cached), len(prompt))
    if tuple(cached[:size]) == tuple(prompt[:size]):
        return size
    return next(i for i in range(size) if cached[i] != prompt[i])
