"""Opens the teachers of objective "distill"."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.config import EngineConfig, RunConfig
from areal_gym.engines.checkpoint_config import vocab_size_of
from areal_gym.errors import ConfigError, EngineUnreachableError
from areal_gym.plugins import registry
from areal_gym.runs.task_texts import filled_in
from areal_gym.trainer.base import ReferenceTrainer
from areal_gym.types import Group, Message, Trajectory
from areal_gym.utils.files import path_hints

if TYPE_CHECKING:
    from areal_gym.chat import Renderer
    from areal_gym.chat.template import ToolSchemas
    from areal_gym.config.objective_settings import FurtherTeacherConfig
    from areal_gym.engines.base import Engine
    from areal_gym.engines.servers.server_engine import ServerEngine
    from areal_gym.runs.preparation import PreparedRun
    from areal_gym.trainer.base import GroupTrainer, Teacher
    from areal_gym.trainer.objectives.distillation import Prompts
    from areal_gym.trainer.teacher_divergence import VocabularyTeacher


_PLACEHOLDER = Path("TEACHER")
"""The checkpoint in commands that start a teacher's server: only people know which it is."""
Annotate = Callable[[Sequence[Group]], Awaitable[Sequence[Group]]]
"""Returns groups with the log-probabilities of a teacher."""


@asynccontextmanager
async def open_teacher(
    prepared: PreparedRun, trainer: GroupTrainer, renderer: Renderer
) -> AsyncIterator[Annotate | None]:
    """Load the settings' teachers, or connect to them; yield None for other objectives.

    Raises:
        ConfigError: a checkpoint does not exist or has another vocabulary, or the trainer cannot be
            its own teacher.
        EngineError: the teacher's servers do not answer.
    """
    config, policy, components = prepared.config, prepared.policy, prepared.components
    if config.objective != "distill" or config.teacher.is_in_trainer:
        yield None
        return
    from areal_gym.trainer.objectives.distillation import (
        PolicyTeacher,
        TeacherMixture,
        annotate,
    )

    assert components is not None
    schemas = [tool.schema() for tool in components.make_env().tools]
    prompts = hinted_prompts(config.teacher.hint, renderer, schemas)
    top_k = _top_k(config, policy)
    async with AsyncExitStack() as stack:
        teachers: list[tuple[Teacher, float, str | None]] = []
        for settings in (config.teacher, *config.teacher.further):
            teacher: Teacher
            if settings is config.teacher and config.teacher.is_policy:
                teacher = PolicyTeacher(_scoring(trainer, top_k))
            else:
                teacher = await stack.enter_async_context(
                    _open_one(config, settings, policy, top_k, prepared.display.say)
                )
            teachers.append((teacher, settings.weight, settings.env))
        is_alone = len(teachers) == 1 and config.teacher.env is None
        scorer = teachers[0][0] if is_alone else TeacherMixture(teachers)

        async def with_teacher(groups: Sequence[Group]) -> Sequence[Group]:
            return await annotate(groups, scorer, prompts, top_k=top_k)

        yield with_teacher


@asynccontextmanager
async def _open_one(
    config: RunConfig,
    settings: FurtherTeacherConfig,
    policy: Path,
    top_k: int | None,
    say: Callable[[str], None],
) -> AsyncIterator[Teacher]:
    from areal_gym.engines.servers.server_engine import ServerEngine
    from areal_gym.models.backend import ModelLoader
    from areal_gym.models.device import pick_device
    from areal_gym.trainer.objectives.distillation import LocalTeacher
    from areal_gym.trainer.objectives.remote_teacher import RemoteTeacher

    if settings.model is None:
        url, max_context = settings.url, config.engine.max_context
        # Servers that score a sequence need room for one token more.
        served = EngineConfig(id=settings.engine, url=url, max_context=max_context + 1)
        engine_class = registry().load("engines", settings.engine)
        is_server = isinstance(engine_class, type) and issubclass(engine_class, ServerEngine)
        # The policy's own name in a command to start the teacher would make it its own teacher.
        engine = engine_class.from_settings(_PLACEHOLDER if is_server else policy, served)
        try:
            await _start(engine, settings)
            if is_server:
                _require_same_size(engine, policy)
            if engine.max_context <= max_context:
                raise ConfigError(
                    f"the teacher at {', '.join(url)} takes at most {engine.max_context - 1} "
                    f"tokens, and episodes have up to engine.max_context = {max_context}",
                    hints=[
                        f"start it with a context of at least {max_context + 8} tokens",
                        f"or engine.max_context={engine.max_context - 1}",
                    ],
                )
            await _require_scores(engine, settings.engine, top_k)
            yield RemoteTeacher(engine, patience_s=config.rollout.outage_patience_s, say=say)
        finally:
            await engine.aclose()
        return
    directory = _checkpoint_of(Path(settings.model))
    _require_same_tokenizer(directory, policy)
    trainer, model = config.trainer, config.model
    loader = ModelLoader(backend=model.backend, trusts_code=model.trust_remote_code)
    teacher = LocalTeacher(
        loader.load(directory, device=pick_device(trainer.device, "trainer.device")),
        tokens_per_microbatch=trainer.tokens_per_microbatch,
        num_threads=trainer.num_threads,
        vocab_size=vocab_size_of(policy),
    )
    try:
        yield teacher
    finally:
        teacher.close()


async def _start(engine: Engine, settings: FurtherTeacherConfig) -> None:
    """Connect to the teacher's servers.

    Raises:
        ConfigError: a server is of another kind.
        EngineUnreachableError: a server does not answer.
    """
    try:
        await engine.start()
    except EngineUnreachableError as error:
        raise EngineUnreachableError(
            f"the teacher does not answer (teacher.url = {', '.join(settings.url)}): "
            f"{error.message}",
            hints=[
                *error.hints,
                f"{_PLACEHOLDER} is the teacher's checkpoint, not the policy's",
                "without a server, this process runs it: teacher.model=DIR instead of teacher.url",
            ],
        ) from error


