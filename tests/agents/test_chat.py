from areal_gym.agents.base import Agent
from areal_gym.agents.chat import ChatAgent
from areal_gym.agents.plugin import register_agents


def test_chat_agent_is_the_registered_default():
    (spec,) = [spec for spec in register_agents() if spec.id == "chat"]
    assert spec.entry_point == "areal_gym.agents.chat:ChatAgent"
    assert isinstance(ChatAgent(), Agent)
