"""Messages to tokens and back: what a chat template adds, and what sampled ids mean."""

from areal_gym.rendering.dialogue import Dialogue, Prompt
from areal_gym.rendering.renderer import Renderer
from areal_gym.rendering.tokenizer import Tokenizer
from areal_gym.rendering.transcript import Transcript, transcribe

__all__ = ["Dialogue", "Prompt", "Renderer", "Tokenizer", "Transcript", "transcribe"]
