"""Training objectives besides reward maximisation, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.settings_model import Settings, Urls

OBJECTIVES: Mapping[str, str] = {
    "rl": "maximise the reward of episodes (reinforcement learning)",
    "sft": "imitate dialogues (supervised fine-tuning)",
    "dpo": "prefer the chosen to the rejected dialogue (direct preference optimisation)",
    "kto": "imitate good answers and avoid bad ones, not in pairs (Kahneman-Tversky optimisation)",
    "orpo": "imitate the chosen dialogue and prefer it, without a reference (odds ratios)",
    "rm": "score the chosen dialogue above the rejected one (a reward model)",
    "distill": "match a teacher's probabilities on own samples (on-policy distillation)",
}
SUPERVISED = ("sft", "dpo", "kto", "orpo", "rm")
"""Objectives that learn from fixed data, without episodes."""


class DataConfig(Settings):
    """Data of objectives that learn from fixed data: a file, or else the environment's
    demonstrators."""

    file: str | None = None
    """JSON lines: {"messages": [...]}; for dpo, orpo and rm with "chosen" and "rejected", for kto
    with "completion" and "label"."""
    heldout_file: str | None = None
    """Held-out examples; by default a random tenth of `file`, which is then not trained on."""
    num_examples: int = Field(2048, ge=1)
    """Demonstrations, or pairs of them, made from training tasks; eval.num_tasks more are made
    from held-out tasks for evaluation."""
    min_reward: float | None = None
    """For sft: leave out demonstrations with a lower reward; null takes all."""
    batch_size: int = Field(32, ge=1)
    """Examples per step."""


class DpoConfig(Settings):
    """The preference loss (`areal_gym.trainer.objectives.dpo.preference_loss`)."""

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """The loss of Rafailov et al. (2023), or IPO of Azar et al. (2023)."""
    beta: float = Field(0.1, gt=0)
    """Strength of the constraint to the policy that the run began with."""


class KtoConfig(Settings):
    """The loss of objective kto (`areal_gym.trainer.objectives.kto.kto_loss`)."""

    beta: float = Field(0.1, gt=0)
    """Strength of the constraint to the policy that the run began with."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of good answers; the paper keeps the ratio of both weights, times the number of each
    kind, between 1 and 4/3."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of bad answers."""


class OrpoConfig(Settings):
    """The loss of objective orpo (`areal_gym.trainer.objectives.orpo.Orpo`)."""

    weight: float = Field(0.1, gt=0)
    """Weight of the odds ratio beside the log-probability of the chosen answer."""


class FurtherTeacherConfig(Settings):
    """One more teacher of objective "distill"."""

    model: str | None = None
    """A checkpoint directory, or a run directory: its newest checkpoint."""
    url: Urls = ()
    """Servers that serve the teacher; no weights are published to them."""
    engine: str = "sglang"
    """The kind of the servers at `url`: sglang, vllm, or a plugin's engine that scores prompts."""
    env: str | None = None
    """The environment (of a mix) whose tasks it teaches; null teaches all."""
    weight: float = Field(1.0, gt=0)
    """Its weight in the mixture of the teachers of a task."""


class TeacherConfig(FurtherTeacherConfig):
    """The teacher of objective "distill": a policy with the same tokenizer."""

    is_policy: bool = False
    """The teacher is the policy itself, with the weights that are trained, given the hint
    (on-policy self-distillation)."""
    hint: str | None = None
    """A text that the teacher alone reads, at the end of the first user message; {name} is a field
    of the task's data, as in "The answer is {answer}."."""
    divergence: Literal["sampled", "reverse", "forward"] = "sampled"
    """"sampled": the log-ratio of each sampled token is its advantage; "reverse" and "forward": the
    KL divergence of or from the policy is the loss."""
    top_k: int | None = Field(None, ge=1)
    """With "reverse" or "forward": the KL divergence over this many of the teacher's likeliest
    tokens and all others as one; null takes the whole vocabulary of teacher.model."""
    further: tuple[FurtherTeacherConfig, ...] = ()
    """More teachers. Where several teach a task, the teacher is their mixture, by weight."""

    @property
    def is_in_trainer(self) -> bool:
        """Whether the trainer itself runs the teacher, whose whole distributions it needs."""
        own_rows = self.hint is not None or self.env is not None or bool(self.further)
        return self.divergence != "sampled" and self.model is not None and not own_rows


