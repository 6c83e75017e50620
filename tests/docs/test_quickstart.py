"""What docs/quickstart.md shows of a game is what is seen there."""

import io
import re
from pathlib import Path

from areal_gym.cli.app import run

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()


def test_the_game_goes_as_it_is_shown(monkeypatch, capsys):
    section = PAGE.partition("## 3. Play")[2]
    command = re.search(r"^    areal-gym (play .*)$", section, re.M)[1].split()
    shown = re.search(r"```text\n(.*?)```", section, re.S)[1].splitlines()
    typed = [line.removeprefix("> ") for line in shown if line.startswith("> ")]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    assert run(command) == 0
    seen = capsys.readouterr().out
    assert "\n".join(line for line in shown if not line.startswith("> ")) in seen
