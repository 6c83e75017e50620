"""Makes the trainer of the settings: in this process, in child processes, or on Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal_gym.config import RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.distributed.cluster import Cluster
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.runs.early_checks import load_algorithm
from areal_gym.runs.teacher import vocabulary_teacher

if TYPE_CHECKING:
    import torch

    from areal_gym.trainer.base import ExampleTrainer, GroupTrainer
    from areal_gym.trainer.parallel.remote_trainer import RemoteTrainer

_Trainer = TypeVar("_Trainer")


def make_trainer(
    config: RunConfig,
    policy: Path,
    *,
    initial: Path | None = None,
    cluster: Cluster | None = None,
    profiles: Path | None = None,
) -> GroupTrainer:
    """Make the trainer of the settings, which trains on groups; end it with `close_trainer`.

    Args:
        config: the run's settings.
        policy: the checkpoint with the trainer's first weights.
        initial: the checkpoint that the run began with, if it is resumed from another one.
        cluster: the cluster on which the ranks become Ray actors.
        profiles: the directory for profiles; None makes none.

    Raises:
        ConfigError: the settings do not fit the trainer.
    """
    advantage, loss = load_algorithm(config)
    trainer_class: Callable[..., GroupTrainer] = registry().load("trainers", config.trainer.id)
    teacher = vocabulary_teacher(config, initial or policy)
    teacher_arguments: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    return _placed(
        *(config, cluster, trainer_class, policy, initial or policy, profiles),
        advantage=advantage,
        loss=loss,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        reference=(initial or policy).absolute(),
        **teacher_arguments,
    )


def make_supervised_trainer(
    config: RunConfig, policy: Path, *, initial: Path, cluster: Cluster | None, profiles: Path
) -> ExampleTrainer:
    """Make the trainer of an objective on fixed data; arguments and errors as in `make_trainer`."""
    from areal_gym.trainer.objectives.dpo import Dpo
    from areal_gym.trainer.objectives.kto import Kto
    from areal_gym.trainer.objectives.orpo import Orpo
    from areal_gym.trainer.objectives.reward_model import BradleyTerry
    from areal_gym.trainer.objectives.supervised import Objective, Sft, Supervised

    objective: Objective = Sft()
    if config.objective == "rm":
        objective = BradleyTerry()
    elif config.objective == "dpo":
        objective = Dpo(initial.absolute(), kind=config.dpo.kind, beta=config.dpo.beta)
    elif config.objective == "kto":
        objective = Kto(initial.absolute(), **config.kto.model_dump())
    elif config.objective == "orpo":
        objective = Orpo(weight=config.orpo.weight)
    return _placed(config, cluster, Supervised, policy, initial, profiles, objective=objective)


def _placed(
    config: RunConfig,
    cluster: Cluster | None,
    trainer_class: Callable[..., _Trainer],
    policy: Path,
    initial: Path,
    profiles: Path | None,
    **arguments: Any,
) -> _Trainer | RemoteTrainer:
    """Make a trainer where the settings want it: here, in child processes, or on the cluster."""
    from areal_gym.models.backend import ModelLoader
    from areal_gym.models.device import pick_device

    settings = config.trainer_of_run(profiles)
    source = policy if settings.lora is None else initial  # a checkpoint has the adapter merged
    loader = ModelLoader(
        backend=config.model.backend,
        trusts_code=config.model.trust_remote_code,
        is_reward_model=config.objective == "rm",
    )
    if cluster is not None and settings.runs_in != "thread":
        from areal_gym.distributed.ray_ranks import RayTrainer

        return RayTrainer(cluster, trainer_class, source, settings, loader=loader, **arguments)
    device = pick_device(settings.device, "trainer.device")
    has_rollouts = config.objective not in SUPERVISED
    overlaps = has_rollouts and config.rollout.max_staleness > 0 and device.type == "cpu"
    is_apart = settings.runs_in == "process" or (settings.runs_in == "auto" and overlaps)
    if is_apart or settings.num_ranks > 1:
        from areal_gym.trainer.parallel.worker import ProcessTrainer

        _require_devices(device, settings.num_ranks)
        return ProcessTrainer(
            trainer_class, source, settings, loader=loader, device=device.type, **arguments
        )
    from areal_gym.trainer.parallel.fsdp import load_for_training

    model = load_for_training(source, settings, device=device, loader=loader)
    return trainer_class(model, settings, **arguments)


def _require_devices(device: torch.device, num_ranks: int) -> None:
    from areal_gym.models.device import device_count, is_accelerator

    if is_accelerator(device) and num_ranks > device_count():
        raise ConfigError(
            f"trainer.num_ranks = {num_ranks}, but there are {device_count()} GPUs",
            hints=["one rank per GPU; trainer.device=cpu trains on the CPU"],
        )
