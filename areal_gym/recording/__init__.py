"""Records episodes token by token."""

from areal_gym.recording.conversations import Conversations
from areal_gym.recording.record import EpisodeRecord, TurnDraft, stop_reason_of
from areal_gym.recording.recorder import ContextFullError, InFlight, Recorder, derive_seed

__all__ = [
    "ContextFullError",
    "Conversations",
    "EpisodeRecord",
    "InFlight",
    "Recorder",
    "TurnDraft",
    "derive_seed",
    "stop_reason_of",
]
