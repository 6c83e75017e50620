"""GRPO in one file, from top to bottom: a tiny transformer learns to sort three digits.

    python examples/minimal_grpo.py

Nothing is hidden behind plugins, servers or threads. What it takes from the package are the parts
that every algorithm shares: the decoder, the advantages, the loss, the packing of rows.

    prompt "7 2 5 ->", eight siblings each -> reward: share of the right digits -> advantage inside
    the group -> clipped loss on the sampled tokens -> one update -> again with the new weights

The model starts from random weights, so all it ever learns comes from the reward.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from areal_gym.models.tiny.decoder import Decoder, build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import LossInputs, aggregate, aggregation_weights, ppo_clip
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens

NUM_DIGITS = 3
ARROW = 10  # tokens 0 to 9 are the digits, 10 stands between question and answer
PROMPT_LENGTH = NUM_DIGITS + 1

CONFIG = DecoderConfig(
    architecture="qwen3",
    vocab_size=11,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.1,
)


def sample_prompt(rng: random.Random) -> list[int]:
    """A question: digits and the arrow."""
    return [rng.randrange(10) for _ in range(NUM_DIGITS)] + [ARROW]


def reward(prompt: list[int], answer: list[int]) -> float:
    """Share of the digits that stand where sorting puts them."""
    wanted = sorted(prompt[:NUM_DIGITS])
    return sum(a == b for a, b in zip(answer, wanted, strict=True)) / NUM_DIGITS


@torch.no_grad()
def generate(
    decoder: Decoder, prompts: list[list[int]], temperature: float = 1.0
) -> tuple[list[list[int]], list[list[float]]]:
    """Answers and the log-probability of each sampled token. (The package's engine has a cache.)"""
    rows = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in rows]
    for _ in range(NUM_DIGITS):
        batch = pack([Row(token_ids=row) for row in rows])
        hidden = decoder(batch)
        last = torch.tensor([index[-1] for index in batch.row_index])
        scores = (hidden[last] @ decoder.lm_head_weight.T).log_softmax(-1)
        if temperature == 0:
            chosen = scores.argmax(-1)
        else:
            chosen = torch.multinomial((scores / temperature).softmax(-1), 1).squeeze(1)
        for i, token in enumerate(chosen.tolist()):
            rows[i].append(token)
            logprobs[i].append(float(scores[i, token]))
    return [row[PROMPT_LENGTH:] for row in rows], logprobs


def train_step(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    rng: random.Random,
    num_prompts: int = 32,
    group_size: int = 8,
) -> float:
    """One GRPO step; returns the mean reward of its batch."""
    # 1. Rollouts: G siblings of every prompt.
    questions = [sample_prompt(rng) for _ in range(num_prompts)]
    prompts = [question for question in questions for _ in range(group_size)]
    answers, old_logprobs = generate(decoder, prompts)
    rewards_G = torch.tensor([reward(p, a) for p, a in zip(prompts, answers, strict=True)])

    # 2. Advantages: how much better than its siblings was each answer?
    group_ids_G = torch.arange(num_prompts).repeat_interleave(group_size)
    advantages_G = grpo(rewards_G, group_ids_G).float()

    # 3. Log-probabilities of the sampled tokens under the current weights, in one packed forward
    #    pass: each prompt is computed once for all its siblings.
    rows = [
        Row(token_ids=prompt + answer, num_shared=PROMPT_LENGTH)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    mask = (False,) * PROMPT_LENGTH + (True,) * NUM_DIGITS
    scores = score_tokens(decoder, pack(rows), [mask] * len(rows))

    # 4. The clipped loss, one number per token, averaged over all tokens.
    lengths = torch.full((len(rows),), NUM_DIGITS)
    old_T = torch.tensor(old_logprobs).flatten()
    batch = LossInputs(
        logprobs=scores.logprobs,
        proximal=old_T,
        old_logprobs=old_T,
        advantages=advantages_G.repeat_interleave(lengths),
        sequence_ids=torch.arange(len(rows)).repeat_interleave(lengths),
    )
    weights = torch.tensor(aggregation_weights("token_mean", lengths.tolist()))
    loss = aggregate(ppo_clip(batch).loss, weights.repeat_interleave(lengths))

    # 5. The update.
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    return float(rewards_G.mean())


def accuracy(decoder: Decoder, num_prompts: int = 256) -> float:
    """Share of questions sorted without a mistake, greedily, on questions of a fixed seed."""
    rng = random.Random(10**6)
    prompts = [sample_prompt(rng) for _ in range(num_prompts)]
    answers, _ = generate(decoder, prompts, temperature=0)
    return sum(reward(p, a) == 1 for p, a in zip(prompts, answers, strict=True)) / num_prompts


def main(num_steps: int, seed: int) -> tuple[float, float]:
    """Train and print; returns the accuracy before and after."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    decoder = build_decoder(CONFIG, seed=seed)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=2e-3, weight_decay=0.0)
    before = accuracy(decoder)
    start_s = time.perf_counter()
    for step in range(1, num_steps + 1):
        mean_reward = train_step(decoder, optimizer, rng)
        if step % 25 == 0 or step == num_steps:
            print(
                f"step {step:4d}  reward {mean_reward:.3f}  {time.perf_counter() - start_s:.0f} s"
            )
    after = accuracy(decoder)
    print(f"sorted without a mistake: {before:.2f} before, {after:.2f} after")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.seed)
