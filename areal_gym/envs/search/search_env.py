"""The environment `search`."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, require_dialect, write_call
from areal_gym.envs.base import Response
from areal_gym.envs.grading import extract_answer
from areal_gym.envs.old_arguments import takes_old_files
from areal_gym.envs.questions import QuestionEnv
from areal_gym.envs.search.corpus import Hit
from areal_gym.envs.search.generated_world import world
from areal_gym.envs.search.retrievers import Retriever
from areal_gym.envs.tools import chosen_tools, cut_text, one_argument_tool
from areal_gym.errors import ConfigError, ToolError, UsageError
from areal_gym.plugins import registry
from areal_gym.tasks import Draft, RowTasks, key_of_text
from areal_gym.tasks.given_tasks import open_tasks
from areal_gym.tasks.row_checks import text_field, texts_field
from areal_gym.tasks.rows import SourceRow
from areal_gym.types import Message, text_of

_MAX_QUERY = 1_000
_MAX_QUERIES = 10
_OWN_RETRIEVERS = ("bm25", "http")

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CITATION = re.compile(r"\[([^\[\]\s]{1,80})\]")
_VERDICTS = {"yes", "no", "noanswer"}
"""Answers without a partial F1, since half a verdict is worthless (HotpotQA)."""


def search_draft(row: SourceRow) -> Draft:
    """Convert a row with `answers`, or one `answer`; `support` and `queries` are lists of texts."""
    question = text_field(row, "question")
    is_several = "answers" in row.data
    answers = texts_field(row, "answers") if is_several else [text_field(row, "answer")]
    data: dict[str, Any] = {"question": question, "answers": answers}
    for name in ("support", "queries"):
        if row.data.get(name):
            data[name] = texts_field(row, name)
    for name in ("hops", "type"):
        if isinstance(row.data.get(name), int | str):
            data[name] = row.data[name]
    return Draft(key_of_text(question), data, row.data.get("split"))


@takes_old_files(search_draft, "skip_broken", "where", path="questions", test="test_questions")
class SearchEnv(QuestionEnv):
    r"""Multi-hop questions with a search engine.

    Task: a question whose answer takes one passage, or several found one after the other; from a
        small invented world that is built in, or of a file.
    Tools: `search(query)` gives the best passages; `open(id)` a whole one; `batch_search(queries)`,
        on request, several searches in one call.
    Observation: the question, then what the tools say.
    Action: an assistant message. One with tool calls is answered by their results; one without
        is the final answer, in `\boxed{}`, with the ids of passages in square brackets as
        citations.
    Reward: exact match with an accepted answer (or F1), partly for citations if `citations` is
        above 0. Parts: `em`, `f1`, `citation` (where the supporting passages are known), `format`.
    Episode end: terminated by the final answer; truncated after `max_turns`.
    Splits: `train` and `test`: those of the rows' `split`, or of two files, or a tenth of the
        questions.
    Metrics: `tool_calls`, `tool_errors`, `searches`, `pages` (opened), `found` (supporting
        passages that were shown, where they are known).
    Data: generated; or yours. History: v0.

    Args:
        hops: of the built-in questions, how many passages they take (1 to 3); None is all.
        corpus: a file of passages ({"id", "title", "text"}); None is the built-in world.
        tasks: questions about the corpus, {"question", "answers", "support"}: a file, a data set
            of the hub, a list, settings such as {"data": FILE, "test": FILE, "where": {"hops": 2},
            "skip_broken": true}, or a task source.
        retriever: who searches: "bm25", "http", or a plugin's (`areal-gym list retrievers`).
        retriever_kwargs: its arguments, such as {"url": ...}.
        tools: which of "search", "batch_search" and "open" there are.
        top_k: passages of one search.
        max_snippet: characters of a passage that a search shows.
        max_page: characters of a page that is opened.
        max_pages: how many pages of an episode are opened.
        max_turns: assistant messages after which the episode is truncated.
        max_tool_calls: calls of an episode that are run.
        score: what is rewarded: "em" or "f1".
        citations: which share of the reward is for citing the supporting passages.
        tool_dialect: how calls are written; by default as the model's own chat template does.

    Raises:
        ConfigError: the retriever needs a package that is not installed.
        DataError: a file is missing or has a broken row, or the index is of another corpus.
    """

    suspends = True
    system_prompt = r"Answer the question by searching. Put the answer in \boxed{}."

    def __init__(
        self,
        *,
        hops: Sequence[int] | None = (1, 2),
        corpus: str | Path | None = None,
        tasks: Any = None,
        retriever: str = "bm25",
        retriever_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[str] = ("search", "open"),
        top_k: int = 3,
        max_snippet: int = 300,
        max_page: int = 4_000,
        max_pages: int = 5,
        max_turns: int = 6,
        max_tool_calls: int | None = None,
        score: Literal["em", "f1"] = "em",
        citations: float = 0.0,
        tool_dialect: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if (corpus is not None and tasks is None) or (
            tasks is not None and corpus is None and retriever == "bm25"
        ):
            raise UsageError(
                "corpus and questions go together: a file of passages, and questions",
                hints=["corpus=passages.jsonl tasks=questions.jsonl"],
            )
        if score not in ("em", "f1") or not 0 <= citations < 1:
            raise UsageError(
                f'score = {score!r}, citations = {citations!r}: "em" or "f1", and 0 to below 1'
            )
        super().__init__(
            _world_tasks(None if hops is None else tuple(hops))
            if tasks is None
            else open_tasks(tasks, search_draft),
            render_mode=render_mode,
        )
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.tool_dialect = tool_dialect and require_dialect(tool_dialect)
        self.retriever = _shared_retriever(
            retriever,
            None if corpus is None else str(corpus),
            json.dumps(dict(retriever_kwargs or {}), sort_keys=True),
        )
        # What a plugin's retriever raises may be its own fault.
        self.judges_all_output = retriever in _OWN_RETRIEVERS
        self._top_k = top_k
        self._max_snippet, self._max_page, self._max_pages = max_snippet, max_page, max_pages
        self._score, self._citations = score, citations
        self._num_searches = self._num_pages = self._num_opened = 0
        self._shown: set[str] = set()
        query = {"type": "string", "description": "words to look for"}
        queries = {"type": "array", "items": query}
        id = {"type": "string", "description": "as search shows it in brackets"}
        self.tools = chosen_tools(
            tools,
            one_argument_tool("search", "Find passages.", {"query": query}, self._search),
            one_argument_tool(
                "batch_search",
                "Find passages for several queries.",
                {"queries": queries},
                self._batch_search,
            ),
            one_argument_tool("open", "Read a whole passage.", {"id": id}, self._open),
        )

    def first_messages(self, task: Any) -> Sequence[Message]:
        """Return the instruction and the question."""
        self._num_opened = 0
        self._shown = set()
        system, question = super().first_messages(task)
        if self._citations:
            cite = " Cite the passages that tell it by their ids: [id]."
            system = {**system, "content": text_of(system["content"]) + cite}
        return [system, question]

    async def respond(self, message: Message) -> Response:
        """Run the calls, or grade the answer."""
        if not (message.get("tool_calls") or message.get("parse_error")):
            return self._grade(text_of(message["content"]))
        support = set(self.task.data.get("support", ()))
        num_found = len(support & self._shown)
        self._num_searches = self._num_pages = 0
        results = await self.call_tools(message)
        metrics = {
            "tool_calls": results.num_calls,
            "tool_errors": results.num_errors,
            "searches": self._num_searches,
            "pages": self._num_pages,
        }
        if support:
            metrics["found"] = len(support & self._shown) - num_found
        return Response(messages=results.messages, metrics=metrics)

    def gold_action(self) -> str:
        """Search for one thing after the other, if the queries are known, then answer and cite."""
        data = self.task.data
        queries = data.get("queries", ())
        if self.num_turns < min(len(queries), self.max_turns - 1):
            dialect = self.tool_dialect or DEFAULT_DIALECT
            return write_call("search", {"query": queries[self.num_turns]}, dialect)
        cited = "".join(f" [{id}]" for id in data.get("support", ())) if self._citations else ""
        return f"\\boxed{{{data['answers'][0]}}}{cited}"

    def _grade(self, text: str) -> Response:
        golds = self.task.data["answers"]
        answer, em, f1 = None, 0.0, 0.0
        with self.judging():
            answer = extract_answer(text)
            if answer is not None:
                em, f1 = exact_match(answer, golds), f1_score(answer, golds)
        parts = {"em": em, "f1": f1, "format": float(answer is not None)}
        reward = em if self._score == "em" else f1
        support = self.task.data.get("support", ())
        if support:
            parts["citation"] = citation_score(cited_ids(text), support)
            # Citing the right passages beside a wrong answer earns nothing.
            reward *= 1 - self._citations + self._citations * parts["citation"]
        metrics = {"tool_calls": 0, "tool_errors": 0, "searches": 0, "pages": 0}
        return Response(reward=reward, reward_parts=parts, is_terminated=True, metrics=metrics)

    # ---- tools ---------------------------------------------------------------------------------

    async def _search(self, query: str) -> str:
        return (await self._find([query]))[0]

    async def _batch_search(self, queries: list[Any]) -> str:
        if not queries or not all(isinstance(query, str) for query in queries):
            raise ToolError("queries is a list of texts")
        if len(queries) > _MAX_QUERIES:
            raise ToolError(f"{len(queries)} queries are too many; at most {_MAX_QUERIES}")
        texts = await self._find(queries)
        return "\n\n".join(f"{q}:\n{text}" for q, text in zip(queries, texts, strict=True))

    async def _find(self, queries: list[str]) -> list[str]:
        for query in queries:
            if not query.strip():
                raise ToolError("the query is empty")
            if len(query) > _MAX_QUERY:
                raise ToolError(f"the query has {len(query)} characters; at most {_MAX_QUERY}")
        self._num_searches += len(queries)
        results = await self.retriever.search([_clean(query) for query in queries], self._top_k)
        return [self._show(hits) for hits in results]

    def _show(self, hits: Sequence[Hit]) -> str:
        self._shown.update(hit.passage.id for hit in hits)
        lines = []
        for passage, _ in hits:
            title = f"{passage.title}: " if passage.title else ""
            lines.append(f"[{passage.id}] {title}{cut_text(passage.text, self._max_snippet)}")
        return "\n".join(lines) or "nothing found"

    async def _open(self, id: str) -> str:
        if self._num_opened >= self._max_pages:
            raise ToolError(f"{self._max_pages} pages were opened, and no more can be")
        passage = await self.retriever.get(_clean(id.strip().strip("[]")))
        if passage is None:
            raise ToolError(f"no passage {id[:80]!r}; search shows ids in brackets")
        self._num_pages += 1
        self._num_opened += 1
        self._shown.add(passage.id)
        return cut_text(f"{passage.title}\n{passage.text}".strip(), self._max_page)


def _clean(text: str) -> str:
    """Return the text as valid UTF-8: half of a surrogate pair matches nothing."""
    return text.encode("utf-8", "replace").decode()


# ---- tasks ---------------------------------------------------------------------------------------


@cache
def _world_tasks(hops: tuple[int, ...] | None) -> RowTasks:
    rows = [
        SourceRow(f"question {number}", f"world/{number}", question)
        for number, question in enumerate(world().questions())
        if hops is None or question["hops"] in hops
    ]
    if not rows:
        raise UsageError(f"hops = {hops}: the built-in questions have 1, 2 or 3")
    return RowTasks("the built-in world", rows, search_draft)


@cache
def _shared_retriever(id: str, corpus: str | None, kwargs: str) -> Retriever:
    retriever_class = registry().load("retrievers", id)
    try:
        made: Retriever = retriever_class(
            None if corpus is None else Path(corpus), **json.loads(kwargs)
        )
    except TypeError as error:
        raise ConfigError(
            f"retriever_kwargs do not fit {id!r}: {error}",
            hints=[f"its arguments: areal-gym show {id} --kind retrievers"],
        ) from error
    return made


# ---- scores: exact match and F1, as SQuAD and HotpotQA count them --------------------------------


def normalize(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles and extra space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Iterable[str]) -> float:
    """Return 1 if the answer is one of the right ones, else 0."""
    given = normalize(answer)
    return float(bool(given) and any(given == normalize(gold) for gold in golds))


def f1_score(answer: str, golds: Iterable[str]) -> float:
    """Return the best harmonic mean of precision and recall over words."""
    return max((_f1(normalize(answer), normalize(gold)) for gold in golds), default=0.0)


def _f1(given: str, gold: str) -> float:
    if given != gold and (given in _VERDICTS or gold in _VERDICTS):
        return 0.0
    given_words, gold_words = given.split(), gold.split()
    num_shared = sum((Counter(given_words) & Counter(gold_words)).values())
    return _harmonic_mean(num_shared, len(given_words), len(gold_words))


def cited_ids(text: str) -> list[str]:
    """Return the texts in square brackets, in order, each once: `[w00009]`."""
    return list(dict.fromkeys(_CITATION.findall(text)))


def citation_score(cited: Collection[str], support: Collection[str]) -> float:
    """Return the F1 of the cited passages against those that support the answer."""
    wanted = set(support)
    return _harmonic_mean(len(wanted & set(cited)), len(set(cited)), len(wanted))


def _harmonic_mean(num_shared: int, num_given: int, num_wanted: int) -> float:
    return 2 * num_shared / (num_given + num_wanted) if num_shared else 0.0
