"""A run that learns from fixed data: no episodes, no engine, the same directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.distributed.cluster import Cluster, open_cluster
from areal_gym.errors import StopTraining
from areal_gym.report import keep_report
from areal_gym.report.learning_curve import draw_learning_curve
from areal_gym.run_dir.provenance import entries_used
from areal_gym.run_dir.run_dir import RunDir, RunMode
from areal_gym.runs.callbacks import Callback, Callbacks
from areal_gym.runs.components import (
    Components,
    close_learner,
    hash_of_policy,
    make_loggers,
    policy_directory,
    require_devices,
    require_same_start,
    save_settings,
)
from areal_gym.runs.examples_data import load_examples
from areal_gym.runs.logger_threads import Loggers
from areal_gym.runs.restarts import restart_on_lost_rank
from areal_gym.runs.resume import require_resumable
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.utils.blocking import interruptible
from areal_gym.utils.files import write_atomic
from areal_gym.utils.statistics import cpu_s
from areal_gym.version import __version__


def train_supervised(
    config: RunConfig,
    *,
    run_dir: Path,
    mode: RunMode = "new",
    from_step: int | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """The whole of a run with objective sft, dpo or rm; returns the summary, as `train` does.

    Raises:
        GymError: see `areal_gym.errors`; what was learned so far is saved where the disk allows.
    """
    import torch

    torch.set_num_threads(config.trainer.num_threads)
    shown = display or SilentDisplay()
    with RunDir.open(run_dir, mode, begins=mode == "new") as directory:
        return restart_on_lost_rank(
            lambda is_resumed, from_step: _learn(
                config, directory, shown, Callbacks(callbacks), is_resumed, from_step
            ),
            config,
            directory,
            shown,
            is_resumed=mode == "resume",
            from_step=from_step,
        )


def _learn(
    config: RunConfig,
    directory: RunDir,
    display: Display,
    told: Callbacks,
    is_resumed: bool,
    from_step: int | None,
) -> dict[str, Any]:
    from areal_gym.trainer.batch.examples import batch_of_step
    from areal_gym.trainer.checkpoint import (
        checkpoint_of,
        keep_checkpoints,
        latest_checkpoint,
        require_space,
        require_whole,
        restore_learner,
        save_learner,
    )

    cpu_before_s = cpu_s()
    with ExitStack() as stack:
        display.say(
            f"areal-gym {__version__} | objective {config.objective} | model "
            f"{config.engine.model} | seed {config.seed} | run directory: {directory.path}"
        )
        has_env = config.data.file is None or config.engine.model == "starter"
        parts = Components.of(config) if has_env else None
        policy, warm_start = policy_directory(config, parts, display)
        if is_resumed:
            require_resumable(directory, config)
            require_same_start(directory, policy)
        learned, measured = load_examples(config, parts, Renderer.from_checkpoint(policy), display)
        found = latest_checkpoint(directory.checkpoints_dir) if is_resumed else None
        if from_step is not None:
            found = checkpoint_of(directory.checkpoints_dir, from_step)
        if found is not None:
            require_whole(found[1])
        done, source = found or (0, policy)
        cluster = stack.enter_context(_open_cluster(config))
        learner = _make_learner(config, source, policy, cluster)
        stack.callback(close_learner, learner)
        require_space(learner, directory.checkpoints_dir, config.trainer.keep_checkpoints)
        if found is not None:
            restore_learner(learner, source)
        _settle(config, directory, display, policy, done, is_resumed)
        if is_resumed:
            directory.rewind(done)
        if found is not None:
            display.say(f"resumed at step {done} from {source}")

        def evaluate(step: int) -> None:
            if any(row["step"] == step for row in directory.read_evaluations()):
                return
            row = learner.evaluate(measured)
            directory.append_evaluation({"step": step, "heldout": row})
            told.tell("on_evaluation", step, {f"eval/{name}": x for name, x in row.items()})
            display.say(f"held-out at step {step}: {_in_words(row)} ({len(measured)} examples)")

        def keep() -> str | None:
            rows = directory.read_evaluations()
            scores = {row["step"]: -row["heldout"]["loss"] for row in rows}
            return keep_checkpoints(
                directory.checkpoints_dir, config.trainer.keep_checkpoints, scores
            )

        saved = done or None

        def save(step: int) -> None:
            nonlocal saved
            if step != saved:
                save_learner(learner, directory.checkpoints_dir, step, policy)
                saved = step
                keep()
                told.tell("on_checkpoint", step, directory.checkpoint(step))

        told.tell("on_start", directory)
        evaluate(done)
        loggers = Loggers(make_loggers(config), display.say)
        loggers.open(directory.loggers_dir, config, first_step=done + 1)
        display.phase("train", config.steps)
        start_s = time.perf_counter()
        try:
            told.raise_if_stopped()
            with _interrupts_between_steps() as raise_if_interrupted:
                for step in range(done + 1, config.steps + 1):
                    step_s = time.perf_counter()
                    batch = batch_of_step(learned, step, config.data.batch_size, config.seed)
                    row = {"step": step, **learner.step(batch)}
                    row["time/step_s"] = time.perf_counter() - step_s
                    done = step
                    directory.append_metrics(row)
                    loggers.log(step, row)
                    display.step(step, config.steps, row)
                    told.tell("on_step", step, row, ())
                    if config.trainer.save_every and step % config.trainer.save_every == 0:
                        save(step)
                    if config.eval.every and step % config.eval.every == 0:
                        evaluate(step)
                    raise_if_interrupted()
                    told.raise_if_stopped()
            save(done)
        except StopTraining as stop:
            display.say(f"stopped after step {done}, as a callback wanted: {stop}")
            save(done)
        except (KeyboardInterrupt, Exception):
            if done:
                save(done)
                display.say(f"stopped after step {done}; what was learned is in {directory.path}")
                if directory.is_intact:
                    display.say(f"go on with: areal-gym train --resume --out {directory.path}")
            raise
        finally:
            loggers.close()
        train_s = time.perf_counter() - start_s
        evaluate(done)
        facts = {
            "num_heldout_examples": len(measured),
            "num_steps": done,
            "stopped": told.stopped,
            "warm_start_s": warm_start.get("warm_start_s", 0.0),
            "train_s": round(train_s, 2),
            "cpu_s": round(cpu_s() - cpu_before_s, 2),
            "warm_start": warm_start,
        }
        summary = _conclude(config, directory, display, facts, keep())
        told.tell("on_end", summary)
        return summary


def _settle(
    config: RunConfig,
    directory: RunDir,
    display: Display,
    policy: Path,
    step: int,
    is_resumed: bool,
) -> None:
    """Write down what the run is; whatever was refused before has left the directory as it was."""
    remarks = require_resumable(directory, config) if is_resumed else []
    directory.begin()
    for words in (*directory.repairs, *remarks):
        directory.append_log(words)
        display.say(words)
    save_settings(directory, config)
    used = (entry.to_dict() for entry in entries_used(config))
    directory.save_provenance(used, hash_of_policy(policy))
    directory.report_start(step=step, steps=config.steps)


@contextmanager
def _open_cluster(config: RunConfig) -> Iterator[Cluster | None]:
    """`open_cluster`, where no event loop runs."""
    if config.cluster.address is None:
        yield None
        return
    with asyncio.Runner() as runner:
        opened = open_cluster(config)
        cluster = runner.run(opened.__aenter__())
        try:
            yield cluster
        finally:
            runner.run(opened.__aexit__(None, None, None))


def _make_learner(config: RunConfig, source: Path, policy: Path, cluster: Cluster | None) -> Any:
    """A learner with the weights in `source`, for a run that began with `policy`."""
    from areal_gym.distributed.ray_ranks import RaySupervised
    from areal_gym.models.device import pick_device
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint
    from areal_gym.models.tiny.scored_decoder import load_reward_model
    from areal_gym.trainer.objectives.dpo import Dpo
    from areal_gym.trainer.objectives.reward_model import BradleyTerry
    from areal_gym.trainer.objectives.sft import Sft
    from areal_gym.trainer.objectives.supervised import Objective, Supervised
    from areal_gym.trainer.parallel.worker import ProcessSupervised

    trainer, device = config.trainer, pick_device(config.trainer.device)
    if trainer.lora is not None:  # what is in `source` has the adapter merged
        source = policy
    is_placed = cluster is not None and trainer.runs_in != "thread"
    is_apart = is_placed or trainer.num_ranks > 1 or trainer.runs_in == "process"
    load = load_reward_model if config.objective == "rm" else load_checkpoint
    decoder = load(source, device="cpu" if is_apart else device)
    objective: Objective = Sft()
    if config.objective == "rm":
        objective = BradleyTerry()
    elif config.objective == "dpo":
        objective = Dpo(policy.absolute(), kind=config.dpo.kind, beta=config.dpo.beta)
    if not is_apart:
        return Supervised(decoder, trainer, objective=objective)
    if cluster is not None and is_placed:
        return RaySupervised(cluster, Supervised, decoder, trainer, objective=objective)
    require_devices(device, trainer.num_ranks)
    return ProcessSupervised(Supervised, decoder, trainer, device=device.type, objective=objective)


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Keep an interrupt until it is asked for: weights are never left half updated."""
    is_interrupted = False

    def note() -> None:
        nonlocal is_interrupted
        is_interrupted = True

    def raise_if_interrupted() -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    with interruptible(note):
        yield raise_if_interrupted


