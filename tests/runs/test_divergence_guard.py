"""The guard against divergence: what it sees, when it warns and stops, what it leaves behind."""

from __future__ import annotations

import random

import pytest

from areal_gym.config import load_config
from areal_gym.errors import ConfigError, DivergedError
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.divergence_guard import DivergenceGuard, NewestRewards
from areal_gym.runs.train import train
from areal_gym.types import FinishReason, StopReason, Task, TokenSpan, Trajectory, Turn
from tests._support import fading_env
from tests._support.display_lines import Lines


def row(step, *, reward=0.9, std=0.3, num_episodes=64, **train_metrics):
    """The metrics of a step in which all is well, but for what is given."""
    usual = {"approx_kl": 0.02, "ratio": 1.0, "entropy": 0.3} | train_metrics
    return {
        "step": step,
        "reward/newest": reward,
        "reward/newest_std": std,
        "reward/newest_min": 0.0,
        "reward/newest_episodes": float(num_episodes),
        **{f"train/{name}": value for name, value in usual.items()},
    }


def guarded(tmp_path, *overrides, rows=()):
    display = Lines()
    config = load_config(overrides=["env.id=tir", *overrides])
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    return DivergenceGuard(config, RunDir(tmp_path), display, rows), display.lines


def stops_at(guard, rows):
    """The step at which the guard stops the run, and the error; (None, None) when it does not."""
    for each in rows:
        guard.observe(each)
        try:
            guard.raise_if_diverged()
        except DivergedError as error:
            return each["step"], error
    return None, None


SIGNALS = {
    "kl": ({"approx_kl": 1.2}, "KL divergence"),
    "ratio": ({"ratio": 0.3}, "mean ratio"),
    "stale-ratio": ({"stale_ratio": 4.0}, "mean ratio"),
    "entropy": ({"entropy": 3.0}, "entropy has risen"),
    "reward": ({"reward": 0.0, "std": 0.0}, "reward of its newest versions has fallen"),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_warns_once_and_then_stops(name, tmp_path):
    change, reason = SIGNALS[name]
    guard, lines = guarded(tmp_path)
    rows = [row(step) for step in range(1, 21)]
    rows += [row(step, **change) for step in range(21, 41)]
    step, error = stops_at(guard, rows)
    # Three of five steps for a median to see it, one to warn of, and three of patience.
    assert 23 + 3 <= step <= 25 + 3
    assert reason in error.message
    assert f"since step {step - 3}" in error.message
    assert [line for line in lines if reason in line] == lines
    assert len(lines) == 1
    assert lines[0].startswith("warning: the policy may be diverging")


@pytest.mark.parametrize("name", SIGNALS)
def test_two_bad_steps_are_ignored_as_noise(name, tmp_path):
    change, _ = SIGNALS[name]
    guard, lines = guarded(tmp_path)
    rows = [row(step, **(change if step % 10 < 2 else {})) for step in range(1, 101)]
    assert stops_at(guard, rows) == (None, None)
    assert lines == []


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_can_be_switched_off(name, tmp_path):
    change, _ = SIGNALS[name]
    setting = "ratio" if name == "stale-ratio" else name
    guard, lines = guarded(tmp_path, f"guard.{setting}=null")
    rows = [row(step, **(change if step > 20 else {})) for step in range(1, 61)]
    assert stops_at(guard, rows) == (None, None)
    assert lines == []


def test_guard_modes_warn_and_ignore(tmp_path):
    rows = [row(step, approx_kl=2.0) for step in range(1, 41)]
    guard, lines = guarded(tmp_path, "guard.action=warn")
    assert stops_at(guard, rows) == (None, None)
    assert len(lines) == 1
    assert "stops" not in lines[0]
    guard, lines = guarded(tmp_path, "guard.action=ignore")
    assert stops_at(guard, rows) == (None, None)
    assert lines == []
    assert guard.observe(rows[0]) == {}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("group_size", "num_groups"), [(8, 8), (4, 2), (2, 1)])
def test_noise_of_few_episodes_does_not_stop_the_run(seed, group_size, num_groups, tmp_path):
    """Tasks that all siblings solve or none does: a batch of few groups jumps up and down."""
    rng = random.Random(seed)
    guard, _ = guarded(tmp_path, f"rollout.group_size={group_size}")

    def drawn(step):
        solved = sum(rng.random() < 0.5 for _ in range(num_groups)) / num_groups
        std = (solved * (1 - solved)) ** 0.5
        return row(step, reward=solved, std=std, num_episodes=group_size * num_groups)

    assert stops_at(guard, [drawn(step) for step in range(1, 201)]) == (None, None)


