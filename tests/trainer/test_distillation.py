"""A teacher's log-probabilities: whose they are, where they go, and that they teach."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError, TrainError
from areal_gym.trainer.algorithms.advantages import AdvantageInputs, estimate
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import distill
from areal_gym.trainer.objectives import remote_teacher
from areal_gym.trainer.objectives.distillation import LocalTeacher, annotate
from areal_gym.trainer.objectives.remote_teacher import RemoteTeacher
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import TokenSpan, Trajectory
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import batch, honest_logprobs, tiny_decoder


def scores_of(decoder, token_ids):
    """Log-probabilities of all tokens but the first, as an engine scores."""
    ids = torch.tensor(token_ids)
    with torch.no_grad():
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        scores = (hidden @ decoder.lm_head_weight.T).log_softmax(-1)
    return scores[torch.arange(len(ids) - 1), ids[1:]].tolist()


class Server:
    """What scores remotely; it fails as often as it is told to."""

    def __init__(self, decoder, num_failures=0):
        self.decoder, self.num_failures, self.num_calls = decoder, num_failures, 0

    async def score(self, token_ids):
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.num_calls <= self.num_failures:
            raise EngineError("the server is having a rest")
        return scores_of(self.decoder, token_ids)


def taught(groups, teacher):
    return asyncio.run(annotate(groups, teacher))


def spans_of(groups):
    return [span for group in groups for t in group for span in t.spans]


def test_distillation_advantage_by_hand():
    inputs = AdvantageInputs.from_turns(
        [[0.0, 1.0], [1.0]],
        [[1, 2], [1]],
        [0, 0],
        old_logprobs_T=torch.tensor([-1.0, -2.0, -0.5, -3.0]),
        teacher_logprobs_T=torch.tensor([-0.5, -4.0, -0.5, -1.0]),
    )
    assert estimate(distill, inputs).advantages_T.tolist() == [0.5, -2.0, 0.0, 2.0]
    found = estimate(distill, inputs, discount=0.5).advantages_T
    assert found.tolist() == [0.5 + 0.5 * -2.0, -2.0, 0.0, 2.0]


def test_missing_teacher_is_refused():
    inputs = AdvantageInputs.from_turns([[1.0]], [[2]], [0], old_logprobs_T=torch.zeros(2))
    with pytest.raises(ConfigError, match="needs teacher_logprobs_T, but the batch has no teacher"):
        estimate(distill, inputs)


def test_local_and_remote_teachers_agree():
    groups = batch()
    teacher = tiny_decoder(5)
    local = LocalTeacher(teacher, tokens_per_microbatch=64)
    ours, theirs = taught(groups, local), taught(groups, RemoteTeacher(Server(teacher)))
    local.close()
    for span, a, b in zip(spans_of(groups), spans_of(ours), spans_of(theirs), strict=True):
        assert (a.token_ids, a.logprobs) == (span.token_ids, span.logprobs)
        if span.origin == "policy":
            assert a.teacher_logprobs == pytest.approx(b.teacher_logprobs, abs=1e-4)
        else:
            assert a.teacher_logprobs is None
    trajectory = next(iter(ours[0]))
    expected = scores_of(teacher, trajectory.token_ids)
    flat = [
        value for span in trajectory.spans for value in span.teacher_logprobs or (None,) * len(span)
    ]
    for value, wanted in zip(flat[1:], expected, strict=True):
        assert value is None or value == pytest.approx(wanted, abs=1e-4)
    assert Trajectory.from_dict(trajectory.to_dict()).spans == trajectory.spans


def test_failing_teacher_server_is_retried_a_limited_number_of_times():
    (group,) = batch(num_groups=1, group_size=1)
    server = Server(tiny_decoder(), num_failures=2)
    taught([group], RemoteTeacher(server))
    assert server.num_calls == 3
    with pytest.raises(EngineError, match="having a rest"):
        taught([group], RemoteTeacher(Server(tiny_decoder(), num_failures=3)))


class UnansweringServer(Server):
    """A teacher whose server does not answer its first `num_failures` calls."""

    async def score(self, token_ids):
        try:
            return await super().score(token_ids)
        except EngineError as error:
            raise EngineUnreachableError(error.message, hints=["start the teacher"]) from None


def test_lost_teacher_server_is_waited_for(monkeypatch):
    monkeypatch.setattr(remote_teacher, "_MAX_PAUSE_S", 0.01)
    (group,) = batch(num_groups=1, group_size=1)
    server, said = UnansweringServer(tiny_decoder(), num_failures=7), []
    taught([group], RemoteTeacher(server, patience_s=60, say=said.append))
    assert server.num_calls == 8
    (line,) = said
    assert line.startswith("the teacher's servers are lost, and the run waits for them (the server")
    teacher = RemoteTeacher(UnansweringServer(tiny_decoder(), num_failures=10**9), patience_s=0.1)
    with pytest.raises(EngineUnreachableError, match="did not come back: waited 0 s") as caught:
        taught([group], teacher)
    assert caught.value.hints == ("start the teacher",)


def test_invalid_teacher_logprobs_are_refused():
    class Liar:
        async def score(self, rows):
            return [[0.7] * row.num_marked for row in rows]

    with pytest.raises(TrainError, match="are not log-probabilities"):
        taught(batch(num_groups=1), Liar())


def divergence(student, teacher, groups):
    """Mean over the tokens of sum_v p(v) (log p(v) - log teacher(v)): the exact reverse KL."""
    total, count = 0.0, 0
    for group in groups:
        for trajectory in group:
            ids = torch.tensor(trajectory.token_ids)
            with torch.no_grad():
                ours, theirs = (
                    (
                        decoder.hidden_states(
                            ids, torch.arange(len(ids)), causal_attend([len(ids)])
                        )
                        @ decoder.lm_head_weight.T
                    ).log_softmax(-1)
                    for decoder in (student, teacher)
                )
            total += float((ours.exp() * (ours - theirs)).sum(-1).mean())
            count += 1
    return total / count


def sample_all(student, groups, generator, num_tokens=5):
    """New first turns of the groups' members, sampled by the student."""
    members = [trajectory for group in groups for trajectory in group]
    ids = [list(trajectory.spans[0].token_ids) for trajectory in members]
    logprobs = [[] for _ in members]
    for _ in range(num_tokens):
        lengths = [len(row) for row in ids]
        positions = torch.cat([torch.arange(length) for length in lengths])
        with torch.no_grad():
            hidden = student.hidden_states(
                torch.tensor([i for row in ids for i in row]), positions, causal_attend(lengths)
            )
            last = hidden[torch.tensor(lengths).cumsum(0) - 1]
            scores = (last @ student.lm_head_weight.T).log_softmax(-1)
        choices = torch.multinomial(scores.exp(), 1, generator=generator).squeeze(1)
        for row, values, choice, score in zip(ids, logprobs, choices.tolist(), scores, strict=True):
            row.append(choice)
            values.append(float(score[choice]))
    sampled = {
        trajectory.id: (
            trajectory.spans[0],
            TokenSpan(
                origin="policy",
                token_ids=tuple(row[-num_tokens:]),
                logprobs=tuple(values),
                policy_version=0,
            ),
        )
        for trajectory, row, values in zip(members, ids, logprobs, strict=True)
    }
    return [
        replace(
            group,
            trajectories=tuple(replace(t, spans=sampled[t.id], turns=t.turns[:1]) for t in group),
        )
        for group in groups
    ]


