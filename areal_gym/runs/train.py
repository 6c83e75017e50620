"""One training run, from the warm start to the summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig, require_plain_sampling
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.config.online_settings import ONLINE
from areal_gym.distributed.cluster import open_cluster
from areal_gym.engines.base import Engine
from areal_gym.errors import NothingToDoError
from areal_gym.report import keep_report
from areal_gym.report.learning_curve import CurvePoint, draw_learning_curve
from areal_gym.run_dir.provenance import entries_used, require_installed
from areal_gym.run_dir.run_dir import RunDir, RunMode
from areal_gym.runs.callbacks import Callback, Callbacks
from areal_gym.runs.components import (
    Components,
    close_learner,
    hash_of_policy,
    make_learner,
    make_loggers,
    open_engine,
    policy_directory,
    require_same_start,
    save_settings,
)
from areal_gym.runs.evaluation import Evaluations
from areal_gym.runs.fixed_data import train_supervised
from areal_gym.runs.logger_threads import Loggers
from areal_gym.runs.probe import (
    LogprobGap,
    first_messages,
    keep_rounding_from_clips,
    measure_gap,
    require_agreement,
)
from areal_gym.runs.restarts import restart_on_lost_rank
from areal_gym.runs.resume import require_resumable
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.runs.sandboxes import announce_sandboxes
from areal_gym.runs.serve_policy import open_gateway
from areal_gym.runs.steps import RunContext, take_steps
from areal_gym.runs.teacher import open_teacher
from areal_gym.runs.workers import open_workers
from areal_gym.utils.blocking import run_to_end
from areal_gym.utils.files import write_atomic
from areal_gym.utils.markup import counted
from areal_gym.utils.statistics import cpu_s
from areal_gym.version import __version__


def train(
    config: RunConfig,
    *,
    run_dir: Path,
    mode: RunMode = "new",
    from_step: int | None = None,
    display: Display | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Run the whole of it and return the summary, which is also in `summary.json`.

    A callback may end it before its last step, in the same orderly way (`stopped` in the summary
    says why); `mode="resume"` goes on from there, too.

    On a cluster, a trainer's process that dies costs the steps since the newest checkpoint: the
    run goes on from there.

    Interrupted (Ctrl-C), it saves a checkpoint of what was learned and raises KeyboardInterrupt;
    `mode="resume"` goes on from there, or from the checkpoint of `from_step`: what was learned
    after that step is forgotten.

    Raises:
        GymError: see `areal_gym.errors`; what was learned so far is saved where the disk allows.
    """
    require_installed(config)
    if mode == "resume" and from_step is None:
        _require_steps_left(config, RunDir(run_dir))
    if config.objective in SUPERVISED:
        return train_supervised(
            config,
            run_dir=run_dir,
            mode=mode,
            from_step=from_step,
            display=display,
            callbacks=callbacks,
        )
    require_plain_sampling(config)
    run = _Training(config, display or SilentDisplay(), Callbacks(callbacks))
    with RunDir.open(run_dir, mode, begins=mode == "new") as directory:

        def play(is_resumed: bool, from_step: int | None) -> dict[str, Any]:
            start = run.prepare(directory, is_resumed=is_resumed)
            return run_to_end(run.play(directory, start, is_resumed, from_step))

        return restart_on_lost_rank(
            play,
            config,
            directory,
            run.display,
            is_resumed=mode == "resume",
            from_step=from_step,
        )


