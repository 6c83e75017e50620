"""The rewards `math` and `code`: the graders of the environments of these names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from areal_gym.envs.code.code_env import find_code, run_tests
from areal_gym.envs.code.code_tasks import code_draft
from areal_gym.envs.grading import agrees, extract_answer
from areal_gym.envs.judging import JudgingBoundary
from areal_gym.errors import DataError, EnvError
from areal_gym.plugins import registry
from areal_gym.rewards.base import Score
from areal_gym.rewards.text_rewards import ColumnReward
from areal_gym.sandbox.base import Sandbox
from areal_gym.tasks import SourceRow


class Math(ColumnReward):
    r"""1 if the final answer is the right one, as a number or by algebra; else 0.

    The final answer stands in `\boxed{}`, after `####`, or after "the answer is".

    Args:
        answer: the column of the right answer, or of a list of right answers. One that holds `####`
            counts from there on.
    """

    timeout_s: ClassVar[float] = 300.0

    def __init__(self, *, answer: str = "answer") -> None:
        super().__init__(answer)

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return 1.0 or 0.0.

        Raises:
            SandboxError: the process that does algebra failed.
        """
        golds = self.golds(row)
        answer = None
        with JudgingBoundary():
            answer = extract_answer(completion)
        if answer is None:
            return 0.0
        for gold in golds:
            if await agrees(answer, gold):
                return 1.0
        return 0.0


class Code(ColumnReward):
    """The share of tests that the completion's code passes, in a sandbox.

    The code is the last fenced block. The tests are never in the reach of the code.

    Args:
        tests: the column of the tests: a list of statements (`assert f(2) == 4`), a list of
            `{"args": [...], "result": ...}` with the column `entry_point` beside it, or the text of
            HumanEval's `def check(candidate)`, also with `entry_point`.
        all_or_nothing: whether all tests must pass.
        sandbox: the id of the sandbox: areal-gym list sandboxes.
    """

    timeout_s: ClassVar[float] = 600.0

    def __init__(
        self,
        *,
        tests: str = "tests",
        all_or_nothing: bool = False,
        sandbox: Sandbox | str = "process",
    ) -> None:
        super().__init__(tests)
        self._all_or_nothing = all_or_nothing
        self._sandbox = (
            registry().get("sandboxes", sandbox).id if isinstance(sandbox, str) else sandbox
        )

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> Score:
        """Return the share, and the counts of tests as metrics.

        Raises:
            EnvError: the row has no tests in one of these forms.
            SandboxError: the sandbox failed.
        """
        data = _task_data(self.gold(row), row)
        tests: Sequence[Mapping[str, Any]] = data["checks"]
        code = find_code(completion)
        num_passed = 0
        if code is not None:
            boundary = JudgingBoundary()
            num_passed, _ = await run_tests(code, data, tests, self._sandbox, boundary)
        share = num_passed / len(tests)
        reward = float(num_passed == len(tests)) if self._all_or_nothing else share
        return Score(reward=reward, metrics={"tests": len(tests), "tests_passed": num_passed})


def _task_data(tests: Any, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of a task of `code`, whose question the tests do not need."""
    prompt = row.get("prompt")
    fields: dict[str, Any] = {
        "question": "-",
        "text": "-",
        "prompt": prompt if isinstance(prompt, str) and prompt.strip() else "-",
        "entry_point": row.get("entry_point"),
    }
    if isinstance(tests, str) and fields["entry_point"] and "def check(" in tests:
        fields["test"] = tests
    elif isinstance(tests, str):
        fields["test_list"] = [tests]
    elif isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests) and tests:
        fields["test_list"] = list(tests)
    else:
        fields["tests"] = tests
    try:
        return code_draft(SourceRow("the row", "row", fields)).data
    except DataError as error:
        raise EnvError(str(error)) from None
