from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, NotFiniteError, TrainError
from areal_gym.trainer.algorithms.advantages import grpo, reinforce, reinforce_baseline
from areal_gym.trainer.algorithms.losses import LossOutput, cispo, gspo, ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.bins import Row, split_by_tokens
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.batch.sequences import make_sequences, sequences_of
from areal_gym.trainer.checkpoint import (
    keep_checkpoints,
    latest_checkpoint,
    require_space,
    require_whole,
    restore_trainer,
    save_trainer,
)
from areal_gym.trainer.chunked_logprobs import chunk_tokens, score_tokens
from areal_gym.trainer.states import prefixed
from areal_gym.trainer.step_stats import MeansByLag
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, TokenSpan, Trajectory
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import (
    batch,
    honest_logprobs,
    random_ids,
    tiny_decoder,
    trajectory,
)


def learner(seed: int = 0, *, advantage=grpo, loss=ppo_clip, **config) -> Trainer:
    return Trainer(tiny_decoder(seed), TrainerConfig(**config), advantage=advantage, loss=loss)


def flat_weights(trained: Trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in trained.weights()]).clone()


# ---- sequences -------------------------------------------------------------------------------


def test_sequence_contains_the_spans_in_order():
    rng = random.Random(0)
    played = trajectory(rng, (1, 2, 3), reward=1.0, num_turns=3, version=7, ends_with_env=True)
    (row,) = make_sequences(played)
    assert row.token_ids == played.token_ids
    assert row.num_prompt_tokens == 3
    assert row.num_trainable == played.num_policy_tokens
    assert not any(row.loss_mask[:3])
    assert not row.loss_mask[-1]
    assert {v for v, m in zip(row.versions, row.loss_mask, strict=True) if m} == {7}
    assert {v for v, m in zip(row.versions, row.loss_mask, strict=True) if not m} == {-1}


def test_final_tool_output_keeps_the_reward():
    played = trajectory(random.Random(1), (5,), reward=1.0, num_turns=2, ends_with_env=True)
    assert make_sequences(played)[0].reward == 1.0


def forked(played: Trajectory, prompt: tuple[int, ...]) -> Trajectory:
    """The same turns, but the last one was sampled after another prompt."""
    last = replace(played.spans[-1], branch=1)
    begin = TokenSpan(origin="prompt", token_ids=prompt, turn=last.turn, branch=1)
    return replace(played, spans=(*played.spans[:-2], begin, last))


def test_fork_is_a_separate_row_with_the_whole_reward():
    played = trajectory(random.Random(3), (5, 6), reward=1.0, num_turns=3)
    fork = forked(played, (7, 8, 9))
    assert fork.num_forks == 1
    first, second = make_sequences(fork, 4, 2)
    assert first.token_ids == tuple(i for span in played.spans[:-2] for i in span.token_ids)
    assert second.token_ids == (7, 8, 9, *played.spans[-1].token_ids)
    assert second.num_prompt_tokens == 3
    assert first.num_trainable + second.num_trainable == played.num_policy_tokens
    assert [row.reward for row in (first, second)] == [1.0, 1.0]
    assert [(row.trajectory_id, row.branch, row.group_id) for row in (first, second)] == [
        (2, 0, 4),
        (2, 1, 4),
    ]
    assert Trajectory.from_dict(json.loads(json.dumps(fork.to_dict()))) == fork


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant_length"])
def test_forked_trajectory_weighs_as_much_as_a_plain_one(aggregation):
    """A fork that rewrites nothing is no difference: the second row is the first one, longer."""
    rng = random.Random(5)
    members = [trajectory(rng, (5, 6), reward=float(i % 2), num_turns=3) for i in range(4)]

    def split(played: Trajectory) -> Trajectory:
        return forked(played, tuple(i for span in played.spans[:-1] for i in span.token_ids))

    def trained(trajectories: list[Trajectory]) -> tuple[torch.Tensor, dict[str, float]]:
        group = Group(id="0", task=trajectories[0].task, trajectories=tuple(trajectories))
        one = learner(aggregation=aggregation)
        metrics = one.step([group], 0)
        return flat_weights(one), metrics

    whole, metrics = trained(members)
    split_up, split_metrics = trained([split(members[0]), *members[1:3], split(members[3])])
    assert (whole - flat_weights(learner())).norm() > 1e-4
    torch.testing.assert_close(split_up, whole, atol=1e-6, rtol=1e-5)
    for name in ("reward/mean", "reward/std", "train/zero_advantage", "rollout/turns"):
        assert split_metrics[name] == metrics[name]
    assert split_metrics["train/sequences"] == metrics["train/sequences"] + 2


