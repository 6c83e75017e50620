"""Other gyms' episodes, for `envs.py`, which runs this with the Python of a venv that has one.

    python gyms_side.py gem | skyrl | verifiers

Reads `{"case", "num_episodes", "num_in_flight"}` (a line of JSON) from standard input, plays, and
answers with a line of JSON. Each gym plays as its own users write it: the environment, the tool and
the policy's text are ours. Nothing of areal-gym is imported here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from importlib.metadata import version
from typing import Any

# Lines of JSON go to whoever started this; whatever else is printed is for people.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

NUM_TURNS = 5
QUESTION, GOLD = "What is 37*48+12?", "1788"
ANSWER = r"The result is \boxed{1788}"
CODE = "37*48+12"
BOX = re.compile(r"\\boxed\{([^{}]*)\}")
Run = Callable[[str, int, int], Coroutine[Any, Any, None]]


def reward_of(text: str) -> float:
    """The same on all sides: what the last box holds is compared as text."""
    boxes = BOX.findall(text)
    return float(bool(boxes) and boxes[-1] == GOLD)


async def in_flight(play: Callable[[], Awaitable[None]], num_episodes: int, num: int) -> None:
    """Play so many, `num` at a time, on this event loop."""
    left = iter(range(num_episodes))

    async def play_on() -> None:
        for _ in left:
            await play()

    await asyncio.gather(*(play_on() for _ in range(num)))


def gem() -> Run:
    """Its vector environment: observations, rewards, flags; no transcript."""
    from gem.core import Env
    from gem.tools.base_tool import BaseTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper
    from gem.utils.constants import TERMINAL_STATE
    from gem.vector.sync_vector_env import SyncVectorEnv

    class Question(Env):
        def reset(self, seed: int | None = None) -> Any:
            super().reset(seed)
            return QUESTION, {}

        def step(self, action: str) -> Any:
            return TERMINAL_STATE, reward_of(action), True, True, {}

    class Python(BaseTool):
        tool_type = "python"
        pattern = re.compile(r"<python>(.*?)</python>", re.DOTALL)

        def instruction_string(self) -> str:
            return "Code in <python>...</python> is run."

        def execute_action(self, action: str) -> Any:
            found = self.pattern.search(action)
            if found is None:
                return False, True, "", action
            return True, False, str(len(found[1])), action[: found.end()]

    def one(case: str) -> Env:
        return Question() if case == "single" else ToolEnvWrapper(Question(), [Python()])

    async def run(case: str, num_episodes: int, num: int) -> None:
        replies = [f"<python>{CODE}</python>"] * (NUM_TURNS - 1) if case == "tools" else []
        envs = SyncVectorEnv(["question"] * num, [lambda: one(case)] * num)
        envs.reset()  # and from then on by themselves
        for _ in range(num_episodes // num):
            for reply in [*replies, ANSWER]:
                _, rewards, is_over, _, _ = envs.step([reply] * num)
            assert is_over.all()
            assert rewards.sum() == num

    return run


def skyrl() -> Run:
    """Steps on the event loop; the environment keeps its messages, as its `search` does."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
    from skyrl_gym.tools.core import ToolGroup, tool

    class Tools(ToolGroup):
        def __init__(self) -> None:
            super().__init__("tools")

        @tool
        def python(self, code: str) -> str:
            return str(len(code))

    class Question(BaseTextEnv):
        pattern = re.compile(r"<python>(.*?)</python>", re.DOTALL)

        def __init__(self) -> None:
            super().__init__()
            self.max_turns = NUM_TURNS
            self.init_tool_groups([Tools()])
            self.history: list[dict[str, str]] = []

        def step(self, action: str) -> Any:
            self.turns += 1
            self.history.append({"role": "assistant", "content": action})
            found = self.pattern.search(action)
            if found is None:
                return BaseTextEnvStepOutput(
                    observations=[], reward=reward_of(action), done=True, metadata={}
                )
            said = {
                "role": "user",
                "content": self._execute_tool("tools", "python", [found[1]]),
            }
            self.history.append(said)
            return BaseTextEnvStepOutput(
                observations=[said], reward=0.0, done=self.turns >= self.max_turns, metadata={}
            )

    async def run(case: str, num_episodes: int, num: int) -> None:
        replies = [f"<python>{CODE}</python>"] * (NUM_TURNS - 1) if case == "tools" else []

        async def play() -> None:
            env = Question()
            history, _ = env.init([{"role": "user", "content": QUESTION}])
            for reply in [*replies, ANSWER]:
                await asyncio.sleep(0)  # where the policy would be asked
                found = env.step(reply)
                history = [*history, {"role": "assistant", "content": reply}]
                history += found["observations"]
            assert found["done"]
            assert found["reward"] == 1.0
            env.close()

        await in_flight(play, num_episodes, num)

    return run