def test_reward_drop_is_relative_to_the_range_of_rewards(tmp_path):
    """Rewards from -1 to 1: a fall from 0.8 to 0.2 is less than half the way, one to -0.4 more."""

    def rows(fallen):
        return [
            row(step, reward=0.8 if step <= 20 else fallen, std=0.3) | {"reward/newest_min": -1.0}
            for step in range(1, 41)
        ]

    assert stops_at(guarded(tmp_path)[0], rows(0.2)) == (None, None)
    assert stops_at(guarded(tmp_path)[0], rows(-0.4))[0] is not None


EXPLORING = [
    row(step, reward=min(0.4 + 0.02 * step, 0.9), std=0.4, entropy=min(0.3 + 0.05 * step, 2.5))
    for step in range(1, 61)
]
"""The policy earns twice as much, and its entropy is eight times as high."""


def test_entropy_may_rise_while_the_reward_does(tmp_path):
    guard, lines = guarded(tmp_path)
    assert stops_at(guard, EXPLORING) == (None, None)
    assert lines == []
    # In a resumed run, too, which knows where the reward was.
    assert stops_at(guarded(tmp_path, rows=EXPLORING[:40])[0], EXPLORING[40:]) == (None, None)


@pytest.mark.parametrize(
    "overrides", [["rollout.curriculum=success-rate", "env.id=countdown"], ["guard.reward=null"]]
)
def test_entropy_may_not_rise_where_no_reward_says_that_it_helps(overrides, tmp_path):
    flat = [{**each, "reward/newest": 0.4} for each in EXPLORING]
    rewarded = EXPLORING if "guard.reward=null" not in overrides else flat
    _, error = stops_at(guarded(tmp_path, *overrides)[0], rewarded)
    assert "entropy has risen" in error.message


def test_a_student_may_take_over_the_entropy_of_its_teacher(tmp_path):
    distilling = guarded(tmp_path, "objective=distill", "teacher.model=anything")[0]
    assert stops_at(distilling, EXPLORING) == (None, None)


def test_high_entropy_stops_the_run_once_the_gain_is_half_lost(tmp_path):
    """From 0.42 to 0.9, and to 0.6: less than `guard.reward` allows, and too little to hesitate."""
    lost = [row(step, reward=0.6, std=0.4, entropy=2.5) for step in range(61, 81)]
    step, error = stops_at(guarded(tmp_path)[0], EXPLORING + lost)
    assert step < 75
    assert "entropy has risen" in error.message


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.curriculum=success-rate", "env.id=countdown"],
        ["objective=distill", "teacher.model=anything"],
    ],
    ids=["curriculum", "distillation"],
)
def test_falling_rewards_can_be_allowed(overrides, tmp_path):
    guard, _ = guarded(tmp_path, *overrides)
    rows = [row(step, reward=0.9 if step <= 20 else 0.0) for step in range(1, 61)]
    assert stops_at(guard, rows) == (None, None)


def test_steps_without_episodes_or_metrics_are_tolerated(tmp_path):
    guard, _ = guarded(tmp_path)
    rows = [row(step) if step % 3 else {"step": step} for step in range(1, 31)]
    rows[10]["train/approx_kl"] = None
    assert stops_at(guard, rows) == (None, None)


def test_last_good_checkpoint_is_named_with_a_command(tmp_path):
    guard, _ = guarded(
        tmp_path, "trainer.optimizer=muon", "rollout.max_staleness=8", "trainer.minibatches=4"
    )
    rows = [row(step, reward=0.9 if step <= 20 else 0.1) for step in range(1, 41)]
    error = None
    for each in rows:
        guard.observe(each)
        if guard.wants_checkpoint:
            (tmp_path / "checkpoints" / f"step-{each['step']:06d}").mkdir()
        try:
            guard.raise_if_diverged()
        except DivergedError as caught:
            error = caught
            break
    saved = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    good = guard.good_checkpoint()
    assert good == 10
    assert saved[0] == 10
    assert guard.protected == {good}
    assert error is not None
    path = tmp_path / "checkpoints" / "step-000010"
    assert f"the last good checkpoint is {path}" in error.message
    resume = f"--resume --from-step 10 --out {tmp_path}"
    assert any(resume in hint and "trainer.lr=0.00015" in hint for hint in error.hints)
    assert any("trainer.correction.second_moment=0.04" in hint for hint in error.hints)
    assert any("guard.action=warn" in hint for hint in error.hints)


