"""Directories of evaluations, made without any policy."""

from areal_gym.run_dir.evaluation_writer import EvaluationWriter
from areal_gym.types import StopReason, Task
from tests._support.run_dirs import trajectory

FACTS = {
    "env": "math",
    "env_kwargs": {"level": 2},
    "benchmark": None,
    "split": "test",
    "policy": {"model": "starter", "run": "runs/math-1", "step": 40},
    "agent": "chat",
    "engine": "embedded",
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 64},
    "seed": 0,
    "num_tasks": 4,
    "num_samples": 2,
    "success_reward": 1.0,
}


def sample(index, attempt, *, is_failed=False):
    """The trajectory of a sample; whether it succeeds depends on its place."""
    failure = {"stop_reason": StopReason.ENGINE_ERROR, "error": "gone"} if is_failed else {}
    return trajectory(
        index * 7 + attempt,
        id=f"eval-{index:06d}-{attempt}",
        group_id=f"eval-{index:06d}",
        env_id="math",
        task=Task(id=f"test/{index}", data={"answer": str(index)}, split="test"),
        **{"stop_reason": StopReason.COMPLETED, **failure},
    )


def write_evaluation(path, samples, *, scores=None, mode="new", **facts):
    """An evaluation with these samples (index, attempt); unfinished without scores."""
    with EvaluationWriter(path, {**FACTS, **facts}, settings="env: {}\n", mode=mode) as writer:
        writer.begin(8)
        for index, attempt in samples:
            add(writer, index, attempt)
        if scores is not None:
            writer.finish(scores)
    return writer


def add(writer, index, attempt, *, is_failed=False):
    """Write a sample of `sample`."""
    trajectory = sample(index, attempt, is_failed=is_failed)
    writer.add_trajectory(trajectory)
    writer.add_sample(index, attempt, trajectory)
