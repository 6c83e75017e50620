"""A served teacher's likeliest tokens against the same checkpoint in the trainer."""

import asyncio

import pytest

from areal_gym.config import TrainerConfig
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.algorithms.advantages import reinforce
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.objectives.distillation import annotate
from areal_gym.trainer.objectives.remote_teacher import RemoteTeacher
from areal_gym.trainer.teacher_divergence import VocabularyTeacher
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_training import batch


def check_served_teacher(opened, policies, *, top_k=16):
    """Require that the divergences from the first policy are those of a teacher in the trainer."""
    groups = batch(num_groups=2)

    async def annotated():
        async with opened(policies[0]) as engine:
            return await annotate(groups, RemoteTeacher(engine), top_k=top_k)

    served_groups = asyncio.run(annotated())
    for direction in ("forward", "reverse"):
        served, local = (
            divergence(policies, batch_of, directory, direction, top_k)
            for directory, batch_of in ((None, served_groups), (policies[0], groups))
        )
        assert served == pytest.approx(local, abs=1e-5)
        assert served > 0


def divergence(policies, groups, directory, direction, top_k):
    trainer = Trainer(
        load_checkpoint(policies[1]),
        TrainerConfig(advantage="reinforce"),
        advantage=reinforce,
        loss=ppo_clip,
        teacher=VocabularyTeacher(directory=directory, direction=direction, top_k=top_k),
    )
    return trainer.step(groups, version=0)["train/kl_teacher"]