def test_student_converges_to_its_teacher():
    student, teacher = tiny_decoder(1), tiny_decoder(2)
    config = TrainerConfig(advantage="distill", clip_low=None, clip_high=None, lr=3e-3)
    learner = Trainer(student, config, advantage=distill, loss=ppo_clip)
    local = LocalTeacher(teacher)
    generator = torch.Generator().manual_seed(0)
    prompts = batch(num_groups=6)
    before = divergence(student, teacher, sample_all(student, prompts, generator))
    first = None
    for step in range(30):
        groups = taught(sample_all(student, prompts, generator), local)
        metrics = learner.step(groups, 0)
        first = first if step else metrics["train/kl_teacher"]
    local.close()
    after = divergence(student, teacher, sample_all(student, prompts, generator))
    assert after < 0.7 * before
    assert metrics["train/kl_teacher"] < first
    assert before > 0.5


def test_equal_student_and_teacher_have_no_gradient():
    decoder = tiny_decoder()
    groups = honest_logprobs(decoder, batch())
    local = LocalTeacher(tiny_decoder())
    groups = taught(groups, local)
    local.close()
    config = TrainerConfig(advantage="distill", clip_low=None, clip_high=None)
    metrics = Trainer(decoder, config, advantage=distill, loss=ppo_clip).step(groups, 0)
    assert metrics["train/kl_teacher"] == pytest.approx(0, abs=1e-5)
    assert metrics["train/grad_norm"] < 1e-4
