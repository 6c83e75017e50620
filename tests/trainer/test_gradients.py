"""The trainer's gradient against transformers and autograd in float64, written from the papers.

The reference shares nothing with the trainer but the weights: each row passes alone through
transformers' model in float64, and advantages, losses and corrections are plain Python below.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.plugins import registry
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, TokenSpan, Trajectory
from tests._support.tiny_training import batch, honest_logprobs, tiny_checkpoint, tiny_decoder

MAX_NEW = 8
TOLERANCE = 2e-5
"""Relative, of the gradient's norm: the trainer computes in float32."""


# ---- batches ---------------------------------------------------------------------------------


def sampled(seed: int = 0, *, forks: bool = False, versions: tuple[int, ...] = (0,)) -> list[Group]:
    """Ragged groups, sampled by a policy that is near the one that is trained."""
    rng = random.Random(seed)

    def nearby(t: Trajectory, version: int) -> Trajectory:
        spans = []
        for span in t.spans:
            if span.origin == "policy":
                logprobs = tuple(p + rng.uniform(-0.35, 0.35) for p in span.logprobs)
                span = replace(span, logprobs=logprobs, policy_version=version)
            spans.append(span)
        if forks and len(t.turns) > 1 and rng.random() < 0.7:
            last = replace(spans[-1], branch=1)
            prompt = tuple(rng.randrange(50) for _ in range(6))
            other = TokenSpan(origin="prompt", token_ids=prompt, turn=last.turn, branch=1)
            spans[-2:] = [other, last]  # what the environment said last is seen no more
        turns = tuple(replace(turn, reward=rng.choice([0.0, 0.5, 1.0])) for turn in t.turns)
        return replace(t, spans=tuple(spans), turns=turns)

    groups = honest_logprobs(tiny_decoder(), batch(seed, num_groups=4))
    return [
        replace(
            g, trajectories=tuple(nearby(t, versions[i % len(versions)]) for i, t in enumerate(g))
        )
        for g in groups
    ]


# ---- the reference ---------------------------------------------------------------------------


@dataclass
class Row:
    """One sequence as the reference sees it; lists have a number for each policy token."""

    trajectory: int
    ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)


@dataclass
class Batch:
    """Rows of all trajectories, and what the environment paid for each turn."""

    rows: list[Row]
    rewards: list[list[float]]
    groups: list[int]

    def length(self, trajectory: int) -> int:
        return sum(len(row.places) for row in self.rows if row.trajectory == trajectory)


def read(groups: list[Group]) -> Batch:
    rows, rewards, group_ids = [], [], []
    for g, group in enumerate(groups):
        for t in group:
            by_branch: dict[int, Row] = {}
            for span in t.spans:
                row = by_branch.setdefault(span.branch, Row(len(rewards)))
                if span.origin == "policy":
                    row.places += range(len(row.ids), len(row.ids) + len(span.token_ids))
                    row.old += span.logprobs
                    row.turns += [span.turn] * len(span.token_ids)
                row.ids += span.token_ids
            rows += by_branch.values()
            rewards.append([turn.reward for turn in t.turns])
            group_ids.append(g)
    return Batch(rows, rewards, group_ids)


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


def group_relative(totals: list[float], groups: list[int], *, has_std: bool) -> list[float]:
    """DeepSeekMath 4.1.2, and Dr. GRPO without the deviation."""
    found = []
    for total, group in zip(totals, groups, strict=True):
        siblings = [r for r, g in zip(totals, groups, strict=True) if g == group]
        centred = total - sum(siblings) / len(siblings)
        if max(siblings) == min(siblings):
            found.append(0.0)
        else:
            found.append(centred / (std(siblings) + 1e-6) if has_std else centred)
    return found


def generalised(
    rewards: list[float], values: list[float], discount: float, lam: float
) -> list[float]:
    """Schulman et al. 2016, eq. 16, of one trajectory that came to its end."""
    advantages, following, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        following = reward + discount * next_value - value + discount * lam * following
        next_value = value
        advantages.append(following)
    return advantages[::-1]


def token_rewards(data: Batch, trajectory: int) -> list[float]:
    """A turn's reward is on its last policy token."""
    turns = [turn for row in data.rows if row.trajectory == trajectory for turn in row.turns]
    last = {turn: i for i, turn in enumerate(turns)}
    return [
        data.rewards[trajectory][turn] if last[turn] == i else 0.0 for i, turn in enumerate(turns)
    ]


def clip(advantage: float, r: Tensor, low: float, high: float) -> Tensor:
    """Schulman et al. 2017, eq. 7; a loss."""
    return -torch.minimum(advantage * r, advantage * r.clamp(1 - low, 1 + high))


# A policy loss gets log-probabilities, proximal ones and advantages of one row, all [T].
RowLoss = Callable[[Tensor, Tensor, list[float]], Tensor]