def _require_same_size(engine: ServerEngine, policy: Path) -> None:
    """Raise ConfigError if a server's vocabulary is not the policy's, padding aside."""
    from areal_gym.trainer.teacher_divergence import MOST_PADDING

    size = vocab_size_of(policy)
    for state in engine.servers:
        facts = state.facts
        if size is None or facts is None or facts.vocab_size is None:
            continue
        if not size <= facts.vocab_size <= size + MOST_PADDING:
            raise ConfigError(
                f"the teacher at {state.client.url} serves {facts.model_path}, whose vocabulary "
                f"has {facts.vocab_size} tokens; that of the policy {policy} has {size}",
                hints=[
                    "distill from a model of the same family: its tokenizer must be the policy's",
                    "if only the padding of its vocabulary is shorter: teacher.model=DIR",
                ],
            )


def _top_k(config: RunConfig, policy: Path) -> int | None:
    """Return how many of a teacher's likeliest tokens are learned, at most the vocabulary."""
    teacher = config.teacher
    if teacher.top_k is None:
        return None
    models = [each.model for each in (teacher, *teacher.further) if each.model is not None]
    sizes = map(vocab_size_of, (policy, *(_checkpoint_of(Path(model)) for model in models)))
    return min([teacher.top_k, *(size for size in sizes if size)])


def _scoring(trainer: GroupTrainer, top_k: int | None) -> ReferenceTrainer:
    """Return the trainer; raise ConfigError if it cannot score as the teacher must."""
    method = "score_at" if top_k is None else "score_top"
    if isinstance(trainer, ReferenceTrainer) and hasattr(trainer, method):
        return trainer
    raise ConfigError(
        f"teacher.is_policy = true: {type(trainer).__name__} cannot score at temperature 1",
        hints=[f"it needs the method {method} (docs/plugins.md)"],
    )


async def _require_scores(engine: Engine, id: str, top_k: int | None) -> None:
    """Let servers score two tokens, as they will score the policy's.

    Raises:
        ConfigError: the engine cannot, or its servers list fewer tokens.
        EngineError: a server fails.
    """
    from areal_gym.engines.base import ScoringEngine, TopScoringEngine

    probe = [0, 0]
    if top_k is None and isinstance(engine, ScoringEngine):
        await engine.score(probe)
    elif top_k is not None and isinstance(engine, TopScoringEngine):
        await engine.score_top(probe, top_k)
    else:
        what = "score tokens" if top_k is None else "list the likeliest tokens of a prompt"
        raise ConfigError(
            f"teacher.engine = {id!r} cannot {what}",
            hints=["engines that can: teacher.engine=sglang, teacher.engine=vllm"],
        )


def vocabulary_teacher(config: RunConfig, policy: Path) -> VocabularyTeacher | None:
    """Return the teacher of a divergence, which the trainer computes, if there is one.

    Raises:
        ConfigError: the checkpoint does not exist, or has another vocabulary.
    """
    settings = config.teacher
    if config.objective != "distill" or settings.divergence == "sampled":
        return None
    from areal_gym.trainer.teacher_divergence import VocabularyTeacher

    directory = None
    if settings.is_in_trainer:
        assert settings.model is not None
        directory = _checkpoint_of(Path(settings.model)).absolute()
        _require_same_tokenizer(directory, policy)
    return VocabularyTeacher(
        directory=directory, direction=settings.divergence, top_k=settings.top_k
    )


def hinted_prompts(hint: str | None, renderer: Renderer, tools: ToolSchemas) -> Prompts | None:
    """Return a function that gives a trajectory's first prompt without and with the hint.

    The hint is at the end of the first user message, after an empty line. Returns None without one.
    """
    if hint is None:
        return None

    def prompts(trajectory: Trajectory) -> tuple[Sequence[int], Sequence[int]]:
        text = filled_in(hint, trajectory.task, "teacher.hint")
        answers = (i for i, m in enumerate(trajectory.messages) if m["role"] == "assistant")
        first = list(trajectory.messages[: next(answers, len(trajectory.messages))])
        place = next((i for i, m in enumerate(first) if m["role"] == "user"), None)
        if place is None:
            raise ConfigError("teacher.hint needs a user message to which it can be added")
        plain = renderer.first_ids(first, tools)
        first[place] = _with_text(first[place], text)
        return plain, renderer.first_ids(first, tools)

    return prompts


def _with_text(message: Message, text: str) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{text}"}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}


def _checkpoint_of(directory: Path) -> Path:
    from areal_gym.trainer.checkpoint import latest_checkpoint

    if (directory / "config.json").exists():
        return directory
    checkpoint = latest_checkpoint(directory / "checkpoints")
    if checkpoint is None:
        raise ConfigError(
            f"teacher.model = {str(directory)!r} is neither a checkpoint's directory nor a run's",
            hints=[
                *path_hints(directory),
                "a checkpoint holds config.json; all runs: areal-gym list runs",
            ],
        )
    return checkpoint[1]


def _require_same_tokenizer(teacher: Path, policy: Path) -> None:
    from tokenizers import Tokenizer

    vocabularies = []
    for directory in (teacher, policy):
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"{directory} has no tokenizer.json")
        vocabularies.append(Tokenizer.from_file(str(file)).get_vocab())
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"the teacher {teacher} has another vocabulary than the policy {policy}: its "
            "log-probabilities would belong to other tokens",
            hints=["distill from a model of the same family: engine.model and teacher.model"],
        )
