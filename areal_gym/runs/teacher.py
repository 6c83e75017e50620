"""The teacher of objective "distill"."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.config import EngineConfig, RunConfig
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.utils.files import path_hints

if TYPE_CHECKING:
    from areal_gym.trainer.base import Teacher


@asynccontextmanager
async def open_teacher(config: RunConfig, policy: Path) -> AsyncIterator[Teacher | None]:
    """Load or connect to the teacher of the settings; None for other objectives.

    Raises:
        ConfigError: there is no such checkpoint, or it has another vocabulary.
        EngineError: its servers do not answer.
    """
    if config.objective != "distill":
        yield None
        return
    from areal_gym.models.backend import ModelLoader
    from areal_gym.models.device import pick_device
    from areal_gym.trainer.objectives.distillation import LocalTeacher, RemoteTeacher

    if config.teacher.model is None:
        url, max_context = config.teacher.url, config.engine.max_context
        settings = EngineConfig(id="sglang", url=url, max_context=max_context)
        engine = registry().load("engines", "sglang").from_settings(policy, settings)
        try:
            await engine.start()
            yield RemoteTeacher(engine)
        finally:
            await engine.aclose()
        return
    directory = _checkpoint_of(Path(config.teacher.model))
    _require_same_tokenizer(directory, policy)
    trainer, model = config.trainer, config.model
    loader = ModelLoader(backend=model.backend, trusts_code=model.trust_remote_code)
    teacher = LocalTeacher(
        loader.load(directory, device=pick_device(trainer.device, "trainer.device")),
        tokens_per_microbatch=trainer.tokens_per_microbatch,
        num_threads=trainer.num_threads,
    )
    try:
        yield teacher
    finally:
        teacher.close()


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
            raise ConfigError(f"{directory} holds no tokenizer.json")
        vocabularies.append(Tokenizer.from_file(str(file)).get_vocab())
    if vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"the teacher {teacher} has another vocabulary than the policy {policy}: its "
            "log-probabilities would belong to other tokens",
            hints=["distill from a model of the same family: engine.model and teacher.model"],
        )
