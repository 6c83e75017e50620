"""Convert messages to token ids and back."""

from areal_gym.chat.dialogue import Dialogue, Prompt
from areal_gym.chat.renderer import Renderer
from areal_gym.chat.tokenizer import Tokenizer
from areal_gym.chat.transcript import Transcript, transcribe

__all__ = ["Dialogue", "Prompt", "Renderer", "Tokenizer", "Transcript", "transcribe"]
