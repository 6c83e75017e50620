import subprocess
import sys

import pytest

from areal_gym.utils.child_python import import_path, python_argv


@pytest.mark.parametrize("arguments", [("-c", "import tabnanny"), ("-m", "tabnanny", "-h")])
def test_files_of_the_working_directory_are_not_taken_for_modules(arguments, tmp_path):
    (tmp_path / "tabnanny.py").write_text("raise SystemExit('a file of the working directory')")
    shadowed = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True)
    assert b"a file of the working directory" in shadowed.stderr
    child = subprocess.run(python_argv(*arguments), cwd=tmp_path, capture_output=True, check=False)
    assert b"a file of the working directory" not in child.stderr


def test_child_imports_what_this_process_imports(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("print('imported')")
    for path in (str(tmp_path), ""):  # as in an interactive Python that was started there
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "path", [path, *sys.path])
            environment = import_path()
        code = subprocess.run(
            python_argv("-c", "import mine"), env=environment, capture_output=True, check=False
        )
        assert code.stdout == b"imported\n"
