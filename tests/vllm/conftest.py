"""Servers to run the suite against: the fake one always, the real one where it is installed."""

from __future__ import annotations

import pytest

from areal_gym.testing.engine_contract import tiny_policies
from tests._support.server_processes import SERVED_CONTEXT
from tests._support.vllm_processes import KINDS, LORA, running_server


@pytest.fixture(scope="session", params=KINDS)
def kind(request):
    """Which server the test runs against."""
    return request.param


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Two checkpoints of the same shape and different weights."""
    made = tiny_policies(tmp_path_factory.mktemp("served"), max_context=SERVED_CONTEXT)
    return [made.first, made.second]


@pytest.fixture(scope="session")
def decoders(policies):
    """The weights of the two checkpoints."""
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint

    return [load_checkpoint(policy) for policy in policies]


@pytest.fixture(scope="session")
def server(kind, policies, tmp_path_factory):
    """The URL of one server for all tests of a kind; each test publishes what it needs."""
    log = tmp_path_factory.mktemp(kind) / "server.log"
    with running_server(kind, policies[0], log, *LORA) as url:
        yield url
