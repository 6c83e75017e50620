"""Each chaos script runs at its small size; `python -m tests.chaos all` runs the full ones."""

import pytest

from tests.chaos.__main__ import run_script, script_names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # tests/distributed kills workers of Ray, too.
    [
        pytest.param(name, marks=[pytest.mark.long] if name == "ray_workers" else [])
        for name in script_names()
    ],
)
def test_small_chaos_loses_nothing(name, tmp_path):
    assert run_script(name, small=True, directory=tmp_path)["seconds"] > 0
