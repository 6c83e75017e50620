"""What several tests of the command line need."""

import pytest

from areal_gym.cli.app import run


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """Run the program in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = run(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return call