def ppo(low: float, high: float) -> RowLoss:
    return lambda logp, prox, a: torch.stack(
        [clip(x, r, low, high) for x, r in zip(a, (logp - prox).exp(), strict=True)]
    )


def gspo(logp: Tensor, prox: Tensor, a: list[float]) -> Tensor:
    """Zheng et al. 2025, eq. 5 to 7."""
    s = (logp - prox).mean().exp()
    return torch.stack([clip(sum(a) / len(a), s, 0.1, 0.15)] * len(a))


def gspo_token(logp: Tensor, prox: Tensor, a: list[float]) -> Tensor:
    """Zheng et al. 2025, eq. 13 and 14."""
    s = (logp - prox).mean().exp().detach() * (logp - logp.detach()).exp()
    return torch.stack([clip(x, r, 0.1, 0.15) for x, r in zip(a, s, strict=True)])


def cispo(logp: Tensor, prox: Tensor, a: list[float]) -> Tensor:
    """MiniMax-M1, eq. 4 and 5."""
    return -(logp - prox).exp().clamp(max=1.2).detach() * torch.tensor(a) * logp


def sapo(logp: Tensor, prox: Tensor, a: list[float]) -> Tensor:
    """Gao et al. 2025: the gate (4 / tau) sigmoid(tau (r - 1))."""
    tau = torch.tensor([1.0 if x > 0 else 1.05 for x in a], dtype=torch.float64)
    return -torch.tensor(a) * 4 / tau * torch.sigmoid(tau * ((logp - prox).exp() - 1))


def reference_model(seed: int, directory) -> Any:
    path = save_checkpoint(tiny_decoder(seed), directory / f"policy-{seed}")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )


def hidden_states(model: Any, row: Row, weights: dict[str, Tensor]) -> Tensor:
    """[T, C]: before each policy token."""
    given = torch.tensor([row.ids])
    output = torch.func.functional_call(
        model, weights, args=(), kwargs={"input_ids": given, "output_hidden_states": True}
    )
    return output.hidden_states[-1][0][[place - 1 for place in row.places]]


