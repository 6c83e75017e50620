"""Run directories to be looked at, made without any training."""

import random

import yaml

from areal_gym.config import RunConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.types import StopReason, Task, TokenSpan, Trajectory, Turn

WORDS = "the sum of two numbers is easy to see"


def trajectory(place, step=1, *, num_tokens=6, group_size=4, rng=None, **facts):
    """One with two turns and a tool call between them; `facts` replace its fields."""
    rng = rng or random.Random(place)
    version = max(0, step - 1 - place % 2)
    half = num_tokens // 2
    reward = float(rng.random() < 0.5)
    fields = {
        "id": f"g{place // group_size:04d}-{place % group_size}",
        "group_id": f"g{place // group_size:04d}",
        "task": Task(id=f"train/{place // group_size}", data={"answer": str(place)}),
        "env_id": "tir" if place % 3 else "math",
        "spans": (
            TokenSpan(origin="prompt", token_ids=(1, 2, 3)),
            sampled(rng, half, version, 0),
            TokenSpan(origin="env", token_ids=(4, 5), turn=1),
            sampled(rng, num_tokens - half, version, 1),
        ),
        "turns": (
            Turn(finish_reason="stop", engine_s=0.2, env_s=0.05, tool_s=0.04),
            Turn(
                finish_reason="stop", reward=reward, reward_parts={"answer": reward}, engine_s=0.1
            ),
        ),
        "messages": (
            {"role": "system", "content": "Put the answer into a box."},
            {"role": "user", "content": f"How much is {place} + {step}?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call0",
                        "type": "function",
                        "function": {
                            "name": "python",
                            "arguments": {"code": f"print({place} + {step})"},
                        },
                    }
                ],
            },
            {"role": "tool", "name": "python", "content": str(place + step)},
            {"role": "assistant", "content": f"\\boxed{{{place + step}}} " + WORDS},
        ),
        "stop_reason": StopReason.MAX_TURNS if place % 7 == 3 else StopReason.COMPLETED,
        "seed": place,
    }
    return Trajectory(**{**fields, **facts})


def sampled(rng, num, version, turn):
    ids = tuple(rng.randrange(6, 60) for _ in range(num))
    logprobs = tuple(-rng.expovariate(2) for _ in range(num))
    return TokenSpan(
        origin="policy", token_ids=ids, logprobs=logprobs, policy_version=version, turn=turn
    )


def trained(trajectories):
    """What a trainer would say of them."""
    for place, one in enumerate(trajectories):
        old = [p for span in one.spans if span.logprobs for p in span.logprobs]
        advantage = 0.5 if one.reward else -0.5
        yield {
            "trajectory": place,
            "advantage": advantage,
            "advantages": [advantage] * len(old),
            "logprobs": [round(p + 0.1, 5) for p in old],
        }


def metrics(step):
    return {
        "step": step,
        "reward/mean": 0.2 + 0.05 * step,
        "reward/pass@1": 0.2 + 0.05 * step,
        "reward/pass@4": min(1.0, 0.4 + 0.05 * step),
        "train/approx_kl": 0.001 * step,
        "train/entropy": 1 / step,
        "train/clip_fraction": 0.01,
        "rollout/staleness_mean": 0.5,
        "rollout/staleness_max": 1.0,
        "rollout/stop/completed": 0.9,
        "rollout/stop/max_turns": 0.1,
        "time/wait_s": 1.0,
        "time/train_s": 2.0,
        "time/publish_s": 0.1,
        "time/step_s": 3.1,
        "time/overlap_efficiency": 0.7,
        "limited_by": "training",
    }


def evaluation(step, accuracy):
    report = {"pass@1": accuracy, "pass@1_low": accuracy - 0.05, "pass@1_high": accuracy + 0.05}
    return {"step": step, "sampled": report, "greedy": report}


def add_step(run, step, trajectories):
    run.append_metrics(metrics(step))
    run.save_trained(trained(trajectories), step=step)
    run.save_trajectories(trajectories, name=step)


def make_run(path, *, num_steps=3, num_trajectories=16, is_finished=True, **settings):
    """A whole run directory; `settings` go into its configuration."""
    with RunDir.open(path) as run:
        config = RunConfig.model_validate({"steps": num_steps, **settings})
        run.save_config(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        run.save_provenance([], "0123456789abcdef")
        run.append_evaluation(evaluation(0, 0.25))
        for step in range(1, num_steps + 1):
            add_step(run, step, [trajectory(i, step) for i in range(num_trajectories)])
        run.append_evaluation(evaluation(num_steps, 0.75))
        if is_finished:
            run.save_summary({"num_steps": num_steps, "train_s": 12.5})
    return path
