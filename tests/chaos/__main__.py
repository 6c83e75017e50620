"""`python -m tests.chaos [NAME ...]` runs chaos scripts at full size; no name lists them.

A script is a module of this folder with a docstring and a function
`run(small: bool, directory: Path) -> dict[str, object]`, which raises AssertionError where
something was lost, and returns the figures that docs/chaos.md shows. `small` is the size that CI
runs.
"""

import argparse
import importlib
import json
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def script_names() -> list[str]:
    """Every chaos script of this folder, by module name."""
    return sorted(
        path.stem
        for path in HERE.glob("*.py")
        if not path.stem.startswith(("_", "test_", "support"))
    )


def run_script(name: str, *, small: bool, directory: Path) -> dict[str, object]:
    """Runs one script and returns its figures, with the seconds that it took."""
    started = time.perf_counter()
    figures = importlib.import_module(f"{__package__}.{name}").run(small=small, directory=directory)
    return {**figures, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    """Runs the scripts that were named, or lists all of them."""
    parser = argparse.ArgumentParser(description="Chaos scripts; see docs/chaos.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts to run, or all")
    parser.add_argument("--small", action="store_true", help="the size that CI runs")
    options = parser.parse_args()
    if not options.names:
        for name in script_names():
            summary = (importlib.import_module(f"{__package__}.{name}").__doc__ or "").splitlines()[
                0
            ]
            print(f"{name:24} {summary}")
        return
    names = script_names() if options.names == ["all"] else options.names
    for name in names:
        if name not in script_names():
            parser.error(
                f"there is no script {name!r}; available: {', '.join(script_names())}, all"
            )
        with tempfile.TemporaryDirectory(prefix=f"chaos-{name}-") as directory:
            figures = run_script(name, small=options.small, directory=Path(directory))
        print(json.dumps({"script": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
