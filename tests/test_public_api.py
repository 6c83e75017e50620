"""The names that people import, and what importing them costs."""

import importlib
import pickle
import pkgutil
import subprocess
import sys
import traceback

import pytest

import areal_gym
from areal_gym.errors import UnknownIdError, UsageError


def python(code, *, check=True, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
        env={**os.environ, **env},
    )


def test_every_public_name_exists():
    for name in areal_gym.__all__:
        assert getattr(areal_gym, name) is not None, name
    assert set(areal_gym.__all__) <= set(dir(areal_gym))


def test_all_is_sorted():
    assert areal_gym.__all__ == sorted(areal_gym.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = areal_gym.nonsense


def test_every_name_in_all_exists():
    for module in sorted(m.name for m in pkgutil.walk_packages(areal_gym.__path__, "areal_gym.")):
        # They run in other processes: sandboxes, servers with packages of their own.
        if module.endswith("__main__") or ".worker." in module or ".server_side." in module:
            continue
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", ()):
            assert hasattr(loaded, name), f"{module}.{name}"


def test_importing_the_package_is_cheap():
    code = (
        "import time; before = time.process_time(); import areal_gym, sys; "
        "print(time.process_time() - before); "
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    seconds, modules = python(code).stdout.splitlines()
    # The aim is 0.05; the bound only catches a heavy import, on any machine.
    assert float(seconds) < 0.35
    assert not {"torch", "transformers", "gymnasium", "numpy", "pydantic"} & set(modules.split())


@pytest.mark.parametrize(
    "code",
    [
        "import areal_gym, gymnasium; env = gymnasium.make('areal_gym/tir-v0')",
        "import gymnasium, areal_gym; env = gymnasium.make('areal_gym/tir-v0')",
        "import gymnasium; env = gymnasium.make('areal_gym:areal_gym/tir-v0')",
        "import areal_gym.envs.base, gymnasium; env = gymnasium.make('areal_gym/tir-v0')",
    ],
)
def test_gymnasium_registration_in_any_import_order(code):
    done = python(f"{code}; print(env.reset(seed=0)[0]); import importlib.resources")
    assert done.stdout.strip()
    assert not done.stderr


def test_gymnasium_keeps_its_own_loader():
    done = python("import areal_gym, gymnasium; print(type(gymnasium.__spec__.loader).__name__)")
    assert done.stdout.strip() == "SourceFileLoader"


def test_make_returns_an_environment():
    env = areal_gym.make("countdown")
    text, info = env.reset(seed=3)
    assert text == info["messages"][-1]["content"]
    env.close()


def test_make_explains_mistakes():
    with pytest.raises(UnknownIdError) as caught:
        areal_gym.make("coundown")
    assert "did you mean 'countdown'?" in caught.value.hints
    with pytest.raises(UsageError, match="max_turn") as wrong:
        areal_gym.make("tir", max_turn=3)
    assert any("did you mean 'max_turns'" in hint for hint in wrong.value.hints)


def test_traceback_shows_hints():
    with pytest.raises(areal_gym.GymError) as caught:
        areal_gym.make("tri")
    assert "did you mean 'tir'?" in "".join(traceback.format_exception(caught.value))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.__notes__ == list(caught.value.hints)
