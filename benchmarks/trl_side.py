"""GRPO steps in TRL, for `trl_step.py`, which runs this with the Python of a venv that has TRL.

Reads what to do from standard input (a line of JSON), then takes one step for each further line and
answers each with a line of JSON. Nothing of areal-gym is imported here.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from typing import Any

# One line of JSON per step goes to whoever started this; everything else is for people.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
warnings.filterwarnings("ignore")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

SPECIAL = {"user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|tool|>"}
END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARSER = {
    "defaults": {"role": "assistant"},
    "start_anchor": SPECIAL["assistant"],
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte, so that a text's length in tokens can be chosen."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([*SPECIAL.values(), END, PAD])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=PAD
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = PARSER
    return tokenizer


def look(key: str) -> str:
    """
    Look something up.

    Args:
        key: what to look up.
    """
    return key.ljust(task["reply"], ".")[: task["reply"]]


class Forced(transformers.LogitsProcessor):
    """Lets nothing be sampled but the given tokens."""

    def __init__(self, ids_BT: torch.Tensor) -> None:
        self.ids_BT = ids_BT
        self.start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, self.ids_BT[:, input_ids.shape[1] - self.start, None], 0.0)


class Steps(transformers.TrainerCallback):
    """Waits for a line before each step, and tells what the step took."""

    def __init__(self) -> None:
        self.generating_s = 0.0
        self.rows: list[Any] = []
        self.begin_s = 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.generating_s, self.begin_s = 0.0, time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "grad_norm" not in logs:
            return
        spent = time.process_time() - self.begin_s
        answer = {
            "cpu_s": spent,
            "generation_cpu_s": self.generating_s,
            "grad_norm": logs["grad_norm"],
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "rows": self.rows,
            "version": f"TRL {trl.__version__}, transformers {transformers.__version__}",
        }
        print(json.dumps(answer), file=ANSWERS)
        self.wait()


class Trainer(trl.GRPOTrainer):
    """Measures generation, and keeps what was generated."""

    def _generate(self, prompts: list[Any]) -> Any:
        begin_s = time.process_time()
        found = super()._generate(prompts)
        steps.generating_s = time.process_time() - begin_s
        prompt_ids, completion_ids, tool_mask = found[:3]
        masks = tool_mask or [[1] * len(ids) for ids in completion_ids]
        steps.rows = [list(row) for row in zip(prompt_ids, completion_ids, masks, strict=True)]
        return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())
    tokenizer = byte_tokenizer()
    turns = [  # the same for each step: [turn][row] texts
        tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").input_ids
        for texts in task["turns"]
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    generate, num_calls = model.generate, 0

    def forced_generate(*arguments: Any, **options: Any) -> Any:
        global num_calls
        processor = transformers.LogitsProcessorList([Forced(turns[num_calls % len(turns)])])
        num_calls += 1
        return generate(*arguments, logits_processor=processor, **options)

    model.generate = forced_generate
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in task["prompts"]]
    group, rewards = task["group"], task["rewards"]
    steps = Steps()
    trainer = Trainer(
        model,
        reward_funcs=[lambda completions, **_: rewards],
        args=trl.GRPOConfig(
            output_dir=task["scratch"],
            use_cpu=True,
            per_device_train_batch_size=task["num_rows"],
            gradient_accumulation_steps=len(prompts) * group // task["num_rows"],
            num_generations=group,
            max_completion_length=task["max_completion_length"],
            shuffle_dataset=False,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            adam_beta2=0.98,
            max_steps=10_000,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **task["settings"],
        ),
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer,
        tools=[look] if len(turns) > 1 else None,
        callbacks=[steps],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    steps.wait()
    trainer.train()
