"""A batch as tensors: inputs of advantage estimators, columns of token values, and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.trainer.algorithms.advantage_inputs import (
    NO_PARTS,
    AdvantageInputs,
    TrajectoryInputs,
)
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence


class TokenBatch:
    """Named columns with one value per trained token; the values of a row are [T_row].

    `recorded` maps names to columns of the rows, which are read when they are taken.
    """

    def __init__(
        self,
        rows: Sequence[TokenSequence],
        device: torch.device,
        recorded: Mapping[str, str] | None = None,
    ) -> None:
        self._rows = rows
        self._lengths = [row.num_trainable for row in rows]
        self._device = device
        self._recorded = dict(recorded or {})
        self._values: dict[str, list[Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._recorded

    def put(self, name: str, values_T: Tensor) -> None:
        """Store the values of all rows' tokens, [T], row after row."""
        self._values[name] = list(torch.split(values_T.to(self._device), self._lengths))

    def put_rows(self, name: str, indexes: Sequence[int], values_T: Tensor) -> None:
        """Store the values of the rows `indexes`, [T], in that order; other rows have none."""
        values = self._values.setdefault(name, [torch.zeros(0)] * len(self._lengths))
        parts = torch.split(values_T.to(self._device), [self._lengths[i] for i in indexes])
        for i, part in zip(indexes, parts, strict=True):
            values[i] = part

    def put_per_row(self, name: str, values_B: Tensor) -> None:
        """Store one value per row, [B], for all tokens of the row."""
        pairs = zip(values_B.to(self._device), self._lengths, strict=True)
        self._values[name] = [value.expand(length) for value, length in pairs]

    def take(self, name: str, indexes: Sequence[int]) -> Tensor:
        """Return the values of the rows `indexes`, [T], in that order."""
        if name in self._recorded:
            rows = [self._rows[i] for i in indexes]
            return trained(rows, self._recorded[name]).to(self._device)
        values = self._values[name]
        return torch.cat([values[i] for i in indexes])

    def all(self, name: str) -> Tensor:
        """Return the values of all rows, [T]."""
        return self.take(name, range(len(self._lengths)))

    def per_row(self, values_B: Tensor, indexes: Sequence[int]) -> Tensor:
        """Repeat one value per row of `indexes`, [B], for each of the row's tokens, [T]."""
        lengths = torch.tensor([self._lengths[i] for i in indexes])
        return values_B.repeat_interleave(lengths).to(self._device)

    def row_ids(self, indexes: Sequence[int]) -> Tensor:
        """Return for each token the position of its row in `indexes`: 0, 1, 2, ..."""
        return self.per_row(torch.arange(len(indexes)), indexes)


def trained(rows: Sequence[TokenSequence], name: str) -> Tensor:
    """Return the values of a column at the tokens that the rows train on, [T]."""
    values = np.concatenate([row.trained(name) for row in rows])
    return torch.tensor(values, dtype=torch.float32 if values.dtype.kind == "f" else torch.long)


def advantage_inputs(
    rows: Sequence[TokenSequence], config: TrainerConfig, max_new_tokens: int
) -> AdvantageInputs:
    """Make the inputs of estimators: shaped rewards, and the turn and trajectory of each token.

    `rows` are all branches of all trajectories, in order.
    """
    turn_rewards, turn_lengths = _shaped_turns(rows, config, max_new_tokens)
    heads = [row for row in rows if row.branch == 0]
    token_values = {"old_logprobs_T": trained(rows, "old_logprobs")}
    if any(row.teacher_logprobs for row in rows):
        token_values["teacher_logprobs_T"] = trained(rows, "teacher_logprobs")
    if any(prob is not None for row in heads for prob in row.answer_probs):
        token_values["answer_probs_T"] = _answer_probs(heads, turn_lengths)
    return AdvantageInputs.from_turns(
        turn_rewards,
        turn_lengths,
        [row.group_id for row in heads],
        state_keys=[row.state_keys or (None,) for row in heads] if has_state_keys(rows) else None,
        reward_parts_G=_reward_parts(heads),
        **token_values,
    )


