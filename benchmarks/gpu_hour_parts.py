"""The parts of `gpu_hour.py`: each is called in a process of its own and writes one JSON file."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig, load_config
from areal_gym.errors import GymError, StopTraining
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.callbacks import Callback
from areal_gym.runs.train import train
from areal_gym.types import Group

QWEN3_06B: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    **{"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TOY: dict[str, Any] = QWEN3_06B | {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"vocab_size": 320, "max_position_embeddings": 2048},
}
Rows = list[dict[str, Any]]


class CannotRun(Exception):
    """The part cannot run here; the text says why."""


@dataclass(frozen=True)
class Job:
    """What the driver asks for."""

    part: str
    out: str
    model: str | None
    gpu: str
    is_toy: bool
    sglang_python: str | None
    limit_s: float
    uses_stand_in: bool = False

    @property
    def policy(self) -> Path:
        """The checkpoint: the user's, or the random one that the part "model" has made."""
        return Path(self.model or Path(self.out, "random-model"))

    def settings(self, *overrides: str) -> RunConfig:
        """Return settings of a run of this size."""
        dtype = "float32" if self.is_toy else "bfloat16"
        new, context = (8, 192) if self.is_toy else (256, 1024)
        return load_config(
            overrides=[
                *(f"engine.model={self.policy}", f"engine.max_context={context}"),
                *(f"engine.dtype={dtype}", f"trainer.dtype={dtype}", "trainer.optimizer=adamw"),
                *(f"rollout.max_new_tokens={new}", "rollout.filters=[]", "model.backend=auto"),
                *("trainer.lr=1e-6", "trainer.save_every=0", "eval.num_tasks=1"),
                f"trainer.tokens_per_microbatch={1024 if self.is_toy else 16_384}",
                *overrides,
            ]
        )


def row(
    figure: str, unit: str, measured: float | None, plan: float | None = None
) -> dict[str, Any]:
    return {"figure": figure, "unit": unit, "plan": plan, "measured": measured}


# ---- the model ----------------------------------------------------------------------------------


def make_model(job: Job) -> Rows:
    """Write a checkpoint of random weights, and a tokenizer, unless there are real ones."""
    import torch
    from transformers import Qwen3Config

    from areal_gym.models.hf.hf_loading import build_policy
    from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

    if job.model is None:
        sizes = TOY if job.is_toy else QWEN3_06B
        template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja")
        texts = ["Make 17 from 3, 4 and 5.", template.read_text()]
        tokenizer = build_tokenizer(texts, vocab_size=320)
        config = Qwen3Config(
            **sizes,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"),
            pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
        )
        policy = build_policy(config, seed=0)
        policy.network.to(torch.float32 if job.is_toy else torch.bfloat16)
        policy.network.save_pretrained(job.policy)
        save_tokenizer(tokenizer, job.policy, max_context=sizes["max_position_embeddings"])
    size = sum(file.stat().st_size for file in job.policy.glob("*.safetensors"))
    return [row("weights on disk", "GB", size / 1e9)]


# ---- steps of the trainer alone -----------------------------------------------------------------


