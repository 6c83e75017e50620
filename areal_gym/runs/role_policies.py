"""Policies of fixed roles: the environment's own, a chat server, or a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl

from areal_gym.chat import Dialogue, Renderer
from areal_gym.chat.chat_client import ChatClient
from areal_gym.config import EngineConfig, RunConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.envs.role_order import RolePolicy
from areal_gym.errors import (
    ConfigError,
    EngineError,
    EngineUnreachableError,
    EnvError,
    EnvUnreachableError,
    choices,
)
from areal_gym.images.openai_parts import openai_content
from areal_gym.plugins import registry
from areal_gym.types import text_of
from areal_gym.utils.files import path_hints
from areal_gym.utils.per_loop import PerLoop


class GoldPolicy:
    """Plays the environment's gold actions."""

    async def answer(self, env: TextEnv, seed: int) -> str:
        """Return the gold action."""
        return env.gold_action()


class NoopPolicy:
    """Plays the environment's noop actions."""

    async def answer(self, env: TextEnv, seed: int) -> str:
        """Return the noop action."""
        return env.noop_action()


@dataclass(slots=True)
class ServerPolicy:
    """Calls an OpenAI-compatible chat server.

    `?model=NAME` at the end of the URL names the model; without it, the server must have exactly
    one.
    """

    url: str
    params: SamplingParams
    _client: ChatClient = field(init=False, repr=False)
    _model: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        base, _, query = self.url.partition("?")
        self._model = dict(parse_qsl(query)).get("model", "")
        self._client = ChatClient(
            base, temperature=self.params.temperature, max_tokens=self.params.max_new_tokens
        )

    async def answer(self, env: TextEnv, seed: int) -> str:
        """Return the text of the server's answer; the server gets no tools.

        Raises:
            EngineUnreachableError: the connection failed.
            EngineError: the server gave no answer.
        """
        messages = [
            {"role": message["role"], "content": openai_content(message["content"])}
            for message in env.dialogue
        ]
        try:
            self._model = self._model or await self._only_model()
            return (await self._client.complete(messages, model=self._model)).text
        except EnvError as error:  # the client's other users are environments
            is_down = isinstance(error, EnvUnreachableError)
            error_class = EngineUnreachableError if is_down else EngineError
            message = f"the role {env.role} is played by a server: {error.message}"
            raise error_class(message, hints=error.hints) from error

    async def _only_model(self) -> str:
        names = await self._client.models()
        if len(names) != 1:
            hints = [f"{self.url}?model={name}" for name in names[:5]]
            raise EnvError(f"{self.url} has {len(names)} models: which one?", hints=hints)
        return names[0]


@dataclass(slots=True)
class _Sampler:
    """A checkpoint's engine, which is started when it is first needed."""

    engine: Engine
    renderer: Renderer
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_started: bool = False

    async def start(self) -> None:
        async with self.starting:
            if not self.has_started:
                await self.engine.start()
                self.has_started = True

    async def aclose(self) -> None:
        await self.engine.aclose()


_samplers: PerLoop[_Sampler] = PerLoop(_Sampler.aclose)


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Samples from a checkpoint with its own embedded engine; each process loads it once."""

    directory: Path
    params: SamplingParams
    settings: EngineConfig

    async def answer(self, env: TextEnv, seed: int) -> str:
        """Return a sampled answer as text; its ids are not kept, because it is not trained on."""
        sampler = _samplers.get(self._make, f"{self.directory} {self.settings.max_context}")
        await sampler.start()
        renderer = sampler.renderer
        schemas = [tool.schema() for tool in env.tools]
        dialogue = Dialogue(renderer, schemas, dialect=env.tool_dialect)
        prompt = dialogue.prompt(list(env.dialogue), replaces_history=True)
        if len(prompt.token_ids) >= sampler.engine.max_context:
            raise EngineError(f"the dialogue of a role fills the context of {self.directory}")
        params = SamplingParams(
            max_new_tokens=self.params.max_new_tokens,
            temperature=self.params.temperature,
            stop_token_ids=renderer.stop_token_ids,
            seed=seed,
        )
        name = f"fixed-{env.role}-{seed}"
        try:
            generation = await sampler.engine.generate(prompt.token_ids, params, session=name)
        finally:
            sampler.engine.release(name)
        return text_of(dialogue.answer(prompt, generation.token_ids)["content"])

    def _make(self) -> _Sampler:
        engine = registry().load("engines", "embedded").from_settings(self.directory, self.settings)
        return _Sampler(engine, Renderer.from_checkpoint(self.directory))


def make_fixed_roles(
    fixed: Mapping[str, str], env: TextEnv, config: RunConfig, key: str
) -> dict[str, RolePolicy]:
    """Return the policies of a run's fixed roles, by role; `key` names the setting in errors.

    Raises:
        ConfigError: the environment has no such role, no role is left for the policy, or the
            checkpoint does not exist.
    """
    for role in fixed:
        if role not in env.roles:
            no_roles = [f"{config.env.id} has no roles: one policy plays an episode alone"]
            raise ConfigError(
                f"{key}: {config.env.id} has no role {role!r}",
                hints=choices(role, env.roles) if env.roles else no_roles,
            )
    if env.roles and set(fixed) == set(env.roles):
        raise ConfigError(
            f"{key} fixes all roles of {config.env.id}: none is left for the policy",
            hints=[f"leave one out: {', '.join(env.roles)}"],
        )
    return {role: _policy_of(name, config, f"{key}.{role}") for role, name in fixed.items()}


def _checkpoint_of_run(run: Path) -> Path | None:
    """Return a run's best checkpoint, else its newest; None without any."""
    from areal_gym.trainer.checkpoint import latest_checkpoint

    best = run / "checkpoints" / "best"
    if (best / "config.json").exists():
        return best
    newest = latest_checkpoint(run / "checkpoints")
    return None if newest is None else newest[1]


def _policy_of(name: str, config: RunConfig, key: str) -> RolePolicy:
    if name == "gold":
        return GoldPolicy()
    if name == "noop":
        return NoopPolicy()
    rollout = config.rollout
    params = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
    if "://" in name:
        return ServerPolicy(name, params)
    directory = Path(name)
    if not (directory / "config.json").exists():
        directory = _checkpoint_of_run(directory) or directory
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{key} = {name!r} is not a policy",
            hints=[
                "gold or noop, http://HOST:PORT/v1, a checkpoint's directory or a run's",
                *path_hints(directory),
            ],
        )
    settings = EngineConfig(model=str(directory.absolute()), max_context=config.engine.max_context)
    return CheckpointPolicy(directory.absolute(), params, settings)
