"""Runs of distillation from whole distributions, from the policy with a hint, from two teachers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from areal_gym.config import RunConfig, load_config
from areal_gym.engines.sglang.fake import FakeSGLangServer
from areal_gym.engines.vllm.fake_vllm import FakeVLLMServer
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from tests._support.served_in_thread import served_in_thread


def config_of(policy, *overrides: str, steps: int = 6) -> RunConfig:
    return load_config(
        overrides=[
            *("objective=distill", f"engine.model={policy}", f"steps={steps}", "env.id=math"),
            *("engine.max_context=240", "rollout.max_new_tokens=8", "rollout.batch_groups=4"),
            *("rollout.group_size=2", "eval.num_tasks=4", "trainer.lr=3e-3", *overrides),
        ]
    )


@pytest.fixture
def teacher(tiny_policy, tmp_path):
    """Another policy of the same kind."""
    decoder = build_decoder(load_checkpoint(tiny_policy).config, seed=9)
    return save_checkpoint(decoder, tmp_path / "teacher", tokenizer_dir=tiny_policy)


def padded(policy, directory, num_rows: int, seed: int):
    """Save a policy with the same tokenizer whose embedding has `num_rows` more rows."""
    config = load_checkpoint(policy).config
    config = replace(config, vocab_size=config.vocab_size + num_rows)
    return save_checkpoint(build_decoder(config, seed=seed), directory, tokenizer_dir=policy)


def kl_of(config: RunConfig, directory) -> list[float]:
    train(config, run_dir=directory)
    return [row["train/kl_teacher"] for row in RunDir(directory).read_metrics()]


def test_whole_distributions_are_learned_by_one_rank_and_by_two(tiny_policy, teacher, tmp_path):
    whole = ("teacher.divergence=reverse", f"teacher.model={teacher}")
    one = kl_of(config_of(tiny_policy, *whole), tmp_path / "one")
    assert one[-1] < one[0]
    two = kl_of(config_of(tiny_policy, *whole, "trainer.num_ranks=2", steps=1), tmp_path / "two")
    assert two[0] == pytest.approx(one[0], rel=1e-3)


@pytest.mark.parametrize("is_larger", [True, False])
def test_teacher_may_pad_the_vocabulary_to_another_size(tiny_policy, tmp_path, is_larger):
    other = padded(tiny_policy, tmp_path / "other", 16, seed=9)
    policy, teacher = (tiny_policy, other) if is_larger else (other, tiny_policy)
    hint = "teacher.hint=The answer is {answer}."
    forward = "teacher.divergence=forward"
    kinds = {
        "sampled": [],
        "forward": [forward],
        "ranks": [forward] if is_larger else [forward, "trainer.num_ranks=2"],
        "recorded": ["teacher.divergence=reverse", "teacher.top_k=100000", hint],
    }
    first_kl = {
        kind: kl_of(
            config_of(policy, f"teacher.model={teacher}", *settings, steps=1), tmp_path / kind
        )[0]
        for kind, settings in kinds.items()
    }
    assert math.isfinite(first_kl.pop("sampled"))
    assert all(kl > 0 for kl in first_kl.values())
    assert first_kl["ranks"] == pytest.approx(first_kl["forward"], rel=1e-3)


def test_policy_with_a_hint_teaches_itself_and_the_run_is_replayed(tiny_policy, tmp_path):
    own = ("teacher.is_policy=true", "teacher.hint=The answer is {answer}.")
    config = config_of(tiny_policy, *own, steps=3)
    found = kl_of(config, tmp_path / "run")
    assert all(kl != 0 for kl in found)  # the hint changes what it would say
    run = RunDir(tmp_path / "run")
    assert replay(load_config(run.config_file), run.path).is_identical
    top = ("teacher.divergence=forward", "teacher.top_k=100000")  # the whole vocabulary
    assert kl_of(config_of(tiny_policy, *own, *top, steps=1), tmp_path / "top")[0] > 1e-6
    with pytest.raises(ConfigError, match="does not fit the task"):
        kl_of(config_of(tiny_policy, own[0], "teacher.hint=It is {nothing}."), tmp_path / "wrong")


def test_policy_of_the_beginning_teaches_with_a_hint(tiny_policy, tmp_path):
    frozen = f"teacher.model={tiny_policy}"
    plain = kl_of(config_of(tiny_policy, frozen, steps=1), tmp_path / "plain")
    assert plain == pytest.approx([0], abs=1e-5)  # both are the same policy
    hint = "teacher.hint=The answer is {answer}."
    hinted = kl_of(config_of(tiny_policy, frozen, hint, steps=1), tmp_path / "hinted")
    assert abs(hinted[0]) > 1e-4


def test_two_teachers_are_one_mixture(tiny_policy, teacher, tmp_path):
    alone = kl_of(config_of(tiny_policy, f"teacher.model={teacher}", steps=1), tmp_path / "alone")
    pair = (f"teacher.model={teacher}", f"teacher.further=[{{model: {tiny_policy}}}]")
    mixed = kl_of(config_of(tiny_policy, *pair, steps=1), tmp_path / "mixed")
    # Half of the mixture is the policy itself.
    assert mixed[0] < alone[0]


@pytest.mark.parametrize(
    ("kind", "direction", "make_server", "options"),
    [
        ("sglang", "reverse", FakeSGLangServer, {}),
        ("vllm", "forward", FakeVLLMServer, {"max_logprobs": 24}),
    ],
)
def test_served_teacher_gives_the_numbers_of_a_local_one(
    tiny_policy, teacher, tmp_path, kind, direction, make_server, options
):
    top = (f"teacher.divergence={direction}", "teacher.top_k=16")
    local = config_of(tiny_policy, *top, f"teacher.model={teacher}", steps=2)
    expected = kl_of(local, tmp_path / "local")
    with served_in_thread(make_server, teacher, **options) as server:
        served = (*top, f"teacher.url={server.url}", f"teacher.engine={kind}")
        divergences = kl_of(config_of(tiny_policy, *served, steps=2), tmp_path / "served")
        if kind == "vllm":
            with pytest.raises(ConfigError, match="lists at most 24 tokens") as caught:
                kl_of(config_of(tiny_policy, *served, "teacher.top_k=25"), tmp_path / "wide")
            assert "start it with --max-logprobs 25" in caught.value.hints
    assert divergences[0] == pytest.approx(expected[0], abs=1e-5)
    assert divergences[1] == pytest.approx(expected[1], rel=1e-2)
    assert 0 < divergences[1] < divergences[0]
    run = RunDir(tmp_path / "served")
    assert replay(load_config(run.config_file), run.path).is_identical  # the server has gone


def test_each_environment_has_its_own_teacher_of_top_tokens(tiny_policy, teacher, tmp_path):
    """One teacher is behind a server, with a hint, and the other is local."""
    with served_in_thread(FakeSGLangServer, teacher) as server:
        config = config_of(
            tiny_policy,
            *("teacher.divergence=forward", "teacher.top_k=8", f"teacher.url={server.url}"),
            f"teacher.further=[{{model: {tiny_policy}}}]",
            "teacher.hint=The answer is {answer}.",
            steps=1,
        )
        assert kl_of(config, tmp_path / "run")[0] > 0
        assert server.num_requests > 1


def test_lost_teacher_ends_the_run_and_is_no_reward(tiny_policy, teacher, tmp_path):
    with served_in_thread(FakeSGLangServer, teacher) as server:
        url = server.url
        scored = type(server)._scored
        calls = []

        async def failing(token_ids, body):
            calls.append(1)
            if len(calls) > 20:
                raise EngineError("the accelerator has fallen off the bus")
            return await scored(server, token_ids, body)

        server._scored = failing
        top = ("teacher.divergence=reverse", "teacher.top_k=4", f"teacher.url={url}")
        with pytest.raises(EngineError, match="fallen off the bus"):
            kl_of(config_of(tiny_policy, *top, steps=20), tmp_path / "run")
    rows = RunDir(tmp_path / "run").read_metrics()
    assert all(row["train/kl_teacher"] > 0 for row in rows)
    assert len(rows) < 20


def test_hints_about_a_teachers_server_do_not_name_the_policy(tiny_policy, tmp_path):
    config = config_of(tiny_policy, "teacher.url=http://127.0.0.1:9")
    with pytest.raises(EngineUnreachableError, match="the teacher does not answer") as caught:
        train(config, run_dir=tmp_path / "run")
    start, whose, _ = caught.value.hints
    assert start.endswith("--model-path TEACHER --host 127.0.0.1 --port 9")
    assert whose == "TEACHER is the teacher's checkpoint, not the policy's"
    assert str(tiny_policy) not in f"{caught.value} {caught.value.hints}"


def test_teachers_server_may_pad_the_vocabulary_but_not_have_another(tiny_policy, tmp_path):
    top = ("teacher.divergence=forward", "teacher.top_k=100000")
    near, far = (padded(tiny_policy, tmp_path / str(n), n, seed=9) for n in (16, 1025))
    with served_in_thread(FakeSGLangServer, near) as server:
        served = config_of(tiny_policy, *top, f"teacher.url={server.url}", steps=1)
        served_kl = kl_of(served, tmp_path / "near")
    # The local teacher's distribution is over the common tokens; the server's leaves 6% to padding.
    local = kl_of(
        config_of(tiny_policy, *top[:1], f"teacher.model={near}", steps=1), tmp_path / "l"
    )
    assert served_kl == pytest.approx(local, rel=0.3, abs=0.1)
    refused = pytest.raises(
        ConfigError, match=r"whose vocabulary has .* tokens; that of the policy"
    )
    with served_in_thread(FakeSGLangServer, far) as server, refused as caught:
        kl_of(config_of(tiny_policy, *top, f"teacher.url={server.url}"), tmp_path / "far")
    assert "must be the policy's" in caught.value.hints[0]


MIX = "env.kwargs={envs: [{id: math}, {id: tir, name: tools}]}"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["teacher.env=mth"], "teacher.env = 'mth' is no env", "did you mean 'math'?"),
        (["env.id=mix", MIX, "teacher.env=tool"], "teacher.env = 'tool'", "available: math, tools"),
        (
            ["env.id=mix", MIX, "teacher.further=[{model: X, env: mth}]"],
            r"teacher.further\[0\].env = 'mth'",
            "did you mean 'math'?",
        ),
        (["env.id=mix", MIX, "teacher.env=math"], "no teacher teaches the tasks of 'tools'", "all"),
    ],
)
def test_environments_of_teachers_exist_and_have_one(
    tiny_policy, teacher, tmp_path, overrides, message, hint
):
    config = config_of(tiny_policy, f"teacher.model={teacher}", *overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        train(config, run_dir=tmp_path / "run")
    assert any(hint in each for each in caught.value.hints)


def test_teacher_with_a_shorter_context_is_refused(tiny_policy, teacher, tmp_path):
    refused = pytest.raises(ConfigError, match="takes at most 121 tokens, and episodes")
    with served_in_thread(FakeSGLangServer, teacher, max_context=128) as server, refused:
        kl_of(config_of(tiny_policy, f"teacher.url={server.url}"), tmp_path / "run")


def test_advantages_that_take_no_teacher_are_refused(tiny_policy, teacher, tmp_path):
    config = config_of(tiny_policy, f"teacher.model={teacher}", "trainer.advantage=per_turn")
    with pytest.raises(ConfigError, match=r"'per_turn' .* would learn from rewards"):
        train(config, run_dir=tmp_path / "run")
