"""Prepares a run before its event loop starts, and writes the first files of its directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.config.trust import remember_settings
from areal_gym.errors import NothingToDoError
from areal_gym.images import ImageStore
from areal_gym.run_dir.provenance import entries_used
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.callbacks import Callbacks
from areal_gym.runs.components import Components, make_loggers
from areal_gym.runs.examples_data import load_examples
from areal_gym.runs.logger_threads import Loggers
from areal_gym.runs.policy_directory import hash_of_policy, policy_directory, require_same_start
from areal_gym.runs.restarts import Restarts
from areal_gym.runs.resume import require_resumable
from areal_gym.runs.reward_trial import try_rewards
from areal_gym.runs.run_display import Display
from areal_gym.runs.run_inputs import save_inputs
from areal_gym.runs.task_counts import announce_tasks
from areal_gym.runs.taught_envs import require_taught_envs
from areal_gym.utils.blocking import run_to_end
from areal_gym.utils.command_words import quoted
from areal_gym.utils.statistics import cpu_s
from areal_gym.version import __version__

if TYPE_CHECKING:
    from areal_gym.trainer.batch.examples import Example


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """Everything about a run that is known before its event loop starts."""

    config: RunConfig
    directory: RunDir
    display: Display
    callbacks: Callbacks
    restarts: Restarts
    loggers: Loggers
    components: Components | None
    """None if the settings need no environment."""
    policy: Path
    """The checkpoint that the run began with; later checkpoints get its tokenizer."""
    warm_start: dict[str, Any]
    examples: tuple[list[Example], list[Example]]
    """Examples to train on and to measure on; empty unless the objective is on fixed data."""
    is_resumed: bool
    checkpoint: tuple[int, Path] | None
    """Step and path of the checkpoint from which the run continues."""
    cpu_before_s: float

    @property
    def step(self) -> int:
        """The number of steps taken before."""
        return 0 if self.checkpoint is None else self.checkpoint[0]

    @property
    def source(self) -> Path:
        """The checkpoint with the trainer's first weights."""
        return self.policy if self.checkpoint is None else self.checkpoint[1]

    def begin(self) -> None:
        """Write settings and provenance: the first change to a resumed or replaced directory."""
        config, directory = self.config, self.directory
        warnings = require_resumable(directory, config) if self.is_resumed else []
        directory.begin()
        for line in (*directory.repairs, *warnings):
            directory.append_log(line)
            self.display.say(line)
        save_settings(directory, config)
        used = (entry.to_dict() for entry in entries_used(config))
        inputs = directory.read_provenance().get("inputs", [])
        directory.save_provenance(used, hash_of_policy(self.policy))
        if self.is_resumed and inputs:
            directory.add_provenance(inputs=inputs)
        for line in save_inputs(directory, config):
            directory.append_log(line)
            self.display.say(line)
        directory.save_tokenizer(self.policy)
        directory.report_start(step=self.step, steps=config.steps)

    def rewind(self) -> None:
        """Delete all records after the checkpoint; without a checkpoint, all records."""
        if self.is_resumed:
            self.directory.rewind(self.step)
        # Ranks in other processes find the examples' images only in the run's store.
        rows = (row for examples in self.examples for example in examples for row in example)
        ImageStore(self.directory.images_dir).keep(i.sha256 for row in rows for i in row.images)
        if self.checkpoint is not None:
            self.display.say(f"resumed at step {self.step} from {self.source}")


