"""An environment of verifiers 0.3: sums, with a tool."""

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def load_environment(size: int = 20):
    def right(completion, answer, **kwargs):
        if answer == "13":
            raise RuntimeError("unlucky")
        return float(answer in completion[-1]["content"])

    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(size)]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[right]))
