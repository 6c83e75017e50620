from __future__ import annotations

import importlib.util

from tests._support.paths import ROOT

FILE = ROOT / "examples" / "minimal_grpo.py"


def test_minimal_grpo_is_below_200_lines():
    assert len(FILE.read_text().splitlines()) < 200


def test_minimal_grpo_learns(capsys):
    spec = importlib.util.spec_from_file_location("minimal_grpo", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(num_steps=50, seed=0)
    rewards = [line.split()[3] for line in capsys.readouterr().out.splitlines()[:-1]]
    # Guessing gives 0.1 a digit.
    assert float(rewards[-1]) > 0.4
