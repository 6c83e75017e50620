"""What tests type in place of the docs' placeholders, what they do not run, and why.

Patterns are regular expressions; names in braces are those of `place.Names`.
`test_code_blocks.py` finds rows that nothing uses.
"""

SUBSTITUTIONS = (
    # Abbreviations.
    (r"^areal-gym ((?:data )?[\w-]+) \[OPTIONS\].*", r"areal-gym \1 --help"),
    (r"^areal-gym (train|eval|serve|serve-env|check|replay)$", r"areal-gym \1 --help"),
    (r"^areal-gym serve-env --mcp$", "areal-gym serve-env --help"),
    (r"^areal-gym eval (-k K|--json)$", r"areal-gym eval --env math \1"),
    (r"-k K", "-k 2"),
    (r"^areal-gym -p no:NAME \.\.\.$", "areal-gym -p no:loggers list"),
    (r"^areal-gym train --resume --out", "areal-gym train --resume steps=2 --out"),
    (r"--model URL$", "--model {chat}/v1 engine.kwargs.model=Ada --env math"),
    (r"--objective NAME", "--objective sft --env math"),
    (r"--sandbox NAME", "{snippets}"),
    (r"-c FILE key=value \.\.\.", "-c examples/recipes/math_tiny.yaml seed=1"),
    (r"--config my_run.yaml", "--config examples/recipes/tir_tiny.yaml engine.model={policy}"),
    (r" \.\.\. env", " --engine sglang --engine.url {sglang} engine.model={policy} env"),
    (r"sandbox.suite \[FILE\]", "sandbox.suite {snippets}"),
    (r" \[--[^]]*\]", ""),
    # Placeholders.
    (r"\bnew KIND NAME", "new loss mine"),
    (r"\bnew (\w+) NAME", r"new \1 mine"),
    (r"^areal-gym COMMAND", "areal-gym list"),
    (r"\b(?:NAME|ENV|ID)\b", "math"),
    (r"loss=my_loss", "loss=ppo_clip"),
    (r"\bAGENT\b", "chat"),
    (r"\bENGINE\b", "embedded"),
    (r"\bRUN --refused", "{refused} --refused"),
    (r"\bRUN\b|runs/tir-1 /data/runs", "{run}"),
    (r"--fixtures DIR", "--fixtures {fixtures}"),
    (r"data_dir=DIR", "data_dir={tau2}"),
    (r"\bDIR\b", "{policy}"),
    # Servers of the tests, on any port.
    (r"remote:http://HOST:PORT", "remote:{env}"),
    (r"--model http://HOST:PORT", "--model {chat}"),
    (r"user=http://HOST:PORT", "user={chat}"),
    (r"http://(?:HOST:PORT|10\.0\.0\.7:30000)", "{sglang}"),
    (r"http://localhost:8000/", "{retriever}/"),
    (r"^areal-gym data pull tau2$", "areal-gym data pull tau2 --base-url {published} --to pulled"),
    (r"/opt/sglang/bin/python -m sglang.launch_server", "{fake}"),
    (r"--port \d+", "--port 0"),
    (r"gateway=127\.0\.0\.1:\d+", "gateway=127.0.0.1:0"),
    (r"^areal-gym view(?!.*(--export|--help))", "areal-gym view --port 0"),
    (r"(sglang\.fake) (--model-path)", r"\1 --port 0 \2"),
    (r"\| jq$", "| python -m json.tool"),
)
"""(text of the docs, text that is typed), applied in this order."""

PYTHON_SUBSTITUTIONS = (
    (r"path/to/policy", "{policy}"),
    (r"step-000\d00", "step-000001"),
)
SMALL = (
    *("steps=1", "rollout.group_size=2", "rollout.batch_groups=2", "rollout.max_in_flight=4"),
    *("rollout.max_new_tokens=16", "engine.num_slots=8", "eval.num_tasks=2"),
)
EXTRA_ARGUMENTS = (
    (r"^areal-gym train (?!--resume)(?!.*(--dry-run|--help))", SMALL),
    # Filters need a policy that is sometimes right: it says 2.
    (
        r"^areal-gym train .*(filters=.*(zero|rate)|=dapo)",
        ("engine.model={policy}", "env.kwargs.path=twos.jsonl", "rollout.group_size=4"),
    ),
    (
        r"^areal-gym train .*(-c|--objective) .*(sft|dpo|reward|distill)",
        ("data.num_examples=16", "data.batch_size=4"),
    ),
    (r"^areal-gym eval (?!--help)", SMALL[1:]),
    (r"^areal-gym bench", ("rollout",)),
    (r"^areal-gym check (?!.*(--fixtures|--help))", ("--tasks", "1", "--concurrent", "8")),
)
"""(pattern of commands, arguments that make them small)"""

