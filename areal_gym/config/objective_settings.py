"""What `areal-gym train` can learn besides a reward, and the settings of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from areal_gym.config.settings_model import Settings

OBJECTIVES: Mapping[str, str] = {
    "rl": "the reward of episodes",
    "sft": "say what was said (supervised fine-tuning)",
    "dpo": "say what was preferred rather than what was not",
    "rm": "give the preferred dialogue the higher number (a reward model)",
    "distill": "be as likely as a teacher to say what one says (on-policy distillation)",
}
SUPERVISED = ("sft", "dpo", "rm")
"""Those that learn from fixed data, without episodes."""


class DataConfig(Settings):
    """What objectives sft, dpo and rm learn from: a file, else the environment's demonstrators."""

    file: str | None = None
    """JSON lines: {"messages": [...]}, for dpo and rm with "chosen" and "rejected"."""
    heldout_file: str | None = None
    """What is measured on; by default a tenth of `file`, drawn by chance, which is then not learned
    from."""
    num_examples: int = Field(2048, ge=1)
    """How many demonstrations, or pairs of them, are made from training tasks; eval.num_tasks of
    held-out tasks are measured on."""
    min_reward: float | None = None
    """For sft: demonstrations with a smaller reward are not learned from; null takes all."""
    batch_size: int = Field(32, ge=1)
    """Examples of a step."""


class DpoConfig(Settings):
    """`areal_gym.trainer.objectives.dpo.preference_loss`."""

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss: of Rafailov et al. (2023), or IPO of Azar et al. (2023)."""
    beta: float = Field(0.1, gt=0)
    """How strongly the policy is held to the one that the run began with."""


class TeacherConfig(Settings):
    """Who is imitated with objective "distill": a policy with the same tokenizer."""

    model: str | None = None
    """A checkpoint's directory, or a run's: its newest checkpoint."""
    url: tuple[str, ...] = ()
    """Or SGLang servers that serve it; nothing is published to them."""

    @field_validator("url", mode="before")
    @classmethod
    def _accept_one_url(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


def check_objective(
    objective: str, advantage: str, data: DataConfig, teacher: TeacherConfig, temperature: float
) -> None:
    """Refuse settings that the objective does not go with.

    Raises:
        ValueError: why.
    """
    if objective == "distill":
        if (teacher.model is None) == (not teacher.url):
            raise ValueError(
                "objective = 'distill' needs one teacher: teacher.model=DIR (a checkpoint, or a "
                "run), or teacher.url=http://HOST:PORT (SGLang)"
            )
        if temperature != 1:
            raise ValueError(
                f"rollout.temperature = {temperature:g} with objective = 'distill': teachers give "
                "log-probabilities at temperature 1, and what is sampled must be of the same kind"
            )
    elif teacher != TeacherConfig() or advantage == "distill":
        raise ValueError("a teacher teaches with objective=distill only")
    if data.min_reward is not None and (objective != "sft" or data.file is not None):
        raise ValueError(
            "data.min_reward is about demonstrations for objective=sft; files and pairs have no "
            "rewards"
        )