def test_single_update_starts_at_ratio_one():
    """It scores the stale tokens as a pass of its own would, which M2PO's mask needs."""
    groups = batch(num_groups=4)
    one = learner(tokens_per_microbatch=64)
    two = learner(tokens_per_microbatch=64, correction={"second_moment": 1e9})  # masks nothing
    one.step(groups, version=2)
    assert two.step(groups, version=2)["train/kept_fraction"] == pytest.approx(1)
    assert (flat_weights(one) - flat_weights(learner())).norm() > 1e-4
    assert torch.equal(flat_weights(one), flat_weights(two))


def test_trained_values_of_each_token_are_recorded():
    trained = learner(lr=1e-2, minibatches=2)
    assert trained.trained_tokens() == []
    groups = batch(0, num_groups=4)
    rows = sequences_of(tuple(groups))
    before = [score.tolist() for score in trained.score(rows)]
    trained.step(groups, 0)
    told = trained.trained_tokens()
    assert [row["trajectory"] for row in told] == [row.trajectory_id for row in rows]
    # The first half was updated with the weights as they were, the second one with later ones.
    for row, logprobs in zip(told[: len(rows) // 2], before, strict=False):
        assert row["logprobs"] == pytest.approx(logprobs, abs=2e-5)
    assert told[-1]["logprobs"] != pytest.approx(before[-1], abs=2e-5)
    for row in told:
        assert len(row["advantages"]) == len(row["logprobs"])
        assert row["advantages"] == [pytest.approx(row["advantage"], abs=1e-5)] * len(
            row["logprobs"]
        )
    mean = sum(row["advantage"] for row in told) / len(told)
    assert mean == pytest.approx(0, abs=1e-4)


def test_divergence_metrics_by_staleness():
    groups = batch(num_groups=2, version=3) + batch(seed=1, num_groups=2, version=1)
    metrics = learner().step(groups, version=3)
    by_lag = [metrics["train/approx_kl_stale0"], metrics["train/approx_kl_stale2"]]
    counts = [
        sum(t.num_policy_tokens for g in part for t in g) for part in (groups[:2], groups[2:])
    ]
    mean = sum(v * n for v, n in zip(by_lag, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(metrics["train/approx_kl"], rel=1e-4)
    assert "train/approx_kl_stale0" not in learner().step(batch(), version=0)


# ---- packing ---------------------------------------------------------------------------------

rows_strategy = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 12)), min_size=1, max_size=10
)


@settings(deadline=None, max_examples=25)
@given(shapes=rows_strategy)
def test_packed_rows_compute_the_same_as_single_rows(shapes):
    rng = random.Random(len(shapes))
    prompts = [random_ids(rng, 1, 8) for _ in range(4)]
    rows = []
    for which, num_shared, length in shapes:
        shared = prompts[which][:num_shared]
        rows.append(Row(token_ids=shared + random_ids(rng, length, length), num_shared=len(shared)))
    decoder = tiny_decoder()
    packed = pack(rows)
    hidden = decoder(packed)
    for row, index in zip(rows, packed.row_index, strict=True):
        ids = torch.tensor(row.token_ids)
        alone = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        torch.testing.assert_close(hidden[torch.tensor(index)], alone, atol=1e-5, rtol=1e-5)


@settings(deadline=None)
@given(shapes=rows_strategy, budget=st.integers(1, 60))
def test_micro_batches_keep_every_row_and_respect_the_budget(shapes, budget):
    rng = random.Random(3)
    prompts = [random_ids(rng, 6, 6) for _ in range(4)]
    rows = [
        Row(token_ids=prompts[w][:n] + random_ids(rng, length, length), num_shared=n)
        for w, n, length in shapes
    ]
    parts = split_by_tokens(rows, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    for part in parts:
        size = len(pack([rows[i] for i in part]).token_ids_N)
        assert size <= budget or len(part) == 1


def test_shared_prompts_give_the_same_gradient_as_padded_rows():
    groups = batch(num_groups=4, group_size=5)
    rows = sequences_of(tuple(groups))

    def gradient(is_shared: bool) -> torch.Tensor:
        decoder = tiny_decoder()
        packed = pack(
            [
                Row(token_ids=r.token_ids, num_shared=r.num_prompt_tokens if is_shared else 0)
                for r in rows
            ]
        )
        score_tokens(decoder, packed, [r.loss_mask for r in rows]).logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in decoder.parameters()])

    plain, shared = gradient(False), gradient(True)
    assert float((plain - shared).norm() / plain.norm()) < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_hidden_states_of_chosen_tokens_equal_a_full_forward(recompute):
    """Nor does it matter that one is wanted twice, as the last of a shared prompt is."""
    decoder, wanted = tiny_decoder(), torch.tensor([7, 2, 2, 4])
    decoder.recomputes_layers = recompute
    inputs = torch.arange(9), torch.arange(9), causal_attend([9])
    weights = torch.randn(4, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    found = decoder.hidden_states(*inputs, wanted), decoder.hidden_states(*inputs)[wanted]
    torch.testing.assert_close(*found)
    parameters = list(decoder.parameters())
    ours, theirs = (torch.autograd.grad((part * weights).sum(), parameters) for part in found)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_scores_are_independent_of_chunk_size(monkeypatch):
    rows = sequences_of(tuple(batch()))
    packed = pack([Row(token_ids=r.token_ids) for r in rows])
    masks = [r.loss_mask for r in rows]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        decoder = tiny_decoder()
        scores = score_tokens(decoder, packed, masks, temperature=0.7)
        scores.logprobs.sum().backward()
        return scores.logprobs.detach(), decoder.lm_head_weight.grad

    whole = run()
    monkeypatch.setattr("areal_gym.trainer.chunked_logprobs._CHUNK_LOGITS", 150)
    for found, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_chunks_of_logits_are_sized_for_the_device():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [chunk_tokens(size, cpu) for size in (512, 151_936, 2**23)] == [8192, 27, 1]
    assert [chunk_tokens(size, gpu) for size in (512, 65_536, 151_936)] == [4096, 2048, 1024]


# ---- the learner -----------------------------------------------------------------------------


def gradient(trained: Trainer, groups: list[Group]) -> torch.Tensor:
    """What a step's clipped gradient was: after one step, Adam's mean is 0.1 times it."""
    trained.step(groups, version=0)
    means = [tensor for name, tensor in trained.states().items() if name.endswith(".exp_avg")]
    return 10 * torch.cat([mean.flatten() for mean in means])


@pytest.mark.parametrize("loss", [ppo_clip, gspo, cispo])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant_length"])
def test_micro_batches_do_not_change_the_gradient(loss, aggregation):
    groups = batch(num_groups=4)
    whole, parts = (
        gradient(learner(loss=loss, aggregation=aggregation, tokens_per_microbatch=budget), groups)
        for budget in (100_000, 64)
    )
    assert float(whole.norm()) > 0.1
    assert float((whole - parts).norm() / whole.norm()) < 1e-5


def test_final_env_tokens_do_not_change_the_gradient():
    def ending(ends_with_env: bool) -> Group:
        members = tuple(
            trajectory(
                random.Random(i), (1, 2), reward=i % 2, num_turns=2, ends_with_env=ends_with_env
            )
            for i in range(4)
        )
        return Group(id="g", task=members[0].task, trajectories=members)

    plain, longer = gradient(learner(), [ending(False)]), gradient(learner(), [ending(True)])
    assert float((plain - longer).norm() / plain.norm()) < 1e-5


def test_bfloat16_computes_nearly_the_same_gradient():
    groups = honest_logprobs(tiny_decoder(), batch(num_groups=4))
    exact, rounded = (gradient(learner(dtype=dtype), groups) for dtype in ("float32", "bfloat16"))
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.99


def test_tiny_learning_rate_changes_the_weights():
    trained = learner(lr=1e-6)
    before = flat_weights(trained)
    trained.step(batch(), version=0)
    moved = (flat_weights(trained) - before).abs()
    assert float(moved.max()) > 0
    assert float((moved > 0).float().mean()) > 0.5


@pytest.mark.slow
def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler, but '.+' is not"):
        learner(compile=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
def test_compiled_layers_train_the_same():
    plain, compiled = learner(lr=1e-2), learner(lr=1e-2, compile=True)
    start = flat_weights(plain)
    for seed in range(2):
        groups = batch(seed=seed, num_groups=2 + seed)  # two sizes, one compilation
        expected, found = plain.step(groups, version=0), compiled.step(groups, version=0)
        assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    moved = (flat_weights(plain) - start).norm()
    assert (flat_weights(compiled) - flat_weights(plain)).norm() / moved < 1e-3
    names = {name for name, _ in compiled.weights()}
    assert names == {name for name, _ in plain.weights()}  # what checkpoints call them


def test_bfloat16_master_weights_are_refused():
    with pytest.raises(ConfigError, match="float32"):
        Trainer(tiny_decoder().bfloat16(), TrainerConfig(), advantage=grpo, loss=ppo_clip)


def test_training_raises_rewarded_tokens():
    decoder = tiny_decoder()
    groups = honest_logprobs(decoder, batch(seed=5, num_groups=4))
    trained = Trainer(decoder, TrainerConfig(lr=3e-3), advantage=grpo, loss=ppo_clip)

    def gap() -> float:
        rows = [r for r in sequences_of(tuple(groups)) if r.num_trainable]
        packed = pack([Row(token_ids=r.token_ids) for r in rows])
        with torch.no_grad():
            scores = score_tokens(decoder, packed, [r.loss_mask for r in rows]).logprobs
        parts = torch.split(scores, [r.num_trainable for r in rows])
        good = [float(p.mean()) for p, r in zip(parts, rows, strict=True) if r.reward == 1]
        bad = [float(p.mean()) for p, r in zip(parts, rows, strict=True) if r.reward == 0]
        return sum(good) / len(good) - sum(bad) / len(bad)

    before = gap()
    metrics = trained.step(groups, version=0)
    assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    for _ in range(3):
        trained.step(groups, version=0)
    assert gap() > before


def test_groups_with_equal_rewards_do_not_change_weights():
    rng = random.Random(2)
    members = tuple(trajectory(rng, (1, 2), reward=1.0) for _ in range(4))
    trained = learner()
    before = flat_weights(trained)
    group = Group(id="g", task=members[0].task, trajectories=members)
    metrics = trained.step([group], version=0)
    assert metrics["train/zero_advantage"] == 1.0
    assert torch.equal(flat_weights(trained), before)


def test_member_without_tokens_counts_only_in_the_baseline():
    rng = random.Random(2)
    played = trajectory(rng, (1, 2), reward=1.0)
    empty = Trajectory(id="e", group_id="g", task=played.task, env_id="test")
    group = Group(id="g", task=played.task, trajectories=(played, empty))
    metrics = learner().step([group], version=0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["train/zero_advantage"] == 0
    with pytest.raises(TrainError, match="no token"):
        learner().step([Group(id="g", task=played.task, trajectories=(empty, empty))], version=0)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5, 7])
def test_any_number_of_groups_trains(num_groups):  # trap 10
    trained = learner(minibatches=2, tokens_per_microbatch=64)
    before = flat_weights(trained)
    metrics = trained.step(batch(num_groups=num_groups), 0)
    assert metrics["rollout/tokens"] > 0
    assert not torch.equal(before, flat_weights(trained))


@pytest.mark.parametrize("reward", [True, 1, 0.5])
def test_any_real_reward_trains(reward):
    rng = random.Random(2)
    members = tuple(trajectory(rng, (1, 2), reward=r) for r in (reward, 0.0, 0.0))
    group = Group(id="g", task=members[0].task, trajectories=members)
    assert learner().step([group], version=0)["reward/mean"] == pytest.approx(float(reward) / 3)


def test_staleness_is_measured_and_corrected():
    fresh, stale = learner(), learner()
    groups = batch(version=3)
    assert "train/stale_weight" not in fresh.step(groups, version=3)
    metrics = stale.step(groups, version=5)
    assert metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == 2
    assert 0 < metrics["train/stale_weight"] <= 5


def test_minibatches_split_by_group():
    trained = learner(minibatches=3)
    metrics = trained.step(batch(num_groups=3), version=0)
    assert metrics["train/skipped_updates"] == 0
    assert trained.num_steps == 1


def infinite(inputs):
    return LossOutput(loss=inputs.logprobs * float("inf"))


def test_infinite_gradients_are_skipped_then_refused():
    trained = learner(loss=infinite)
    before = flat_weights(trained)
    assert trained.step(batch(), version=0)["train/skipped_updates"] == 1
    assert torch.equal(flat_weights(trained), before)
    trained.step(batch(), version=0)
    with pytest.raises(NotFiniteError, match="the loss was not finite 3 times"):
        trained.step(batch(), version=0)
    # Whoever repeats the step, or resumes, is not refused for what was counted before.
    assert trained.step(batch(), version=0)["train/skipped_updates"] == 1


def infinite_slope(inputs):
    """The square root's gradient at 0 is infinite, and its value is not."""
    return LossOutput(loss=(inputs.logprobs - inputs.logprobs.detach()).abs().sqrt())


def constant_nan(inputs):
    return LossOutput(loss=inputs.logprobs + float("nan"))


@pytest.mark.parametrize(("loss", "what"), [(infinite_slope, "gradient"), (constant_nan, "loss")])
def test_nonfinite_loss_and_gradient_are_detected_separately(loss, what):
    trained = learner(loss=loss)
    before = flat_weights(trained)
    for _ in range(2):
        assert trained.step(batch(), version=0)["train/skipped_updates"] == 1
    with pytest.raises(NotFiniteError, match=f"the {what} was not finite"):
        trained.step(batch(), version=0)
    assert torch.equal(flat_weights(trained), before)


def test_nonfinite_reward_is_never_trained():
    bad = trajectory(random.Random(0), (1, 2), reward=float("inf"))
    trained = learner(advantage=reinforce)
    with pytest.raises(TrainError, match="of which 1 of 1 are not finite"):
        trained.step([Group(id="g", task=bad.task, trajectories=(bad,))], version=0)


def test_unknown_loss_arguments_are_refused():
    with pytest.raises(ConfigError, match="'dual_clipp'") as error:
        learner(loss_kwargs={"dual_clipp": 3})
    assert "dual_clip" in error.value.hints[0]


def test_training_is_reproducible():
    found = []
    for _ in range(2):
        trained = learner(optimizer="muon")
        for seed in range(3):
            trained.step(batch(seed=seed), version=0)
        found.append(flat_weights(trained))
    assert torch.equal(*found)


# ---- checkpoints -----------------------------------------------------------------------------


def test_training_resumes_bit_for_bit_from_a_checkpoint(tmp_path):
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint

    whole = learner()
    for seed in range(4):
        whole.step(batch(seed=seed), version=0)
        if seed == 1:
            save_trainer(whole, tmp_path, 2, tmp_path)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    step, path = found
    assert step == 2
    resumed = Trainer(load_checkpoint(path), TrainerConfig(), advantage=grpo, loss=ppo_clip)
    restore_trainer(resumed, path)
    for seed in (2, 3):
        resumed.step(batch(seed=seed), version=0)
    assert torch.equal(flat_weights(resumed), flat_weights(whole))


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    trained = learner()
    for step in (1, 2, 3, 4, 10):
        save_trainer(trained, tmp_path, step, tmp_path)
    # Step 2 is being measured, step 7 was not saved.
    scores = {0: 0.1, 1: 0.9, 2: None, 3: 0.5, 7: 1.0}
    assert keep_checkpoints(tmp_path, 1, scores) == "step-000001"
    assert names_in(tmp_path) == ["best", "step-000001", "step-000002", "step-000010"]
    assert (tmp_path / "best" / "config.json").samefile(tmp_path / "step-000001" / "config.json")
    assert latest_checkpoint(tmp_path) == (10, tmp_path / "step-000010")
    # Of two that are as good, the newer one has seen more.
    assert keep_checkpoints(tmp_path, 1, {1: (0.0, 0.4), 10: (0.0, 0.3)}) == "step-000001"
    assert keep_checkpoints(tmp_path, 1, {1: 0.9, 2: 0.3, 10: 0.9}) == "step-000010"
    assert names_in(tmp_path) == ["best", "step-000010"]
    require_whole(tmp_path / "best")


def test_unmeasured_checkpoints_are_kept_by_age(tmp_path):
    for step in (1, 2, 10):
        save_trainer(learner(), tmp_path, step, tmp_path)
    assert keep_checkpoints(tmp_path, 2, {0: 0.5}) is None
    assert names_in(tmp_path) == ["step-000002", "step-000010"]


@pytest.mark.parametrize("file", ["trainer/__0_0.distcp", "model.safetensors"])
def test_truncated_checkpoint_file_is_named_with_a_hint(file, tmp_path):
    trained = learner()
    trained.step(batch(), version=0)
    for step in (3, 5):
        path = save_trainer(trained, tmp_path, step, tmp_path)
        require_whole(path)
    whole = (path / file).read_bytes()
    for size in (0, 100, len(whole) - 1):
        (path / file).write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=file.replace(".", r"\.")) as caught:
            require_whole(path)
        assert "--resume --from-step 3" in caught.value.hints[0]


