"""The plans that recipes of real models carry at their heads.

python -m tests._support.recipe_plans        # computes and writes all of them again
"""

import json
import re
import sys
import tempfile
import textwrap
from pathlib import Path

from areal_gym.config import load_config
from areal_gym.plan.plan_lines import summary
from areal_gym.plan.run_plan import plan_run
from tests._support.paths import ROOT
from tests._support.qwen3_shapes import config_json

RECIPES = ROOT / "examples" / "recipes"
REAL = sorted(RECIPES.glob("*/*.yaml"))
_WIDTH = 100


def comments_of(path):
    """The comments at the head of a recipe, as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def gpu_of(path):
    """The kind of GPUs that a recipe's plan is for."""
    return re.search(r"plan: \d+ x ([\w-]+)", comments_of(path))[1]


def planned(path):
    """The plan of a recipe, for a model whose config is in the tree."""
    config = load_config(path)
    name = config.engine.model.removeprefix("Qwen3-")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config_json(name)))
        here = load_config(path, overrides=[f"engine.model={directory}"])
        return plan_run(here, gpu=gpu_of(path))


def write(path):
    """Replace the plan at the head of a recipe."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# plan: "))
    end = start + 1
    while lines[end].startswith("#   "):
        end += 1
    block = []
    for number, line in enumerate(summary(planned(path))):
        prefix = "# " if number == 0 else "#   "
        block += textwrap.wrap(
            line, _WIDTH, initial_indent=prefix, subsequent_indent="#   ", break_on_hyphens=False
        )
    lines[start:end] = block
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for recipe in [Path(word).absolute() for word in sys.argv[1:]] or REAL:
        write(recipe)
        print(recipe.relative_to(ROOT), flush=True)
