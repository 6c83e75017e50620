"""The notebooks of examples/notebooks run in a real kernel, from the first cell to the last."""

from __future__ import annotations

import re

import pytest

from tests._support.paths import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

OWN_DATA = ROOT / "examples" / "notebooks" / "own_data.ipynb"


def printed(folder, timeout_s):
    """Run the notebook in the folder and return what its cells printed."""
    notebook = nbformat.read(OWN_DATA, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = nbclient.NotebookClient(
        notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert [("text/html" in data) for data in shown] == [False, False, True, True, True]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def rewards(text):
    before, after = re.search(r"reward (-?[\d.]+) -> (-?[\d.]+): a gain", text).groups()
    return float(before), float(after)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_own_data_runs_in_a_kernel(tiny_policy, tmp_path, monkeypatch):
    for name, value in (("MODEL", tiny_policy), ("NUM_ROWS", 150), ("STEPS", 1)):
        monkeypatch.setenv(name, str(value))
    text = printed(tmp_path, timeout_s=300)
    before, after = rewards(text)
    assert before <= 0 >= after  # a policy of random weights, and one step
    assert text.count("Which is the largest: ") >= 4


@pytest.mark.long
def test_own_data_learns(tmp_path):
    before, after = rewards(printed(tmp_path, timeout_s=1800))
    assert before < 0.6
    assert after > before + 0.2