def trajectory_inputs(
    rows: Sequence[TokenSequence], config: TrainerConfig, max_new_tokens: int
) -> TrajectoryInputs:
    """Make the inputs of estimators that need no values per token; see `advantage_inputs`."""
    turn_rewards, _ = _shaped_turns(rows, config, max_new_tokens)
    heads = [row for row in rows if row.branch == 0]
    return TrajectoryInputs(
        rewards_G=torch.tensor([sum(rewards) for rewards in turn_rewards], dtype=torch.float64),
        group_ids_G=torch.tensor([row.group_id for row in heads], dtype=torch.long),
        reward_parts_G=_reward_parts(heads),
    )


def has_state_keys(rows: Sequence[TokenSequence]) -> bool:
    """Return whether an environment named the states of the rows' turns."""
    return any(key is not None for row in rows for key in row.state_keys)


def _shaped_turns(
    rows: Sequence[TokenSequence], config: TrainerConfig, max_new_tokens: int
) -> tuple[list[list[float]], list[list[int]]]:
    """Return, for the turns of each trajectory, the shaped rewards and the policy's tokens.

    Shaping scales all turns' rewards; any other change of the trajectory's reward applies to its
    last turn.
    """
    heads = [row for row in rows if row.branch == 0]
    turn_rewards = [list(row.turn_rewards) or [0.0] for row in heads]
    turn_lengths = [[0] * len(rewards) for rewards in turn_rewards]
    for row in rows:
        for run in row.runs:
            turn_lengths[row.trajectory_id][run.turn] += run.num_tokens
    shaping = config.reward
    rewards_G = torch.tensor([sum(rewards) for rewards in turn_rewards], dtype=torch.float64)
    shaped_G = rewards_G
    if shaping.length_penalty:
        shaped_G = length_penalised(
            shaped_G,
            torch.tensor([sum(lengths) for lengths in turn_lengths]),
            torch.tensor([row.group_id for row in heads]),
            share=shaping.length_penalty,
            right_reward=shaping.right_reward,
        )
    if shaping.overlong_tail:
        longest_G = torch.tensor([max(lengths) for lengths in turn_lengths])
        shaped_G = shaped_G + overlong_penalty(
            longest_G,
            max_length=max_new_tokens,
            tail=max(1, round(shaping.overlong_tail * max_new_tokens)),
            factor=shaping.overlong_factor,
        )
    shaped_G = shape_rewards(shaped_G, bias=shaping.bias, scale=shaping.scale, clip=shaping.clip)
    for rewards, total in zip(turn_rewards, shaped_G.tolist(), strict=True):
        rewards[:] = [reward * shaping.scale for reward in rewards]
        rewards[-1] += total - sum(rewards)
    return turn_rewards, turn_lengths


