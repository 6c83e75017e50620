"""Compares the settings of a resumed run: some may change silently, others warn or are refused."""

from __future__ import annotations

from areal_gym.config import RunConfig, load_config
from areal_gym.config.settings_model import flat
from areal_gym.errors import ConfigError, GymError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.markup import short

SILENT = (
    # How long the run is, and what is kept and shown of it.
    *("steps", "eval.at_start", "eval.every", "loggers"),
    *("trainer.keep_checkpoints", "trainer.save_every"),
    # Where and how fast it is computed.
    *("cluster", "gateway", "engine.device", "engine.kwargs", "engine.num_slots"),
    *("engine.num_threads", "engine.url", "teacher.url", "trainer.compile", "trainer.cpu_offload"),
    *("trainer.device", "trainer.num_ranks", "trainer.parallel", "trainer.num_threads"),
    *("trainer.connect_timeout_s", "trainer.max_restarts", "trainer.recompute_layers"),
    *("trainer.profile", "trainer.runs_in", "trainer.tokens_per_microbatch"),
    "trainer.weight_sync",
    *("rollout.episode_timeout_s", "rollout.max_failure_rate", "rollout.max_in_flight"),
    "rollout.max_retries",
    # The initial weights are compared by their hash, wherever they are.
    "engine.model",
)
"""Settings that do not change the meaning of the run; they may differ silently."""
NEVER = ("objective", "seed", "deterministic")
"""Settings that define the run; another value is refused."""


def require_resumable(directory: RunDir, config: RunConfig) -> list[str]:
    """Return warnings about settings that differ; raise ConfigError for those in NEVER."""
    try:
        before = load_config(directory.config_file)
    except GymError:  # written by another version, whose settings are not comparable
        return [f"the settings in {directory.config_file} cannot be compared with the ones now"]
    changed = changed_settings(before, config)
    refused = {key: pair for key, pair in changed.items() if _is_under(key, NEVER)}
    if refused:
        values = "; ".join(f"{key} = {old!r}, not {new!r}" for key, (old, new) in refused.items())
        key, (old, _) = next(iter(refused.items()))
        raise ConfigError(
            f"the run in {directory.path} has {values}: with another value it is another run",
            hints=[
                f"continue the run with its own value: {key}={old}",
                "or begin another run in another directory, with --out",
            ],
        )
    reported = {key: pair for key, pair in changed.items() if not _is_under(key, SILENT)}
    changes = (
        f"{key} {short(old, 40)} -> {short(new, 40)}" for key, (old, new) in reported.items()
    )
    warning = f"warning: resumed with other settings than before: {'; '.join(changes)}"
    return ([warning] if reported else []) + _schedule_warnings(before, config)


def _schedule_warnings(before: RunConfig, now: RunConfig) -> list[str]:
    """Warn if another number of steps stretches or shortens the learning rate's schedule."""
    schedule = now.trainer.lr_schedule
    if schedule.id == "constant" or schedule.steps is not None or before.steps == now.steps:
        return []
    return [
        f"warning: trainer.lr_schedule = {schedule.id!r} now ends at step {now.steps}, not at step "
        f"{before.steps}: the learning rate continues where a run of {now.steps} steps has it "
        f"(trainer.lr_schedule.steps={before.steps} keeps the old schedule, then stays at its end)"
    ]


def changed_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the settings that differ, by dotted key, with old and new value."""
    old, new = (dict(flat(config.model_dump(mode="json"))) for config in (before, now))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _is_under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
