"""Teachers with a hint, the policy as its own teacher, and mixtures of teachers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.runs.teacher import hinted_prompts
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import distill
from areal_gym.trainer.objectives.distillation import (
    LocalTeacher,
    PolicyTeacher,
    TeacherMixture,
    annotate,
)
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Task
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import batch, tiny_decoder


def scores_of(decoder, token_ids) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        scores = (hidden @ decoder.lm_head_weight.T).log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), ids[1:]].tolist()


def sampled(trajectory, scores) -> list[float]:
    """Of the scores of a trajectory's tokens but the first, those of the policy's tokens."""
    origins = [span.origin for span in trajectory.spans for _ in range(len(span))]
    return [s for s, origin in zip(scores, origins[1:], strict=True) if origin == "policy"]


def taught(trajectory) -> list[float]:
    return [x for span in trajectory.spans for x in span.teacher_logprobs or ()]


def own_trainer(decoder) -> Trainer:
    return Trainer(decoder, TrainerConfig(), advantage=distill, loss=ppo_clip, temperature=0.5)


def test_policy_with_a_hint_scores_its_own_tokens_after_the_hinted_prompt():
    groups, decoder = batch(num_groups=2), tiny_decoder(3)
    hint = (7, 8, 9)

    def prompts(trajectory):
        prompt = tuple(trajectory.spans[0].token_ids)
        return prompt, (*hint, *prompt)

    for teacher in (PolicyTeacher(own_trainer(decoder)), LocalTeacher(tiny_decoder(3))):
        annotated = asyncio.run(annotate(groups, teacher, prompts))
        for group in annotated:
            for trajectory in group:
                scores = scores_of(decoder, (*hint, *trajectory.token_ids))[len(hint) :]
                expected = sampled(trajectory, scores)
                assert taught(trajectory) == pytest.approx(expected, abs=1e-4)
        if isinstance(teacher, LocalTeacher):
            teacher.close()


def test_hint_that_fits_no_prompt_is_refused():
    teacher = PolicyTeacher(own_trainer(tiny_decoder()))
    with pytest.raises(ConfigError, match="fits no prompt"):
        asyncio.run(annotate(batch(num_groups=1), teacher, lambda _: ((99,), (98,))))


def test_mixture_of_teachers_by_hand():
    (group,) = batch(num_groups=1, group_size=2)
    decoders = tiny_decoder(3), tiny_decoder(4)
    first, second = (LocalTeacher(decoder) for decoder in decoders)
    mixture = TeacherMixture([(first, 3.0, None), (second, 1.0, None)])
    (annotated,) = asyncio.run(annotate([group], mixture))
    for trajectory in annotated:
        parts = [sampled(trajectory, scores_of(d, trajectory.token_ids)) for d in decoders]
        expected = [
            math.log(0.75 * math.exp(a) + 0.25 * math.exp(b)) for a, b in zip(*parts, strict=True)
        ]
        assert taught(trajectory) == pytest.approx(expected, abs=1e-4)
    first.close()
    second.close()


def test_each_environment_of_a_mix_has_its_own_teacher():
    groups = [
        replace(
            group,
            trajectories=tuple(replace(t, task=Task(id="x", data={"env": env})) for t in group),
        )
        for group, env in zip(batch(num_groups=2), ("math", "tir"), strict=True)
    ]
    decoders = {"math": tiny_decoder(3), "tir": tiny_decoder(4)}
    teachers = {env: LocalTeacher(decoder) for env, decoder in decoders.items()}
    mixture = TeacherMixture([(teacher, 1.0, env) for env, teacher in teachers.items()])
    for group in asyncio.run(annotate(groups, mixture)):
        for trajectory in group:
            scores = scores_of(decoders[trajectory.task.data["env"]], trajectory.token_ids)
            assert taught(trajectory) == pytest.approx(sampled(trajectory, scores), abs=1e-4)
    only = TeacherMixture([(teachers["math"], 1.0, "math")])
    with pytest.raises(ConfigError, match="no teacher teaches the tasks of 'tir'"):
        asyncio.run(annotate(groups, only))
    for teacher in teachers.values():
        teacher.close()


class Words:
    """A renderer that makes one token of each letter of the first user message."""

    def first_ids(self, messages, tools=()):
        return tuple(ord(c) for m in messages for c in f"{m['role'][0]}:{m['content']}")


def test_hint_is_written_at_the_end_of_the_first_user_message():
    (group,) = batch(num_groups=1, group_size=1)
    dialogue = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "no"},
    ]
    trajectory = replace(
        group.trajectories[0], messages=tuple(dialogue), task=Task(id="x", data={"answer": 4})
    )
    prompts = hinted_prompts("It is {answer}.", Words(), [])
    texts = ["".join(map(chr, ids)) for ids in prompts(trajectory)]
    assert texts == ["s:Su:2+2?", "s:Su:2+2?\n\nIt is 4."]
    assert hinted_prompts(None, Words(), []) is None
    mixed = replace(
        trajectory, task=Task(id="x", data={"env": "math", "task": {"data": {"answer": 9}}})
    )
    assert "".join(map(chr, prompts(mixed)[1])).endswith("It is 9.")
    with pytest.raises(ConfigError, match="does not fit the task") as caught:
        hinted_prompts("It is {result}.", Words(), [])(trajectory)
    assert caught.value.hints == ("its data has: answer",)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["teacher.is_policy=true"], "learn nothing"),
        (["teacher.is_policy=true", "teacher.hint=x", "teacher.model=a"], "needs one teacher"),
        (["teacher.model=a", "teacher.further=[{weight: 2}]"], "needs a model or a url"),
        ([], "needs one teacher"),
    ],
)
def test_settings_of_teachers_that_do_not_fit_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(overrides=["objective=distill", *overrides])
