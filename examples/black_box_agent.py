"""An agent that was written for OpenAI's client: it asks three times, and the majority answers.

    areal-gym train --env math --agent openai \\
        agent.kwargs.function=examples/black_box_agent.py:solve

The three answers are three branches of one trajectory. Run by itself it asks whatever
OPENAI_BASE_URL is, `areal-gym serve --env math` for instance:

    python examples/black_box_agent.py "What is 17*3?"
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from types import SimpleNamespace

from openai import AsyncOpenAI


async def solve(client: AsyncOpenAI, task) -> str:
    reply = await client.chat.completions.create(model="gpt-4o", messages=task.messages, n=3)
    answers = [choice.message.content or "" for choice in reply.choices]
    boxes = [answer.rpartition("\\boxed{")[2].partition("}")[0] for answer in answers]
    (winner, _), *_ = Counter(boxes).most_common()
    return answers[boxes.index(winner)]


async def main(question: str) -> None:
    task = SimpleNamespace(messages=[{"role": "user", "content": question}])
    async with AsyncOpenAI() as client:
        print(await solve(client, task))


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:])))