def prepare_run(
    config: RunConfig,
    directory: RunDir,
    display: Display,
    callbacks: Callbacks,
    restarts: Restarts,
    *,
    is_resumed: bool,
    from_step: int | None,
) -> PreparedRun:
    """Find or make the policy, and load examples; a warm start takes a minute.

    This happens outside of the event loop, so that an interrupt ends it at once. A new directory is
    written to from here on; an existing one is not changed until everything has started.
    """
    cpu_before_s = cpu_s()
    is_supervised = config.objective in SUPERVISED
    needs_env = not is_supervised or config.data.file is None or config.engine.model == "starter"
    components = Components.of(config) if needs_env else None
    loggers = Loggers(make_loggers(config), display.say)
    _announce(config, directory, display)
    require_taught_envs(config)
    if components is not None and not is_supervised:
        run_to_end(components.make_shared(display))
        config = announce_tasks(config, components, display.say)
        run_to_end(try_rewards(components, "train", display.say))
        _warn_of_contamination(config, components, display)
    policy, warm_start = policy_directory(config, components, display)
    if is_resumed:
        require_resumable(directory, config)
        require_same_start(directory, policy)
    examples: tuple[list[Example], list[Example]] = ([], [])
    if is_supervised:
        examples = load_examples(config, components, Renderer.from_checkpoint(policy), display)
    prepared = PreparedRun(
        config=config,
        directory=directory,
        display=display,
        callbacks=callbacks,
        restarts=restarts,
        loggers=loggers,
        components=components,
        policy=policy,
        warm_start=warm_start,
        examples=examples,
        is_resumed=is_resumed,
        checkpoint=_checkpoint(directory, is_resumed=is_resumed, from_step=from_step),
        cpu_before_s=cpu_before_s,
    )
    if directory.has_begun and not is_resumed:
        prepared.begin()
    return prepared


def require_steps_left(config: RunConfig, directory: RunDir) -> None:
    """Raise NothingToDoError if no step is left, before the summary is overwritten."""
    num_steps = int((directory.read_summary() or {}).get("num_steps", 0))
    if 0 < config.steps <= num_steps:
        raise NothingToDoError(
            f"{directory.path} has taken all of its {num_steps} steps",
            hints=[
                f"train longer: --resume --out {quoted(directory.path)} --steps {2 * num_steps}",
                f"look at it: areal-gym view {quoted(directory.path)}",
            ],
        )


def save_settings(directory: RunDir, config: RunConfig) -> None:
    """Write the resolved settings into a run directory; this user trusts them from now on."""
    directory.save_config(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    remember_settings(config)


def _checkpoint(
    directory: RunDir, *, is_resumed: bool, from_step: int | None
) -> tuple[int, Path] | None:
    from areal_gym.trainer.checkpoint import checkpoint_of, latest_checkpoint, require_whole

    folder = directory.checkpoints_dir
    checkpoint = latest_checkpoint(folder) if is_resumed else None
    if from_step is not None:
        checkpoint = checkpoint_of(folder, from_step)
    if checkpoint is not None:
        require_whole(checkpoint[1])
    return checkpoint


def _announce(config: RunConfig, directory: RunDir, display: Display) -> None:
    where, model = f"run directory: {directory.path}", config.engine.model
    start, seed = f"areal-gym {__version__}", f"seed {config.seed}"
    if config.objective in SUPERVISED:
        display.say(f"{start} | objective {config.objective} | model {model} | {seed} | {where}")
        return
    owners = sorted({entry.plugin.source for entry in entries_used(config)})
    env, agent, engine = config.env.id, config.agent.id, f"{config.engine.id} ({model})"
    display.say(f"{start} | env {env} | agent {agent} | engine {engine} | {seed}")
    display.say(f"  plugins: {', '.join(owners)} | {where}")


def _warn_of_contamination(config: RunConfig, components: Components, display: Display) -> None:
    """Warn if held-out tasks are trained on; seeds keep generated splits apart."""
    from areal_gym.envs.contamination import find_contamination

    if config.eval.num_tasks == 0:
        return
    split, env = config.eval.split, components.make_env()
    if split == "train":
        display.say("warning: eval.split = train: the tasks of the evaluation are trained on")
    elif all(env.num_tasks(name) is not None for name in ("train", split)):
        contamination = find_contamination(env, heldout=split)
        if contamination.overlaps:
            display.say(
                f"warning: {len(contamination.overlaps)} of {contamination.num_heldout:,} "
                f"questions in split {split!r} are trained on, or similar ones: "
                f"{contamination.num_same} word for word (areal-gym data check {config.env.id})"
            )
    env.close()