WARM_START = {
    **{"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
    **{"ffn_size": 64, "num_tokenizer_texts": 60, "batch_size": 4, "num_probes": 2},
    **{"warmup_steps": 1, "min_hold_steps": 5, "max_hold_steps": 5, "decay_steps": 5},
}
"""Arguments of `areal_gym.warm_start.starter_policy.Recipe`: 10 batches of 4."""

RUNS = (
    (("--env", "tir", *SMALL, "--out", "runs/ended"), 0),
    # A policy that says 2 or 3.
    (
        (
            *("--objective", "sft", "data.file=dialogues.jsonl", "data.batch_size=8"),
            *("steps=30", "trainer.lr=0.02", "eval.num_tasks=2", "--out", "runs/says-two"),
            "engine.model=runs/ended/checkpoints/step-000001",
        ),
        0,
    ),
    # A step whose loss is not finite.
    (
        (
            *("--env", "tir", *SMALL, "steps=9", "--out", "runs/refused"),
            *("trainer.algorithm=reinforce", "trainer.reward={bias: 1.0, scale: 1.0e+300}"),
        ),
        3,
    ),
)
"""(arguments of `areal-gym train`, exit code): runs that exist before a page is followed."""

ONCE = r"^areal-gym check "
"""Commands that take seconds and print the same on every page."""

EXIT_CODES = (
    (r"^areal-gym doctor", (0, 1)),  # something may be missing here
    (r"--refused", (1,)),  # "refused again"
    (r"--env online", (130,)),  # ended by Ctrl-C
)
"""(pattern of commands, allowed exit codes): 0 for all others."""

WITHOUT_SHARED = (
    r"tau2/(airline|retail)|--fixtures|data pull",
    "the data of tau2-bench, in ../shared",
)
"""The row of NOT_RUN where ../shared is missing."""

NOT_RUN = (
    (r"^make ", "installs from a registry: make --dry-run"),
    (r"^pip install (?!-e)", "asks a registry: its extras are ours"),
    (r"^source ", "makes this very environment the shell's"),
    (r"^python -m build", "asks a registry: tests/install/test_wheel.py builds the wheel"),
    (r"^ray start", "several machines"),
    (r"^python benchmarks/", "measures for minutes"),
    (r"^python -m tests\.chaos", "takes minutes: tests/chaos/test_chaos.py runs small ones"),
    (r"^python examples/online", "beside a run, in a second shell: tests/examples/test_agents.py"),
    (r"serve_cpu\.py", "SGLang itself, in an environment of its own: tests/sglang"),
    (r"sandbox\.image", "needs an engine for containers: tests/sandbox/test_docker.py"),
    (r"sandbox=docker", "needs an engine for containers: tests/sandbox/test_docker.py"),
    (r"cluster\.address=", "starts a Ray, or joins one: tests/distributed does"),
    (r"num_servers=2", "needs GPUs and SGLang: tests/sglang"),
    (r"openai/gsm8k:main", "asks the Hugging Face hub"),
    (r"langchain_agent", "LangChain is not installed: tests/examples/test_frameworks.py"),
    (r"textarena:", "TextArena is not installed: tests/envs/test_adapters.py"),
    (r"openenv:", "OpenEnv is not installed: tests/envs/test_adapters.py"),
    (r"^(?:rewards|tasks) ->|^this process +Ray|^first prompt \|", "a drawing"),
    (r"^areal-gym train, eval, view", "a drawing"),
)
"""(pattern, reason): such commands are only parsed, and `train` is a dry run."""