def test_run_without_checkpoint_is_told_to_start_again(tmp_path):
    guard, _ = guarded(tmp_path)
    _, error = stops_at(guard, [row(step, approx_kl=2.0) for step in range(1, 41)])
    assert "no checkpoint was written before" in error.message
    assert "begin again" in error.hints[0]


def test_resumed_run_restores_the_guards_baseline(tmp_path):
    before = [row(step, reward=0.8) for step in range(1, 21)]
    fallen = [row(step, reward=0.1) for step in range(21, 41)]
    expected, _ = stops_at(guarded(tmp_path)[0], before + fallen)
    assert stops_at(guarded(tmp_path, rows=before)[0], fallen)[0] == expected
    # One that went on in the middle of it all is given its patience again, and no more.
    guard, _ = guarded(tmp_path, rows=before + fallen[:10])
    assert stops_at(guard, fallen[10:])[0] == 34


@pytest.mark.parametrize("override", ["guard.kl=0", "guard.ratio=1", "guard.reward=1.5"])
def test_invalid_guard_limits_are_refused(override):
    with pytest.raises(ConfigError):
        load_config(overrides=["env.id=tir", override])


# ---- rewards of the newest versions ----------------------------------------------------------


def ended(reward: float, stop: StopReason = StopReason.COMPLETED) -> Trajectory:
    return Trajectory(
        id="t",
        group_id="g",
        task=Task(id="x", data={}),
        env_id="test",
        spans=(TokenSpan(origin="prompt", token_ids=(1,)),),
        turns=(Turn(finish_reason=FinishReason.STOP, reward=reward),),
        stop_reason=stop,
    )


def test_newest_rewards_are_those_since_the_previous_step():
    newest = NewestRewards()
    for reward in (1.0, 0.0, float("nan")):
        newest.add(ended(reward))
    newest.add(ended(9.0, StopReason.ENV_ERROR))
    assert newest.take() == {
        "reward/newest": 0.5,
        "reward/newest_std": 0.5,
        "reward/newest_min": 0.0,
        "reward/newest_episodes": 2.0,
    }
    assert newest.take() == {}


# ---- whole runs ------------------------------------------------------------------------------


@pytest.fixture
def fading(monkeypatch):
    monkeypatch.setattr(fading_env.Fading, "num_played", 0)
    set_registry(Registry(PluginManager.installed(modules=["tests._support.fading_env"])))
    yield
    set_registry(None)


def config_of(policy, num_paid, *overrides):
    return load_config(
        overrides=[
            f"engine.model={policy}",
            "env.id=fading",
            f"env.kwargs.num_paid={num_paid}",
            "rollout.group_size=2",
            "rollout.batch_groups=16",
            "rollout.max_in_flight=32",
            "rollout.max_new_tokens=4",
            "engine.num_slots=16",
            "engine.max_context=256",
            "eval.num_tasks=2",
            "trainer.save_every=0",
            "guard.window=2",
            "guard.patience=1",
            "guard.save_every=3",
            "steps=20",
            *overrides,
        ]
    )


def test_diverged_run_stops_and_resumes_from_the_last_good_checkpoint(
    fading, tiny_policy, tmp_path
):
    display = Lines()
    out = tmp_path / "run"
    # Six steps are paid for.
    with pytest.raises(DivergedError) as caught:
        train(config_of(tiny_policy, 6 * 32), run_dir=out, display=display)
    run = RunDir(out)
    rows = run.read_metrics()
    assert [r["reward/newest"] for r in rows[:5]] == [1.0] * 5
    assert rows[6]["reward/newest"] == 0.0
    last = rows[-1]["step"]
    assert last <= 10
    assert rows[-1]["guard/severity"] >= 1 > rows[5]["guard/severity"]
    good = run.checkpoint(3)
    assert f"the last good checkpoint is {good}" in caught.value.message
    assert good.is_dir()
    assert run.checkpoint(last).is_dir()  # nothing that was learned is lost, either
    assert sum("may be diverging" in line for line in display.lines) == 1
    assert not any("go on with: " in line for line in display.lines)

    fading_env.Fading.num_played = 0
    config = config_of(tiny_policy, 10_000, "steps=6", "trainer.lr=1e-5")
    summary = train(config, run_dir=out, mode="resume", from_step=3)
    assert summary["num_steps"] == 6
    assert [r["step"] for r in run.read_metrics()] == [1, 2, 3, 4, 5, 6]
