"""The built-in environments."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import BenchmarkSpec, EnvSpec, RetrieverSpec, RewardSpec, hookimpl

_HALVES = ({"id": "tir", "weight": 0.5}, {"id": "math", "weight": 0.5})
_MATH, _TAU2 = "math:MathEnv", "tau2.tau2_env:Tau2Env"
_BENCHMARK = "tools multi-turn user benchmark"

# Id, class, tags, summary, arguments.
_ENVS: tuple[tuple[str, str, str, str, dict[str, object]], ...] = (
    ("choice", "choice:ChoiceEnv", "choice single-turn generated jsonl",
     "multiple-choice questions", {}),
    ("code", "code.code_env:CodeEnv", "code single-turn generated jsonl",
     "write a function that hidden tests call in a sandbox", {}),
    ("countdown", "countdown:CountdownEnv", "math single-turn generated",
     "reach a target with given numbers", {}),
    ("mix", "mix:MixedEnv", "multi-turn generated",
     "several environments in one run, by weight", {"envs": _HALVES}),
    ("nim", "nim:NimEnv", "game roles multi-turn generated",
     "two roles take stones in turn: self-play with a known solution", {}),
    ("online", "online_env:OnlineEnv", "gateway",
     "no environment: outside programs call the policy and post rewards", {}),
    ("prompts", "prompts:PromptsEnv", "tools multi-turn data",
     "your own prompts, reward and tools: --data, --reward, --tools", {}),
    ("search", "search.search_env:SearchEnv", "tools multi-turn generated jsonl",
     "multi-hop questions with a search engine", {}),
    ("shapes", "shapes:ShapesEnv", "images multi-turn generated",
     "questions about drawn pictures: for policies that see", {}),
    ("tir", "tir:TirEnv", "math tools multi-turn generated",
     "arithmetic with a Python sandbox", {}),
    ("math", _MATH, "math single-turn generated jsonl",
     "arithmetic and word problems, or a file of questions", {}),
    ("math/multi-turn", _MATH, "math multi-turn generated jsonl",
     "as math, with feedback and more tries", {"max_turns": 3}),
    ("math/gsm8k", _MATH, "math single-turn data",
     "grade-school word problems (GSM8K)", {"tasks": "gsm8k"}),
    ("math/math500", _MATH, "math single-turn data",
     "competition problems (MATH, held out: MATH-500)", {"tasks": "math500"}),
    ("tau2", _TAU2, "tools multi-turn user generated",
     "customer service in a library of tools: the built-in domain of tau2", {"domain": "mock"}),
    ("tau2/mock", _TAU2, "tools multi-turn user generated",
     "the built-in domain of tau2 by its full name", {"domain": "mock"}),
    ("tau2/retail", _TAU2, _BENCHMARK,
     "customer service in a shop, verdicts as in tau2-bench", {"domain": "retail"}),
    ("tau2/airline", _TAU2, _BENCHMARK,
     "customer service of an airline, verdicts as in tau2-bench", {"domain": "airline"}),
    ("tau2/telecom", _TAU2, _BENCHMARK,
     "customer service of a carrier, verdicts as in tau2-bench", {"domain": "telecom"}),
)  # fmt: skip

_BENCHMARKS = (
    ("gsm8k", "1,319 grade-school word problems"),
    ("math500", "500 competition problems of MATH"),
    ("aime24", "30 problems of the AIME 2024, 16 samples each"),
    ("aime25", "30 problems of the AIME 2025, 16 samples each"),
    ("aime26", "30 problems of the AIME 2026, 16 samples each"),
    ("gpqa-diamond", "198 multiple-choice questions of doctoral physics, chemistry, biology"),
    ("humaneval+", "164 Python functions, tests of EvalPlus"),
    ("mbpp+", "378 small Python functions, tests of EvalPlus"),
    ("tau2-retail", "customer service in a shop, with a simulated customer"),
    ("tau2-airline", "customer service of an airline, with a simulated customer"),
    ("tau2-telecom", "customer service of a carrier, with a simulated customer"),
)

# Adapters to other libraries: id, class, the argument that stands after the colon of the id,
# summary, required packages.
_ADAPTERS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("gymnasium", "adapters.gymnasium:GymnasiumEnv", "name",
     "an environment of Gymnasium, in words", ()),
    ("harbor", "harbor.harbor_env:HarborEnv", "path",
     "tasks that are folders with an image, an instruction and tests", ()),
    ("reasoning_gym", "adapters.reasoning_gym:ReasoningGymEnv", "dataset",
     "generated problems: leg_counting and a hundred more kinds", ("reasoning_gym",)),
    ("textarena", "adapters.textarena:TextArenaEnv", "game",
     "a game of TextArena for one player", ("textarena",)),
    ("openenv", "adapters.openenv:OpenEnvEnv", "url",
     "an environment behind an OpenEnv server", ("openenv",)),
    ("verifiers", "verifiers.verifiers_env:VerifiersEnv", "id",
     "an environment of verifiers 0.3 or 0.4, from a Python of its own", ()),
    ("remote", "server.remote_env:RemoteEnv", "url",
     "an environment served by areal-gym serve-env", ()),
)  # fmt: skip


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    """Offer the environments that come with areal-gym."""
    for id, place, words, summary, kwargs in _ENVS:
        place, tags = f"areal_gym.envs.{place}", tuple(words.split())
        yield EnvSpec(id=id, entry_point=place, summary=summary, kwargs=kwargs, tags=tags)
    for id, place, argument, summary, requires in _ADAPTERS:
        yield EnvSpec(
            id=id,
            entry_point=f"areal_gym.envs.{place}",
            summary=summary,
            tags=("adapter",),
            argument=argument,
            requires=requires,
            extra=id.replace("_", "-") if requires else "",
        )


@hookimpl
def register_benchmarks() -> Iterable[BenchmarkSpec]:
    """Offer the benchmarks that areal-gym knows; their objects have all that is known of each."""
    for id, summary in _BENCHMARKS:
        name = id.replace("-", "_").replace("+", "_plus").upper()
        place = f"areal_gym.envs.benchmarks.known:{name}"
        yield BenchmarkSpec(id=id, entry_point=place, summary=summary)


@hookimpl
def register_retrievers() -> Iterable[RetrieverSpec]:
    """Offer the retrievers that come with areal-gym."""
    for id, name, summary in (
        ("bm25", "Bm25Retriever", "BM25 over a local index"),
        ("http", "HttpRetriever", "a server with the HTTP API of Search-R1"),
    ):
        entry_point = f"areal_gym.envs.search.retrievers:{name}"
        yield RetrieverSpec(id=id, entry_point=entry_point, summary=summary)


# Id, object, summary, required packages.
_REWARDS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("code", "envs.graded_rewards:Code", "the share of tests that the code passes", ()),
    ("exact", "rewards.text_rewards:Exact", "1 if the text is the answer", ()),
    ("format", "rewards.text_rewards:Format", "1 for text in the given tags, in order", ()),
    ("json_schema", "rewards.limited_rewards:JsonSchema",
     "1 for JSON that fits a schema", ("jsonschema",)),
    ("judge", "rewards.judge:Judge", "the score of a language model with a rubric", ()),
    ("length", "rewards.text_rewards:Length", "1 for a length within limits", ()),
    ("math", "envs.graded_rewards:Math", "1 for the right answer, by number or algebra", ()),
    ("regex", "rewards.limited_rewards:Regex", "1 if a pattern is found", ()),
)  # fmt: skip


@hookimpl
def register_rewards() -> Iterable[RewardSpec]:
    """Offer the rewards that come with areal-gym."""
    for id, place, summary, requires in _REWARDS:
        entry_point = f"areal_gym.{place}"
        yield RewardSpec(id=id, entry_point=entry_point, summary=summary, requires=requires)
