"""Runs any causal language model of transformers in the embedded engine.

The scheduler passes the same steps as to `CachedDecoder`: decoding rows with one token each and new
prompts, all on one flat token axis. Keys and values are in our own caches, one row per sequence;
recurrent layers keep transformers' states, one per row.

This is for small models, and for trying any architecture without a server: layers run in
transformers' code, and attention is torch's products with masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from areal_gym.engines.embedded.cached_network import Prompt, Step, require_same_names
from areal_gym.errors import EngineError
from areal_gym.message_types import ImageRef
from areal_gym.models.hf.hf_loading import without_progress_bars
from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.hf.hf_vision import PlacedPictures
from areal_gym.models.hf.token_mixing import NAME, ScoreRules, masked_attention

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""Names of the argument by which recurrent layers get their states."""


class CachedHFPolicy:
    """The weights, caches and recurrent states of one policy; used from one thread."""

    def __init__(self, policy: HFPolicy, *, num_rows: int, max_context: int) -> None:
        self.policy = policy
        self.num_rows = num_rows
        self.scratch = max_context
        self.can_cut = policy.can_share_prompts
        first = next(policy.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.routed_experts: Tensor | None = None
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of each layer, [rows, positions, K, D] and [..., E]."""
        self._states: list[DynamicCache | None] = [None] * num_rows

    def copy(self) -> CachedHFPolicy:
        """Return another network with a copy of the weights and an empty cache."""
        network = self.policy.network
        twin = type(network)(network.config).to(device=self.device, dtype=self.dtype)
        twin.load_state_dict(network.state_dict())
        policy = HFPolicy(twin)
        policy.vision = None if self.policy.vision is None else self.policy.vision.of(twin)
        return CachedHFPolicy(policy, num_rows=self.num_rows, max_context=self.scratch)

    @property
    def takes_images(self) -> bool:
        """Whether the policy accepts images."""
        return self.policy.vision is not None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights by the checkpoint's names, or nothing.

        Raises:
            EngineError: a name is missing or unknown, or a shape differs.
        """
        network = self.policy.network
        try:
            with without_progress_bars():
                read, report = type(network).from_pretrained(
                    None,
                    config=network.config,
                    state_dict=dict(weights),
                    attn_implementation=NAME,
                    dtype=self.dtype,
                    output_loading_info=True,
                )
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"the published weights are of another model: {error}") from error
        require_same_names(report["missing_keys"], report["unexpected_keys"])
        network.load_state_dict(read.state_dict())
        if self.policy.vision is not None:  # loading has reset the attention of all parts
            self.policy.vision.use_own_attention()

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first cached tokens of `source`; only where rows can be cut."""
        assert self.can_cut
        for cache in chain.from_iterable(self._caches.values()):
            cache[target, :num_tokens] = cache[source, :num_tokens]

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the first cached tokens, and the states, of two rows."""
        for cache in chain.from_iterable(self._caches.values()):
            kept = cache[a, :num_tokens].clone()
            cache[a, :num_tokens] = cache[b, :num_tokens]
            cache[b, :num_tokens] = kept
        self._states[a], self._states[b] = self._states[b], self._states[a]

    def clear(self) -> None:
        """Drop all caches, in which a broken model may have left NaNs for later sequences."""
        self._caches.clear()
        self._states = [None] * self.num_rows

    def forward(self, step: Step) -> Tensor:
        """Return float32 logits, [R + B, V]; see `CachedNetwork.forward`."""
        mixing = _CachedMixing(self, step)
        placed = self._placed(step) if step.images else None
        hidden_NC = self.policy.hidden_states(step.token_ids_N, step.positions_N, mixing, placed)
        self.routed_experts = mixing.routed_experts(len(self.policy.layers))
        return self.policy.logits(hidden_NC[step.last_tokens]).float()

    def _placed(self, step: Step) -> PlacedPictures:
        """Return the images that enter in this step, and the positions of all its tokens."""
        vision = self.policy.vision
        assert vision is not None
        refs: list[ImageRef] = []
        positions_3N = step.positions_N.expand(3, -1).clone()
        for row, images in step.images.items():
            if row < step.num_decoding:
                positions_3N[:, row] += vision.shift_behind(images)
        for prompt, tokens in step.placed_prompts:
            images = step.images.get(prompt.row, ())
            row_3T = vision.positions_of(prompt.stop, images)
            if row_3T is not None:
                positions_3N[:, tokens] = row_3T[:, prompt.start :].to(self.device)
            offset = tokens.start - prompt.start
            refs += [image.moved(offset) for image in images if image.start >= prompt.start]
        return PlacedPictures(
            tuple(refs), positions_3N if vision.has_positions else None, pictures_N=None
        )

    def cache_of(self, layer: int, k_NKD: Tensor, v_NKE: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's cached keys and values; the new ones give their shape and type."""
        if layer not in self._caches:
            shape = (self.num_rows, self.scratch + 1)
            # Zeros, not empty: a masked NaN is still a NaN.
            keys, values = (x.new_zeros(*shape, *x.shape[1:]) for x in (k_NKD, v_NKE))
            self._caches[layer] = keys, values
        return self._caches[layer]

    def state_of(self, row: int, *, is_new: bool) -> DynamicCache:
        """Return the recurrent states of a row, fresh ones at the beginning of its sequence."""
        state = self._states[row]
        if is_new or state is None:
            state = self._states[row] = DynamicCache(
                config=self.policy.network.config.get_text_config()
            )
        return state


class _CachedMixing:
    """The `TokenMixing` of one step: every token sees its row's cache and itself."""

    def __init__(self, network: CachedHFPolicy, step: Step) -> None:
        self._network = network
        self._step = step
        spans = [
            (row, slice(row, row + 1), False)
            for row, position in enumerate(step.positions_R.tolist())
            if position != network.scratch
        ]
        for prompt, tokens in step.placed_prompts:
            spans.append((prompt.row, tokens, prompt.start == 0))
        self._spans = spans
        """For each sequence: its cache row, its tokens, and whether it begins in this step."""
        self._begun: dict[int, DynamicCache] = {}
        self._experts: dict[int, Tensor] = {}
        """The experts by which the step's logits are computed, [R + B, K], by layer."""

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, rules: ScoreRules
    ) -> Tensor:
        """Put keys and values into the cache, and return the attention, [N, H, E]."""
        step = self._step
        keys, values = self._network.cache_of(layer, k_NKD, v_NKE)
        keys[step.rows_N, step.positions_N] = k_NKD
        values[step.rows_N, step.positions_N] = v_NKE
        outputs = []
        if count := step.num_decoding:
            cached, q_R1HD = (slice(0, count), slice(0, step.num_keys)), q_NHD[:count, None]
            position_R1 = step.positions_R[:, None]
            outputs.append(_attend(q_R1HD, keys[cached], values[cached], position_R1, rules))
        for prompt, tokens in step.placed_prompts:
            cached = slice(prompt.row, prompt.row + 1), slice(0, prompt.stop)
            position_1Q = step.positions_N[None, tokens]
            outputs.append(
                _attend(
                    q_NHD[None, tokens],
                    keys[cached],
                    values[cached],
                    position_1Q,
                    rules,
                    self._seen(prompt),
                )
            )
        return torch.cat([out.flatten(0, 1) for out in outputs])

    def _seen(self, prompt: Prompt) -> Tensor | None:
        """Return which keys belong to a query's image, [1, Q, P]; None if all is causal."""
        vision, images = self._network.policy.vision, self._step.images.get(prompt.row, ())
        if vision is None:
            return None
        pictures_P = vision.pictures_of(images, prompt.stop, self._network.device)
        if pictures_P is None:
            return None
        of_query_Q = pictures_P[prompt.start :]
        return ((of_query_Q[:, None] == pictures_P) & (of_query_Q >= 0)[:, None])[None]

    def recur(
        self, forward: Callable[..., Tensor], hidden_1NC: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Run a recurrent layer on each sequence with its row's states: [1, N, C]."""
        name = next(name for name in _CACHE_ARGUMENTS if name in kwargs)
        out_1NC = torch.zeros_like(hidden_1NC)
        for row, tokens, is_new in self._spans:
            # The states of all layers are one object: made once in a step.
            if row not in self._begun:
                self._begun[row] = self._network.state_of(row, is_new=is_new)
            out_1NC[:, tokens] = forward(hidden_1NC[:, tokens], **kwargs | {name: self._begun[row]})
        return out_1NC

    def route(self, layer: int, own_NK: Tensor, num_experts: int) -> Tensor:
        """Record the router's choice."""
        self._experts[layer] = own_NK[self._step.last_tokens]
        return own_NK

    def routed_experts(self, num_layers: int) -> Tensor | None:
        """Return the choices of all layers, [R + B, L, K]; None if there was no router."""
        if not self._experts:
            return None
        without = torch.zeros_like(next(iter(self._experts.values())))
        return torch.stack([self._experts.get(i, without) for i in range(num_layers)], dim=1)


def _attend(
    q_BQHD: Tensor,
    k_BPKD: Tensor,
    v_BPKE: Tensor,
    position_BQ: Tensor,
    rules: ScoreRules,
    is_seen_BQP: Tensor | None = None,
) -> Tensor:
    """Attend to cached keys at positions 0, 1, 2, ...; [B, Q, H, E]."""
    age_BQP = position_BQ[:, :, None] - torch.arange(k_BPKD.shape[1], device=k_BPKD.device)
    mask_BQP = torch.zeros(age_BQP.shape, device=k_BPKD.device).masked_fill_(
        age_BQP < 0, -torch.inf
    )
    return masked_attention(
        q_BQHD, k_BPKD, v_BPKE, mask_BQP[:, None], age_BQP, position_BQ, rules, is_seen_BQP
    )
