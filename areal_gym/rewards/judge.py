"""`judge`: a language model scores the completion by a rubric."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from areal_gym.chat.chat_client import ChatClient, RefusedError
from areal_gym.errors import ConfigError, EnvError, GymError, choices
from areal_gym.rewards.base import Score
from areal_gym.rewards.verdicts import Verdict, question, read_verdict
from areal_gym.types import Message
from areal_gym.utils.cache import cache_directory
from areal_gym.utils.files import path_hints, write_atomic

_NUM_ASKS = 3
"""How often a judge is asked, in all, if its answers have no valid verdict."""
_MIN_CHARS = 500
"""The shortest length, in characters, to which texts are cut that the server refuses."""
_COLUMN = re.compile(r"\{([A-Za-z_]\w*)\}")


def _majority(scores: Sequence[float]) -> float:
    return min(statistics.multimode(scores))


_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": _majority,
}


class Judge:
    """The score of a language model that follows a rubric, from 0 to 1.

    The judge reads the prompt and the completion between markers with a random tag, and ends its
    answer with a line that has its verdict and that tag, so nothing in the completion can imitate a
    verdict. If an answer has no valid verdict, the judge is asked again. If it fails repeatedly, an
    EnvError is raised, and the episode is played again instead of getting a reward.

    With several criteria, their mean is the reward. Metrics: `disagreement` (standard
    deviation of the votes), `calls`, `cached`, `prompt_tokens`, `completion_tokens` and, with
    `prices`, `cost`.

    Args:
        base_url: the URL of an OpenAI-compatible server: `https://api.openai.com/v1`,
            `http://HOST:PORT`.
        model: the judge's name on that server.
        rubric: the grading instructions: a text, a file (.md or .txt), or texts by criterion.
            `{answer}` is replaced by the row's column of that name.
        scale: the worst and the best score that the judge may give.
        votes: how often the judge is asked about each completion.
        aggregate: "mean", "median" or "majority" (the lowest of several modes) of the votes.
        dialogue: whether the judge reads all messages, including tools' results, and not only the
            prompt and the last message.
        temperature: the judge's sampling temperature; by default 0, and 0.7 with several votes.
        max_tokens: the limit of the judge's answer, in tokens.
        api_key_env: the variable with the key; by default OPENAI_API_KEY, without which only
            servers at http:// addresses are asked. "" for servers that need no key.
        concurrency: the maximum number of concurrent requests.
        request_timeout_s: the time limit of one request, in seconds.
        num_tries: how often a request is sent at most, if it fails.
        max_chars: longer prompts and completions are cut in the middle; those that the server
            refuses are halved, repeatedly.
        cache: the directory of verdicts; by default in the user's cache. False stores none.
        prices: US dollars per million tokens of input and of output.
    """

    never_blocks: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 600.0
    """The limit of one reward in seconds, including waits in the queue and between tries."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        rubric: str | Mapping[str, str],
        scale: Sequence[float] = (0, 10),
        votes: int = 1,
        aggregate: str = "mean",
        dialogue: bool = False,
        temperature: float | None = None,
        max_tokens: int = 1024,
        api_key_env: str | None = None,
        concurrency: int = 32,
        request_timeout_s: float = 60.0,
        num_tries: int = 4,
        max_chars: int = 24_000,
        cache: str | bool = True,
        prices: Sequence[float] | None = None,
    ) -> None:
        if aggregate not in _AGGREGATES:
            raise ConfigError(
                f"aggregate = {aggregate!r} of a judge", hints=choices(aggregate, _AGGREGATES)
            )
        for name, value in (("votes", votes), ("concurrency", concurrency), ("tries", num_tries)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} = {value!r} of a judge: one at least")
        self._rubric = _read_rubric(rubric)
        self._low, self._high = _read_scale(scale)
        self._votes, self._aggregate = votes, _AGGREGATES[aggregate]
        self._dialogue = dialogue
        self._max_chars = max_chars
        self._prices = _read_prices(prices)
        if temperature is None:
            temperature = 0.0 if votes == 1 else 0.7
        is_key_needed = api_key_env is None and str(base_url).startswith("https://")
        self._client = ChatClient(
            base_url,
            model=model,
            temperature=temperature,
            max_tokens=max_tokens,
            timeout_s=request_timeout_s,
            num_tries=num_tries,
            num_at_once=concurrency,
            api_key_env="OPENAI_API_KEY" if is_key_needed else api_key_env,
        )
        self._identity: list[Any] = [base_url, model, self._rubric, [self._low, self._high]]
        self._identity += [temperature, max_tokens, max_chars]
        self._cache: Path | None = None
        if cache:
            is_chosen = isinstance(cache, str)
            self._cache = Path(str(cache)) if is_chosen else cache_directory() / "judge"
        texts = " ".join(self._rubric.values())
        self.required_columns = tuple(dict.fromkeys(_COLUMN.findall(texts)))

    async def __call__(
        self,
        completion: str,
        prompt: str | Sequence[Message],
        messages: Sequence[Message],
        row: Mapping[str, Any],
    ) -> Score:
        """Return the aggregated votes.

        Raises:
            EnvError: the judge gave no verdict.
        """
        rubric = {name: _filled(text, row) for name, text in self._rubric.items()}
        if self._dialogue:
            prompt, completion = "", _transcript(messages)
        elif not isinstance(prompt, str):
            prompt = _transcript(prompt)
        prompt, completion = _without_controls(prompt), _without_controls(completion)
        votes = await asyncio.gather(
            *(self._vote(rubric, prompt, completion, number) for number in range(self._votes))
        )
        scores = {
            name: [self._scaled(vote.scores[name]) for vote in votes] for name in self._rubric
        }
        parts = {name: self._aggregate(values) for name, values in scores.items()}
        num_prompt_tokens, num_output_tokens = (
            sum(getattr(vote, name) for vote in votes)
            for name in ("prompt_tokens", "completion_tokens")
        )
        metrics = {
            "disagreement": statistics.fmean(map(statistics.pstdev, scores.values())),
            "calls": float(sum(vote.num_calls for vote in votes)),
            "cached": float(sum(vote.num_calls == 0 for vote in votes)),
            "prompt_tokens": float(num_prompt_tokens),
            "completion_tokens": float(num_output_tokens),
        }
        if self._prices is not None:
            input_price, output_price = self._prices
            cost = num_prompt_tokens * input_price + num_output_tokens * output_price
            metrics["cost"] = cost / 1e6
        has_parts = len(parts) > 1
        reward = statistics.fmean(parts.values())
        return Score(reward=reward, parts=parts if has_parts else {}, metrics=metrics)

    def _scaled(self, score: float) -> float:
        """Map the judge's scale to 0 to 1."""
        return (score - self._low) / (self._high - self._low)

    async def _vote(
        self, rubric: Mapping[str, str], prompt: str, completion: str, number: int
    ) -> Verdict:
        identity = [*self._identity, self._dialogue, rubric, prompt, completion, number]
        file = self._cache_file(identity)
        cached = self._read_cached(file)
        if cached is not None:
            return cached
        verdict = await self._ask_in_context(rubric, prompt, completion)
        if file is not None:
            # If the cache cannot be written, later requests cost money, but the episode goes on.
            with contextlib.suppress(OSError, GymError):
                text = json.dumps({"scores": verdict.scores})
                await asyncio.to_thread(write_atomic, file, text, is_synced=False)
        return verdict

    async def _ask_in_context(
        self, rubric: Mapping[str, str], prompt: str, completion: str
    ) -> Verdict:
        """Ask the judge; if the server refuses the request as too long, cut the texts and retry.

        Otherwise a policy could avoid a low reward by a text longer than the judge's context.
        """
        limit = self._max_chars
        while True:
            try:
                return await self._ask(rubric, _cut(prompt, limit), _cut(completion, limit))
            except RefusedError:
                limit = min(limit, max(len(prompt), len(completion))) // 2
                if limit < _MIN_CHARS:
                    raise

    async def _ask(self, rubric: Mapping[str, str], prompt: str, completion: str) -> Verdict:
        tag, messages, end = question(rubric, (self._low, self._high), prompt, completion)
        num_prompt_tokens = num_output_tokens = 0
        problem = ""
        for num_calls in range(1, _NUM_ASKS + 1):
            reply = await self._client.complete(messages)
            num_prompt_tokens += reply.prompt_tokens
            num_output_tokens += reply.completion_tokens
            scores, problem = read_verdict(reply.text, tag, list(rubric), (self._low, self._high))
            if scores is not None:
                return Verdict(scores, num_calls, num_prompt_tokens, num_output_tokens)
            messages = [
                *messages[:2],
                {
                    "role": "assistant",
                    "content": _cut(_without_controls(reply.text), 4_000) or "(nothing)",
                },
                {"role": "user", "content": f"That is no verdict: {problem}. {end}"},
            ]
        raise EnvError(f"the judge gave no verdict in {_NUM_ASKS} answers: {problem}")

    def _read_cached(self, file: Path | None) -> Verdict | None:
        if file is None:
            return None
        try:
            cached = json.loads(file.read_bytes())["scores"]
            scores = {name: float(cached[name]) for name in self._rubric}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        is_valid = all(self._low <= score <= self._high for score in scores.values())
        return Verdict(scores, 0, 0, 0) if is_valid else None

    def _cache_file(self, identity: Sequence[Any]) -> Path | None:
        if self._cache is None:
            return None
        text = json.dumps(identity, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._cache / digest[:2] / f"{digest}.json"


def _read_rubric(rubric: str | Mapping[str, str]) -> dict[str, str]:
    if isinstance(rubric, Mapping) and rubric:
        if "tag" in rubric:
            raise ConfigError("a criterion cannot be called 'tag': the verdict has its own")
        if all(isinstance(text, str) and text.strip() for text in rubric.values()):
            return {str(name): text for name, text in rubric.items()}
    elif isinstance(rubric, str) and rubric.strip():
        if rubric.endswith((".md", ".txt")) and "\n" not in rubric:
            path = Path(rubric)
            try:
                rubric = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"cannot read the rubric {path}: {error}", hints=path_hints(path)
                ) from None
        if rubric.strip():
            return {"score": rubric}
    raise ConfigError(
        "the judge has an empty rubric",
        hints=["give a text, a file, or texts by criterion: {correct: ..., polite: ...}"],
    )


def _read_scale(scale: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = map(float, scale)
        if not -1e9 < low < high < 1e9:
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(
            f"scale = {scale!r} of a judge: the worst and the best score are needed",
            hints=["for example [0, 10] or [1, 5]"],
        ) from None
    return low, high


def _read_prices(prices: Sequence[float] | None) -> tuple[float, float] | None:
    if prices is None:
        return None
    try:
        input_price, output_price = map(float, prices)
    except (TypeError, ValueError):
        raise ConfigError(
            f"prices = {prices!r} of a judge: dollars per million tokens of input and of output",
            hints=["for example [0.15, 0.6]"],
        ) from None
    return input_price, output_price


def _filled(rubric: str, row: Mapping[str, Any]) -> str:
    """Return the rubric with the row's columns filled in; raise EnvError if one is missing."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in row:
            raise EnvError(f"the rubric names {match[0]}, and the row has no such column")
        return str(row[match[1]])

    return _COLUMN.sub(value, rubric)


def _transcript(messages: Sequence[Message]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _without_controls(text: str) -> str:
    """Break up control tokens, and replace characters that servers refuse."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ").replace("<|", "< |")


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
