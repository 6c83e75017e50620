"""The suite of hostile programs in local places, as root of the place and as nobody."""

import json
import os
import subprocess
import sys

import pytest

BY_DESIGN = {
    # A place has a network of its own, and sockets on it.
    "every_family_of_sockets",
    "datagrams_to_the_host",
    "address_on_an_unconnected_pair",
    # Memory is bounded for all processes together; one process has no limit to raise, and when
    # memory runs out the kernel ends one process after the other.
    "raise_own_limits",
    "shared_memory_of_children",
    # It expects a result of the sandbox's own interpreter.
    "ok_before_the_deadline",
}
OF_ROOT = {
    "change_what_the_interpreter_is_made_of",
    "hard_links_to_what_is_protected",
    "capabilities_and_identities",
}
"""What root of a place may do: it owns the files and users of its place."""


def attack(cache, *arguments, user):
    """Return the report of the suite; `user` is the user of the place."""
    left_out = BY_DESIGN | (OF_ROOT if user == 0 else set())
    command = [sys.executable, "-m", "areal_gym.sandbox.suite", "--json", "--fresh", *arguments]
    command += ["-p", "areal_gym.places.attacked", "--sandbox", "local-place"]
    command += ["--set", f'user="{user}"', "--leave-out", ",".join(sorted(left_out))]
    environment = {**os.environ, "AREAL_GYM_CACHE": str(cache)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("user", [0, 65534])
def test_programs_that_break_out_of_sandboxes_do_not_leave_a_place(local_cache, user):
    report = attack(local_cache, "--only", "escape,walls,network", user=user)
    assert report["of"] >= 20
    assert not report["failures"]
    assert not report["host"]


@pytest.mark.long
@pytest.mark.parametrize("user", [0, 65534])
def test_the_whole_suite_is_contained_by_local_places(local_cache, user):
    report = attack(local_cache, user=user)
    assert report["of"] >= 160
    assert not report["failures"]
    assert not report["host"]
