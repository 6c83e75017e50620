r"""The benchmarks that areal-gym knows. docs/benchmarks.md is made of this table.

Counts are those of the files that are named here. Data are not shipped.
"""

from __future__ import annotations

from areal_gym.envs.benchmarks.benchmark import Benchmark, DataFile

_GITHUB = "https://raw.githubusercontent.com"
_SIMPLE_RL = (
    f"{_GITHUB}/hkust-nlp/simpleRL-reason/cf1c7858bfc145a27aa733e75d930d34f0d318a6"
    "/examples/simplelr_math_eval/data"
)
_BOXED = r"the problem, after: Solve the problem. Put the final answer in \boxed{}."
_MATH_GRADER = "math: the last box or stated answer, equal by numbers or algebra"
_MATH_NUMBERS = (
    "reports with zero-shot chat prompts and a boxed answer; few-shot numbers and those of "
    "lm-evaluation-harness' exact match differ by points"
)

GSM8K = Benchmark(
    id="gsm8k",
    env="math",
    data=DataFile(
        place="gsm8k/test.jsonl",
        url=f"{_GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
        "/grade_school_math/data/test.jsonl",
        num_bytes=749738,
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
    ),
    num_tasks=1319,
    is_greedy=True,
    max_new_tokens=1024,
    max_context=2048,
    prompt=_BOXED,
    grader=_MATH_GRADER,
    compares_with=_MATH_NUMBERS,
    licence="MIT",
    tested="all gold answers are right",
)

MATH500 = Benchmark(
    id="math500",
    env="math",
    env_kwargs={"tasks": {"fields": {"question": "problem"}}},
    data=DataFile(
        place="math500/test.jsonl",
        url=f"{_SIMPLE_RL}/math500/test.jsonl",
        num_bytes=446564,
        sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
    ),
    num_tasks=500,
    is_greedy=True,
    max_new_tokens=4096,
    max_context=5120,
    prompt=_BOXED,
    grader=_MATH_GRADER,
    compares_with=f"{_MATH_NUMBERS}; reasoning models are reported with 4 or more samples: -k 4",
    licence="MIT (MATH; the choice of 500: MIT, openai/prm800k)",
    tested="all gold answers are right",
)


def _aime(year: int, data: DataFile, licence: str, tested: str) -> Benchmark:
    return Benchmark(
        id=f"aime{year % 100}",
        env="math",
        env_kwargs={"tasks": {"fields": {"question": "problem"}}},
        data=data,
        num_tasks=30,
        num_samples=16,
        temperature=0.6,
        top_p=0.95,
        max_new_tokens=30720,
        max_context=32768,
        prompt=_BOXED,
        grader=_MATH_GRADER,
        compares_with="avg@k of reports with temperature 0.6, top_p 0.95 and 32k tokens: pass@1 "
        "here is their mean over samples. 30 problems: the interval is wide whatever k is",
        licence=licence,
        tested=tested,
    )


AIME24 = _aime(
    2024,
    DataFile(
        place="aime/aime24.jsonl",
        url=f"{_SIMPLE_RL}/aime24/test.jsonl",
        num_bytes=14193,
        sha256="578ba9f47cbb1958e3e5882c40788de88338d913848da3a074e83946525d0e02",
    ),
    "the problems are the MAA's; the repository: MIT",
    "all gold answers are right",
)
_ARENA = "CC BY-NC-SA 4.0 (MathArena); the problems are the MAA's"
AIME25 = _aime(
    2025, DataFile(place="aime/aime25.jsonl", hub="MathArena/aime_2025"), _ARENA, "untested here"
)
AIME26 = _aime(
    2026, DataFile(place="aime/aime26.jsonl", hub="MathArena/aime_2026"), _ARENA, "untested here"
)

