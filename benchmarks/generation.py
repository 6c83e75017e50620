"""Tokens per CPU second of the embedded engine, next to transformers' `generate()`.

    python benchmarks/generation.py [--json]

Both sample with one thread from the same weights: equal lengths at batch 64, and ragged two-turn
episodes, where `generate()` computes the whole context again every turn. The roof is what torch's
matrix product reaches at the sizes of the decode step; ours is quicker on some processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import Decoder, build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.runs.speed import shape

MODELS = {
    "qwen3 0.4M (the starter policy's shape)": shape("0.4M"),
    "qwen2 2M": shape("2M"),
}
Episodes = list[tuple[list[int], list[int]]]
"""(prompt, new tokens of each turn)"""
Result = dict[str, float]

PROMPT, NEW, BATCH = 40, 64, 64
EPISODES, GROUP, RESPONSE = 128, 8, 8


def prompts(rng: random.Random, count: int, vocab: int, siblings: int = 1) -> list[list[int]]:
    found = [[rng.randrange(10, vocab) for _ in range(PROMPT)] for _ in range(count // siblings)]
    return [prompt for prompt in found for _ in range(siblings)]


def turn_lengths(rng: random.Random) -> list[list[int]]:
    """New tokens of each turn of each episode: a call of 15 to 40, an answer of 4 to 12."""
    return [[rng.randint(15, 40), rng.randint(4, 12)] for _ in range(EPISODES)]


class Embedded:
    def __init__(self, decoder: Decoder, num_slots: int) -> None:
        self.decoder, self.num_slots = decoder, num_slots

    def play(self, episodes: Episodes) -> tuple[int, float]:
        """(tokens, CPU seconds) of episodes given as (prompt, new tokens of each turn)."""

        async def episode(engine: EmbeddedEngine, index: int) -> int:
            prompt, lengths = episodes[index]
            ids, total = list(prompt), 0
            for turn, length in enumerate(lengths):
                params = SamplingParams(max_new_tokens=length, seed=index * 7 + turn)
                found = await engine.generate(ids, params, session=str(index))
                ids += [*found.token_ids, *range(1, 1 + RESPONSE)]
                total += len(found.token_ids)
            engine.release(str(index))
            return total

        async def main() -> tuple[int, float]:
            engine = EmbeddedEngine(self.decoder, num_slots=self.num_slots, max_context=256)
            await engine.start()
            start = time.process_time()
            totals = await asyncio.gather(*(episode(engine, i) for i in range(len(episodes))))
            spent = time.process_time() - start
            await engine.aclose()
            return sum(totals), spent

        return asyncio.run(main())


class Generate:
    """transformers, one call per turn, left-padded."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model

    def play(self, episodes: Episodes) -> tuple[int, float]:
        contexts = [list(prompt) for prompt, _ in episodes]
        total = 0
        start = time.process_time()
        for turn in range(len(episodes[0][1])):
            longest = max(map(len, contexts))
            ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts])
            mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
            lengths = [turns[turn] for _, turns in episodes]
            with torch.no_grad():
                out = self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max(lengths),
                    do_sample=True,
                    pad_token_id=0,
                    eos_token_id=None,
                )[:, longest:].tolist()
            # A row is done at its own length; the batch goes on until its longest is.
            for context, row, length in zip(contexts, out, lengths, strict=True):
                context += [*row[:length], *range(1, 1 + RESPONSE)]
                total += length
        return total, time.process_time() - start


def roof_gflops(config: DecoderConfig) -> float:
    """GFLOP/s of the feed-forward product at a batch of 128 rows, one thread."""
    x = torch.randn(128, config.hidden_size)
    w = torch.randn(2 * config.intermediate_size, config.hidden_size)
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(200):
            torch.nn.functional.linear(x, w)
        spent = time.process_time() - start
        best = max(best, 200 * 2 * x.numel() * w.shape[0] / spent / 1e9)
    return best


def compare(ours: Embedded, theirs: Generate, episodes: Episodes, rounds: int) -> Result:
    """Tokens per CPU second of both, best of `rounds`; the ratio is the rounds' median.

    A busy machine slows both, but not evenly over time: so they take turns.
    """
    for player in (ours, theirs):
        player.play(episodes[:8])  # warm up
    mine: list[float] = []
    reference: list[float] = []
    ratios: list[float] = []
    for _ in range(rounds):
        for player, speeds in ((ours, mine), (theirs, reference)):
            tokens, spent = player.play(episodes)
            speeds.append(tokens / spent)
        ratios.append(mine[-1] / reference[-1])
    return {
        "tokens_per_cpu_s": round(max(mine)),
        "generate_tokens_per_cpu_s": round(max(reference)),
        "ratio": round(statistics.median(ratios), 2),
    }


def measure(name: str, config: DecoderConfig) -> dict[str, object]:
    decoder = build_decoder(config, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(decoder, Path(folder) / "model")
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
    rng = random.Random(0)
    equal = [(p, [NEW]) for p in prompts(rng, BATCH, config.vocab_size)]
    ragged = list(
        zip(
            prompts(rng, EPISODES, config.vocab_size, siblings=GROUP),
            turn_lengths(rng),
            strict=True,
        )
    )
    ours, theirs = Embedded(decoder, num_slots=128), Generate(model)
    found: dict[str, object] = {"model": name}
    for label, episodes in (("equal", equal), ("ragged", ragged)):
        result = compare(ours, theirs, episodes, rounds=5)
        found |= {f"{label}_{key}": value for key, value in result.items()}
    weights = sum(p.numel() for n, p in decoder.named_parameters() if p.ndim == 2)
    roof = roof_gflops(config)
    flops = 2 * weights * float(str(found["equal_tokens_per_cpu_s"])) / 1e9
    return {**found, "roof_gflops": round(roof, 1), "roof_fraction": round(flops / roof, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows = [measure(name, config) for name, config in MODELS.items()]
    if arguments.json:
        print(json.dumps({"benchmark": "generation", "rows": rows}))
        return
    print(f"{'model':<42}{'case':<8}{'embedded':>10}{'generate':>10}{'ratio':>7}   tokens / CPU-s")
    for row in rows:
        for case in ("equal", "ragged"):
            print(
                f"{row['model']!s:<42}{case:<8}{row[f'{case}_tokens_per_cpu_s']:>10}"
                f"{row[f'{case}_generate_tokens_per_cpu_s']:>10}{row[f'{case}_ratio']:>7}"
            )
        print(
            f"{'':<42}matrix products: {row['roof_fraction']:.1%} of the roof of "
            f"{row['roof_gflops']} GFLOP/s"
        )


if __name__ == "__main__":
    main()
