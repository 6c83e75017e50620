"""The starter policy: a small Qwen3-shaped model, built from scratch and warm-started.

    demonstrations -> tokenizer -> model -> imitation until a measured skill is there -> cache

The learning rate is held until the policy copies exactly (an expression into a call, a result into
an answer) on nine probes of ten, because the step at which copying appears depends on the seed;
then it decays. Imitation is supervised fine-tuning (`Sft`). Environments with pictures get a policy
that sees (`vision_starter`). The result is a Hugging Face checkpoint, cached under a key of
everything that made it, so that the second run starts at once.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from areal_gym.chat import Renderer
from areal_gym.config import TrainerConfig
from areal_gym.engines.scripted import ByteTokenizer
from areal_gym.envs.base import TextEnv
from areal_gym.images import use_image_store
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import Decoder, build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from areal_gym.types import Content, Message, content_hash, images_of
from areal_gym.utils.cache import cache_directory, readable_cache_errors
from areal_gym.warm_start.demonstration_rows import demonstrated_row
from areal_gym.warm_start.demonstrations import (
    Demonstration,
    demonstrate,
    demonstrators_for,
    perfect_demonstration,
)
from areal_gym.warm_start.starter_tokenizer import (
    build_tokenizer,
    save_tokenizer,
    starter_template,
)
from areal_gym.warm_start.vision_starter import (
    VISION_TOKENS,
    VisionRecipe,
    build_vision_policy,
    imitate_gold,
    write_image_settings,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of a starter policy, besides its environment and seed."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 384
    vocab_size: int = 512
    max_context: int = 512
    num_tokenizer_texts: int = 3000
    batch_size: int = 32
    lr: float = 2e-3
    """The learning rate of AdamW: embeddings and norms."""
    muon_lr: float = 0.03
    """The learning rate of Muon: the layers' matrices."""
    warmup_steps: int = 30
    min_hold_steps: int = 100
    max_hold_steps: int = 450
    decay_steps: int = 150
    end_scale: float = 0.02
    """The learning rate at the end of the decay, as a share."""
    skill_gate: float = 0.9
    """The share of exact probes that starts the decay."""
    num_probes: int = 128
    probe_every: int = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterPolicy:
    """A warm-started checkpoint, and how it was made."""

    directory: Path
    """The checkpoint's directory, in Hugging Face's layout."""
    facts: dict[str, Any]
    """warm_start_s, num_steps, skill, demonstrators (accuracy and share of each); for
    policies that see, also the `expected_reward` of sampled answers, and that of `guessing`."""
    is_cached: bool

    @property
    def best_demonstrator(self) -> float | None:
        """The accuracy of the best imitated demonstrator; None if imitation ended early."""
        demonstrators = self.facts["demonstrators"].values()
        return max((float(d["accuracy"]) for d in demonstrators), default=None)


_NUM_LOOKED_AT = 8
"""Tasks of which one shows whether there are pictures: a mix has tasks of several kinds."""

Progress = Callable[[int, int, str], None]
"""A callback that gets (steps done, maximum steps, metrics so far)."""


def prepare_starter(
    env: TextEnv,
    *,
    env_key: str,
    seed: int,
    recipe: Recipe | VisionRecipe | None = None,
    on_progress: Progress | None = None,
) -> StarterPolicy:
    """Return the starter policy for an environment, from the cache or newly made.

    `env_key` has the environment's id and arguments, for the cache; `seed` decides about the model,
    the demonstrations and their order. An environment without demonstrators is a UsageError, a
    cache that cannot be written a TrainError.
    """
    recipes = (Recipe(), VisionRecipe()) if recipe is None else (recipe,)
    for each in recipes:
        directory = _cached_directory(each, env_key, seed)
        facts_file = directory / "warm_start.json"
        if facts_file.exists():
            facts = json.loads(facts_file.read_text())
            return StarterPolicy(directory=directory, facts=facts, is_cached=True)
    demonstrators_for(env)
    recipe = recipes[-1] if shows_pictures(env) else recipes[0]
    directory = _cached_directory(recipe, env_key, seed)
    start_s = time.perf_counter()
    with readable_cache_errors():
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        # The run keeps none of the pictures that are drawn here.
        with use_image_store(draft / "images"):
            policy, facts = _make(env, recipe, draft, seed, on_progress)
        facts["warm_start_s"] = round(time.perf_counter() - start_s, 2)
        facts["num_parameters"] = sum(p.numel() for p in policy.parameters())
        save_checkpoint(
            policy,
            directory,
            tokenizer_dir=draft,
            extra_files={"warm_start.json": (json.dumps(facts, indent=2) + "\n").encode()},
        )
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return StarterPolicy(directory=directory, facts=facts, is_cached=False)


def shows_pictures(env: TextEnv) -> bool:
    """Return whether first messages of the environment have pictures."""
    for seed in range(1 if env.suspends else _NUM_LOOKED_AT):
        _, info = env.reset(seed=seed)
        if any(images_of(message["content"]) for message in info["messages"]):
            return True
    return False


def _make(
    env: TextEnv,
    recipe: Recipe | VisionRecipe,
    draft: Path,
    seed: int,
    on_progress: Progress | None,
) -> tuple[PolicyModel, dict[str, Any]]:
    tokenizer = _make_tokenizer(env, recipe, draft)
    if isinstance(recipe, VisionRecipe):
        write_image_settings(draft, recipe)
        policy = build_vision_policy(draft, recipe, tokenizer, seed=seed)
        encode = partial(demonstrated_row, Renderer.from_checkpoint(draft))
        return policy, imitate_gold(policy, env, encode, recipe, seed, on_progress)
    decoder = build_decoder(_decoder_config(recipe, tokenizer), seed=seed)
    encode = partial(demonstrated_row, Renderer.from_checkpoint(draft))
    return decoder, _imitate(decoder, env, encode, recipe, seed, on_progress)


