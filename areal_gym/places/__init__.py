"""Places: containers of one episode each, in which commands run and files are kept."""

from areal_gym.places.base import (
    CommandResult,
    FileChanges,
    Place,
    PlaceImage,
    PlaceLimits,
    Places,
    ProgramPlace,
)

__all__ = [
    "CommandResult",
    "FileChanges",
    "Place",
    "PlaceImage",
    "PlaceLimits",
    "Places",
    "ProgramPlace",
]
