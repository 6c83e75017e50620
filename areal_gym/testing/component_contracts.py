"""The contracts of losses, advantage estimators and rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import random
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from areal_gym.rewards import RewardSet
    from areal_gym.trainer.algorithms.advantages import AdvantageEstimator, AdvantageInputs
    from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput, PolicyLoss

Compares = Literal["siblings", "batch", "nothing"]

_LENGTHS = (3, 1, 5, 2, 4)  # lengths of the sequences in the batch on which losses are tested
_GROUPS = ((0.0, 1.0, 3.0), (0.5, 0.5), (2.0, 0.0, 0.0, 1.0))
"""Rewards of the groups on which estimators are tested: ragged, the second one constant."""


def check_policy_loss(loss: PolicyLoss, **settings: Any) -> None:
    """Check the contract of a policy loss, with `settings` as its keyword arguments.

    - It gives one finite number per token, the same when called again, and keeps its inputs.
    - On policy the gradient is REINFORCE's: -A per token, or per sequence in the sum.
    - A sequence's loss and gradient depend on nothing but that sequence: not on packing, order or
      micro-batches.
    - Numbers and gradients are finite for log-ratios of 30 and -30.
    - Tokens with weight 0 have a gradient of exactly 0, whatever their ratio is.
    - Metrics are per token, finite and without gradient.
    - A loss with a batch pass (`losses.with_batch_pass`) keeps all that for the tokens that the
      pass picked; REINFORCE's gradient it has where none is picked. The pass gives one bool per
      token, the same in whatever order the sequences come.

    Raises:
        AssertionError: a rule is broken.
        ConfigError: the loss itself raises it.
    """
    _check_output(loss, settings)
    _check_on_policy(loss, settings)
    _check_alone(loss, settings)
    _check_extremes(loss, settings)
    _check_batch_pass(loss, settings)


def check_advantage_estimator(
    estimator: AdvantageEstimator, *, compares: Compares = "siblings", **settings: Any
) -> None:
    """Check the contract of an advantage estimator, with `settings` as its keyword arguments.

    - It gives one finite number per trajectory (or per token), also for ragged groups, and does not
      change its inputs.
    - The order of trajectories and the numbers that name groups do not matter.
    - The best trajectory of a group gets more than the worst.
    - If it `compares` siblings, a constant added to all rewards of a group changes nothing, and a
      group of equal rewards gets exactly 0; if it compares the batch, the same holds for the batch.

    Raises:
        AssertionError: a rule is broken.
        ConfigError: the estimator itself raises it.
    """
    from areal_gym.trainer.algorithms.advantages import estimate

    def run(rewards: tuple[tuple[float, ...], ...], order: list[int] | None = None) -> Tensor:
        return estimate(estimator, _trajectories(rewards, order), **settings).advantages_T

    inputs = _trajectories(_GROUPS)
    before = [t.clone() for t in _tensors(inputs)]
    plain_T = estimate(estimator, inputs, **settings).advantages_T
    for tensor, copy in zip(_tensors(inputs), before, strict=True):
        _require((tensor == copy).all(), "it changes its inputs in place")

    order = [7, 2, 8, 0, 4, 1, 6, 3, 5]
    starts = _starts(inputs)
    shuffled = _trajectories(_GROUPS, order)
    moved_T = run(_GROUPS, order)
    for tokens, i in zip(_starts(shuffled), order, strict=True):
        rule = "the order of trajectories, or the groups' ids, matter"
        _same(moved_T[tokens], plain_T[starts[i]], rule)

    rewards_G = inputs.rewards_G
    for members in ([0, 1, 2], [5, 6, 7, 8]):
        best = max(members, key=lambda i: float(rewards_G[i]))
        worst = min(members, key=lambda i: float(rewards_G[i]))
        is_more = plain_T[starts[best]][-1] > plain_T[starts[worst]][-1]
        _require(is_more, "the best of a group gets no more than the worst")

    if compares == "nothing":
        return
    shifts = (5.0, -2.0, 1.0) if compares == "siblings" else (3.0, 3.0, 3.0)
    pairs = zip(_GROUPS, shifts, strict=True)
    shifted = tuple(tuple(r + shift for r in rewards) for rewards, shift in pairs)
    _same(run(shifted), plain_T, f"a constant added to all rewards of the {compares} matters")
    flat_T = plain_T[starts[3].start : starts[4].stop]
    if compares == "batch":
        flat_T = run(tuple((0.1,) * len(rewards) for rewards in _GROUPS))
    _require((flat_T == 0).all(), f"equal rewards of the {compares} do not give exactly 0")


def check_reward(
    reward: Any, *, row: Mapping[str, Any], right: str, wrong: str, prompt: str = ""
) -> None:
    """Check the contract of a reward, given as it is given to a run: a function, an id, settings.

    - `right`, a completion for the `row`, earns more than `wrong`, and no hostile text (empty, a
      megabyte, nested, undecodable, ...) earns more than it.
    - Every text gets a finite number; nothing that a policy writes makes the reward raise.
    - The same text gets the same reward again, beside other texts, and from a copy of the reward,
      as other processes have it.
    - The row stays as it is, and the columns that the reward needs are in it.

    Raises:
        AssertionError: a rule is broken.
        ConfigError: the reward cannot be loaded.
    """
    from areal_gym.rewards import load_rewards

    rewards = load_rewards(reward)
    absent = [column for column in rewards.required_columns if column not in row]
    _require(not absent, f"it needs columns that the row does not have: {', '.join(absent)}")
    before, texts = deepcopy(dict(row)), [right, wrong, *_HOSTILE_TEXTS]

    def score(scorer: RewardSet, texts: list[str]) -> list[float]:
        return asyncio.run(_scores(scorer, texts, row, prompt))

    earned = score(rewards, texts)
    _require(dict(row) == before, "it changes the row")
    best, worst, *others = earned
    _require(best > worst, f"the right completion earns {best}, the wrong one {worst}")
    for text, value in zip(_HOSTILE_TEXTS, others, strict=True):
        rule = f"the text {_shown(text)} earns {value}, and the right completion {best}"
        _require(value <= best, rule)
    for text, value in zip(texts[:2], earned[:2], strict=True):
        _require(score(rewards, [text]) == [value], f"{_shown(text)} alone earns another reward")
    try:
        copied: RewardSet = pickle.loads(pickle.dumps(rewards))
    except (pickle.PicklingError, AttributeError, TypeError):  # a function inside of a test
        return
    _require(score(copied, texts[:2]) == earned[:2], "a copy of it gives other rewards")


_HOSTILE_TEXTS = (
    *("", " \n", "\0", "\ud800", "\u202e4", "4" * 10_000, "a" * 1_000_000, "{" * 5_000),
    *("[" * 20_000, r"\boxed{" * 2_000, "<think>" * 3, "```\n" * 50, '{"a": NaN}', "#### "),
)


async def _scores(
    rewards: RewardSet, texts: list[str], row: Mapping[str, Any], prompt: str
) -> list[float]:
    """Score the texts beside each other; raise AssertionError for one that makes it raise."""
    from areal_gym.errors import EpisodeError
    from areal_gym.rewards import RewardInput

    samples = [RewardInput(completion=text, prompt=prompt, row=row) for text in texts]

    async def reward_of(sample: RewardInput) -> float:
        try:
            return (await rewards.score(sample)).reward
        except EpisodeError as error:
            text = _shown(sample.completion)
            raise AssertionError(f"the text {text}: {error.message}") from error

    return await asyncio.gather(*map(reward_of, samples))


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:20]}... ({len(text):,} characters)")


# ---- losses ----------------------------------------------------------------------------------


def _check_output(loss: PolicyLoss, settings: dict[str, Any]) -> None:
    batch = _tokens()
    before = [t.clone() for t in _tensors(batch)]
    output = loss(batch, **settings)
    for tensor, copy in zip(_tensors(batch), before, strict=True):
        _require(tensor.equal(copy), "it changes its inputs in place")
    again = loss(batch, **settings)
    shape = batch.logprobs.shape
    _require(output.loss.shape == shape, f"its loss has shape {tuple(output.loss.shape)}, not [T]")
    _require(output.loss.requires_grad, "its loss carries no gradient")
    _require(output.loss.isfinite().all(), "its loss is not finite")
    _require(output.loss.equal(again.loss), "called twice, it gives different losses")
    for name, values_T in output.metrics.items():
        _require(values_T.shape == shape, f"its metric {name!r} has a shape other than [T]")
        _require(not values_T.requires_grad, f"its metric {name!r} carries a gradient")
        _require(values_T.isfinite().all(), f"its metric {name!r} is not finite")


def _check_on_policy(loss: PolicyLoss, settings: dict[str, Any]) -> None:
    for is_shared in (True, False):
        batch = _with_none_picked(loss, _tokens(log_ratio=0.0, has_one_advantage_each=is_shared))
        gradient_T = _gradient(batch, loss(batch, **settings))
        if is_shared:
            _same(gradient_T, -batch.advantages, "the gradient on policy is not REINFORCE's, -A")
        sums = batch.advantages.new_zeros(len(_LENGTHS))
        _same(
            sums.index_add(0, batch.sequence_ids, gradient_T),
            sums.index_add(0, batch.sequence_ids, -batch.advantages),
            "the gradient on policy, summed over a sequence, is not REINFORCE's",
        )


def _check_alone(loss: PolicyLoss, settings: dict[str, Any]) -> None:
    import torch

    batch = _tokens()
    output = loss(batch, **settings)
    gradient_T = _gradient(batch, output)
    picked_T = _picked(loss, batch, settings)
    for order in ([3, 0, 4, 2, 1], [2, 1], [0], [1]):
        taken_T = torch.cat([(batch.sequence_ids == i).nonzero().squeeze(1) for i in order])
        part = _tokens(taken_T, order)
        if picked_T is not None:
            part = dataclasses.replace(part, picked=picked_T[taken_T])
        alone = loss(part, **settings)
        rule = "a sequence's {} depends on what else is in the micro-batch, or on its order"
        _same(alone.loss.detach(), output.loss.detach()[taken_T], rule.format("loss"))
        _same(_gradient(part, alone), gradient_T[taken_T], rule.format("gradient"))


def _check_batch_pass(loss: PolicyLoss, settings: dict[str, Any]) -> None:
    import torch

    batch = _tokens()
    picked_T = _picked(loss, batch, settings)
    if picked_T is None:
        return
    shape, rule = batch.logprobs.shape, "its batch pass gives other than one bool per token"
    _require(picked_T.shape == shape and picked_T.dtype == torch.bool, rule)
    order = [3, 0, 4, 2, 1]
    taken_T = torch.cat([(batch.sequence_ids == i).nonzero().squeeze(1) for i in order])
    moved_T = _picked(loss, _tokens(taken_T, order), settings)
    assert moved_T is not None
    _require(moved_T.equal(picked_T[taken_T]), "its batch pass depends on the sequences' order")


def _picked(loss: PolicyLoss, batch: LossInputs, settings: dict[str, Any]) -> Tensor | None:
    """Return the tokens that the batch pass of the loss picks; None for a loss without one."""
    from areal_gym.trainer.algorithms.losses import batch_pass

    look = batch_pass(loss)
    return None if look is None else look(batch, **settings)


def _with_none_picked(loss: PolicyLoss, batch: LossInputs) -> LossInputs:
    from areal_gym.trainer.algorithms.losses import batch_pass

    if batch_pass(loss) is None:
        return batch
    return dataclasses.replace(batch, picked=batch.advantages.new_zeros(len(batch.advantages)) > 0)


def _check_extremes(loss: PolicyLoss, settings: dict[str, Any]) -> None:
    for log_ratio in (30.0, -30.0):
        batch = _tokens(log_ratio=log_ratio, is_single=True)
        output = loss(batch, **settings)
        where = f"where the log-ratio is {log_ratio:g}"
        _require(output.loss.isfinite().all(), f"its loss is not finite {where}")
        _require(_gradient(batch, output).isfinite().all(), f"its gradient is not finite {where}")
        is_masked_T = batch.sequence_ids % 2 == 0
        again = _tokens(log_ratio=log_ratio, is_single=True)
        masked = loss(again, **settings)
        gradient_T = _gradient(again, masked, weights_T=(~is_masked_T).float())
        _require((gradient_T[is_masked_T] == 0).all(), f"masked tokens have a gradient {where}")


def _tokens(
    taken_T: Tensor | None = None,
    order: list[int] | None = None,
    *,
    log_ratio: float | None = None,
    has_one_advantage_each: bool = False,
    is_single: bool = False,
) -> LossInputs:
    """Make the same tokens every time (float64, or float32), or those of the chosen sequences."""
    import torch

    from areal_gym.trainer.algorithms.losses import LossInputs

    rng = random.Random(0)
    ids_T = torch.tensor([i for i, length in enumerate(_LENGTHS) for _ in range(length)])

    def draw(low: float, high: float) -> Tensor:
        values = [rng.uniform(low, high) for _ in ids_T]
        return torch.tensor(values, dtype=torch.float32 if is_single else torch.float64)

    proximal_T, drift_T, advantages_T = draw(-3, -0.1), draw(-0.5, 0.5), draw(-2, 2)
    old_T = proximal_T + draw(-0.2, 0.2)
    if log_ratio is not None:
        drift_T = torch.full_like(drift_T, log_ratio)
    if has_one_advantage_each:
        advantages_T = advantages_T[ids_T]
    logprobs_T = proximal_T + drift_T
    if taken_T is None or order is None:
        taken_T, order = torch.arange(len(ids_T)), list(range(len(_LENGTHS)))
    return LossInputs(
        logprobs=logprobs_T[taken_T].requires_grad_(True),
        proximal=proximal_T[taken_T],
        old_logprobs=old_T[taken_T],
        advantages=advantages_T[taken_T],
        sequence_ids=torch.tensor([order.index(i) for i in ids_T[taken_T].tolist()]),
    )


def _gradient(batch: LossInputs, output: LossOutput, weights_T: Tensor | None = None) -> Tensor:
    import torch

    total = (output.loss if weights_T is None else output.loss * weights_T).sum()
    (gradient_T,) = torch.autograd.grad(total, batch.logprobs)
    return gradient_T


# ---- estimators ------------------------------------------------------------------------------


def _trajectories(
    rewards: tuple[tuple[float, ...], ...], order: list[int] | None = None
) -> AdvantageInputs:
    """Make trajectories of one or two turns, rewarded at the end; an `order` renumbers groups."""
    import torch

    from areal_gym.trainer.algorithms.advantages import AdvantageInputs

    rng = random.Random(0)
    shapes = [
        (reward, group, [rng.randint(1, 4) for _ in range(1 + (i + group) % 2)])
        for group, members in enumerate(rewards)
        for i, reward in enumerate(members)
    ]
    values = [[rng.uniform(-0.1, 0.1) for _ in range(sum(lengths))] for _, _, lengths in shapes]
    taken = range(len(shapes)) if order is None else order
    chosen = [shapes[i] for i in taken]
    rewards_G = torch.tensor([reward for reward, _, _ in chosen], dtype=torch.float64)
    return AdvantageInputs.from_turns(
        [[0.0] * (len(lengths) - 1) + [reward] for reward, _, lengths in chosen],
        [lengths for _, _, lengths in chosen],
        [group if order is None else 7 - 3 * group for _, group, _ in chosen],
        state_keys=[[f"state {k}" for k in range(len(lengths))] for _, _, lengths in chosen],
        reward_parts_G={"all": rewards_G},
        role_means_G=torch.zeros(len(chosen), dtype=torch.float64),
        answer_probs_T=torch.full((sum(sum(n) for *_, n in chosen),), 0.5, dtype=torch.float64),
        values_T=torch.tensor([v for i in taken for v in values[i]], dtype=torch.float64),
        final_values_G=torch.zeros(len(chosen), dtype=torch.float64),
    )


def _starts(inputs: AdvantageInputs) -> list[slice]:
    """Return the place of each trajectory's tokens."""
    counts = inputs.trajectory_ids_T.bincount(minlength=len(inputs.rewards_G)).tolist()
    return [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]


# ---- both ------------------------------------------------------------------------------------


def _tensors(inputs: LossInputs | AdvantageInputs) -> list[Tensor]:
    import torch

    values = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return [value for value in values if isinstance(value, torch.Tensor)]


def _require(condition: bool | Tensor, rule: str) -> None:
    if not bool(condition):
        raise AssertionError(rule)


def _same(actual: Tensor, expected: Tensor, rule: str) -> None:
    if not actual.double().allclose(expected.double(), rtol=1e-6, atol=1e-6):
        raise AssertionError(f"{rule}: {actual.tolist()} is not {expected.tolist()}")