_PICTURE = "\N{OBJECT REPLACEMENT CHARACTER}"


def _make_tokenizer(env: TextEnv, recipe: Recipe | VisionRecipe, directory: Path) -> Tokenizer:
    as_bytes = ByteTokenizer()
    renderer = Renderer(as_bytes, starter_template())
    rng = random.Random(0)  # one tokenizer for all seeds of a recipe

    def text_of(shown: Demonstration) -> str:
        schemas = [tool.schema() for tool in shown.tools]
        ids = list(renderer.first_ids(_without_pictures(shown.first_messages), schemas))
        for turn, text in enumerate(shown.texts):
            ids += as_bytes.encode(text)
            replies = shown.replies[turn] if turn < len(shown.replies) else ()
            ids += renderer.bridge_ids(-1, _without_pictures(replies))
        return as_bytes.decode(ids)

    texts = [text_of(demonstrate(env, rng)) for _ in range(recipe.num_tokenizer_texts)]
    tokenizer = build_tokenizer(
        (piece for text in texts for piece in text.split(_PICTURE)),
        vocab_size=recipe.vocab_size,
        more_control_tokens=VISION_TOKENS if isinstance(recipe, VisionRecipe) else (),
    )
    save_tokenizer(tokenizer, directory, max_context=recipe.max_context)
    return tokenizer


def _without_pictures(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark in place of each picture, where no token goes across."""
    return [{**message, "content": _marked(message["content"])} for message in messages]


def _marked(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else _PICTURE for part in content)


# ---- imitation -------------------------------------------------------------------------------


def _decoder_config(recipe: Recipe, tokenizer: Tokenizer) -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )


def _imitate(
    decoder: Decoder,
    env: TextEnv,
    encode: Callable[..., Example],
    recipe: Recipe,
    seed: int,
    on_progress: Progress | None,
) -> dict[str, Any]:
    rng = random.Random(seed)
    rates = {"lr": recipe.lr, "muon_lr": recipe.muon_lr, "warmup_steps": recipe.warmup_steps}
    settings = TrainerConfig.model_validate({"optimizer": "muon", **rates})
    trainer = Supervised(decoder, settings, objective=Sft())
    probe_rng = random.Random(5)
    probes = [
        encode(perfect_demonstration(env, probe_rng), skips_first=True)
        for _ in range(recipe.num_probes)
    ]
    rewards: dict[str, list[float]] = {}
    max_steps = recipe.max_hold_steps + recipe.decay_steps
    step, skill = 0, 0.0
    left: int | None = None  # steps of the decay; None while the rate is held
    while left is None or left > 0:
        shown = [demonstrate(env, rng) for _ in range(recipe.batch_size)]
        for demonstration in shown:
            rewards.setdefault(demonstration.demonstrator_id, []).append(demonstration.reward)
        scale = 1.0
        if left is not None:
            scale = recipe.end_scale + (1 - recipe.end_scale) * left / recipe.decay_steps
            left -= 1
        loss = trainer.step([encode(each) for each in shown], scale=scale)["train/loss"]
        step += 1
        is_probed = left is None and step >= recipe.min_hold_steps
        if (is_probed and step % recipe.probe_every == 0) or left == 0:
            # Share of the probes in which every marked token is the likeliest one.
            skill = trainer.evaluate(probes)["exact"]
        if left is None and (
            (is_probed and skill >= recipe.skill_gate) or step >= recipe.max_hold_steps
        ):
            left = recipe.decay_steps
        if on_progress is not None and step % 5 == 0:
            total = max_steps if left is None else step + left
            on_progress(step, total, f"loss {loss:.2f}  copies exactly {skill:.0%}")
    num_shown = sum(len(values) for values in rewards.values())
    return {
        "num_steps": step,
        "skill": round(skill, 4),
        "demonstrators": {
            name: {
                "accuracy": round(sum(values) / len(values), 4),
                "share": round(len(values) / num_shown, 4),
            }
            for name, values in sorted(rewards.items())
        },
    }


# ---- cache -----------------------------------------------------------------------------------


_MAKERS = ("warm_start", "models", "envs")
_TRAINER_FILES = (
    *("batch/examples.py", "batch/packing.py", "chunked_logprobs.py", "optimizer.py"),
    *("policy_trainer.py", "objectives/supervised.py"),
)
"""The parts of the trainer that imitation uses: a new policy loss must not invalidate warm
starts."""


def _cached_directory(recipe: Recipe | VisionRecipe, env_key: str, seed: int) -> Path:
    return cache_directory() / "starter" / _cache_key(recipe, env_key, seed)


def _cache_key(recipe: Recipe | VisionRecipe, env_key: str, seed: int) -> str:
    """Return a hash of recipe, environment, seed, torch, processor and source files."""
    package = Path(__file__).parent.parent
    files = [
        *(file for folder in _MAKERS for file in (package / folder).rglob("*")),
        *(package / "trainer" / name for name in _TRAINER_FILES),
    ]
    sources = {
        str(file.relative_to(package)): content_hash(file.read_text())
        for file in files
        if file.suffix in (".py", ".jinja")
    }
    made_by = {
        "recipe": dataclasses.asdict(recipe),
        "env": env_key,
        "seed": seed,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "sources": sources,
    }
    return content_hash(made_by)