def measure_step(job: Job, length: int, *, recomputes: bool) -> Rows:
    """Take packed steps on sequences of one length; the plan simulates the same step."""
    from areal_gym.plan.run_plan import plan_run
    from areal_gym.plan.simulated_trainers import full_group

    num_microbatches = 2 if job.is_toy else 4
    budget = 2 * length if job.is_toy else max(length, 16_384)
    num_rows = num_microbatches * (budget // length)
    config = job.settings(
        *(f"engine.max_context={length}", f"trainer.tokens_per_microbatch={budget}"),
        *("rollout.batch_groups=1", f"rollout.group_size={num_rows}"),
        *(f"trainer.recompute_layers={recomputes}", "model.backend=transformers"),
    )
    trainer = trainer_of(config)
    group = full_group(config, num_microbatches)
    trainer.step([group], 0)  # warms up
    steps = [trainer.step([group], version) for version in (1, 2, 3)]
    best = min(steps, key=lambda metrics: float(metrics["time/train_s"]))
    del trainer
    gc.collect()
    plan = plan_run(config, gpu=job.gpu, tokens_per_episode=length)
    peak = best.get("memory/gpu_peak_mb")
    tokens = num_rows * length
    return [
        row("tokens per second", "1/s", tokens / best["time/train_s"], tokens / _train_s(plan)),
        row("model FLOPs utilisation", "share", best.get("train/mfu")),
        row("seconds of a step", "s", best["time/train_s"], _train_s(plan)),
        row(
            "peak memory" if peak else "peak memory (not counted on a CPU)",
            "GB",
            None if peak is None else peak / 1e3,
            sum(plan.rank_bytes.values()) / 1e9,
        ),
    ]


def _train_s(plan: Any) -> float:
    return float(plan.seconds["train"])


def trainer_of(config: RunConfig) -> Any:
    """Return the trainer of the settings, in this process."""
    from areal_gym.runs.make_trainer import make_trainer

    return make_trainer(config, Path(config.engine.model))


# ---- runs ---------------------------------------------------------------------------------------


class Deadline(Callback):
    """Stops a run in an orderly way when its time is over."""

    def __init__(self, limit_s: float) -> None:
        self._end_s = time.monotonic() + limit_s

    def on_step(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        if time.monotonic() > self._end_s:
            raise StopTraining(f"its time is over after step {step}")


def run(job: Job, *overrides: str) -> tuple[RunDir, dict[str, Any]]:
    """Train with the settings until the deadline; return the run and its summary."""
    config = job.settings(*overrides)
    with tempfile.TemporaryDirectory(dir=job.out) as parent:
        directory = Path(parent, "run")
        summary = train(config, run_dir=directory, callbacks=[Deadline(0.8 * job.limit_s)])
        kept = Path(job.out, f"{job.part}-run")
        kept.mkdir(exist_ok=True)
        for file in ("metrics.jsonl", "plugins.json", "config.yaml", "log.txt"):
            if (directory / file).exists():
                (directory / file).replace(kept / file)
    return RunDir(kept), summary


def served(job: Job) -> list[str]:
    """Return the settings of one SGLang server beside the trainer, or of a stand-in for it."""
    command = [job.sglang_python or sys.executable, "-m", "sglang.launch_server"]
    arguments = ["--dtype", "bfloat16", "--mem-fraction-static", "0.35"]
    if job.is_toy or job.uses_stand_in:
        command, arguments = [sys.executable, "-m", "areal_gym.engines.sglang.fake"], []
    elif job.sglang_python is None and importlib.util.find_spec("sglang") is None:
        raise CannotRun("SGLang is not installed here: --sglang-python PYTHON names one")
    kwargs = {"num_servers": 1, "command": command, "server_args": arguments}
    return ["engine.id=sglang", f"engine.kwargs={json.dumps(kwargs)}"]


SHORT = ("env.id=math", "steps=2", "rollout.batch_groups=2", "rollout.group_size=4")


def measure_parity(job: Job, engine: Sequence[str]) -> Rows:
    """Compare the log-probabilities of engine and trainer, in the probe and in training."""
    directory, _ = run(job, *SHORT, *engine)
    gap = directory.read_provenance()["engine_gap"]
    trained = [metrics["train/engine_gap"] for metrics in directory.read_metrics()]
    return [
        row("log-probability gap, mean", "nats", gap["mean"]),
        row("log-probability gap, largest", "nats", gap["max"]),
        row("tokens compared", "", gap["num_tokens"]),
        row("gap in training, mean", "nats", max(trained)),
    ]


def measure_vllm(job: Job) -> Rows:
    """Compare the log-probabilities of tokens that vLLM has sampled with the trainer's."""
    if importlib.util.find_spec("vllm") is None:
        raise CannotRun("vLLM is not installed in this environment")
    from vllm import LLM, SamplingParams, TokensPrompt

    from areal_gym.trainer.batch.sequences import Sequence as TokenSequence

    prompts = [tuple(range(10 + i, 42 + i)) for i in range(8)]
    config = job.settings()
    llm = LLM(
        model=str(job.policy),
        dtype=config.engine.dtype,
        max_model_len=config.engine.max_context,
        gpu_memory_utilization=0.35,
        enforce_eager=True,
    )
    plain = SamplingParams(temperature=1.0, max_tokens=32, logprobs=0, seed=0, ignore_eos=True)
    given = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    rows = []
    for index, output in enumerate(llm.generate(given, plain)):
        ids = tuple(output.outputs[0].token_ids)
        found = zip(output.outputs[0].logprobs, ids, strict=True)
        logprobs = tuple(float(choices[id].logprob) for choices, id in found)
        prompt = prompts[index]
        rows.append(
            TokenSequence(
                token_ids=(*prompt, *ids),
                loss_mask=(False,) * len(prompt) + (True,) * len(ids),
                old_logprobs=(0.0,) * len(prompt) + logprobs,
                versions=(-1,) * len(prompt) + (0,) * len(ids),
                group_id=index,
                trajectory_id=index,
            )
        )
    scores = trainer_of(config).score(rows)
    gaps = [
        abs(float(ours) - theirs)
        for scored, sequence in zip(scores, rows, strict=True)
        for ours, theirs in zip(scored.tolist(), sequence.old_logprobs[-len(scored) :], strict=True)
    ]
    return [
        row("log-probability gap, mean", "nats", sum(gaps) / len(gaps)),
        row("log-probability gap, largest", "nats", max(gaps)),
        row("tokens compared", "", len(gaps)),
    ]


def measure_publication(job: Job, sync: str) -> Rows:
    """Time a publication to a server on the same machine."""
    from areal_gym.plan.run_plan import plan_run

    # NCCL takes one process for each GPU, and server and trainer share this one.
    kwargs = {"backend": "gloo"} if sync == "distributed" else {}
    settings = [*SHORT, *served(job), "steps=3"]
    settings.append(f"trainer.weight_sync={json.dumps({'id': sync, 'kwargs': kwargs})}")
    directory, _ = run(job, *settings)
    seconds = [metrics["time/publish_s"] for metrics in directory.read_metrics()]
    plan = plan_run(job.settings(*settings, "model.backend=transformers"), gpu=job.gpu)
    planned = float(plan.seconds["publish"])
    return [row(f"publication by {sync}", "s", min(seconds[1:] or seconds), planned)]


def measure_gsm8k(job: Job, eta: int) -> Rows:
    """Train on GSM8K as long as the time lasts; at toy size, on generated questions."""
    if job.is_toy:
        size = ("env.id=math", "steps=3", "rollout.batch_groups=2", "rollout.group_size=2")
        settings = [*size, "engine.id=embedded"]
    elif job.model is None:
        raise CannotRun("no weights to learn with: --model QWEN3_0.6B_DIR")
    else:
        settings = ["env.id=math/gsm8k", "steps=1000", "eval.num_tasks=256", *served(job)]
        settings += ["rollout.batch_groups=16", "rollout.group_size=8", "rollout.max_in_flight=256"]
        settings += ["rollout.template_kwargs={enable_thinking: false}"]
    directory, summary = run(job, *settings, f"rollout.max_staleness={eta}")
    steps = list(directory.read_metrics())
    seconds = sum(step["time/step_s"] for step in steps)
    return [
        row("steps taken", "", len(steps)),
        row("seconds of a step", "s", seconds / len(steps)),
        row("staleness, mean of the last step", "versions", steps[-1]["rollout/staleness_mean"]),
        row("reward of the first step", "", steps[0]["reward/mean"]),
        row("reward of the last step", "", steps[-1]["reward/mean"]),
        row("held-out accuracy before", "share", summary.get("heldout_before")),
        row("held-out accuracy after", "share", summary.get("heldout_after")),
    ]


PARTS: Mapping[str, Callable[[Job], Rows]] = {
    "model": make_model,
    "step-4k": lambda job: measure_step(job, 128 if job.is_toy else 4096, recomputes=False),
    "step-16k": lambda job: measure_step(job, 512 if job.is_toy else 16_384, recomputes=True),
    "parity-sglang": lambda job: measure_parity(job, served(job)),
    "parity-embedded": lambda job: measure_parity(job, ["engine.id=embedded"]),
    "parity-vllm": measure_vllm,
    "publish-disk": lambda job: measure_publication(job, "disk"),
    "publish-tensor": lambda job: measure_publication(job, "tensor"),
    "publish-distributed": lambda job: measure_publication(job, "distributed"),
    "gsm8k-eta0": lambda job: measure_gsm8k(job, 0),
    "gsm8k-eta2": lambda job: measure_gsm8k(job, 2),
    "gsm8k-eta4": lambda job: measure_gsm8k(job, 4),
}


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.is_toy:
        import torch

        torch.set_num_threads(1)
    try:
        result = {"status": "ok", "reason": "", "rows": PARTS[job.part](job)}
    except CannotRun as error:
        result = {"status": "skipped", "reason": str(error), "rows": []}
    except GymError as error:
        hints = "; ".join(hint for hint in error.hints if hint)
        result = {"status": "failed", "reason": f"{error.message} ({hints})"[:500], "rows": []}
    Path(job.out, f"{job.part}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
