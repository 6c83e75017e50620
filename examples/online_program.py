"""A program that learns from its users: it opens sessions at a run's gateway and posts rewards.

    areal-gym train --env online engine.model=DIR gateway=127.0.0.1:8900 \\
        rollout.group_size=4 rollout.batch_groups=4 --out runs/online
    python examples/online_program.py runs/online/gateway.json

`chat` is the program as it was before: an OpenAI client, a base URL and a key. Only what is around
it is new: which session it is, and how the user liked the answer.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI

GROUP_SIZE = 4  # the run's rollout.group_size
QUESTIONS = ("Name a colour.", "Name an animal.", "Say yes or no.")


def chat(base_url: str, api_key: str, question: str) -> str:
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = [{"role": "user", "content": question}]
        reply = client.chat.completions.create(model="gpt-4o", messages=messages)
    return reply.choices[0].message.content or ""


def liked(answer: str) -> float:
    """Our users like short answers."""
    return 1.0 / (1 + len(answer.split()))


def control(gateway: dict[str, str], route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        gateway["base_url"] + route,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {gateway['control_key']}"},
    )
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main(file: Path) -> None:
    gateway = json.loads(file.read_text())
    number = 0
    while True:
        # The sessions of one question are compared with each other: a group's worth of each.
        question = QUESTIONS[number // GROUP_SIZE % len(QUESTIONS)]
        try:
            session = control(gateway, "/rl/sessions", {"task": question})
            answer = chat(session["base_url"], session["api_key"], question)
            end = {"reward": liked(answer)}
            control(gateway, f"/rl/sessions/{session['id']}/end", end)
        except (urllib.error.HTTPError, APIStatusError) as error:
            if getattr(error, "code", None) != 429:
                return  # the session is gone: the run has ended
            time.sleep(float(getattr(error, "headers", {}).get("Retry-After", 1)) / 10)
        except OSError:
            return  # so has the gateway
        else:
            number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