def _in_words(row: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in row.items())


def _conclude(
    config: RunConfig,
    directory: RunDir,
    display: Display,
    facts: dict[str, Any],
    best: str | None,
) -> dict[str, Any]:
    rows = directory.read_evaluations()
    before, after = rows[0]["heldout"], rows[-1]["heldout"]
    checkpoint = f"checkpoints/step-{facts['num_steps']:06d}"
    summary = {
        "objective": config.objective,
        "env": config.env.id,
        "heldout_before": before["accuracy"],
        "heldout_after": after["accuracy"],
        "heldout_loss_before": before["loss"],
        "heldout_loss_after": after["loss"],
        **facts,
        "seed": config.seed,
        "checkpoint": checkpoint,
        "best_checkpoint": None if best is None else f"checkpoints/{best}",
        "version": __version__,
    }
    title = f"{config.objective}, seed {config.seed}"
    curve = draw_learning_curve(directory.read_metrics(), rows, title=title)
    write_atomic(directory.learning_curve_file, curve)
    directory.save_summary(summary)
    display.say(f"  {'held-out':<20}{'before':>8}{'after':>8}")
    for name in before:
        display.say(f"  {name:<20}{before[name]:>8.3f}{after[name]:>8.3f}")
    display.say(f"training {facts['train_s']:.0f} s for {facts['num_steps']} steps")
    display.say(f"curve:     {directory.learning_curve_file}")
    display.say(f"report:    {keep_report(directory)}")
    display.say(
        f"{'model: ' if config.objective == 'rm' else 'policy:'}    {directory.path / checkpoint}"
    )
    if best is not None and best != Path(checkpoint).name:
        display.say(f"best:      {directory.checkpoints_dir / 'best'} ({best})")
    if config.objective != "rm":
        display.say(f"next:      areal-gym eval --env {config.env.id} --run {directory.path} -k 4")
    return summary