@pytest.mark.parametrize(
    "file", ["trainer/.metadata", "trainer/__0_0.distcp", "trainer.json", "config.json"]
)
def test_missing_checkpoint_file_is_named(file, tmp_path):
    path = save_trainer(learner(), tmp_path, 1, tmp_path)
    (path / file).unlink()
    with pytest.raises(ConfigError, match=file.rpartition("/")[2].replace(".", r"\.")):
        require_whole(path)


def test_checkpoint_of_an_older_version_is_refused(tmp_path):
    path = save_trainer(learner(), tmp_path, 1, tmp_path)
    shutil.rmtree(path / "trainer")
    (path / "trainer.pt").write_bytes(b"old")
    with pytest.raises(ConfigError, match="older version") as caught:
        require_whole(path)
    assert caught.value.hints == (f"or start again from its weights: engine.model={path}",)


def test_states_of_another_optimizer_are_refused(tmp_path):
    trained = learner()
    trained.step(batch(), version=0)
    path = save_trainer(trained, tmp_path, 1, tmp_path)
    with pytest.raises(ConfigError, match=r"other settings.* unknown"):
        restore_trainer(learner(optimizer="muon"), path)


def test_skipped_updates_are_counted_across_a_checkpoint(tmp_path):
    trained, resumed = learner(loss=infinite), learner(loss=infinite)
    trained.step(batch(), version=0)
    trained.step(batch(), version=0)
    trained.save(tmp_path / "states").result()
    resumed.load(tmp_path / "states")
    assert resumed.num_steps == 2
    with pytest.raises(TrainError, match="not finite 3 times"):
        resumed.step(batch(), version=0)