def _answer_probs(heads: Sequence[TokenSequence], turn_lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the probability of the known answer before each token's turn, [T]."""
    parts = [np.zeros(0)]
    for row, lengths in zip(heads, turn_lengths, strict=True):
        probs = [np.nan if prob is None else prob for prob in row.answer_probs] or [np.nan]
        parts.append(np.repeat(np.array(probs), lengths))
    return torch.tensor(np.concatenate(parts))


def _reward_parts(heads: Sequence[TokenSequence]) -> dict[str, Tensor] | None:
    """Return the trajectories' values of each reward part, [G], with 0 for a missing one.

    Groups without any part, such as those of a role that is paid by `role_rewards`, or of another
    environment of a mix, have their reward as the part `NO_PARTS`.
    """
    with_parts = {row.group_id for row in heads if row.reward_parts}
    if not with_parts:
        return None
    parts = [
        row.reward_parts if row.group_id in with_parts else {NO_PARTS: row.reward} for row in heads
    ]
    return {
        name: torch.tensor([each.get(name, 0.0) for each in parts], dtype=torch.float64)
        for name in sorted({name for each in parts for name in each})
    }


def length_penalised(
    rewards_G: Tensor,
    lengths_G: Tensor,
    group_ids_G: Tensor,
    *,
    share: float,
    right_reward: float = 1.0,
) -> Tensor:
    """Compute r (1 - share sigmoid((L - mean) / std)) for right answers; others keep their reward.

    Arora and Zanette 2025 (2502.04463, eq. 4 and 5): L is a trajectory's number of tokens; mean and
    deviation (over n, as the authors' program) are those of the right answers (r >= `right_reward`)
    to the same task. A wrong answer gains nothing by being short, and a right one keeps more than
    1 - `share` of its reward.
    """
    rewards_G, lengths_G = rewards_G.to("cpu", torch.float64), lengths_G.double()
    shaped_G = rewards_G.clone()
    for group in group_ids_G.unique().tolist():
        is_right_G = (group_ids_G == group) & (rewards_G >= right_reward)
        lengths = lengths_G[is_right_G]
        deviation = float(lengths.std(correction=0)) if len(lengths) else 0.0
        excess = (lengths - lengths.mean()) / max(deviation, 1e-6)
        shaped_G[is_right_G] *= 1 - share * torch.sigmoid(excess)
    return shaped_G


def overlong_penalty(
    lengths_G: Tensor, *, max_length: int, tail: int, factor: float = 1.0
) -> Tensor:
    """Compute min(-(L - (max_length - tail)) / tail * factor, 0), to be added (DAPO, eq. 13).

    L is the number of the policy's tokens in each trajectory. Over the last `tail` of `max_length`
    tokens the penalty grows from 0 to `factor`. A longer trajectory loses `factor` as well.

    Raises:
        ConfigError: the tail is not within (0, max_length], or the factor is negative.
    """
    if not 0 < tail <= max_length:
        raise ConfigError(
            f"tail = {tail} must be above 0 and at most max_length = {max_length} tokens"
        )
    if factor < 0:
        raise ConfigError(f"factor = {factor} would pay for length; 0 switches the penalty off")
    excess_G = lengths_G.to("cpu", torch.float64) - (max_length - tail)
    return -(excess_G / tail).clamp(0, 1) * factor


def shape_rewards(
    rewards_G: Tensor, *, bias: float = 0.0, scale: float = 1.0, clip: float | None = None
) -> Tensor:
    """Compute (r + bias) * scale, clipped to +-clip; None does not clip.

    Raises:
        ConfigError: the clip is not above 0, which would make all rewards equal.
    """
    if clip is not None and clip <= 0:
        raise ConfigError(f"clip = {clip} makes all rewards 0; null switches it off")
    shaped_G = (rewards_G.to("cpu", torch.float64) + bias) * scale
    return shaped_G if clip is None else shaped_G.clamp(-clip, clip)


def batch_metrics(rows: Sequence[TokenSequence], version: int) -> dict[str, float]:
    """Return metrics of unshaped rewards, of staleness and of sizes."""
    heads = [row for row in rows if row.branch == 0]
    rewards_G = torch.tensor([row.reward for row in heads], dtype=torch.float64)
    by_group: dict[int, list[float]] = {}
    for row in heads:
        by_group.setdefault(row.group_id, []).append(row.reward)
    lags: Counter[int] = Counter()
    for row in rows:
        for run in row.runs:
            if run.version >= 0:  # other tokens were not sampled in this run
                lags[version - run.version] += run.num_tokens
    num_tokens = lags.total()
    return {
        "reward/mean": float(rewards_G.mean()),
        "reward/std": float(rewards_G.std(correction=0)),
        "reward/solve_all": sum(min(r) >= 1 for r in by_group.values()) / len(by_group),
        "reward/solve_none": sum(max(r) <= 0 for r in by_group.values()) / len(by_group),
        "rollout/staleness_mean": sum(lag * num for lag, num in lags.items()) / num_tokens,
        "rollout/staleness_max": float(max(lags)),
        "rollout/tokens": float(num_tokens),
        "rollout/turns": sum(len(row.turn_rewards) for row in heads) / len(heads),
        "train/sequences": float(len(rows)),
        "train/masked_fraction": 1 - num_tokens / sum(len(row) for row in rows),
    }
