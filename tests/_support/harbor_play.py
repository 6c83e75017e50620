"""Plays task folders in real containers, with scripted actions."""

import asyncio
import os
from contextlib import closing

import pytest

from areal_gym.chat.tool_call_formats import write_call
from areal_gym.envs.harbor.harbor_env import HarborEnv
from areal_gym.errors import SandboxError
from areal_gym.plugins import registry

BASE = "areal-gym-harbor-tests"
"""An image of the running interpreter, which needs no registry."""


def backend(name: str) -> dict[str, object]:
    """Return the arguments of HarborEnv for a backend, or skip the test where there is none."""
    if name == "docker":
        from areal_gym.sandbox.containers import connect
        from areal_gym.sandbox.image import import_host

        try:
            client = connect()
        except SandboxError as error:
            pytest.skip(str(error))
        with closing(client):
            if not client.images.list(f"{BASE}:latest"):
                import_host(client, BASE)
        build = {"build_args": {"BASE_IMAGE": BASE}, "build_network": "none"}
        return {"places": "docker", "places_kwargs": build}
    if name not in {entry.id for entry in registry().entries("places")}:
        pytest.skip(f"there are no {name} places")
    if os.geteuid() != 0:
        pytest.skip("namespaces of places need root here")
    return {"places": name}


def bash(command, **more):
    """Return an assistant's text that calls `bash`."""
    return write_call("bash", {"command": command, **more}, "hermes")


def call(name, **arguments):
    """Return an assistant's text that calls a tool."""
    return write_call(name, arguments, "hermes")


GOLD = object()
"""Stands for the gold policy's next action."""


class Played:
    """The steps of an episode."""

    def __init__(self, steps):
        self.steps = steps
        self.reward = sum(step.reward for step in steps)
        self.texts = [
            step.info["messages"][-1]["content"] for step in steps if step.info["messages"]
        ]
        self.last = steps[-1]
        self.info = steps[-1].info
        self.metrics = {}
        for step in steps:
            for name, value in step.info.get("metrics", {}).items():
                self.metrics[name] = self.metrics.get(name, 0) + value


async def play_async(path, actions, **options):
    """Play one episode of the first task; actions are texts, or GOLD."""
    env = HarborEnv(str(path), heldout=0, **options)
    steps = []
    try:
        await env.areset(seed=0, options={"split": "train", "index": 0})
        for action in actions:
            steps.append(await env.astep(env.gold_action() if action is GOLD else action))
            if steps[-1].terminated or steps[-1].truncated:
                break
    finally:
        await env.aclose()
    return Played(steps)


def play(path, *actions, **options):
    """Play one episode of the first task on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(play_async(path, actions, **options), 240))