def _require_steps_left(config: RunConfig, directory: RunDir) -> None:
    """Refuse to take no step: what the run says of itself would be overwritten by nothing."""
    num_steps = int((directory.read_summary() or {}).get("num_steps", 0))
    if 0 < config.steps <= num_steps:
        raise NothingToDoError(
            f"{directory.path} has taken all of its {num_steps} steps",
            hints=[
                f"go on: --resume --out {directory.path} --steps {2 * num_steps}",
                f"look: areal-gym view {directory.path}",
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """What a run begins with."""

    parts: Components
    loggers: Loggers
    policy: Path
    warm_start: dict[str, Any]


@dataclass(slots=True)
class _Training:
    """One training run."""

    config: RunConfig
    display: Display
    callbacks: Callbacks

    def prepare(self, directory: RunDir, *, is_resumed: bool) -> _Start:
        """All that comes before the event loop: a warm start takes a minute, and an interrupt ends
        it at once."""
        config, display = self.config, self.display
        used = entries_used(config)
        parts = Components.of(config)
        loggers = Loggers(make_loggers(config), display.say)
        self._announce(directory, used)
        self._warn_of_contamination(parts)
        policy, warm_start = policy_directory(config, parts, display)
        if is_resumed:
            require_resumable(directory, config)
            require_same_start(directory, policy)
        start = _Start(parts=parts, loggers=loggers, policy=policy, warm_start=warm_start)
        if directory.has_begun:
            self._settle(directory, start, step=0, is_resumed=False)
        return start

    def _settle(self, directory: RunDir, start: _Start, *, step: int, is_resumed: bool) -> None:
        """Write down what the run is: the first that a resumed or replaced run changes."""
        remarks = require_resumable(directory, self.config) if is_resumed else []
        directory.begin()
        for words in (*directory.repairs, *remarks):
            directory.append_log(words)
            self.display.say(words)
        save_settings(directory, self.config)
        used = entries_used(self.config)
        directory.save_provenance((e.to_dict() for e in used), hash_of_policy(start.policy))
        directory.save_tokenizer(start.policy)
        directory.report_start(step=step, steps=self.config.steps)

    async def play(
        self, directory: RunDir, start: _Start, is_resumed: bool, from_step: int | None
    ) -> dict[str, Any]:
        """From the first engine to the summary."""
        from areal_gym.trainer.checkpoint import (
            checkpoint_of,
            keep_checkpoints,
            latest_checkpoint,
            require_space,
            require_whole,
            restore_learner,
        )
        from areal_gym.trainer.weight_sync import make_weight_sync, weights_for

        config, display = self.config, self.display
        cpu_before_s = cpu_s()
        parts, loggers, policy = start.parts, start.loggers, start.policy
        done, source = 0, policy
        found = latest_checkpoint(directory.checkpoints_dir) if is_resumed else None
        if from_step is not None:
            found = checkpoint_of(directory.checkpoints_dir, from_step)
        if found is not None:
            done, source = found
            require_whole(source)
        async with AsyncExitStack() as stack:
            stack.callback(loggers.close)
            cluster = await stack.enter_async_context(open_cluster(config))
            learner = make_learner(config, source, initial=policy, cluster=cluster)
            stack.callback(close_learner, learner)
            rollout_state = None
            if found is not None:
                rollout_state = restore_learner(learner, source)
            num_kept = config.trainer.keep_checkpoints
            require_space(learner, directory.checkpoints_dir, num_kept)
            # Adapters are published beside the base weights, which servers keep.
            served = policy if config.trainer.weight_sync.id == "lora" else source
            engine, renderer = await stack.enter_async_context(
                open_engine(config, served, cluster, display)
            )
            teacher = await stack.enter_async_context(open_teacher(config, policy))
            weight_sync = make_weight_sync(
                engine,
                config.trainer.weight_sync,
                directory=directory.path / "weights",
                lora=config.trainer.lora,
            )
            stack.push_async_callback(weight_sync.aclose)
            if done:
                await weight_sync.publish(weights_for(weight_sync, learner), done)
            gap = await self._probe(parts, engine, renderer, learner, weight_sync, done)
            # Whatever was refused so far has left the directory as it was.
            if not directory.has_begun or is_resumed:
                self._settle(directory, start, step=done, is_resumed=is_resumed)
            directory.add_provenance(engine_gap=asdict(gap))
            reports = await announce_sandboxes(parts, display.say)
            directory.add_provenance(sandboxes=[asdict(report) for report in reports])
            if is_resumed:  # without a checkpoint, too: what was written is written anew
                directory.rewind(done)
            if found is not None:
                display.say(f"resumed at step {done} from {source}")
            loggers.open(directory.loggers_dir, config, first_step=done + 1)
            self.callbacks.tell("on_start", directory)
            await stack.enter_async_context(open_gateway(config, directory, display))
            player = await stack.enter_async_context(
                open_workers(config, parts, policy, engine, cluster)
            )

            def on_evaluation(step: int, row: Mapping[str, float]) -> None:
                loggers.log(step, row)
                self.callbacks.tell("on_evaluation", step, row)

            evaluations = Evaluations(
                config, parts, engine, renderer, directory, display, on_evaluation
            )
            stack.push_async_callback(evaluations.aclose)
            # Step 0 is measured before anything is learned; a resumed run has it on record.
            if evaluations.is_due(done):
                await evaluations.at(done)
            first_step = done + 1
            started = RunContext(
                config=config,
                display=display,
                callbacks=self.callbacks,
                directory=directory,
                parts=parts,
                policy=policy,
                engine=engine,
                renderer=renderer,
                learner=learner,
                weight_sync=weight_sync,
                evaluations=evaluations,
                loggers=loggers,
                teacher=teacher,
                player=player,
            )
            done, train_s = await take_steps(started, done, rollout_state)
            heldout = {}
            if config.env.id != ONLINE:
                heldout = _heldout(evaluations.points[0], await evaluations.at(done))
            best = keep_checkpoints(directory.checkpoints_dir, num_kept, evaluations.scores())
        summary = {
            "objective": config.objective,
            "env": config.env.id,
            **heldout,
            "num_heldout_tasks": config.eval.num_tasks,
            "num_steps": done,
            "stopped": self.callbacks.stopped,
            "first_step": first_step,
            "warm_start_s": start.warm_start.get("warm_start_s", 0.0),
            "train_s": round(train_s, 2),
            "cpu_s": round(cpu_s() - cpu_before_s, 2),
            "seed": config.seed,
            "warm_start": start.warm_start,
            "checkpoint": f"checkpoints/step-{done:06d}",
            "best_checkpoint": None if best is None else f"checkpoints/{best}",
            "version": __version__,
        }
        self._conclude(directory, evaluations, summary)
        self.callbacks.tell("on_end", summary)
        return summary

    async def _probe(
        self,
        parts: Components,
        engine: Engine,
        renderer: Renderer,
        learner: Any,
        weight_sync: Any,
        version: int,
    ) -> LogprobGap:
        """Engine and trainer must be the same model before the first token is trained on."""
        from areal_gym.trainer.weight_sync import weights_for

        config, display = self.config, self.display
        if getattr(engine, "take_over", False):
            await weight_sync.publish(weights_for(weight_sync, learner), version)
        gap = await measure_gap(config, parts, engine, renderer, learner, display.say)
        require_agreement(gap, config)
        display.say(f"engine and trainer agree: log-probabilities differ by {gap}")
        if remark := keep_rounding_from_clips(gap.max, config, learner):
            display.say(f"  {remark}")
        first = await first_messages(parts, config.seed, [])
        for warning in () if first is None else renderer.warnings(*first):
            display.say(warning)
        return gap

    def _warn_of_contamination(self, parts: Components) -> None:
        """Say so when what is measured on is learned from; splits without end are kept apart."""
        from areal_gym.envs.contamination import find_contamination

        split, env = self.config.eval.split, parts.make_env()
        if split == "train":
            self.display.say("warning: eval.split = train: what is learned from is measured on")
        elif all(env.num_tasks(name) is not None for name in ("train", split)):
            found = find_contamination(env, heldout=split)
            if found.overlaps:
                self.display.say(
                    f"warning: {len(found.overlaps)} of {found.num_heldout:,} questions in split "
                    f"{split!r} are learned from, or ones like them: {found.num_same} word for "
                    f"word (areal-gym data check {self.config.env.id})"
                )
        env.close()

    def _announce(self, directory: RunDir, used: Iterable[Any]) -> None:
        config = self.config
        owners = sorted({entry.plugin.source for entry in used})
        self.display.say(
            f"areal-gym {__version__} | env {config.env.id} | agent {config.agent.id} | engine "
            f"{config.engine.id} ({config.engine.model}) | seed {config.seed}"
        )
        self.display.say(f"  plugins: {', '.join(owners)} | run directory: {directory.path}")

    def _conclude(
        self, directory: RunDir, evaluations: Evaluations, summary: dict[str, Any]
    ) -> None:
        display = self.display
        title = f"{self.config.env.id}, seed {self.config.seed}: held-out accuracy"
        best = summary["warm_start"].get("best_demonstrator")
        write_atomic(
            directory.learning_curve_file,
            draw_learning_curve(
                directory.read_metrics(),
                directory.read_evaluations(),
                title=title,
                baselines={} if best is None else {"best demonstrator": best},
            ),
        )
        directory.save_summary(summary)
        rows = []
        if "heldout_before" in summary:
            rows.append(("", "before", "after"))
            for label, key in (("sampled", "heldout"), ("greedy", "heldout_greedy")):
                before, after = summary[f"{key}_before"], summary[f"{key}_after"]
                rows.append((f"held-out, {label}", f"{before:.3f}", f"{after:.3f}"))
        if best is not None:
            rows.append(("best demonstrator", f"{best:.3f}", ""))
        for left, middle, right in rows:
            display.say(f"  {left:<20}{middle:>8}{right:>8}".rstrip())
        num_taken = summary["num_steps"] - summary["first_step"] + 1
        display.say(
            f"warm start {summary['warm_start_s']:.0f} s, training {summary['train_s']:.0f} s "
            f"for {counted(num_taken, 'step')}"
        )
        display.say(f"curve:     {directory.learning_curve_file}")
        display.say(f"report:    {keep_report(directory)}")
        display.say(f"policy:    {directory.path / summary['checkpoint']}")
        if summary["best_checkpoint"] not in (None, summary["checkpoint"]):
            where = directory.checkpoints_dir / "best"
            display.say(f"best:      {where} ({summary['best_checkpoint']})")
        display.say(f"look:      areal-gym view {directory.path}")
        command = f"eval --env {summary['env']} --run {directory.path} -k 4"
        if summary["env"] == ONLINE:
            command = f"serve --run {directory.path}"
        display.say(f"next:      areal-gym {command}")


def _heldout(before: CurvePoint, after: CurvePoint) -> dict[str, Any]:
    return {
        "heldout_before": before.sampled,
        "heldout_after": after.sampled,
        "heldout_greedy_before": before.greedy,
        "heldout_greedy_after": after.greedy,
        "heldout_after_interval": [after.low, after.high],
    }
