"""Rejects LoRA adapters that SGLang refuses without a reason, or that crash it."""

from __future__ import annotations

from pathlib import Path

from areal_gym.errors import EngineError
from areal_gym.utils.files import read_json

_NEEDED = {
    "q_proj": ["v_proj"],
    "k_proj": ["q_proj", "v_proj"],
    "v_proj": ["q_proj"],
    "up_proj": ["gate_proj"],
}
"""The other matrices that an adapter of each matrix must have. SGLang computes them together, and
otherwise crashes, or refuses the adapter without naming a reason."""


def require_whole_groups(adapter: Path) -> None:
    """Check that an adapter has all of the matrices that SGLang computes together.

    Raises:
        EngineError: some are missing; the message names them.
    """
    file = adapter / "adapter_config.json"
    if not file.is_file():  # the server refuses it with its own message
        return
    targets = set(read_json(file)["target_modules"])
    for name in sorted(targets & _NEEDED.keys()):
        missing = [other for other in _NEEDED[name] if other not in targets]
        if missing:
            raise EngineError(
                f"SGLang takes no LoRA adapter of {name} without {' and '.join(missing)}; this one "
                f"has {', '.join(sorted(targets))}",
                hints=[
                    f"trainer.lora.targets=[{','.join(sorted({*targets, *missing}))}]",
                    "trainer.lora.targets=all",
                    "engine.id=vllm takes every adapter",
                ],
            )
