"""What tests type in place of the docs' placeholders, what they do not run, and why.

Patterns are regular expressions; `test_code_blocks.py` finds rows that nothing uses.
"""

from dataclasses import dataclass

from tests._support.small_vision_starter import SmallVisionRecipe

SUBSTITUTIONS = (
    (r"\bNAME\b", "math"),
    (r"\bRUN --refused", "runs/refused --refused"),
    (r"\bRUN\b", "runs/ended"),
    (r"\bDIR\b", "{policy}"),
    (r"(?<=--model )Qwen/Qwen3-0\.6B", "{policy}"),
)
"""(text of the docs, text that is typed), applied in this order."""

PYTHON_SUBSTITUTIONS = ((r"path/to/policy", "{policy}"), (r"step-000\d00", "step-000001"))

SMALL = (
    *("steps=1", "rollout.group_size=2", "rollout.batch_groups=2", "rollout.max_in_flight=4"),
    *("rollout.max_new_tokens=16", "engine.num_slots=8", "eval.num_tasks=2"),
)
# Filters need a policy that is sometimes right: it says 2.
TWOS = ("engine.model={policy}", "env.kwargs.tasks=twos.jsonl", "rollout.group_size=4")
ONE_OF_EACH = ("engine.kwargs.num_servers=1", "trainer.num_ranks=1")
FEW_EXAMPLES = ("data.num_examples=16", "data.batch_size=4")
EXTRA_ARGUMENTS = (
    (r"^areal-gym (-p \S+ )?train (?!.*(--dry-run|rehearsal))", SMALL),
    (r"^areal-gym train -c rehearsal", (*ONE_OF_EACH, *SMALL[1:5], "eval.num_tasks=2")),
    (r"^areal-gym train .*(filters=.*(zero|rate)|=dapo)", TWOS),
    (r"^areal-gym train .*(-c|--objective) .*(sft|dpo|reward|distill)", FEW_EXAMPLES),
    (r"^areal-gym train --data (?!.*--dry-run)", ("engine.max_context=256",)),
    (r"^areal-gym eval ", SMALL[1:]),
    (r"^areal-gym check ", ("--tasks", "1", "--concurrent", "8")),
)
"""(pattern of commands, arguments that make them small)"""

WARM_START = {
    **{"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
    **{"ffn_size": 64, "num_tokenizer_texts": 60, "batch_size": 4, "num_probes": 2},
    **{"warmup_steps": 1, "min_hold_steps": 5, "max_hold_steps": 5, "decay_steps": 5},
}
"""Arguments of `areal_gym.warm_start.starter_policy.Recipe`: 10 batches of 4."""


@dataclass(frozen=True, kw_only=True)
class VisionWarmStart(SmallVisionRecipe):
    """Two batches of 4 for a policy that sees."""

    batch_size: int = 4
    num_probes: int = 2
    max_steps: int = 2


SAYS_TWO = (
    *("--objective", "sft", "data.file=dialogues.jsonl", "data.batch_size=8", "steps=30"),
    *("trainer.lr=0.02", "eval.num_tasks=2", "engine.model=runs/ended/checkpoints/step-000001"),
)
NOT_FINITE = (
    *("--env", "tir", *SMALL, "steps=9", "trainer.algorithm=reinforce"),
    "trainer.reward={bias: 1.0, scale: 1.0e+300}",
)
RUNS = (
    ("runs/ended", ("--env", "tir", *SMALL), 0),
    ("runs/says-two", SAYS_TWO, 0),  # a policy that says 2 or 3
    ("runs/refused", NOT_FINITE, 3),
)
"""(directory, arguments of `areal-gym train`, exit code): runs from before a page is followed."""

EXIT_CODES = ((r"--refused", 1),)
"""(pattern of commands, exit code): 0 for all others."""

NOT_RUN = (
    (r"--benchmark ", "needs data that are not shipped"),
    (r"^make ", "installs from a registry"),
    (r"\bpip install (?!-e)|-m venv", "asks a registry"),
    (r"^source ", "makes this very environment the shell's"),
    (r"^ray start", "several machines"),
    (r"doctor", "what is missing here decides its exit code: tests/cli/test_doctor.py"),
    (r"online", "a gateway without programs: tests/examples/test_agents.py"),
    (r"^areal-gym (serve|view(?!.*--export))", "serves until Ctrl-C: tests/cli/test_servers.py"),
    (r"http://", "asks another server: tests/cli/test_servers.py, tests/sglang"),
    (r"sglang", "starts SGLang: tests/sglang"),
    (r"vllm", "starts vLLM: tests/vllm"),
    (r"weight_relay", "serves until it is ended: tests/trainer/test_delta.py"),
    (r"verifiers:", "needs a Python that has verifiers: tests/envs/test_verifiers.py"),
    (r"mcp-server-", "a server that is no part of this: tests/envs/test_mcp_tools.py"),
    (r"tau2/(airline|retail)|--fixtures|data pull", "tau2-bench's data: tests/envs/tau2"),
    (r"cluster\.address=", "starts a Ray, or joins one: tests/distributed"),
    (r"openai/gsm8k:main", "asks the Hugging Face hub"),
    (r"^areal-gym train -c examples/recipes/qwen3.*Qwen/", "GPUs, and a model of the hub"),
    (r"langchain_agent", "LangChain is not installed: tests/examples/test_frameworks.py"),
    (r"^python examples/minimal_grpo", "tests/examples/test_minimal_grpo.py"),
    (r"harbor:", "starts containers: tests/envs/harbor"),
    (r"textarena:", "not installed: tests/envs/test_adapters.py"),
)
"""(pattern, reason): of such commands only the names are checked."""

DRAWINGS = (
    (r"^(?:rewards|tasks) ->|^this process +Ray|^first prompt \||^drift +=",),
    (r"^areal-gym train, eval, view|^runs/NAME|^message = await episode",),
    (r"^import areal_gym\n\nareal_gym\.train\(",),  # tests/runs/test_own_prompts.py runs it
    (r"^VLLM_SERVER_DEV_MODE=1",),  # another program's command
)