def verifiers() -> Run:
    """Its rollouts, scored, with its own OpenAI client but for the network.

    States have messages and, as a trainer needs them, the tokens that a server would tell.
    """
    import gc
    import logging

    import verifiers.legacy as vf
    from datasets import Dataset
    from openai.types.chat import ChatCompletion
    from verifiers.legacy.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

    logging.disable(logging.WARNING)

    class Scripted(OpenAIChatCompletionsClient):
        def __init__(self, replies: list[ChatCompletion]) -> None:
            super().__init__(object())
            self.replies = replies

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> Any:
            await asyncio.sleep(0)
            return self.replies[sum(message["role"] == "assistant" for message in prompt)]

        async def close(self) -> None:
            pass

    def python(code: str) -> str:
        """Do next to nothing: the path to a tool and back is what is measured."""
        return str(len(code))

    arguments = json.dumps({"code": CODE})

    def answers(num_calls: int) -> list[ChatCompletion]:
        """What a server of bytes as tokens would have answered."""
        found, num_prompt = [], 300 if num_calls else 60
        for turn in range(num_calls + 1):
            message: dict[str, Any] = {"role": "assistant", "content": ANSWER}
            if turn < num_calls:
                function = {"name": "python", "arguments": arguments}
                call = {"id": f"call{turn}", "type": "function", "function": function}
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
            num_sampled = len(ANSWER) if turn == num_calls else len(arguments) + 60
            rows = [{"token": "x", "logprob": -1.0, "top_logprobs": []}] * num_sampled
            choice = {
                "index": 0,
                "finish_reason": "stop" if turn == num_calls else "tool_calls",
                "message": message,
                "logprobs": {"content": rows},
                "token_ids": [120] * num_sampled,
            }
            body = {
                "id": "r",
                "created": 0,
                "model": "policy",
                "object": "chat.completion",
                "choices": [choice],
                "prompt_token_ids": [120] * num_prompt,
            }
            found.append(ChatCompletion.model_validate(body))
            num_prompt += num_sampled + 40
        return found

    def is_right(completion: Any, **_: Any) -> float:
        return reward_of(completion[-1].content)

    dataset = Dataset.from_list([{"question": QUESTION, "answer": GOLD}])
    rubric = vf.Rubric(funcs=[is_right])
    tool_env = vf.ToolEnv(tools=[python], max_turns=NUM_TURNS, dataset=dataset, rubric=rubric)
    single_env = vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[is_right]))
    kinds = {
        "single": (single_env, Scripted(answers(0))),
        "tools": (tool_env, Scripted(answers(NUM_TURNS - 1))),
    }
    gc.freeze()  # as its own workers do, with these numbers
    gc.set_threshold(150_000, 10, 10)

    async def run(case: str, num_episodes: int, num: int) -> None:
        env, client = kinds[case]
        row = {**env.get_dataset()[0], "example_id": 0}

        async def play() -> None:
            found = await env.run_rollout(dict(row), client, "policy", {})
            assert found["reward"] == 1.0, found

        await in_flight(play, num_episodes, num)

    return run


PACKAGES = {"gem": "gem-llm", "skyrl": "skyrl-gym", "verifiers": "verifiers"}

if __name__ == "__main__":
    name = sys.argv[1]
    run = {"gem": gem, "skyrl": skyrl, "verifiers": verifiers}[name]()
    for line in sys.stdin:
        asked = json.loads(line)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        asyncio.run(run(asked["case"], asked["num_episodes"], asked["num_in_flight"]))
        answer = {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "version": f"{PACKAGES[name]} {version(PACKAGES[name])}",
        }
        print(json.dumps(answer), file=ANSWERS)
