"""Training steps of real trainers, measured as simulated ones are."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.images import image_store
from areal_gym.models.backend import ModelLoader
from areal_gym.plan.memory_tracker import MemoryTracker, labelled_training
from areal_gym.plan.simulated_trainers import full_examples, full_group
from areal_gym.plugins import registry
from areal_gym.trainer.objectives.dpo import Dpo
from areal_gym.trainer.objectives.reward_model import BradleyTerry
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.fsdp import drop_gathered, load_for_training
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_vision import PATCH, picture


def settings(*overrides):
    """Settings of a small step of a model of transformers."""
    return load_config(
        overrides=[
            *("engine.model=none", "model.backend=transformers"),
            *("engine.max_context=256", "rollout.max_new_tokens=64"),
            *("trainer.tokens_per_microbatch=512", "trainer.optimizer=adamw", *overrides),
        ]
    )


class RowsOfItsOwn(Ranks):
    """Gives every rank as many rows as the simulated one has."""

    def share(self, members, costs):
        return list(members)


def real_trainer(rank, directory, config, pictures=None):
    """A trainer of this rank and a batch that fills two micro-batches; `pictures` are planned."""
    torch.set_num_threads(1)
    layout = config.trainer.layout
    ranks = RowsOfItsOwn(rank, layout) if layout.num_ranks > 1 else ALONE
    loader = ModelLoader(backend=config.model.backend, is_reward_model=config.objective == "rm")
    policy = load_for_training(directory, config.trainer, ranks, loader=loader)
    if config.objective != "rl":
        objective = {"sft": Sft, "dpo": partial(Dpo, directory), "rm": BradleyTerry}
        trainer = Supervised(
            policy, config.trainer, objective=objective[config.objective](), ranks=ranks
        )
        examples = full_examples(config, 2, pictures)
        return trainer, [tuple(map(with_real_pictures, rows)) for rows in examples]
    trainer = Trainer(
        policy,
        config.trainer,
        advantage=registry().load("advantages", config.trainer.advantage),
        loss=registry().load("losses", config.trainer.loss),
        max_new_tokens=config.rollout.max_new_tokens,
        reference=directory if config.trainer.kl.coefficient else None,
        ranks=ranks,
    )
    group = full_group(config, 2, pictures)
    members = tuple(
        replace(each, spans=tuple(map(with_real_pictures, each.spans))) for each in group
    )
    return trainer, [replace(group, trajectories=members)]


def with_real_pictures(row):
    """Return a row, or a span, whose pictures are in the image store; equal names, equal ones."""
    return replace(row, images=tuple(map(_stored, row.images)))


def _stored(image):
    width, height = (64, 64) if image.grid is None else (PATCH * n for n in image.grid[:0:-1])
    drawn = picture(image.sha256, width, height)
    return replace(image, sha256=image_store().add(drawn)["sha256"])


def peak_of_a_real_step(rank, directory, *overrides, pictures=None):
    """The bytes of a real step by what they are for, when their sum is largest."""
    trainer, batch = real_trainer(rank, directory, settings(*overrides), pictures)
    trainer.step(batch, 0)
    tracker = MemoryTracker(trainer.decoder.shape.vocab_size)
    drop_gathered(*trainer._frozen_models)  # shards are labelled, here and there
    for frozen in trainer._frozen_models:
        tracker.label(frozen.parameters(), "frozen")
    models = torch.nn.ModuleList([trainer.decoder])
    if critic := getattr(trainer, "_critic", None):
        models.append(critic)
    optimizers = [part for part in trainer._parts() if isinstance(part, Optimizer)]
    with labelled_training(tracker, models, [each for part in optimizers for each in part.parts]):
        tracker.label((p for p in models.parameters() if not p.requires_grad), "frozen")
        with tracker:
            trainer.step(batch, 1)
    return tracker.peak


def assert_alike(ours, real):
    """Every part of a simulated step is within a tenth of the real one's."""
    assert sum(ours.values()) == pytest.approx(sum(real.values()), rel=0.1)
    for kind in ("weights", "states", "frozen", "gradients", "activations", "logits"):
        allowed = pytest.approx(real.get(kind, 0), rel=0.1, abs=0.01 * sum(real.values()))
        assert ours.get(kind, 0) == allowed, kind
