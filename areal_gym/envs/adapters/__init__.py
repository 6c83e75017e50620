"""Environments of other libraries: `gymnasium:`, `reasoning_gym:`, `textarena:`, `openenv:`.

`verifiers` (0.4) plays each rollout in a process of its own and asks its policy over HTTP, so its
environments cannot be stepped from here; its programs can be agents behind the gateway instead.
"""