def scores(model: Any, row: Row, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each policy token, [T]."""
    given = torch.tensor([row.ids])
    logits = torch.func.functional_call(model, weights, args=(given,)).logits[0] / TEMPERATURE
    logprobs = logits.log_softmax(-1)[[place - 1 for place in row.places]]
    chosen = logprobs[torch.arange(len(row.places)), [row.ids[place] for place in row.places]]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


TEMPERATURE = 0.8


# ---- cases -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Case:
    """Settings of the trainer, and what the papers call them."""

    settings: dict[str, Any]
    loss: RowLoss = field(default_factory=lambda: ppo(0.2, 0.2))
    aggregation: str = "token_mean"
    has_std: bool = True
    batch: dict[str, Any] = field(default_factory=dict)
    is_stale: bool = False
    kl: float = 0.0
    entropy: float = 0.0
    second_moment: float | None = None
    overlong_tail: int = 0
    minibatches: int = 1
    per_turn: bool = False
    num_ranks: int = 1


STALE = {"is_stale": True, "batch": {"versions": (0, 1)}}
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
CASES = {
    "grpo": Case(settings={}),
    "dr_grpo": Case(
        settings={"algorithm": "dr_grpo"}, aggregation="constant_length", has_std=False
    ),
    "dapo": Case(settings={"algorithm": "dapo"}, loss=ppo(0.2, 0.28), overlong_tail=2),
    "gspo": Case(settings={"algorithm": "gspo", **CLIPS}, loss=gspo, aggregation="seq_mean"),
    "gspo-token": Case(
        settings={
            "algorithm": "gspo",
            "advantage": "per_turn",
            "loss_kwargs": {"level": "token", **CLIPS},
        },
        loss=gspo_token,
        aggregation="seq_mean",
        per_turn=True,
    ),
    "cispo": Case(settings={"algorithm": "cispo", "clip_high": 0.2}, loss=cispo),
    "sapo": Case(settings={"algorithm": "sapo"}, loss=sapo, aggregation="seq_mean"),
    "kl": Case(settings={"kl": {"coefficient": 0.3}}, kl=0.3),
    "entropy": Case(settings={"entropy_bonus": 0.05}, entropy=0.05),
    "stale": Case(settings={}, **STALE),
    "stale-kl-entropy": Case(
        settings={"kl": {"coefficient": 0.3}, "entropy_bonus": 0.05}, kl=0.3, entropy=0.05, **STALE
    ),
    "m2po": Case(
        settings={"algorithm": "m2po", "correction": {"second_moment": 0.02}},
        second_moment=0.02,
        **STALE,
    ),
    "forks": Case(settings={"aggregation": "seq_mean"}, aggregation="seq_mean", batch={"forks": 1}),
    "forks-stale": Case(settings={}, is_stale=True, batch={"versions": (0, 1), "forks": True}),
    "minibatches": Case(settings={"minibatches": 2}, minibatches=2),
    "micro-batches": Case(settings={"tokens_per_microbatch": 64}),
    "ranks": Case(settings={"num_ranks": 2}, num_ranks=2),
}


def reference_loss(
    case: Case, data: Batch, model: Any, weights: dict[str, Tensor], other: Any, members: set[int]
) -> Tensor:
    """The loss of one update on the trajectories `members`."""
    totals = [sum(rewards) for rewards in data.rewards]
    if case.overlong_tail:
        for i in range(len(totals)):
            turns = [t for row in data.rows if row.trajectory == i for t in row.turns]
            longest = max(turns.count(turn) for turn in turns)
            excess = longest - (MAX_NEW - case.overlong_tail)
            totals[i] -= min(max(excess / case.overlong_tail, 0.0), 1.0)
    advantages = group_relative(totals, data.groups, has_std=case.has_std)
    computed = [scores(model, row, weights) for row in data.rows]
    drifts = torch.cat(
        [logp - torch.tensor(r.old) for (logp, _), r in zip(computed, data.rows, strict=True)]
    ).detach()
    num_tokens = sum(data.length(i) for i in members)
    loss = torch.zeros((), dtype=torch.float64)
    for row, (logp, entropy) in zip(data.rows, computed, strict=True):
        if row.trajectory not in members:
            continue
        old = torch.tensor(row.old, dtype=torch.float64)
        prox = logp.detach() if case.is_stale else old
        if case.per_turn:
            given = [turn_advantage(data, row.trajectory, turn) for turn in row.turns]
        else:
            given = [advantages[row.trajectory]] * len(row.places)
        tokens = case.loss(logp, prox, given)
        if case.kl:
            base = scores(other, row, dict(other.named_parameters()))[0].detach()
            tokens = tokens + case.kl * ((base - logp).exp() - 1 - (base - logp))  # k3
        if case.is_stale:
            w = (prox - old).exp().clamp(max=5.0)
            if case.second_moment is not None:
                w = w * kept(drifts, case.second_moment, (prox - old) ** 2)
            tokens = w * tokens
        tokens = tokens - case.entropy * entropy
        if case.aggregation == "token_mean":
            loss = loss + tokens.sum() / num_tokens
        elif case.aggregation == "seq_mean":
            loss = loss + tokens.sum() / data.length(row.trajectory) / len(members)
        else:
            loss = loss + tokens.sum() / MAX_NEW / len(members)
    return loss


def turn_advantage(data: Batch, trajectory: int, turn: int) -> float:
    """The return from this turn on, as if the trajectory had earned it in all."""
    totals = [sum(rewards) for rewards in data.rewards]
    totals[trajectory] = sum(data.rewards[trajectory][turn:])
    return group_relative(totals, data.groups, has_std=True)[trajectory]


def kept(drifts: Tensor, threshold: float, squares: Tensor) -> Tensor:
    """M2PO: the tokens that are left when the furthest go until the mean square is small enough."""
    ascending = sorted((drifts**2).tolist())
    num_kept = max(
        (n for n in range(1, len(ascending) + 1) if sum(ascending[:n]) / n <= threshold), default=0
    )
    assert 0 < num_kept < len(ascending)  # or the case would show nothing
    return (squares <= ascending[num_kept - 1] * (1 + 1e-5)).double()


def gradient_of(loss: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def trained_gradient(states: dict[str, Tensor], prefix: str = "optimizer.adamw.") -> dict:
    """Adam's running mean after one step, which is a tenth of the gradient."""
    return {
        name.removeprefix(prefix).removesuffix(".exp_avg"): 10 * tensor.double()
        for name, tensor in states.items()
        if name.startswith(prefix) and name.endswith(".exp_avg")
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    whole = math.sqrt(sum(float(g.norm() ** 2) for g in expected.values()))
    assert whole > 1e-3
    apart = math.sqrt(sum(float((found[name] - g).norm() ** 2) for name, g in expected.items()))
    assert apart / whole < TOLERANCE
    for name, g in expected.items():
        assert float((found[name] - g).norm()) < 10 * TOLERANCE * whole, name


def make(settings: dict[str, Any], directory) -> Any:
    # Gradients are read off AdamW's mean, so its beta1 has to be the same for stale batches.
    config = TrainerConfig.model_validate(
        {"lr": 1e-12, "max_grad_norm": 1e9, "betas": (0.9, 0.98), "max_drift": None, **settings}
    )
    is_ranked = config.num_ranks > 1
    start = partial(ProcessTrainer, Trainer) if is_ranked else Trainer
    return start(
        tiny_checkpoint() if is_ranked else tiny_decoder(),
        config,
        advantage=registry().load("advantages", config.advantage),
        loss=registry().load("losses", config.loss),
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW,
        reference=directory / "policy-1",
    )


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_the_papers_formula(name, tmp_path):
    case = CASES[name]
    groups = sampled(**case.batch)
    data = read(groups)
    model, other = reference_model(0, tmp_path), reference_model(1, tmp_path)
    weights = dict(model.named_parameters())
    ids = sorted(set(data.groups))
    half = -(-len(ids) // case.minibatches)
    parts = [set(ids[i : i + half]) for i in range(0, len(ids), half)]
    expected: dict[str, Tensor] = {}
    # Of two updates, Adam's mean has 0.09 of the first gradient and 0.1 of the second one.
    for i, part in enumerate(parts):
        members = {t for t, g in enumerate(data.groups) if g in part}
        loss = reference_loss(case, data, model, weights, other, members)
        decay = 0.9 ** (len(parts) - 1 - i)
        for key, value in gradient_of(loss, weights).items():
            expected[key] = expected.get(key, 0.0) + decay * value
    version = 2 if case.is_stale else 0
    if case.num_ranks == 1:
        trained = make(case.settings, tmp_path)
        trained.step(groups, version)
    else:
        ranked = make(case.settings, tmp_path)
        try:
            ranked.step(groups, version)
            ranked.save(tmp_path / "states").result()
        finally:
            ranked.close()
        trained = make({**case.settings, "num_ranks": 1}, tmp_path)
        trained.load(tmp_path / "states")
    assert_same(trained_gradient(trained.states()), expected)


def test_policy_and_critic_gradients_equal_ppos(tmp_path):
    """A critic that knows something: values, GAE, normalised advantages, clipped losses."""
    discount, lam = 0.95, 0.9
    groups = sampled()
    data = read(groups)
    model = reference_model(0, tmp_path)
    reference_model(1, tmp_path)
    kwargs = {"discount": discount, "lam": lam, "is_normalised": True}
    trained = make({"algorithm": "ppo", "advantage_kwargs": kwargs}, tmp_path)
    critic = {name: t for name, t in trained.states().items() if name.startswith("critic.weights.")}
    head = critic["critic.weights.head.weight"]
    with torch.no_grad():
        head.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    trained.step(groups, 0)

    trunk = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    w = head.detach().double().clone().requires_grad_()
    b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    values = [hidden_states(model, row, trunk) @ w[0] + b for row in data.rows]
    raw = [
        generalised(token_rewards(data, row.trajectory), v.tolist(), discount, lam)
        for row, v in zip(data.rows, values, strict=True)
    ]
    every = [a for advantages in raw for a in advantages]
    mean, deviation = sum(every) / len(every), std(every) + 1e-6
    weights = dict(model.named_parameters())
    policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
    for row, advantages, v in zip(data.rows, raw, values, strict=True):
        logp, _ = scores(model, row, weights)
        normalised = [(a - mean) / deviation for a in advantages]
        old = torch.tensor(row.old, dtype=torch.float64)
        policy_loss = policy_loss + ppo(0.2, 0.2)(logp, old, normalised).sum() / len(every)
        returns = torch.tensor(advantages, dtype=torch.float64) + v.detach()
        value_loss = value_loss + 0.5 * ((v - returns) ** 2 / 2).sum() / len(every)
    assert_same(trained_gradient(trained.states()), gradient_of(policy_loss, weights))
    leaves = {f"trunk.{name}": p for name, p in trunk.items()} | {"head.weight": w, "head.bias": b}
    found = trained_gradient(trained.states(), "critic.optimizer.adamw.")
    assert_same(found, gradient_of(value_loss, leaves))


def test_adapter_gradient_equals_that_of_its_product(tmp_path):
    """LoRA (Hu et al. 2021, eq. 3): W + alpha / r B A, of which A and B are trained."""
    pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
    groups = sampled()
    data = read(groups)
    model = reference_model(0, tmp_path)
    reference_model(1, tmp_path)
    trained = make({"lora": {"rank": 3, "alpha": 6.0}}, tmp_path)
    generator = torch.Generator().manual_seed(0)
    leaves = {}
    with torch.no_grad():
        for name, parameter in trained.decoder.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
                leaves[name] = parameter.detach().double().clone().requires_grad_()
    weights = dict(model.named_parameters())
    for name, down in leaves.items():
        if ".lora_A." in name:
            module = name.partition(".lora_A.")[0]
            up = leaves[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + 6.0 / 3 * up @ down
    # The policy is the adapted one; what was sampled is a little off from the one before.
    trained.step(groups, 0)
    members = set(range(len(data.groups)))
    loss = reference_loss(CASES["grpo"], data, model, weights, None, members)
    assert_same(trained_gradient(trained.states()), gradient_of(loss, leaves))
