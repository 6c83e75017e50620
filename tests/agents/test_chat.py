from areal_gym.agents.base import Agent
from areal_gym.agents.chat import ChatAgent
from areal_gym.agents.plugin import register_agents


def test_the_default_agent_is_registered_by_name():
    (spec,) = [spec for spec in register_agents() if spec.id == "chat"]
    assert spec.entry_point == "areal_gym.agents.chat:ChatAgent"
    assert isinstance(ChatAgent(), Agent)