def test_too_little_disk_space_is_refused_before_training(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("areal_gym.trainer.checkpoint.shutil.disk_usage", lambda path: usage)
    with pytest.raises(TrainError, match=r"0\.0 MB left, but checkpoints need"):
        require_space(learner(), tmp_path / "checkpoints", num_kept=2)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"critic": {"trunk": "own"}},
        {"critic": {"trunk": "shared"}},
        {"lora": {"rank": 2}},
    ],
)
def test_required_disk_space_covers_the_whole_checkpoint(settings):
    trained = learner(**settings, advantage=gae if "critic" in settings else grpo)
    trained.step(batch(), version=0)
    held = {**trained.states(), **prefixed("policy", dict(trained.weights()))}
    expected = sum(tensor.nbytes for tensor in held.values())
    # But for Adam's counters of steps, a number each.
    assert trained.checkpoint_bytes() == pytest.approx(expected, abs=4 * len(held) + 100)


def test_running_baseline_is_the_mean_of_earlier_steps_and_is_saved(tmp_path):
    seen = []

    def baseline(rewards_G, group_ids_G, *, past_mean=None):
        seen.append(None if past_mean is None else float(past_mean))
        return reinforce_baseline(rewards_G, group_ids_G, past_mean=past_mean)

    trained, resumed = learner(advantage=baseline), learner(advantage=baseline)
    means = [trained.step(batch(s, group_size=3 + s), version=0)["reward/mean"] for s in range(3)]
    assert len(set(means)) > 1
    assert seen[0] is None
    assert seen[1:] == pytest.approx([means[0], 0.9 * means[0] + 0.1 * means[1]])
    trained.save(tmp_path / "states").result()
    resumed.load(tmp_path / "states")
    for each in (trained, resumed):
        each.step(batch(7), version=0)
    assert seen[-1] == seen[-2] == pytest.approx(0.9 * seen[2] + 0.1 * means[2])


def test_running_baseline_by_hand():
    rewards, ids = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 1])
    assert reinforce_baseline(rewards, ids).tolist() == [1.0, 0.0, 0.5]
    past = torch.tensor(0.25, dtype=torch.float64)
    assert reinforce_baseline(rewards, ids, past_mean=past).tolist() == [0.75, -0.25, 0.25]


def test_tokens_of_future_versions_have_no_lag():
    """As `--from-step` leaves them in the journal: the run goes back, and they are there."""
    means = MeansByLag()
    means.add(torch.tensor([-2, 0, 1]), torch.tensor([1.0, 2.0, 4.0]))
    assert means.metrics("lag") == {"lag0": 1.5, "lag1": 4.0}
