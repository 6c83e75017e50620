"""One training run, from top to bottom.

    prepare_run   plugins, policy (a warm start, if it is made here), examples   no event loop yet
    open_rollouts trainer, engine, probe, gateway, rollout workers (`open_supervised`: the trainer)
    evaluate      the policy before training
    for each step next_batch -> train_on -> publish -> record -> checkpoint_and_evaluate
    evaluate      the policy after training
    conclude      summary, learning curve, report

All objectives share this. Reinforcement learning and distillation take their batches from rollouts
and publish weights to the engine; the others take them from files or demonstrations and publish
nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from areal_gym.config import RunConfig, require_plain_sampling
from areal_gym.config.absolute_paths import with_absolute_paths
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.errors import LostRankError
from areal_gym.images import use_image_store
from areal_gym.run_dir.provenance import require_installed
from areal_gym.run_dir.run_dir import RunDir, RunMode
from areal_gym.runs.callbacks import Callback, Callbacks
from areal_gym.runs.components import use_image_settings
from areal_gym.runs.early_checks import require_startable
from areal_gym.runs.open_run import open_rollouts, open_supervised
from areal_gym.runs.preparation import PreparedRun, prepare_run, require_steps_left
from areal_gym.runs.restarts import Restarts
from areal_gym.runs.run_context import RunContext
from areal_gym.runs.run_display import Display
from areal_gym.runs.run_summary import conclude
from areal_gym.utils.blocking import run_to_end, unbroken

_Item = TypeVar("_Item")


def train(
    config: RunConfig,
    *,
    run_dir: Path,
    mode: RunMode = "new",
    from_step: int | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, and return the summary, which is also in `summary.json`.

    A run may end before its last step in an orderly way, because a callback wants it or because the
    policy solves the tasks and filters leave nothing to train on (`stopped` in the summary says
    why). When interrupted by Ctrl-C, the run saves a checkpoint and raises KeyboardInterrupt.

    If one of the trainer's processes dies, the steps since the newest checkpoint are lost. The run
    continues from there by itself, up to `trainer.max_restarts` times without a new checkpoint.

    Args:
        config: the settings.
        run_dir: the run directory.
        mode: "new", "resume" or another mode of `RunDir.open`.
        from_step: when resuming, the checkpoint to continue from, by default the newest; what was
            learned after it is deleted.
        display: shows progress.
        callbacks: receive the run's events.

    Raises:
        GymError: see `areal_gym.errors`; what was learned so far is saved if the disk allows.
    """
    config = with_absolute_paths(config)
    require_installed(config)
    require_startable(config)
    use_image_settings(config)
    if mode == "resume" and from_step is None:
        require_steps_left(config, RunDir(run_dir))
    if config.objective not in SUPERVISED:
        require_plain_sampling(config)
    display = display or Display()
    with RunDir.open(run_dir, mode, begins=mode == "new") as directory:
        run_callbacks, is_resumed = Callbacks(callbacks), mode == "resume"
        restarts = Restarts(config.trainer.max_restarts)
        while True:
            prepared = prepare_run(
                *(config, directory, display, run_callbacks, restarts),
                is_resumed=is_resumed,
                from_step=from_step,
            )
            try:
                # Images of data were read before, while the directory must not be changed.
                with use_image_store(directory.images_dir):
                    if config.objective in SUPERVISED:
                        return run_to_end(_train(prepared, open_supervised))
                    return run_to_end(_train(prepared, open_rollouts))
            except LostRankError as error:
                if restarts.begin(error, directory, display):
                    is_resumed, from_step = True, None


async def _train(
    prepared: PreparedRun,
    open_run: Callable[[AsyncExitStack, PreparedRun], Awaitable[RunContext[_Item]]],
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        run = await open_run(stack, prepared)
        await run.evaluations.measure_start(run.step)
        async with run.training():
            await take_steps(run)
        await run.evaluations.measure_end(run.step)
        best = run.keep_checkpoints()
    return conclude(run, best)


async def take_steps(run: RunContext[_Item]) -> None:
    """Train to the last step; the version of the weights is the number of steps taken.

    A step that has begun to train is published and recorded even if the run is cancelled, so that
    weights, engine and records always agree on the number of steps.
    """
    for step in run.remaining_steps():
        batch = await run.next_batch()
        metrics = await unbroken(run.train_on(batch, step))
        metrics |= await unbroken(run.publish(step))
        await unbroken(run.record(step, batch, metrics))
        await run.checkpoint_and_evaluate(step)
