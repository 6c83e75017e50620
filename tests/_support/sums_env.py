"""A small environment with a tool, and an engine that records its calls."""

import random
from collections.abc import Mapping

from areal_gym.engines.base import Generation
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tools import tool
from areal_gym.types import FinishReason, Task

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(TextEnv):
    """Sums two numbers: any number of tool calls, then an answer that ends the episode."""

    tools = (add,)

    def sample_task(self, rng, options: Mapping):
        number = options.get("index", int(rng.integers(10**9)))
        return Task(id=str(number), data={"number": number, "row": [1]}, split=options["split"])

    def first_messages(self, task):
        return [{"role": "user", "content": f"What is {task.data['number']} + 7?"}]

    async def respond(self, message):
        if message.get("tool_calls") or message.get("parse_error"):
            results = await self.call_tools(message)
            return Response(
                messages=results.messages, reward=0.25, metrics={"calls": results.num_calls}
            )
        is_right = "10" in message["content"]
        return Response(
            reward=float(is_right), reward_parts={"answer": float(is_right)}, is_terminated=True
        )


class RecordingEngine(ScriptedEngine):
    """Samples random ids (half of them are not UTF-8) and records prompts and samples.

    The same seed gives the same tokens. Weights are "published" inside turns now and then.
    """

    def __init__(self, *, max_context=400, publishes=False, stop_share=0.5):
        super().__init__([], max_context=max_context)
        self.log = {}
        self.publishes = publishes
        self.stop_share = stop_share

    async def generate(self, prompt_ids, params, *, session=None):
        rng = random.Random(params.seed)
        room = min(params.max_new_tokens, self.max_context - len(prompt_ids))
        ids, versions = [], []
        while len(ids) < room and not (ids and ids[-1] in params.stop_token_ids):
            is_stop = rng.random() < self.stop_share / 5
            ids.append(ByteTokenizer.eos_token_id if is_stop else rng.randrange(259))
            versions.append(self.policy_version)
            if self.publishes and rng.random() < 0.1:
                self.policy_version += 1
        is_stopped = ids[-1] in params.stop_token_ids
        generation = Generation(
            token_ids=tuple(ids),
            logprobs=tuple(-rng.random() for _ in ids),
            versions=tuple(versions),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )
        self.log.setdefault(session, []).append((tuple(prompt_ids), generation))
        return generation