GPQA_DIAMOND = Benchmark(
    id="gpqa-diamond",
    env="choice",
    data=DataFile(
        place="gpqa/diamond.jsonl", hub="Idavidrein/gpqa", subset="gpqa_diamond", split="train"
    ),
    num_tasks=198,
    num_samples=4,
    temperature=0.6,
    top_p=0.95,
    max_new_tokens=30720,
    max_context=32768,
    prompt="the question with choices A to D in an order of their own, after: think step by step, "
    "the last line is: Answer: LETTER",
    grader="the last line 'Answer: LETTER', or a letter in the last box",
    compares_with="zero-shot chain-of-thought numbers (OpenAI's simple-evals and alike); each "
    "question has one order of its choices, which env.kwargs.order_seed changes",
    licence="CC BY 4.0; the hub asks you to accept its conditions: do not publish the questions",
    tested="untested here",
)

_CODE_NUMBERS = (
    "EvalPlus' leaderboard (greedy, base and extra tests), with another prompt: theirs is in "
    "evalplus; tests run in areal-gym's sandbox, with its limits"
)
HUMANEVAL_PLUS = Benchmark(
    id="humaneval+",
    env="code",
    env_kwargs={"all_or_nothing": True, "statements_s": 200.0},
    data=DataFile(
        place="evalplus/humaneval_plus.jsonl.gz",
        url=f"{_GITHUB}/evalplus/humanevalplus_release/200defce9e3429d28ca215b6dd061c0f7f31c18b"
        "/HumanEvalPlus-OriginFmt.jsonl.gz",
        num_bytes=1350689,
        sha256="daa7661c8189924068069b0872a440b491edb60f8bdf431d5957adc88d18bae5",
    ),
    num_tasks=164,
    is_greedy=True,
    max_new_tokens=2048,
    max_context=4096,
    prompt="Complete this Python function; write all of it: signature and docstring",
    grader="base and extra tests of EvalPlus 0.1.10 in the sandbox: all must pass",
    compares_with=_CODE_NUMBERS,
    licence="Apache-2.0 (HumanEval: MIT)",
    tested="the reference solutions of every eighth task pass, but HumanEval/32's: its test in "
    "this file unpacks a number and fails for every solution, so that 163 of 164 is the most",
)
MBPP_PLUS = Benchmark(
    id="mbpp+",
    env="code",
    env_kwargs={"all_or_nothing": True, "statements_s": 200.0},
    data=DataFile(
        place="evalplus/mbpp_plus.jsonl.gz",
        url=f"{_GITHUB}/evalplus/mbppplus_release/dadf43da556a00f7bacd71cb154f2932757d9144"
        "/MbppPlus-OriginFmt.jsonl.gz",
        num_bytes=549938,
        sha256="7a5aec547b134fa297ee6c45f829298aa3f58de02547b8d8a5c3d85d9cb10efc",
    ),
    num_tasks=378,
    is_greedy=True,
    max_new_tokens=2048,
    max_context=4096,
    prompt="the problem, the name of the function and its first test",
    grader="base and extra tests of EvalPlus (MBPP+ 0.2.0) in the sandbox: all must pass",
    compares_with=_CODE_NUMBERS,
    licence="Apache-2.0 (MBPP: CC BY 4.0)",
    tested="the reference solutions of every second task pass, but Mbpp/630's, whose values exceed "
    "the sandbox's memory or time",
)


def _tau2(domain: str, num_tasks: int) -> Benchmark:
    return Benchmark(
        id=f"tau2-{domain}",
        env=f"tau2/{domain}",
        split="base",
        num_tasks=num_tasks,
        num_samples=4,
        temperature=1.0,
        max_new_tokens=2048,
        max_context=32768,
        prompt="the benchmark's policy, tools in our words (docs: tau2), a customer by rules",
        grader="the benchmark's: final database, actions, communicated facts",
        compares_with="none as it stands: published pass^k have a language model as customer. "
        "With env.kwargs.user=URL and user_model as in the report, its pass^1 to pass^4",
        licence="MIT",
        tested="verdicts, against the benchmark's own code on recorded dialogues (docs: tau2)",
    )


TAU2_RETAIL = _tau2("retail", 114)
TAU2_AIRLINE = _tau2("airline", 50)
TAU2_TELECOM = _tau2("telecom", 114)
