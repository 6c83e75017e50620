"""Checks settings against this machine before anything slow begins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from areal_gym.config import EngineConfig, RunConfig
from areal_gym.config.algorithm_settings import CriticConfig
from areal_gym.config.objective_settings import SUPERVISED, ignores_teacher
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from areal_gym.trainer.algorithms.advantages import AdvantageEstimator
    from areal_gym.trainer.algorithms.losses import PolicyLoss


def require_startable(config: RunConfig) -> None:
    """Check for mistakes that would show only after a warm start of minutes, or never.

    Raises:
        ConfigError: an engine without servers has a server's URL, a device does not exist, or the
            advantage estimator and the loss do not fit their settings.
    """
    require_server_engine(config.engine)
    require_algorithm(config)
    # On a cluster, the ranks have their devices elsewhere.
    if config.cluster.address is None and find_spec("torch") is not None:
        from areal_gym.models.device import pick_device

        pick_device(config.trainer.device, "trainer.device")
        pick_device(config.engine.device, "engine.device")


def require_algorithm(config: RunConfig) -> None:
    """Try the advantage estimator and the loss out, if the objective has them and torch is here.

    Raises:
        ConfigError: as `load_algorithm`.
    """
    if config.objective not in SUPERVISED and find_spec("torch") is not None:
        load_algorithm(config)


def load_algorithm(config: RunConfig) -> tuple[AdvantageEstimator, PolicyLoss]:
    """Load the advantage estimator and the policy loss of the settings, and try them out.

    Raises:
        ConfigError: they do not take their settings, do not go together, or would ignore a teacher
            or the settings of a critic.
    """
    from areal_gym.trainer.algorithms.advantages import check_settings, needs_critic, takes_teacher
    from areal_gym.trainer.algorithms.token_loss import check_credit, try_loss

    plugins, settings = registry(), config.trainer
    advantage = plugins.load("advantages", settings.advantage)
    is_sampled = config.objective == "distill" and config.teacher.divergence == "sampled"
    if is_sampled and not takes_teacher(advantage):
        raise ConfigError(ignores_teacher(settings.advantage))
    if settings.critic != CriticConfig() and not needs_critic(advantage):
        raise ConfigError(
            f"trainer.critic is set, and trainer.advantage = {settings.advantage!r} has no critic",
            hints=["leave it out, or take an estimator with a critic: trainer.algorithm=ppo"],
        )
    loss = plugins.load("losses", settings.loss)
    check_settings(advantage, settings.advantage_kwargs)
    try_loss(loss, settings)
    check_credit(loss, advantage, settings)
    return advantage, loss


def obstacle_to_warm_start(env_id: str, arguments: Mapping[str, Any]) -> str:
    """Return why a small policy cannot be made for an environment; "" if it can."""
    from areal_gym.warm_start.demonstrations import obstacle_to_imitation

    env: TextEnv = registry().make("envs", env_id, **arguments)
    try:
        return obstacle_to_imitation(env)
    finally:
        env.close()


def require_server_engine(settings: EngineConfig) -> None:
    """Raise ConfigError if the engine would ignore the given URL."""
    if settings.url and not getattr(registry().load("engines", settings.id), "takes_urls", True):
        raise ConfigError(
            f"engine.url = {', '.join(settings.url)}, but the engine {settings.id!r} samples in "
            "this process and calls no server",
            hints=[
                "name the engine of the server: --engine sglang",
                "or leave the URL out, and the policy is sampled here",
            ],
        )
