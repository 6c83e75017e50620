"""Prints the table of docs/benchmarks.md: python -m areal_gym.envs.benchmarks.benchmark_table."""

from __future__ import annotations

from areal_gym.envs.benchmarks.benchmark import Benchmark
from areal_gym.envs.benchmarks.left_out import LEFT_OUT
from areal_gym.plugins import registry


def benchmarks_table() -> str:
    """Return what is known of each built-in benchmark, in Markdown, a section each."""
    sections = []
    for entry in registry().entries("benchmarks"):
        if entry.plugin.distribution == "areal-gym":
            sections.append(_section(entry.load(), entry.spec.summary))
    reasons = "\n".join(f"- **{id}**: {reason}." for id, reason in LEFT_OUT.items())
    sections.append(f"### Left out\n\n{reasons}\n")
    return "\n".join(sections)


def _section(benchmark: Benchmark, summary: str) -> str:
    data = benchmark.data
    rows = {
        "environment": f"`{benchmark.env}`, split `{benchmark.split}`, {benchmark.num_tasks} tasks",
        "prompt": benchmark.prompt,
        "grader": benchmark.grader,
        "sampling": benchmark.sampling,
        "compares with": benchmark.compares_with,
        "data": "`areal-gym data pull tau2`" if data is None else data.source,
        "licence": benchmark.licence,
        "tested here": benchmark.tested,
    }
    lines = [f"| {name} | {text.replace('{}', '{ }')} |" for name, text in rows.items()]
    return "\n".join(
        [f"### {benchmark.id}", "", summary + ".", "", "| | |", "|---|---|", *lines, ""]
    )


if __name__ == "__main__":
    print(benchmarks_table(), end="")
