"""Finds the checkpoint that a run begins with: the user's directory, or the starter policy."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from areal_gym.config import RunConfig
from areal_gym.errors import ConfigError
from areal_gym.models.hub import is_hub_name, model_from_hub
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.run_display import Display
from areal_gym.runs.run_inputs import digests_of_inputs
from areal_gym.utils.files import path_hints


def policy_directory(
    config: RunConfig, components: Components | None, display: Display
) -> tuple[Path, dict[str, Any]]:
    """Return the directory of the initial policy, and facts about a warm start.

    `components` may be None unless `engine.model` is "starter".

    Raises:
        ConfigError: `engine.model` is neither a checkpoint directory nor a model on the hub; or the
            starter policy is to be made, and torch is not installed.
    """
    if config.engine.model != "starter":
        directory = Path(config.engine.model)
        if is_hub_name(config.engine.model):
            directory = model_from_hub(config.engine.model, display.say)
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"engine.model = {config.engine.model!r} is not a checkpoint directory",
                hints=[
                    *_model_hints(config.engine.model),
                    "it must hold config.json, tokenizer.json and, unless served, the weights",
                    "or let areal-gym build a small policy: engine.model=starter",
                ],
            )
        return directory, {}
    assert components is not None
    if find_spec("torch") is None:
        raise ConfigError(
            "the small policy is made with torch, which is not installed",
            hints=[
                "install it: pip install 'areal-gym[train]'",
                "or name a server and what it serves: "
                "--engine sglang --engine.url URL engine.model=DIR",
            ],
        )
    return _starter(config, components, display)


def _model_hints(model: str) -> list[str]:
    best = Path(model) / "checkpoints" / "best"
    if best.exists():
        return [f"it is a run's directory; the best policy of the run: engine.model={best}"]
    return path_hints(Path(model))


def _starter(
    config: RunConfig, components: Components, display: Display
) -> tuple[Path, dict[str, Any]]:
    import torch

    from areal_gym.warm_start.starter_policy import prepare_starter

    # Threads of small products wait for each other, which takes many times longer if busy.
    torch.set_num_threads(config.trainer.num_threads)
    display.phase("warm start")
    total = 0
    notice = "making a small policy that imitates demonstrators: some minutes at most, once"

    def progress(done: int, at_most: int, detail: str) -> None:
        nonlocal total
        if not total:
            display.say(f"warm start: {notice}")
        if at_most != total:
            total = at_most
            display.phase("warm start", total)
        display.advance(done, detail)

    key_facts: dict[str, Any] = {"id": config.env.id, "kwargs": dict(components.env_kwargs)}
    if files := digests_of_inputs(config):  # other contents give another policy
        key_facts["files"] = files
    key = yaml.safe_dump(key_facts)
    try:
        starter = prepare_starter(
            components.make_env(), env_key=key, seed=config.seed, on_progress=progress
        )
    except KeyboardInterrupt:
        display.say(
            "warm start: interrupted; nothing is kept, and it starts from the beginning next"
        )
        raise
    facts = {**starter.facts, "best_demonstrator": starter.best_demonstrator}
    source = f"{facts['num_steps']} steps of imitation in {facts['warm_start_s']:.0f} s"
    if starter.is_cached:
        source = f"from the cache ({starter.directory})"
        facts["warm_start_s"] = 0.0
    display.say(f"warm start: {source}")
    if "guessing" in facts:
        display.say(
            f"  its likeliest answers are right in {facts['skill']:.0%} of unseen tasks; sampled "
            f"ones earn {facts['expected_reward']:.2f}, blind guesses {facts['guessing']:.2f}"
        )
        return starter.directory, facts
    demonstrators = ", ".join(
        f"{name} {d['accuracy']:.2f} (x{d['share']:.2f})"
        for name, d in facts["demonstrators"].items()
    )
    display.say(f"  it imitates demonstrators whose accuracy (and share) is: {demonstrators}")
    return starter.directory, facts


def hash_of_policy(directory: Path) -> str:
    """Return 16 hex digits that identify a checkpoint's weights."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def require_same_start(run: RunDir, policy: Path) -> None:
    """Raise ConfigError if the run did not start with this policy."""
    first, now = run.read_provenance().get("initial_policy"), hash_of_policy(policy)
    if first is not None and first != now:
        raise ConfigError(
            f"{run.path} started with the policy {first}, and {policy} is {now}",
            hints=[
                "name the directory with the weights that the run started with: engine.model=DIR",
                "a warm start gives other weights after a change of the code or of its packages",
            ],
        )
