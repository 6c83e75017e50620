"""What an episode asks of the policy, recorded token by token."""

from areal_gym.recording.conversations import Conversations
from areal_gym.recording.recorder import (
    ContextFullError,
    InFlight,
    Recorder,
    TurnDraft,
    derive_seed,
)

__all__ = [
    "ContextFullError",
    "Conversations",
    "InFlight",
    "Recorder",
    "TurnDraft",
    "derive_seed",
]
