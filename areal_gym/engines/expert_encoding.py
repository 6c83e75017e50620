"""Encodes the experts of tokens as SGLang's servers do: base64 of int32, [T, L, K]."""

from __future__ import annotations

from base64 import b64decode, b64encode

from areal_gym.errors import EngineError
from areal_gym.types import RoutedExperts


def encode_experts(experts: RoutedExperts) -> str:
    """Return experts in SGLang's encoding."""
    import numpy as np

    return b64encode(np.frombuffer(experts.data, "<i2").astype("<i4").tobytes()).decode("ascii")


def decode_experts(text: str, num_tokens: int, num_layers: int) -> RoutedExperts:
    """Decode SGLang's encoding, which does not contain the shape.

    Raises:
        EngineError: the number of experts does not fit the tokens and layers.
    """
    import numpy as np

    values = np.frombuffer(b64decode(text), "<i4")
    top_k, rest = divmod(len(values), num_tokens * num_layers)
    if rest or not top_k:
        raise EngineError(
            f"/generate returned {len(values)} experts, which is not a whole number for each of "
            f"{num_tokens} tokens in each of {num_layers} layers"
        )
    return RoutedExperts(values.astype("<i2").tobytes(), num_layers, top_k)
