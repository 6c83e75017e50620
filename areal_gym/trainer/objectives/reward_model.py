"""A reward model, which gives the better of two dialogues the higher number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from areal_gym.chat import Renderer
from areal_gym.chat.template import ToolSchemas
from areal_gym.chat.transcript import closing_ids, transcribe
from areal_gym.models.backend import Backend, ModelLoader
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import DialogueScorer, PolicyModel
from areal_gym.trainer.batch.examples import Example, TokenRow, placed_micro_batches
from areal_gym.trainer.objectives.dpo import judged_pairs
from areal_gym.trainer.objectives.supervised import Judgement, Objective
from areal_gym.types import Message

_BUDGET = 8192
"""Tokens that are scored at once."""


class BradleyTerry(Objective):
    """Computes -log sigmoid(r(chosen) - r(rejected)); an example is the chosen and rejected row.

    Bradley & Terry 1952; as a reward model's loss: Ouyang et al. 2022 (InstructGPT), eq. 1, with
    pairs only. A row's reward is read at its last token.

    Metrics: `accuracy` (`is_preferred`), `margin`, and the rewards `chosen` and `rejected`.
    """

    heads = ("score",)

    def num_units(self, example: Example) -> int:
        """Return 1: a pair has one loss."""
        return 1

    def __call__(
        self, decoder: PolicyModel, batch: PackedBatch, examples: Sequence[Example]
    ) -> Judgement:
        """Compute the loss and metrics of each pair.

        Raises:
            TypeError: the decoder is not a `DialogueScorer`.
        """
        rewards_P2 = _rewards(decoder, batch).view(len(examples), 2)
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        return judged_pairs(-F.logsigmoid(margin_P), margin_P, rewards_P2)


class Grader:
    """Scores dialogues with a reward model.

    Scores of different tasks need not be comparable: the model has only learned which of two
    answers to the same prompt is better.

    Example::

        grade = reward_model.load("runs/rm/checkpoints/step-000060")
        reward = grade([*env.messages, {"role": "assistant", "content": answer}])
    """

    def __init__(self, model: DialogueScorer, renderer: Renderer) -> None:
        self._model = model.requires_grad_(False)
        self._renderer = renderer
        self._device = next(model.parameters()).device

    def __call__(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> float:
        """Return the reward of one dialogue, which ends with the assistant's message."""
        (reward,) = self.grade([messages], tools)
        return reward

    @torch.no_grad()
    def grade(self, dialogues: Sequence[Sequence[Message]], tools: ToolSchemas = ()) -> list[float]:
        """Return the rewards of several dialogues, in order.

        Raises:
            DataError: the assistant says nothing in a dialogue.
        """
        tail = closing_ids(self._renderer)
        examples: list[Example] = []
        for messages in dialogues:
            ids = transcribe(self._renderer, messages, tools)[-1].token_ids + tail
            examples.append((TokenRow(token_ids=ids, mask=(False,) * len(ids)),))
        by_index: dict[int, float] = {}
        for batch, indexes in placed_micro_batches(examples, _BUDGET, self._device):
            by_index.update(zip(indexes, _rewards(self._model, batch).tolist(), strict=True))
        return [by_index[i] for i in range(len(examples))]


def load(
    directory: Path | str, *, device: torch.device | str = "cpu", backend: Backend = "auto"
) -> Grader:
    """Load a reward model from a checkpoint directory, to be run by `backend` (`ModelLoader`).

    Raises:
        ConfigError: the directory has no checkpoint, or not one of a reward model.
    """
    model = ModelLoader(backend=backend, is_reward_model=True).load(directory, device=device)
    assert isinstance(model, DialogueScorer)
    return Grader(model, Renderer.from_checkpoint(Path(directory)))


def _rewards(decoder: PolicyModel, batch: PackedBatch) -> torch.Tensor:
    """Return the rewards at the last token of each row, [B]."""
    if not isinstance(decoder, DialogueScorer):
        raise TypeError(f"a reward model is needed, not a {type(decoder).__name__}")
    device = batch.token_ids_N.device
    last_B = torch.tensor([int(index[-1]) for index in batch.row_index], device=device)
    return decoder.context.whole(decoder.rewards(decoder(batch, last_B)), len(last_B))
