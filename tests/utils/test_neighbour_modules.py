"""Modules beside a user's file: which are found, and which are mistaken for others."""

from __future__ import annotations

import pytest

from areal_gym.errors import ConfigError
from areal_gym.utils.code_references import load_reference
from areal_gym.utils.neighbour_modules import neighbours

FILES = {
    "mine.py": "import json\nimport numpy\nimport areal_gym\nfrom nm_rules import scale\n"
    "def f():\n    import nm_late.deep as d\n    from nm_kit import words, missing\n",
    "nm_rules.py": "import nm_cycle\nfrom nm_space.inner import x\nscale = 1\n",
    "nm_cycle.py": "import nm_rules\n",
    "nm_late/__init__.py": "",
    "nm_late/deep.py": "from . import near\nfrom .near import y\nfrom ... import above\n",
    "nm_late/near.py": "y = 1\n",
    "nm_kit/__init__.py": "from nm_kit.base import *\n",
    "nm_kit/base.py": "",
    "nm_kit/words.py": "this is no code (\n",
    "nm_space/inner.py": "x = 1\n",
    "nm_unused.py": "",
    "json.py": "",
    "numpy/data.csv": "",
}


def test_imports_from_the_own_folder_are_found(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {str(path.relative_to(tmp_path)) for path in neighbours(tmp_path / "mine.py")}
    assert found == {name for name in FILES if name.startswith("nm_")} - {"nm_unused.py"}


def test_another_folders_module_of_the_same_name_is_refused(tmp_path):
    for folder, text in (("a", "x = 1"), ("b", "x = 2"), ("c", "x = 1")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nm_same.py").write_text(text)
        (tmp_path / folder / "mine.py").write_text("from nm_same import x\ndef f():\n    return x")
    assert load_reference(f"{tmp_path}/a/mine.py:f")() == 1
    with pytest.raises(ConfigError, match=f"another module of that name: {tmp_path}/a") as raised:
        load_reference(f"{tmp_path}/b/mine.py:f")
    assert [*raised.value.hints] == [f"rename {tmp_path}/b/nm_same.py"]
    assert load_reference(f"{tmp_path}/c/mine.py:f")() == 1  # a copy
