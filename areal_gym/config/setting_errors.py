"""Turn validation errors into plain messages: the value given, the values allowed, a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from areal_gym.errors import ConfigError, did_you_mean

_ELSEWHERE = {
    "accumulate_grad_batches": "trainer.tokens_per_microbatch",
    "advantage_estimator": "trainer.advantage",
    "adv_estimator": "trainer.advantage",
    "beta": "trainer.kl.coefficient",
    "checkpoint_interval": "trainer.save_every",
    "clip_ratio": "trainer.clip_low",
    "clip_ratio_high": "trainer.clip_high",
    "clip_ratio_low": "trainer.clip_low",
    "context_length": "engine.max_context",
    "cp_size": "trainer.parallel.context",
    "entropy_coeff": "trainer.entropy_bonus",
    "ep_size": "trainer.parallel.expert",
    "epsilon": "trainer.clip_low",
    "epsilon_high": "trainer.clip_high",
    "eval_interval": "eval.every",
    "eval_on_start": "eval.at_start",
    "eval_steps": "eval.every",
    "global_batch_size": "rollout.batch_groups",
    "gradient_accumulation_steps": "trainer.tokens_per_microbatch",
    "gradient_checkpointing": "trainer.recompute_layers",
    "grad_clip": "trainer.max_grad_norm",
    "kl_coef": "trainer.kl.coefficient",
    "kl_loss_coef": "trainer.kl.coefficient",
    "learning_rate": "trainer.lr",
    "log_with": "loggers",
    "logging": "loggers",
    "loss_type": "trainer.loss",
    "lr_scheduler_type": "trainer.lr_schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_length": "engine.max_context",
    "max_model_len": "engine.max_context",
    "max_response_length": "rollout.max_new_tokens",
    "max_seq_length": "engine.max_context",
    "max_steps": "steps",
    "max_tokens": "rollout.max_new_tokens",
    "micro_batch_size": "trainer.tokens_per_microbatch",
    "mini_batch_size": "trainer.minibatches",
    "model_name_or_path": "engine.model",
    "n": "rollout.group_size",
    "n_gpus": "trainer.num_ranks",
    "n_samples": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "off_policy_steps": "rollout.max_staleness",
    "per_device_train_batch_size": "rollout.batch_groups",
    "ppo_epochs": "trainer.minibatches",
    "report_to": "loggers",
    "rollouts_per_example": "rollout.group_size",
    "save_interval": "trainer.save_every",
    "save_steps": "trainer.save_every",
    "sp_size": "trainer.parallel.context",
    "staleness_damping": "trainer.max_drift",
    "total_steps": "steps",
    "tp_size": "trainer.parallel.tensor",
    "train_batch_size": "rollout.batch_groups",
    "warmup_ratio": "trainer.warmup_steps",
}
"""Names of settings in AReaL, verl, TRL, prime-rl and slime, and the closest settings here."""

_EXPECTED = {
    "tuple_type": "a list, such as [A, B]",
    "list_type": "a list, such as [A, B]",
    "dict_type": "names and values, such as {NAME: VALUE}",
    "mapping_type": "names and values, such as {NAME: VALUE}",
    "model_type": "a section of settings, such as {NAME: VALUE}",
    "model_attributes_type": "a section of settings, such as {NAME: VALUE}",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "none_required": "null",
    "path_type": "a path",
}
"""The values that a setting accepts, by pydantic's type of the error."""


def settings_error(error: ValidationError, source: str, known: Sequence[str]) -> ConfigError:
    """Return the error to raise for settings from `source`; `known` are all valid keys."""
    lines: list[str] = []
    hints: list[str | None] = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r} in {source}")
            hints.append(_nearest(key, known))
        else:
            is_named = not key or problem["type"] == "value_error"  # our messages name the setting
            is_missing = problem["type"] == "missing"  # the input is the section, not the value
            setting = key if is_missing else f"{key} = {problem['input']!r}"
            prefix = "" if is_named else f"{setting}: "
            lines.append(prefix + plain_reason(problem))
    hints.append("all settings: areal-gym train --dry-run")
    return ConfigError("; ".join(lines), hints=hints)


def plain_reason(problem: Mapping[str, Any]) -> str:
    """Return which values a setting accepts.

    `problem` is an entry of pydantic's `ValidationError.errors()`.
    """
    error_type, limits = problem["type"], problem.get("ctx", {})
    if error_type in _EXPECTED:
        return f"it takes {_EXPECTED[error_type]}"
    if error_type == "literal_error":
        return f"it is one of {limits['expected']}"
    if error_type in ("too_short", "too_long"):
        relation = "at least" if error_type == "too_short" else "at most"
        number = limits.get("min_length", limits.get("max_length"))
        return f"it takes {relation} {number} values, not {limits['actual_length']}"
    if error_type == "missing":
        return "it is missing"
    bounds = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt"}
    if (name := bounds.get(error_type, "le")) in limits:
        words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
        return f"it must be {words[name]} {limits[name]}"
    return str(problem["msg"]).removeprefix("Value error, ")


def _nearest(key: str, known: Sequence[str]) -> str | None:
    """Suggest settings, in any section, whose last part resembles the key's."""
    section, _, word = key.rpartition(".")
    if word in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[word]!r}?"
    words = {name: name.rpartition(".")[2] for name in known}
    beside = [words[name] for name in known if name.rpartition(".")[0] == section]
    if {"id", "kwargs"} <= {*beside} and not difflib.get_close_matches(word, beside, cutoff=0.75):
        return (
            f"an argument of what {section}.id names is {section}.kwargs.{word}=VALUE; "
            "areal-gym show ID lists them"
        )
    close = difflib.get_close_matches(word, sorted(set(words.values())))
    names = [name for name in known if words[name] in close]
    names.sort(key=lambda name: (close.index(words[name]), not name.startswith(f"{section}.")))
    if names:
        return f"did you mean {' or '.join(map(repr, names[:3]))}?"
    return did_you_mean(key, known)
