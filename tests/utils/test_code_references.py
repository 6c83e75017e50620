"""Functions and classes by `FILE.py:NAME` and `module:NAME`."""

import json

import pytest

from areal_gym.errors import ConfigError
from areal_gym.utils.code_references import load_reference


def test_load_reference_by_module_name_or_file(tmp_path):
    assert load_reference("json:dumps") is json.dumps
    file = tmp_path / "mine.py"
    file.write_text("def solve(client, task):\n    return 1\n")
    assert load_reference(f"{file}:solve")(None, None) == 1
    for path, expected in (
        ("json:dump_all", "did you mean"),
        ("nothing_there:x", "nothing_there"),
        (f"{tmp_path}/no.py:x", "no file"),
        ("solve", "names no function"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_reference(path)
        assert expected in str(caught.value) + " ".join(caught.value.hints)


def test_load_reference_names_the_missing_package(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text("import nowhere_to_be_found\n")
    with pytest.raises(ConfigError, match="No module named 'nowhere_to_be_found'") as caught:
        load_reference(f"{file}:solve")
    assert caught.value.hints[0].startswith("nowhere_to_be_found must be installed")


def test_errors_name_the_line_and_what_the_file_has(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\nx = 1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError: .* \(mine.py, line 3\)"):
        load_reference(f"{file}:exact")
    file.write_text("import helper_beside_it\n\ndef exact(): ...\n\nlimit = 3\n")
    (tmp_path / "helper_beside_it.py").touch()
    with pytest.raises(ConfigError, match="has no reward 'exactly'") as caught:
        load_reference(f"{file}:exactly", "reward")
    assert "did you mean 'exact'?" in caught.value.hints
    with pytest.raises(ConfigError, match="has no reward 'limit'"):
        load_reference(f"{file}:limit", "reward")


def test_changed_file_is_loaded_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def one():\n    return 1\n")
    assert load_reference(f"{file}:one") is load_reference(f"{file}:one")
    file.write_text("class One:\n    def two(self):\n        return 2\n")
    assert load_reference(f"{file}:One.two")(None) == 2
