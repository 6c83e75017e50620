"""From settings to the objects of a run."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from areal_gym.agents.base import Agent
from areal_gym.chat import Renderer
from areal_gym.config import AgentConfig, EngineConfig, PluginConfig, RunConfig
from areal_gym.config.trust import remember_settings
from areal_gym.distributed.cluster import Cluster
from areal_gym.engines.base import Engine
from areal_gym.engines.checkpoint_config import vocab_size_of
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError, GymError, PluginError, UsageError
from areal_gym.loggers.base import MetricsLogger
from areal_gym.plugins import Kind, registry
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.filters import GroupFilter
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.arguments import check_arguments, check_types, make_with, misfit
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.utils.files import path_hints

if TYPE_CHECKING:
    import torch

_PATIENCE_S = 10
"""How long nothing is said of an engine that starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """What the settings name, imported."""

    env_class: Callable[..., TextEnv]
    env_kwargs: Mapping[str, Any]
    agent: Agent

    @classmethod
    def of(cls, config: RunConfig) -> Components:
        """Import environment and agent, and try whether they can be made.

        Raises:
            UnknownIdError: nobody registered them.
            ConfigError: they do not take the arguments that the settings give.
        """
        found = registry()
        env = found.get("envs", config.env.id)
        parts = cls(
            env_class=env.load(),
            env_kwargs={**getattr(env.spec, "kwargs", {}), **config.env.kwargs},
            agent=_make("agents", config.agent, "agent.kwargs"),
        )
        check_arguments(parts.env_class, parts.env_kwargs, key="env.kwargs", id=config.env.id)
        parts.make_env().close()  # a wrong argument is found before anything has been waited for
        return parts

    def make_env(self) -> TextEnv:
        """A new instance.

        Raises:
            ConfigError: the environment takes no such argument.
        """
        try:
            return self.env_class(**self.env_kwargs)
        except TypeError as error:
            why, near = misfit(error, self.env_class, self.env_kwargs)
            hints = [*near, "its arguments: areal-gym show ENV"]
            hints.append("to leave out those of a run or a recipe: env.kwargs={}")
            raise ConfigError(f"env.kwargs do not fit: {why}", hints=hints) from error
        except GymError:
            raise
        except Exception as error:
            raise ConfigError(
                f"env.kwargs: the environment cannot be made with these arguments: {error!r}",
                hints=["its arguments: areal-gym show ENV"],
            ) from error


def policy_directory(
    config: RunConfig, parts: Components | None, display: Display
) -> tuple[Path, dict[str, Any]]:
    """Where the initial policy is, and how it came to be (for the starter policy, which alone
    needs `parts`).

    Raises:
        ConfigError: `engine.model` is no checkpoint directory; or torch is missing, which makes
            the starter policy.
    """
    if config.engine.model != "starter":
        directory = Path(config.engine.model)
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"engine.model = {config.engine.model!r} is no checkpoint directory",
                hints=[
                    *_model_hints(config.engine.model),
                    "it must hold config.json, tokenizer.json and, unless served, the weights",
                    "or let areal-gym build a small policy: engine.model=starter",
                ],
            )
        return directory, {}
    assert parts is not None
    if find_spec("torch") is None:
        raise ConfigError(
            "the small policy is made with torch, which is not installed",
            hints=[
                "install it: pip install 'areal-gym[train]'",
                "or name a server and what it serves: "
                "--engine sglang --engine.url URL engine.model=DIR",
            ],
        )
    return _starter(config, parts, display)


def _model_hints(model: str) -> list[str]:
    """What may have been meant: a name on the Hugging Face hub, a run, or a directory near by."""
    best = Path(model) / "checkpoints" / "best"
    if best.exists():
        return [f"it is a run's directory; the best policy of the run: engine.model={best}"]
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        name = model.rpartition("/")[2]
        return [
            f"nothing is downloaded here; get it first: hf download {model} --local-dir {name}",
            f"then: engine.model={name}",
        ]
    return path_hints(Path(model))


def _starter(config: RunConfig, parts: Components, display: Display) -> tuple[Path, dict[str, Any]]:
    import torch

    from areal_gym.warm_start.starter_policy import prepare_starter

    # Small products on several threads wait for each other: on a busy machine, many times longer.
    torch.set_num_threads(config.trainer.num_threads)
    display.phase("warm start")
    total = 0

    def progress(done: int, at_most: int, detail: str) -> None:
        nonlocal total
        if not total:
            display.say(
                "warm start: a small policy is made, which imitates demonstrators: "
                "some minutes at most, once"
            )
        if at_most != total:
            total = at_most
            display.phase("warm start", total)
        display.advance(done, detail)

    key = yaml.safe_dump({"id": config.env.id, "kwargs": dict(parts.env_kwargs)})
    try:
        starter = prepare_starter(
            parts.make_env(), env_key=key, seed=config.seed, on_progress=progress
        )
    except KeyboardInterrupt:
        display.say("warm start: interrupted; nothing of it is kept, and it begins anew next time")
        raise
    facts = {**starter.facts, "best_demonstrator": starter.best_demonstrator}
    if starter.is_cached:
        display.say(f"warm start: from the cache ({starter.directory})")
        facts["warm_start_s"] = 0.0
    else:
        display.say(
            f"warm start: {facts['num_steps']} steps of imitation in {facts['warm_start_s']:.0f} s"
        )
    shown = ", ".join(
        f"{name} {d['accuracy']:.2f} (x{d['share']:.2f})"
        for name, d in facts["demonstrators"].items()
    )
    display.say(f"  it imitates demonstrators whose accuracy (and share) is: {shown}")
    return starter.directory, facts


