"""A step whose gradient is not finite: its batch is kept, and the step can be taken again."""

from __future__ import annotations

import math

import pytest

from areal_gym.config import load_config
from areal_gym.errors import NotFiniteError, NothingToDoError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay_refused
from areal_gym.runs.train import train

SMALL = [
    "env.id=shaped",
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=2",
    "trainer.advantage=reinforce",
    "trainer.reward.scale=1e300",  # finite in float64, in which advantages are made, and no longer
]


@pytest.fixture
def ended(shaped_env, tiny_policy, tmp_path):
    """(the directory of a run that ended in its third step, the error)"""
    run_dir = tmp_path / "run"
    config = load_config(overrides=[f"engine.model={tiny_policy}", *SMALL, "steps=9"])
    with pytest.raises(NotFiniteError) as caught:
        train(config, run_dir=run_dir)
    return run_dir, caught.value


def config_of(run_dir, *overrides):
    return load_config(run_dir / "config.yaml", overrides)


def test_batch_of_a_nonfinite_step_is_saved_and_named(ended, tiny_policy):
    run_dir, error = ended
    assert error.message.startswith("step 3: the loss was not finite 3 times in a row")
    file = run_dir / "trajectories" / "refused-000003.jsonl"
    assert error.hints[0] == f"the batch is in {file}"
    assert error.hints[1] == f"repeat the step: areal-gym replay {run_dir} --refused"
    step, groups = RunDir(run_dir).read_refused()
    assert step == 3
    assert [len(group) for group in groups] == [4, 4]
    rows = RunDir(run_dir).read_metrics()
    assert [row["train/skipped_updates"] for row in rows] == [1, 1]
    # Nothing was applied: the policy is the one that the run began with.
    before = load_checkpoint(tiny_policy).state_dict()
    after = load_checkpoint(run_dir / "checkpoints" / "step-000002").state_dict()
    assert all(after[name].equal(weight) for name, weight in before.items())


def test_nonfinite_step_is_repeated_with_other_settings(ended):
    run_dir, _ = ended
    again = replay_refused(config_of(run_dir), run_dir)
    assert (again.step, again.is_finite) == (3, False)
    assert again.unscorable == ()  # the policy is sound; it is the rewards that are not
    helped = replay_refused(config_of(run_dir, "trainer.reward.scale=1"), run_dir)
    assert helped.is_finite
    assert helped.to_dict()["is_finite"]
    assert math.isfinite(helped.loss)
    assert helped.grad_norm > 0


def test_run_without_nonfinite_step_is_refused(ended):
    run_dir, _ = ended
    (run_dir / "trajectories" / "refused-000003.jsonl").unlink()
    with pytest.raises(NothingToDoError, match="refused no step"):
        replay_refused(config_of(run_dir), run_dir)


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        ([], 1, "step 3: its loss or gradient is not finite"),
        (["trainer.reward.scale=1"], 0, "step 3: loss "),
    ],
)
def test_replay_command_prints_the_outcome_of_a_nonfinite_step(
    ended, capsys, overrides, code, said
):
    from areal_gym.cli.app import run

    run_dir, _ = ended
    assert run(["replay", str(run_dir), "--refused", *overrides]) == code
    assert said in capsys.readouterr().out


def test_nan_logprobs_survive_the_file(ended):
    run_dir, _ = ended
    _, groups = RunDir(run_dir).read_refused()
    first = groups[0].trajectories[0]
    span = next(span for span in first.spans if span.origin == "policy")
    object.__setattr__(span, "logprobs", (math.nan, *span.logprobs[1:]))
    RunDir(run_dir).save_refused((t for group in groups for t in group), 4)
    _, read = RunDir(run_dir).read_refused()
    spans = [span for span in read[0].trajectories[0].spans if span.origin == "policy"]
    assert math.isnan(spans[0].logprobs[0])
