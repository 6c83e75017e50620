"""Teachers with a hint, the policy as its own teacher, and mixtures of teachers."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.runs.teacher import hinted_prompts
from areal_gym.trainer.algorithms.advantages import reinforce
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import distill
from areal_gym.trainer.batch.examples import TokenRow
from areal_gym.trainer.objectives.distillation import (
    LocalTeacher,
    PolicyTeacher,
    TeacherMixture,
    annotate,
)
from areal_gym.trainer.teacher_divergence import VocabularyTeacher, vocabulary_kl
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Task, TopTokens, Trajectory
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import CONFIG, batch, tiny_decoder


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


def test_policy_and_local_teacher_list_the_same_tokens():
    groups, local = batch(num_groups=2), LocalTeacher(tiny_decoder(3), tokens_per_microbatch=64)
    teachers = PolicyTeacher(own_trainer(tiny_decoder(3))), local
    listed = [asyncio.run(annotate(groups, teacher, top_k=4)) for teacher in teachers]
    local.close()
    (group, *_) = listed[0]
    assert unpack_group(json.loads(dump_row(pack_group(group)))) == group
    (first, *_) = group
    assert Trajectory.from_dict(json.loads(json.dumps(first.to_dict()))).spans == first.spans
    spans = [[s for g in each for t in g for s in t.spans] for each in listed]
    for own, other in zip(*spans, strict=True):
        assert (own.teacher_top is None) == (own.origin != "policy")
        if own.teacher_top is not None:
            (ids, logprobs), (other_ids, other_logprobs) = (
                span.teacher_top.arrays() for span in (own, other)
            )
            assert ids.shape == (len(own), 4)
            assert (ids == other_ids).all()
            assert logprobs == pytest.approx(other_logprobs, abs=1e-5)


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
        (["teacher.model=a", "teacher.top_k=3"], "reverse or forward"),
        (["teacher.model=a", "teacher.divergence=reverse", "teacher.hint=x"], "teacher.top_k=64"),
        (["teacher.url=http://x:1", "teacher.divergence=forward"], "teacher.top_k=64"),
        (
            ["teacher.is_policy=true", "teacher.hint=x", "teacher.divergence=reverse"],
            "teacher.top_k=64",
        ),
        ([], "needs one teacher"),
        (
            ["teacher.model=a", "trainer.advantage=grpo"],
            "would learn from rewards and ignore the teacher; leave it out, or write "
            "trainer.advantage=distill",
        ),
        (["teacher.model=a", "trainer.algorithm=gspo"], "has its own advantage and loss"),
        (
            ["teacher.model=a", "teacher.divergence=reverse", "trainer.advantage=distill"],
            "write trainer.advantage=reinforce",
        ),
    ],
)
def test_settings_of_teachers_that_do_not_fit_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(overrides=["objective=distill", *overrides])


# ---- whole distributions ---------------------------------------------------------------------


def test_vocabulary_kl_by_hand():
    student = torch.tensor([[0.5, 0.3, 0.2]]).log()
    teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    terms = {
        "forward": [0.7 * math.log(0.7 / 0.5), 0.2 * math.log(0.2 / 0.3), 0.1 * math.log(0.5)],
        "reverse": [0.5 * math.log(0.5 / 0.7), 0.3 * math.log(0.3 / 0.2), 0.2 * math.log(2.0)],
    }
    rests = {"forward": 0.3 * math.log(0.3 / 0.5), "reverse": 0.5 * math.log(0.5 / 0.3)}
    for direction, parts in terms.items():
        expected = {1: parts[0] + rests[direction], 2: sum(parts), None: sum(parts), 9: sum(parts)}
        for top_k, value in expected.items():
            kl_T = vocabulary_kl(student, teacher, direction=direction, top_k=top_k)
            assert kl_T.tolist() == pytest.approx([value], abs=1e-6)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_divergence_over_top_tokens_grows_to_that_over_the_vocabulary(direction):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2, 200, 12, generator=generator, dtype=torch.float64)
    student, teacher = logits.log_softmax(-1)
    whole_T = vocabulary_kl(student, teacher, direction=direction)
    means = []
    for top_k in (1, 3, 6, 11):
        kl_T = vocabulary_kl(student, teacher, direction=direction, top_k=top_k)
        assert (kl_T >= -1e-4).all()
        assert (kl_T <= whole_T + 1e-9).all()
        means.append(float(kl_T.mean()))
    assert means == sorted(means)
    assert means[-1] == pytest.approx(float(whole_T.mean()), rel=0.01)


def test_gradient_is_finite_where_the_teacher_excludes_all_other_tokens():
    student = torch.tensor([[0.2, 0.3, 0.5]]).log().requires_grad_()
    teacher = torch.tensor([[1.0, 1e-30, 1e-38]]).log()
    for direction in ("forward", "reverse"):
        kl_T = vocabulary_kl(student, teacher, direction=direction, top_k=1)
        (gradient,) = torch.autograd.grad(kl_T.sum(), student)
        assert kl_T > 1
        assert gradient.isfinite().all()


def test_mixture_of_top_tokens_by_hand():
    parts = [
        (weight, TopTokens.from_arrays(np.array([ids]), np.log([probs])))
        for weight, ids, probs in ((3.0, [5, 2], [0.6, 0.3]), (1.0, [2, 7], [0.8, 0.1]))
    ]

    class Listing:
        def __init__(self, top):
            self.top = top

        async def score_top(self, rows, top_k):
            return [self.top for _ in rows]

        async def score(self, rows):
            raise NotImplementedError

    mixture = TeacherMixture([(Listing(top), weight, None) for weight, top in parts])
    row = TokenRow(token_ids=(1, 5), mask=(False, True))
    (mixed,) = asyncio.run(mixture.score_top_tasks([row], ["math"], 2))
    ids, logprobs = mixed.arrays()
    assert ids.tolist() == [[5, 2]]
    assert np.exp(logprobs[0]) == pytest.approx([0.75 * 0.6, 0.75 * 0.3 + 0.25 * 0.8], abs=1e-6)


def learned_from_whole_distributions(tmp_path, groups, **teacher) -> tuple[Trainer, list[float]]:
    directory = save_checkpoint(tiny_decoder(7), tmp_path / "teacher")
    trainer = Trainer(
        tiny_decoder(),
        TrainerConfig(advantage="reinforce", lr=3e-3, tokens_per_microbatch=64),
        advantage=reinforce,
        loss=ppo_clip,
        teacher=VocabularyTeacher(directory=directory, **teacher),
    )
    divergences = [trainer.step(groups, version=0)["train/kl_teacher"] for _ in range(12)]
    return trainer, divergences


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("top_k", [None, 20])
def test_student_approaches_the_whole_distribution_of_its_teacher(tmp_path, direction, top_k):
    groups = batch(num_groups=2)
    _, found = learned_from_whole_distributions(tmp_path, groups, direction=direction, top_k=top_k)
    assert found[-1] < 0.7 * found[0]
    if top_k is None:
        student, teacher = tiny_decoder(), tiny_decoder(7)
        expected = []
        for group in groups:
            for trajectory in group:
                ids = torch.tensor(trajectory.token_ids)
                logs = []
                for decoder in (student, teacher):
                    with torch.no_grad():
                        hidden = decoder.hidden_states(
                            ids, torch.arange(len(ids)), causal_attend([len(ids)])
                        )
                        logs.append((hidden @ decoder.lm_head_weight.T).log_softmax(-1))
                p, q = logs if direction == "reverse" else logs[::-1]
                expected += sampled(trajectory, (p.exp() * (p - q)).sum(-1).tolist()[:-1])
        assert found[0] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


# ---- one vocabulary, padded to two sizes -----------------------------------------------------


def padded_decoder(seed: int, vocab_size: int):
    return build_decoder(replace(CONFIG, vocab_size=vocab_size), seed=seed)


def with_padding_sampled(groups):
    """Let the policy sample token 55, which only the larger of the vocabularies has."""

    def changed(span):
        if span.origin != "policy" or len(span) < 2:
            return span
        return replace(span, token_ids=(55, *span.token_ids[1:]))

    return [
        replace(
            group, trajectories=tuple(replace(t, spans=tuple(map(changed, t.spans))) for t in group)
        )
        for group in groups
    ]


def common_logprobs(decoder, token_ids):
    """Log-probabilities over the 50 common tokens, by the whole logits, [N - 1, 50]."""
    ids = torch.tensor(token_ids).clamp_max(decoder.config.vocab_size - 1)
    with torch.no_grad():
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        return (hidden @ decoder.lm_head_weight.T)[:-1, :50].log_softmax(-1)


SIZES = [(50, 58), (58, 50)]


@pytest.mark.parametrize(("own_size", "teachers_size"), SIZES)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("top_k", [None, 20, 58])
def test_divergence_is_over_the_tokens_that_both_have(
    tmp_path, own_size, teachers_size, direction, top_k
):
    groups = batch(num_groups=2)
    if own_size > 50:
        groups = with_padding_sampled(groups)
    student, teacher = padded_decoder(1, own_size), padded_decoder(7, teachers_size)
    expected = []
    for trajectory in (t for group in groups for t in group):
        p, q = (common_logprobs(decoder, trajectory.token_ids) for decoder in (student, teacher))
        kl = torch.nn.functional.kl_div
        own, other = (p, q) if direction == "reverse" else (q, p)
        kl_T = kl(other, own, reduction="none", log_target=True).sum(-1)
        if top_k == 20:  # the teacher's 20 likeliest, and all others as one
            top = q.topk(20).indices
            parts = [
                torch.cat([x.gather(-1, top).exp(), 1 - x.gather(-1, top).exp().sum(-1, True)], -1)
                for x in (own, other)
            ]
            kl_T = (parts[0] * (parts[0] / parts[1]).log()).sum(-1)
        expected += sampled(trajectory, kl_T.tolist())
    trainer = Trainer(
        student,
        TrainerConfig(advantage="reinforce", lr=3e-3, tokens_per_microbatch=64),
        advantage=reinforce,
        loss=ppo_clip,
        teacher=VocabularyTeacher(
            directory=save_checkpoint(teacher, tmp_path / "teacher"),
            direction=direction,
            top_k=top_k,
        ),
    )
    kl_teacher = trainer.step(groups, version=0)["train/kl_teacher"]
    assert kl_teacher == pytest.approx(sum(expected) / len(expected), rel=1e-3)


@pytest.mark.parametrize(("own_size", "teachers_size"), SIZES)
def test_local_teacher_scores_by_the_tokens_that_both_have(own_size, teachers_size):
    groups = batch(num_groups=2)
    if own_size > 50:
        groups = with_padding_sampled(groups)
    teacher = padded_decoder(7, teachers_size)
    local = LocalTeacher(teacher, vocab_size=own_size)
    scored, top = (asyncio.run(annotate(groups, local, top_k=top_k)) for top_k in (None, 58))
    local.close()
    num_unknown = 0
    for one, other in zip(*([t for g in both for t in g] for both in (scored, top)), strict=True):
        logs = common_logprobs(teacher, one.token_ids)
        places = sampled(one, range(len(logs)))
        ids = [one.token_ids[place + 1] for place in places]
        num_unknown += sum(id >= 50 for id in ids)
        expected = [
            float(logs[place][id] if id < 50 else logs[place].min())
            for place, id in zip(places, ids, strict=True)
        ]
        assert taught(one) == pytest.approx(expected, abs=1e-4)
        tops = [span.teacher_top.arrays() for span in other.spans if span.origin == "policy"]
        ids_TK = np.concatenate([ids for ids, _ in tops])
        assert ids_TK.shape == (len(places), 50)
        assert ids_TK.max() == 49
        sums_T = np.exp(np.concatenate([logprobs for _, logprobs in tops])).sum(-1)
        assert sums_T == pytest.approx(1, abs=1e-4)
    assert (num_unknown > 0) == (own_size > 50)
