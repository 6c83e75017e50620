"""The composition root: settings to objects, a run from its first line to its last.

The only package that knows all parts. `areal-gym train`, `eval` and `replay` are thin around
`train`, `evaluate`, `replay` and `replay_refused`; a script may call them as well.
"""

from areal_gym.run.callbacks import Callback
from areal_gym.run.display import Display, SilentDisplay
from areal_gym.run.evaluation import evaluate
from areal_gym.run.garbage import relax_garbage_collection
from areal_gym.run.online import serve
from areal_gym.run.refused import replay_refused
from areal_gym.run.replay import replay
from areal_gym.run.training import train

__all__ = [
    "Callback",
    "Display",
    "SilentDisplay",
    "evaluate",
    "relax_garbage_collection",
    "replay",
    "replay_refused",
    "serve",
    "train",
]