def save_settings(directory: RunDir, config: RunConfig) -> None:
    """Writes the resolved settings into a run directory, which this user thereby trusts."""
    directory.save_config(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    remember_settings(config)


def hash_of_policy(directory: Path) -> str:
    """16 hex digits of a checkpoint's weights: the same digits, the same policy."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def require_same_start(run: RunDir, policy: Path) -> None:
    """Refuse a policy that the run did not start with.

    Raises:
        ConfigError: it is another one.
    """
    known = run.read_provenance().get("initial_policy")
    found = hash_of_policy(policy)
    if known is not None and known != found:
        raise ConfigError(
            f"{run.path} started with the policy {known}, and {policy} is {found}",
            hints=[
                "name the directory with the weights that the run started with: engine.model=DIR",
                "a warm start is made anew when the code or the versions below it change",
            ],
        )


def make_learner(
    config: RunConfig,
    policy: Path,
    *,
    initial: Path | None = None,
    cluster: Cluster | None = None,
) -> Any:
    """The trainer of the settings, with the weights in `policy`; `close_learner` ends it.

    `initial` is the policy that the run began with, when it goes on with another one. With a
    cluster, its ranks are Ray's actors.

    Raises:
        ConfigError: the settings do not fit it.
    """
    from areal_gym.models.device import pick_device
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint
    from areal_gym.trainer.algorithms.token_loss import try_loss

    found = registry()
    trainer, device = config.trainer, pick_device(config.trainer.device)
    arguments = {
        "advantage": found.load("advantages", trainer.advantage),
        "loss": found.load("losses", trainer.loss),
        "temperature": config.rollout.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "reference": initial or policy,
    }
    try_loss(arguments["loss"], trainer)
    learner_class = found.load("trainers", trainer.id)
    if trainer.lora is not None:  # what is in `policy` has the adapter merged
        policy = initial or policy
    if cluster is not None and trainer.runs_in != "thread":
        from areal_gym.distributed.ray_ranks import RayTrainer

        arguments["reference"] = (initial or policy).absolute()
        return RayTrainer(cluster, learner_class, load_checkpoint(policy), trainer, **arguments)
    overlaps = config.rollout.max_staleness > 0 and device.type == "cpu"
    is_apart = trainer.runs_in == "process" or (trainer.runs_in == "auto" and overlaps)
    if is_apart or trainer.num_ranks > 1:
        from areal_gym.trainer.parallel.worker import ProcessTrainer

        require_devices(device, trainer.num_ranks)
        decoder = load_checkpoint(policy)
        return ProcessTrainer(learner_class, decoder, trainer, device=device.type, **arguments)
    return learner_class(load_checkpoint(policy, device=device), trainer, **arguments)


def require_devices(device: torch.device, num_ranks: int) -> None:
    """Refuse more ranks than there are GPUs.

    Raises:
        ConfigError: there are fewer.
    """
    import torch

    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.num_ranks = {num_ranks}, but there are {torch.cuda.device_count()} GPUs",
            hints=["one rank per GPU; trainer.device=cpu trains on the CPU"],
        )


def close_learner(learner: Any) -> None:
    """End a learner that has something to end."""
    close = getattr(learner, "close", None)
    if close is not None:
        close()


def make_filters(config: RunConfig) -> dict[str, GroupFilter]:
    """The group filters of the settings, by id, in their order.

    Raises:
        ConfigError: one does not take the arguments that the settings give.
    """
    return {f.id: _make("filters", f, "rollout.filters") for f in config.rollout.filters}


def make_loggers(config: RunConfig) -> dict[str, MetricsLogger]:
    """The loggers of the settings, by id.

    Raises:
        ConfigError: what one needs is not installed, or it does not take the arguments.
    """
    return {logger.id: _make("loggers", logger, "loggers") for logger in config.loggers}


def make_curriculum(config: RunConfig) -> Curriculum | None:
    """The curriculum of the settings; None takes tasks as they come.

    Raises:
        ConfigError: it does not take the arguments that the settings give.
    """
    settings = config.rollout.curriculum
    return None if settings is None else _make("curricula", settings, "rollout.curriculum")


def _make(kind: Kind, settings: PluginConfig | AgentConfig, key: str) -> Any:
    thing = registry().load(kind, settings.id)
    return make_with(thing, settings.kwargs, key=key, id=settings.id)


def open_renderer(config: RunConfig, policy: Path) -> Renderer:
    """The renderer of `policy`, as the settings want it.

    Raises:
        ConfigError: the tokenizer has tokens that the model does not know.
    """
    renderer = Renderer.from_checkpoint(
        policy,
        template_kwargs=config.rollout.template_kwargs,
        keeps_thinking=config.rollout.thinking == "keep",
    )
    _require_known_tokens(renderer, policy)
    return renderer


def _require_known_tokens(renderer: Renderer, policy: Path) -> None:
    """Refuse a tokenizer that is larger than the model's vocabulary.

    Control tokens beyond it are let pass unless turns end with them: some models are published
    with tokens for pictures that their text part does not know.
    """
    size = vocab_size_of(policy)
    num_tokens = getattr(renderer.tokenizer, "num_plain_tokens", 0)
    needed = max([num_tokens, *(id + 1 for id in renderer.stop_token_ids)])
    if size is not None and needed > size:
        raise ConfigError(
            f"the tokenizer of {policy} has tokens up to {needed - 1:,}, and its model has a "
            f"vocabulary of {size:,}: it knows 0 to {size - 1:,}",
            hints=[
                "they are of different models: save both from the same one",
                "or resize the model: model.resize_token_embeddings(len(tokenizer))",
            ],
        )


def _engine_settings(config: RunConfig) -> EngineConfig:
    """Where several processes ask the servers, servers must make them wait by themselves."""
    settings = config.engine
    if settings.id != "sglang" or not config.cluster.rollout_workers:
        return settings
    kwargs = {**settings.kwargs, "interrupt": "retract"}
    return settings.model_copy(update={"kwargs": kwargs})


def _make_engine(engine_class: Any, policy: Path, settings: EngineConfig) -> Engine:
    """The engine of the settings, not started.

    Raises:
        ConfigError: it does not take the arguments.
        PluginError: its own code fails.
    """
    check_types(engine_class, settings.kwargs, key="engine.kwargs", id=settings.id)
    try:
        engine: Engine = engine_class.from_settings(policy, settings)
    except Exception as error:
        if isinstance(error, TypeError) and re.search(r"\bargument", str(error)):
            raise ConfigError(
                f"engine.kwargs do not fit: {error}",
                hints=[f"its arguments: areal-gym show {settings.id}"],
            ) from error
        raise plugin_error(settings.id, "be made", error) from error
    return engine


def plugin_error(id: str, verb: str, error: Exception) -> GymError:
    """Returns what to raise when an engine fails with an error of its own code.

    An error of ours stays as it is; any other names the engine, its plugin and the cause.
    """
    if isinstance(error, GymError):
        return error
    entry = registry().get("engines", id)
    return PluginError(
        f"the engine {id!r} of plugin {entry.plugin} cannot {verb}: "
        f"{type(error).__name__}: {error}",
        hints=[f"its arguments: areal-gym show {id}"],
    )


async def _with_placed_servers(
    settings: EngineConfig, policy: Path, cluster: Cluster, num_servers: int
) -> EngineConfig:
    from areal_gym.distributed.ray_servers import place_servers

    kwargs = dict(settings.kwargs)
    starting = {
        name: kwargs.pop(name)
        for name in ("command", "server_args", "start_timeout_s")
        if name in kwargs
    }
    kwargs["processes"] = await place_servers(cluster, policy.absolute(), num_servers, **starting)
    return settings.model_copy(update={"kwargs": kwargs})


async def _tell_of_start(engine_id: str, display: Display) -> None:
    elapsed_s = 0
    while True:
        await asyncio.sleep(_PATIENCE_S)
        elapsed_s += _PATIENCE_S
        display.say(f"engine {engine_id}: starting, {elapsed_s} s so far")


@asynccontextmanager
async def open_engine(
    config: RunConfig,
    policy: Path,
    cluster: Cluster | None = None,
    display: Display | None = None,
) -> AsyncIterator[tuple[Engine, Renderer]]:
    """The engine of the settings, started, with `policy`'s renderer; ended on the way out.

    `display` is told while the start goes on: servers take a minute or more.
    """
    renderer = open_renderer(config, policy)
    settings = _engine_settings(config)
    if cluster is not None and config.cluster.servers:
        settings = await _with_placed_servers(settings, policy, cluster, config.cluster.servers)
    engine_class = registry().load("engines", config.engine.id)
    if not hasattr(engine_class, "from_settings"):
        raise UsageError(
            f"the engine {config.engine.id!r} cannot serve a checkpoint",
            hints=["engine.id=embedded and engine.id=sglang do"],
        )
    engine = _make_engine(engine_class, policy, settings)
    teller = asyncio.create_task(_tell_of_start(config.engine.id, display or SilentDisplay()))
    try:
        try:
            await engine.start()
        except Exception as error:
            raise plugin_error(settings.id, "start", error) from error
        finally:
            teller.cancel()
        yield engine, renderer
    finally:
        await engine.aclose()
