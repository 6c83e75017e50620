"""Agents: how the policy is asked in one episode. `base` has the contract, `chat` the default."""
