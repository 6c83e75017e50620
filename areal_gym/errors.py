"""Every error that areal-gym raises on purpose.

    GymError
    +-- UsageError (ValueError)             the request cannot be served; exit code 2
    |   +-- UnknownIdError (KeyError), ConfigError, DataError, RunExistsError (FileExistsError)
    +-- NothingToDoError                    exit code 5
    +-- PluginError (RuntimeError)          exit code 4
    |   +-- DuplicateIdError
    +-- InfrastructureError (RuntimeError)  the machine is at fault; exit code 3
    |   +-- TrainError
    |   |   +-- LostRankError, NotFiniteError, DivergedError, MasteredError
    |   +-- FailureBudgetError
    +-- EpisodeError (RuntimeError)         one episode failed: data, not a crash; never a reward
        +-- EnvError
        |   +-- EnvUnreachableError (ConnectionError), RewardError, TaskError
        +-- EngineError
        |   +-- EngineUnreachableError (ConnectionError), GrammarError
        +-- SandboxError
        |   +-- SandboxUnreachableError (ConnectionError)
        +-- AgentError, WorkerError, EpisodeTimeoutError (TimeoutError)

    ToolError                               shown to the model as the tool's result; not a failure
    StopTraining                            the run ends before its last step; not a failure

An error says what was asked, what exists and what to type next. The command line prints `hints`
indented under the message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial


class GymError(Exception):
    """The base class of all errors of this package: `except areal_gym.GymError`."""

    exit_code: int = 1

    def __init__(self, message: str, *, hints: Iterable[str | None] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hint for hint in hints if hint)
        """What to do next; None among the hints is left out."""
        for hint in self.hints:  # in scripts and notebooks, tracebacks show them
            self.add_note(hint)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders; keyword-only arguments do not survive the default pickling.
        return partial(type(self), self.message, hints=self.hints), ()


class UsageError(GymError, ValueError):
    """The request cannot be served."""

    exit_code = 2


class UnknownIdError(UsageError, KeyError):
    """No plugin has registered this id."""


class ConfigError(UsageError):
    """A setting is wrong, or two settings conflict."""


class DataError(UsageError):
    """A data file is missing or a row of it is broken."""


class RunExistsError(UsageError, FileExistsError):
    """The run directory already holds a run."""


class NothingToDoError(GymError):
    """The selection is empty: zero tasks, no runs."""

    exit_code = 5


class PluginError(GymError, RuntimeError):
    """A plugin is broken or breaks the rules."""

    exit_code = 4


class DuplicateIdError(PluginError):
    """Two plugins register the same id."""


class InfrastructureError(GymError, RuntimeError):
    """The machine, not the request, is at fault."""

    exit_code = 3


class TrainError(InfrastructureError):
    """The trainer cannot go on."""


class LostRankError(TrainError):
    """One of the trainer's processes died; the newest checkpoint is intact."""


class NotFiniteError(TrainError):
    """Losses, gradients or advantages are not finite; none of them was applied."""


class DivergedError(TrainError):
    """The policy diverges; the run was stopped, and its last good checkpoint is kept."""


class MasteredError(TrainError):
    """The policy solves the tasks, and groups that could teach it something are no longer found."""


class FailureBudgetError(InfrastructureError):
    """So many episodes failed that the run means nothing."""


class EpisodeError(GymError, RuntimeError):
    """One episode failed at one boundary; it is recorded, counted and never trained on."""

    exit_code = 3
    boundary: str = "episode"
    is_outage: bool = False
    """Whether something that the episode needs is gone and may come back. The episode is then
    repeated without counting as a retry (`rollout.outage_patience_s`)."""


class EnvError(EpisodeError):
    """The environment's own code failed."""

    boundary = "env"


class EnvUnreachableError(EnvError, ConnectionError):
    """The server of the environment is gone, or has forgotten the session."""

    is_outage = True


class RewardError(EnvError):
    """A reward, a part of it or a metric of the environment is not finite: the group of the episode
    is not trained on."""

    boundary = "reward"


class TaskError(EnvError):
    """The task's own verifier gave no reward: a task that repeats it is dropped from the run."""

    boundary = "task"


class AgentError(EpisodeError):
    """The agent's own code failed."""

    boundary = "agent"


class EngineError(EpisodeError):
    """The policy could not be sampled."""

    boundary = "engine"


class EngineUnreachableError(EngineError, ConnectionError):
    """No engine answers."""

    is_outage = True


class GrammarError(EngineError):
    """The engine cannot enforce the grammar that the answer should follow."""


class SandboxError(EpisodeError):
    """The sandbox failed; a failing snippet is not an error of the sandbox."""

    boundary = "sandbox"


class SandboxUnreachableError(SandboxError, ConnectionError):
    """The engine that runs the sandbox is gone."""

    is_outage = True


class WorkerError(EpisodeError):
    """The process that ran the episode died."""

    boundary = "worker"
    is_outage = True


class EpisodeTimeoutError(EpisodeError, TimeoutError):
    """The episode exceeded its wall-clock limit."""

    boundary = "timeout"


class ToolError(Exception):
    """A tool raises it to tell the model what went wrong; it becomes the tool's result."""


class StopTraining(Exception):  # not an error: an orderly end
    """A callback raises it to end the run after the current step; its text says why."""


def did_you_mean(asked: str, existing: Iterable[str], *, limit: int = 3) -> str | None:
    """Return `"did you mean 'a' or 'b'?"`, or None when no name is close."""
    close = difflib.get_close_matches(asked, list(existing), n=limit, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else None


def choices(asked: str, available: Iterable[str]) -> list[str]:
    """Return hints for an unknown name: similar names, if any, and all available ones."""
    names = list(available)
    hints = [did_you_mean(asked, names), f"available: {', '.join(names) or 'none'}"]
    return [hint for hint in hints if hint]