def check_objective(
    objective: str,
    *,
    algorithm: str,
    advantage: str,
    data: DataConfig,
    teacher: TeacherConfig,
    temperature: float,
) -> None:
    """Raise ValueError if the settings do not fit the objective."""
    if objective == "distill":
        sources = (teacher.model is not None, bool(teacher.url), teacher.is_policy)
        if sum(sources) != 1:
            raise ValueError(
                "objective = 'distill' needs one teacher: teacher.model=DIR (a checkpoint, or a "
                "run), teacher.url=http://HOST:PORT (SGLang), or teacher.is_policy=true with a hint"
            )
        if teacher.is_policy and teacher.hint is None:
            raise ValueError(
                "teacher.is_policy = true without teacher.hint: the policy would be its own "
                "teacher and learn nothing; give a hint such as 'The answer is {answer}.'"
            )
        if teacher.divergence == "sampled" and teacher.top_k is not None:
            raise ValueError("teacher.top_k is for teacher.divergence=reverse or forward")
        if teacher.divergence != "sampled" and not teacher.is_in_trainer and teacher.top_k is None:
            raise ValueError(
                f"teacher.divergence = {teacher.divergence!r} needs the teacher's whole "
                "distributions, which only teacher.model=DIR has, alone, without a hint and for "
                "all tasks; for any other teacher, take its likeliest tokens: teacher.top_k=64"
            )
        if any((further.model is None) == (not further.url) for further in teacher.further):
            raise ValueError("each of teacher.further needs a model or a url")
        if temperature != 1:
            raise ValueError(
                f"rollout.temperature = {temperature:g} with objective = 'distill': teachers give "
                "log-probabilities at temperature 1, and tokens must be sampled at it, too"
            )
        if algorithm != "grpo":
            raise ValueError(
                f"trainer.algorithm = {algorithm!r} with objective = 'distill': distillation has "
                "its own advantage and loss, and the preset would change no more than "
                "rollout.filters; leave it out, and set what you want of it, such as trainer.loss"
            )
        _check_advantage(advantage, teacher.divergence)
    elif teacher != TeacherConfig() or advantage == "distill":
        raise ValueError("a teacher is for objective=distill only")
    if data.min_reward is not None and (objective != "sft" or data.file is not None):
        raise ValueError(
            "data.min_reward is about demonstrations for objective=sft; files and pairs have no "
            "rewards"
        )


def _check_advantage(advantage: str, divergence: str) -> None:
    """Raise ValueError for an advantage with which a run of distillation ignores its teacher.

    Estimators of plugins are left to `areal_gym.runs.early_checks`, which sees their inputs.
    """
    if divergence != "sampled":
        if advantage != "reinforce":
            raise ValueError(
                f"trainer.advantage = {advantage!r} with teacher.divergence = {divergence!r}: the "
                "divergence is itself the loss, which needs no advantage; leave it out, or write "
                "trainer.advantage=reinforce (for the advantage 'distill', "
                "teacher.divergence=sampled)"
            )
    elif advantage in {preset.advantage for preset in PRESETS.values()}:
        raise ValueError(ignores_teacher(advantage))


def ignores_teacher(advantage: str) -> str:
    """Return the message for an advantage that learns from rewards beside a teacher."""
    return (
        f"trainer.advantage = {advantage!r} with objective = 'distill' would learn from rewards "
        "and ignore the teacher; leave it out, or write trainer.advantage=distill (to learn from "
        "rewards: objective=rl, without a teacher)"
    )
