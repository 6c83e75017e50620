"""Messages to tokens and back: what an assistant's text means, and what a chat template adds.

text sampled by the policy --parse_assistant--> Message with tool calls as objects
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal_gym.dialects import DIALECTS, parse_assistant
from areal_gym.errors import ConfigError
from areal_gym.types import Message

if TYPE_CHECKING:
    import jinja2

__all__ = ["DIALECTS", "Renderer", "Tokenizer", "parse_assistant"]


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with nothing added; special tokens in it become their ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        ...


ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools as chat templates take them (`Tool.schema()`), in the environment's order."""

# Letters only, so that no template strips, splits or escapes it.
_SENTINEL = "ArealGymSentinel"
_CACHE_SIZE = 4096
_CACHED_TEXT = 512


class Renderer:
    """A tokenizer and the chat template that its policy was trained on.

    Example::

        renderer = Renderer.from_checkpoint(Path("my-checkpoint"))
        prompt = renderer.first_ids([{"role": "user", "content": "2+2?"}])
        generation = await engine.generate(prompt, ...)
        prompt += generation.token_ids
        prompt += renderer.bridge_ids(generation.token_ids[-1], reply)

    A bridge is what the template writes between the assistant's own text and its next turn: the
    end of turn (unless it was sampled), the new messages, the header of the next turn. It is read
    off a short reference dialogue, so its cost does not grow with the history; `check_bridging`
    proves for the template at hand that this is what the whole dialogue would have given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """Compile the template and check it on dialogues without tools.

        Args:
            tokenizer: encodes and decodes.
            chat_template: jinja, in Hugging Face's dialect.
            special_tokens: names that the template may use, such as `bos_token`.
            stop_token_ids: ids that end a turn besides the template's own end of turn.

        Raises:
            ConfigError: the template is no template, or its turns cannot be bridged.
        """
        self._tokenizer = tokenizer
        self._template = _compile(chat_template)
        self._special_tokens = dict(special_tokens or {})
        self._bridges: dict[object, tuple[int, ...]] = {}
        self._first: dict[object, tuple[int, ...]] = {}
        self._checked_tools: set[str] = set()
        reference = self._encode(self._bridge_text([{"role": "user", "content": "x"}]))
        self.end_of_turn_id = reference[0]
        """The id that the template writes after an assistant's text."""
        self.stop_token_ids = tuple(sorted({self.end_of_turn_id, *stop_token_ids}))
        """Ids at which sampling of a turn ends."""
        self.check_bridging()

    @classmethod
    def from_checkpoint(cls, directory: Path | str) -> Renderer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the template of a Hugging Face model.

        Raises:
            ConfigError: a file or the chat template is missing, or the template cannot be bridged.
        """
        directory = Path(directory)
        config = _read_json(directory / "tokenizer_config.json")
        tokenizer = _FastTokenizer(directory)
        special_tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        stop_ids = _generation_stop_ids(directory)
        if "eos_token" in special_tokens:
            stop_ids += tokenizer.encode(special_tokens["eos_token"])[:1]
        return cls(
            tokenizer,
            _read_chat_template(directory, config),
            special_tokens=special_tokens,
            stop_token_ids=stop_ids,
        )

    def first_ids(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """The first prompt: `messages`, the description of `tools`, the assistant's header.

        Raises:
            ConfigError: the template refuses the messages, or cannot be bridged with these tools.
        """
        tools_key = json.dumps(tools) if tools else ""
        key = _cache_key(messages)
        cached = self._first.get((key, tools_key)) if key is not None else None
        if cached is None:
            if tools and tools_key not in self._checked_tools:
                self.check_bridging(tools)
                self._checked_tools.add(tools_key)
            cached = tuple(self._encode(self._render(messages, tools)))
            if key is not None:
                _remember(self._first, (key, tools_key), cached)
        return list(cached)

    def bridge_ids(self, last_id: int, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids between a sampled turn and the next.

        Args:
            last_id: the last id that was sampled. When it is the end of turn, that is not written
                again; otherwise (the turn was cut) it is.
            messages: what the policy reads next.

        Raises:
            ConfigError: the template refuses the messages.
        """
        key = _cache_key(messages)
        ids = self._bridges.get(key) if key is not None else None
        if ids is None:
            ids = tuple(self._encode(self._bridge_text(messages)))
            if key is not None:
                _remember(self._bridges, key, ids)
        return ids[1:] if last_id == self.end_of_turn_id else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without the stop token at the end."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(ids)

    def check_bridging(self, tools: ToolSchemas = ()) -> None:
        """Prove on generated dialogues that bridges give what the whole dialogue would have given.

        Raises:
            ConfigError: they do not; says where.
        """
        end_of_turn = self._tokenizer.decode([self.end_of_turn_id])
        for dialogue in _reference_dialogues(has_tools=bool(tools)):
            first, *rest = dialogue
            text = self._render(first, tools)
            for index in range(0, len(rest), 2):
                (answer,), reply = rest[index], rest[index + 1]
                bridge = self._bridge_text(reply)
                text += answer["content"] + bridge
                answer_ids, bridge_ids = self._encode(answer["content"]), self._encode(bridge)
                if (
                    not bridge.startswith(end_of_turn)
                    or not end_of_turn.strip()
                    or self.end_of_turn_id in answer_ids
                    or self._encode(answer["content"] + bridge) != answer_ids + bridge_ids
                ):
                    raise ConfigError(
                        "the chat template does not end an assistant's turn with one token of its "
                        f"own: after the text comes {bridge[:40]!r}",
                        hints=["multi-turn training needs a template with an end-of-turn token"],
                    )
            whole = self._render([m for messages in dialogue for m in messages], tools)
            if whole != text:
                raise ConfigError(_difference(whole, text))

    def _bridge_text(self, messages: Sequence[Message]) -> str:
        reference: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _SENTINEL},
        ]
        _before, found, after = self._render([*reference, *messages]).partition(_SENTINEL)
        if not found or not after:
            raise ConfigError(
                "the chat template writes nothing after an assistant's text, or not the text itself"
            )
        return after

    def _render(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> str:
        import jinja2

        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except (UnicodeEncodeError, TypeError):  # lone surrogates have no UTF-8
            return self._tokenizer.encode(text.encode("utf-8", "replace").decode())


def _cache_key(messages: Sequence[Message]) -> object | None:
    """Identifies short plain messages; None for those that are not worth keeping."""
    parts = []
    for message in messages:
        content = message["content"]
        if len(content) > _CACHED_TEXT or "tool_calls" in message:
            return None
        parts.append((message["role"], content, message.get("name"), message.get("tool_call_id")))
    return tuple(parts)


def _remember(cache: dict[object, tuple[int, ...]], key: object, ids: tuple[int, ...]) -> None:
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[key] = ids


def _reference_dialogues(*, has_tools: bool) -> list[list[list[Message]]]:
    """Dialogues as [first messages, [answer], reply, [answer], reply, ...]."""
    texts = ("Seven.", "x = {1: '2'}\n\nNaïve 数学 🙂 end", "a  b\tc <b>&amp;</b>")

    def user(text: str) -> Message:
        return {"role": "user", "content": text}

    def answer(text: str) -> list[Message]:
        return [{"role": "assistant", "content": text}]

    def tool(text: str) -> Message:
        return {"role": "tool", "name": "python", "tool_call_id": "call_0", "content": text}

    dialogues = []
    for first in texts:
        dialogues.append([[user(first)], *(m for t in texts for m in (answer(t), [user(t)]))])
        if has_tools:
            replies = [[tool(t)] for t in texts] + [[tool(t) for t in texts], [user(first)]]
            head: list[Message] = [{"role": "system", "content": "Use tools."}, user(first)]
            dialogues.append([head, *(m for r in replies for m in (answer(first), r))])
    return dialogues


def _difference(whole: str, bridged: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(whole, bridged, strict=False)) if a != b),
        min(len(whole), len(bridged)),
    )
    return (
        "the chat template rewrites earlier turns, so they cannot be bridged: "
        f"a whole dialogue has {whole[at : at + 30]!r} after {whole[max(0, at - 30) : at]!r}, "
        f"bridged turns have {bridged[at : at + 30]!r}"
    )


# ---- the parts of Hugging Face's checkpoint layout -------------------------------------------


class _FastTokenizer:
    """`tokenizers.Tokenizer` with the two methods that rendering needs."""

    def __init__(self, directory: Path) -> None:
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"no tokenizer.json in {directory}",
                hints=["save the tokenizer there: AutoTokenizer(...).save_pretrained(DIRECTORY)"],
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"cannot read {file}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    return tree if isinstance(tree, dict) else {}


def _read_chat_template(directory: Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"no chat template in {directory}",
            hints=[
                "base models often have none; take the instruction-tuned model of the family,",
                "or put a chat_template.jinja beside tokenizer.json",
            ],
        )
    return template


def _generation_stop_ids(directory: Path) -> list[int]:
    eos = _read_json(directory / "generation_config.json").get("eos_token_id")
    if eos is None:
        return []
    return list(eos) if isinstance(eos, list) else [eos]


def _compile(source: str) -> jinja2.Template:
    """Compile with the settings and helpers that Hugging Face's templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks the assistant's text; we need no mark."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            body: list[jinja2.nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template is broken, line {error.lineno}: {error}") from None
