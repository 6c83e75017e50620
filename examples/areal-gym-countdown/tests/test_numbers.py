import asyncio

import pytest
import torch
from areal_gym_countdown.agent import ReminderAgent
from areal_gym_countdown.env import NumbersEnv
from areal_gym_countdown.loss import vanilla

from areal_gym.envs.checker import check_env
from areal_gym.trainer.algorithms.losses import LossInputs


def test_the_environment_keeps_the_contract():
    results = check_env(NumbersEnv)
    assert all(result.is_ok for result in results), results


def test_later_tries_earn_less():
    env = NumbersEnv()
    env.reset(seed=0)
    gold = env.gold_action()
    step = env.step("1+1")
    assert not step.terminated
    assert step.observation.endswith("Try again.")
    assert env.step(gold).reward == 0.5


@pytest.mark.parametrize("text", ["", "1//2", "2**9", "__import__('os')", "9" * 5000])
def test_no_arithmetic_is_no_crash(text):
    env = NumbersEnv()
    env.reset(seed=0)
    assert env.step(text).reward == 0.0


def test_the_agent_repeats_the_rules():
    class Recording:
        tools = ()

        def __init__(self):
            self.asked = []
            self.env = NumbersEnv()
            self.first_messages = self.env.reset(seed=0)[1]["messages"]

        async def ask(self, new_messages):
            self.asked.append(new_messages[-1]["content"])
            return {"role": "assistant", "content": "1"}

        async def act(self, message):
            return await self.env.astep(message)

    episode = Recording()
    asyncio.run(ReminderAgent("Hurry.").play(episode))
    assert len(episode.asked) == 3
    assert all(text.endswith("Hurry.") for text in episode.asked)


def test_the_gradient_of_the_loss_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -3.0])
    batch = LossInputs(
        logprobs=logprobs,
        proximal=logprobs.detach(),
        old_logprobs=logprobs.detach(),
        advantages=advantages,
        sequence_ids=torch.zeros(2, dtype=torch.long),
    )
    vanilla(batch).loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)
