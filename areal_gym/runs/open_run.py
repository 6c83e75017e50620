"""Starts everything that a run needs, in order, and closes it in reverse order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from areal_gym.config import RunConfig
from areal_gym.distributed.cluster import Cluster, open_cluster
from areal_gym.distributed.rollout_workers import RolloutWorkers, WorkerSetup
from areal_gym.engines.base import Engine, TakeOverEngine
from areal_gym.engines.server import EngineServer
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.runs.components import Components
from areal_gym.runs.evaluation import Evaluations
from areal_gym.runs.example_batches import ExampleBatches, ExampleEvaluations
from areal_gym.runs.known_answers import answer_annotator
from areal_gym.runs.make_trainer import make_supervised_trainer, make_trainer
from areal_gym.runs.open_engine import open_engine, open_renderer
from areal_gym.runs.preparation import PreparedRun
from areal_gym.runs.probe import probe_engine
from areal_gym.runs.rollout_batches import RolloutBatches
from areal_gym.runs.run_context import RunContext
from areal_gym.runs.serve_policy import open_gateway
from areal_gym.runs.teacher import open_teacher
from areal_gym.trainer.base import close_trainer
from areal_gym.types import Group

if TYPE_CHECKING:
    from areal_gym.trainer.base import Trainer
    from areal_gym.trainer.batch.examples import Example
    from areal_gym.trainer.colocation import SharedGpus
    from areal_gym.trainer.update import TrainerThread


async def open_supervised(stack: AsyncExitStack, prepared: PreparedRun) -> RunContext[Example]:
    """Start the trainer of an objective on fixed data; `stack` closes what is started.

    An existing directory is changed only after everything has started.
    """
    config, policy = prepared.config, prepared.policy
    cluster, thread = await _begin(stack, prepared)
    trainer = make_supervised_trainer(
        config,
        prepared.source,
        initial=policy,
        cluster=cluster,
        profiles=prepared.directory.profiles_dir.absolute(),
    )
    _restore(stack, prepared, trainer, thread)
    _write_settings(prepared)
    _announce_start(prepared)
    return RunContext(
        prepared=prepared,
        trainer=trainer,
        trainer_thread=thread,
        publisher=None,
        evaluations=ExampleEvaluations(prepared, trainer, thread, _on_evaluation(prepared)),
        make_batches=partial(ExampleBatches, prepared),
        step=prepared.step,
    )


async def open_rollouts(stack: AsyncExitStack, prepared: PreparedRun) -> RunContext[Group]:
    """Start trainer, engine, gateway and rollout workers; see `open_supervised`."""
    from areal_gym.runs.reference_row import reference_maker
    from areal_gym.trainer.update import WeightPublisher
    from areal_gym.trainer.weight_sync import make_weight_sync, takes_adapter

    config, display, components = prepared.config, prepared.display, prepared.components
    assert components is not None
    cluster, thread = await _begin(stack, prepared)
    trainer = make_trainer(
        config,
        prepared.source,
        initial=prepared.policy,
        cluster=cluster,
        profiles=prepared.directory.profiles_dir.absolute(),
    )
    rollout_state = _restore(stack, prepared, trainer, thread)
    gpus = await _shared_gpus(config, trainer, thread)
    # Adapters are published beside the base weights, which the servers keep.
    served = prepared.policy if config.trainer.weight_sync.id == "lora" else prepared.source
    engine, renderer = await stack.enter_async_context(
        open_engine(config, served, cluster, display)
    )
    if gpus is not None:
        gpus.share_with(engine)
    annotate = await stack.enter_async_context(open_teacher(prepared, trainer, renderer))
    annotate = annotate or answer_annotator(config, trainer, renderer)
    settings, directory = config.trainer.weight_sync, prepared.directory.path / "weights"
    weight_sync = make_weight_sync(engine, settings, directory=directory, lora=config.trainer.lora)
    stack.push_async_callback(weight_sync.aclose)
    patience_s = config.rollout.outage_patience_s
    reference = reference_maker(config, trainer, renderer)
    publisher = WeightPublisher(weight_sync, trainer, engine, patience_s, gpus, reference)
    if prepared.step or (isinstance(engine, TakeOverEngine) and engine.take_over):
        await publisher.publish(prepared.step)
    begin = publisher.begin_step
    gap = await probe_engine(config, components, engine, renderer, trainer, display.say, begin)
    await publisher.end_turn(prepared.step)
    _write_settings(prepared)
    prepared.directory.add_provenance(engine_gap=asdict(gap))
    reports = await components.announce_sandboxes(display.say)
    prepared.directory.add_provenance(sandboxes=[asdict(report) for report in reports])
    _announce_start(prepared)
    await stack.enter_async_context(open_gateway(config, prepared.directory, display))
    episode_runner = await stack.enter_async_context(
        _open_workers(
            config,
            components,
            prepared.policy,
            engine,
            cluster,
            has_adapters=takes_adapter(weight_sync),
        )
    )
    setup = EpisodeSetup(
        *(components.make_env, components.agent, engine, renderer),
        env_id=config.env.id,
        agent_id=config.agent.id,
    )
    log = _on_evaluation(prepared)
    evaluations = Evaluations(
        config, components, engine, renderer, prepared.directory, display, log
    )
    stack.push_async_callback(evaluations.aclose)
    return RunContext(
        prepared=prepared,
        trainer=trainer,
        trainer_thread=thread,
        publisher=publisher,
        evaluations=evaluations,
        make_batches=lambda: RolloutBatches(
            prepared, setup, trainer, publisher, annotate, episode_runner, rollout_state
        ),
        step=prepared.step,
    )


@asynccontextmanager
async def _open_workers(
    config: RunConfig,
    components: Components,
    policy: Path,
    engine: Engine,
    cluster: Cluster | None,
    *,
    has_adapters: bool,
) -> AsyncIterator[RolloutWorkers | None]:
    """Start the settings' rollout workers; yield None if episodes are played in this process.

    Workers call servers directly, and name adapters if adapters are published. For an engine in
    this process, a server is started here.

    Raises:
        GymError: a worker could not make its environment, agent or engine.
        InfrastructureError: a worker did not start.
    """
    if cluster is None or not config.cluster.rollout_workers:
        yield None
        return
    policy = policy.absolute()  # workers have another working directory
    async with AsyncExitStack() as stack:
        engine_class: type[ServerEngine] = SGLangEngine
        if isinstance(engine, ServerEngine):
            urls, engine_class = list(engine.server_urls), type(engine)
        else:
            server = EngineServer(engine, model_path=str(policy), host=cluster.host)
            await stack.enter_async_context(server)
            urls = [server.url]
        setup = WorkerSetup(
            env_factory=components.make_env,
            agent=components.agent,
            open_engine=partial(
                engine_class,
                policy,
                urls=urls,
                max_context=engine.max_context,
                is_guest=True,
                has_adapters=has_adapters,
            ),
            open_renderer=partial(open_renderer, config, policy),
            rollout=config.rollout,
            env_id=config.env.id,
            agent_id=config.agent.id,
        )
        workers = RolloutWorkers(cluster, setup, config.cluster.rollout_workers)
        stack.push_async_callback(workers.aclose)
        await workers.start()
        yield workers


async def _begin(
    stack: AsyncExitStack, prepared: PreparedRun
) -> tuple[Cluster | None, TrainerThread]:
    from areal_gym.trainer.update import TrainerThread

    stack.callback(prepared.loggers.close)
    say = prepared.display.say
    cluster = await stack.enter_async_context(open_cluster(prepared.config, say=say))
    return cluster, TrainerThread(prepared.config.trainer.num_threads)


def _restore(
    stack: AsyncExitStack, prepared: PreparedRun, trainer: Trainer[Never], thread: TrainerThread
) -> dict[str, Any] | None:
    # Restore the trainer, and return the state of the rollouts.
    from areal_gym.trainer.checkpoint import require_space, restore_trainer

    stack.callback(close_trainer, trainer)
    stack.callback(thread.close)
    state = None if prepared.checkpoint is None else restore_trainer(trainer, prepared.source)
    directory = prepared.directory.checkpoints_dir
    require_space(trainer, directory, prepared.config.trainer.keep_checkpoints)
    return state


async def _shared_gpus(
    config: RunConfig, trainer: Trainer[Any], thread: TrainerThread
) -> SharedGpus | None:
    """Offload the trainer from the GPUs that it shares with servers, and return them, if any."""
    from areal_gym.trainer.colocation import SharedGpus

    if not config.trainer.colocate:
        return None
    has_adapter = config.trainer.weight_sync.id == "lora"
    gpus = SharedGpus(trainer, thread.call, keeps_weights=has_adapter)
    await gpus.give_to_servers()  # servers measure free memory when they start
    return gpus


def _write_settings(prepared: PreparedRun) -> None:
    # An existing directory is changed only now, when nothing can fail any more.
    if not prepared.directory.has_begun or prepared.is_resumed:
        prepared.begin()


def _announce_start(prepared: PreparedRun) -> None:
    prepared.rewind()
    config, directory = prepared.config, prepared.directory
    prepared.loggers.open(directory.loggers_dir, config, first_step=prepared.step + 1)
    prepared.callbacks.call("on_start", directory)


def _on_evaluation(prepared: PreparedRun) -> Callable[[int, Mapping[str, float]], None]:
    def report(step: int, metrics: Mapping[str, float]) -> None:
        prepared.loggers.log(step, metrics)
        prepared.callbacks.call("on_evaluation", step, metrics)

    return report
