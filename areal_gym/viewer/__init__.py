"""A local web page over run directories: curves, trajectories, tokens; read-only."""

from __future__ import annotations

from areal_gym.viewer.catalog import Catalog
from areal_gym.viewer.export import export

__all__ = ["Catalog", "export"]
