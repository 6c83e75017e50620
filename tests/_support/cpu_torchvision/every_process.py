"""Lets `sitecustomize.py` of this folder be imported by a server and by all that it starts."""

import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)


def begin_again():
    """Start this process again unless PYTHONPATH, which Python reads first, has the folder."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, *paths)))
        os.execv(sys.executable, sys.orig_argv)
