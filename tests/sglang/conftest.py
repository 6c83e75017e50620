"""Servers to run the suite against: the fake one always, the real one where it is installed."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest

from areal_gym.testing.engine_contract import tiny_policies
from tests._support.long_tests import skip_long_if_real
from tests._support.server_processes import SERVED_CONTEXT, KeptServer
from tests._support.sglang_processes import KINDS, LORA, running_server


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
def kept_server(kind, policies, tmp_path_factory):
    """The server that all tests of a kind share."""
    home, start = tmp_path_factory.mktemp(kind), partial(running_server, kind, policies[0])
    with closing(KeptServer(start, home, *(LORA if kind == "real" else []))) as server:
        yield server


@pytest.fixture
def server(kept_server):
    """The URL of the server that all tests of a kind share; each test publishes what it needs."""
    return kept_server.started_or_told()


@pytest.fixture(scope="session")
def spare(kind, policies, tmp_path_factory):
    """A second server for all tests of a kind, which a test may kill."""
    skip_long_if_real(kind)
    home, start = tmp_path_factory.mktemp("spare"), partial(running_server, kind, policies[0])
    with closing(KeptServer(start, home)) as server:
        yield server
