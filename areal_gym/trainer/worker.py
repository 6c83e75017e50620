"""A learner in a process of its own, so that training and rollouts do not share an interpreter.

    rollouts, engine            this process: `ProcessLearner`        the worker: a `Learner`
        groups ------------------> step(groups, version) --pipe--------> step
        weights <----------------- weights() <--- one mapped file ------ parameters, in place

Two threads of one interpreter take turns at every small operation: with nothing but threads, a
step's training took two to three times as long beside rollouts as alone, and the whole used barely
more than one core. The weights are in a file that both map, so that nothing is copied for a
publication; the worker works only inside `step`, and whoever reads them does so between steps.

It is started as a program, not forked: threads are running already. It ends when this process does.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import GymError, TrainError
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Decoder
from areal_gym.trainer.sequences import Sequence as TokenSequence
from areal_gym.types import Group, Task

__all__ = ["ProcessLearner"]

_END_S = 10.0
"""How long a worker may take to end by itself."""


class ProcessLearner:
    """A learner that works in another process, with the interface of `Learner`. CPU only.

    Args:
        learner_class: what is registered as the trainer; made in the worker.
        decoder: the policy; its weights move into shared memory, and change with each step.
        config: the trainer's settings.
        arguments: further arguments of `learner_class`, which must be importable by name.

    Raises:
        GymError: what `learner_class` raised.
        TrainError: the worker did not start.
    """

    def __init__(
        self,
        learner_class: Callable[..., Any],
        decoder: Decoder,
        config: TrainerConfig,
        **arguments: Any,
    ) -> None:
        self.decoder = decoder
        with tempfile.TemporaryDirectory(dir=_memory_directory()) as home:
            file = Path(home) / "weights"
            _share(decoder, file)
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import main; main()"],
                    stdin=theirs.fileno(),
                    env=os.environ
                    | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    # Ctrl-C is for this process, which lets the worker finish its step.
                    start_new_session=True,
                )
                self._pipe = Connection(ours.detach())
            try:
                self._ask("begin", learner_class, decoder.config, config, str(file), arguments)
            except BaseException:
                self.close()
                raise

    def step(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """See `Learner.step`.

        Raises:
            TrainError: the worker died, or what `Learner.step` raises.
        """
        metrics: dict[str, float] = self._ask("step", [_slim(g) for g in groups], version)
        return metrics

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """See `Learner.score`."""
        scores: list[list[float]] = self._ask("score", rows)
        return [torch.tensor(score) for score in scores]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and the live tensors; copy them before the next step."""
        for name, tensor in self.decoder.state_dict().items():
            yield name, tensor.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a checkpoint needs."""
        state: dict[str, Any] = self._ask("state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self._ask("load_state_dict", state)

    def close(self) -> None:
        """End the worker. Idempotent."""
        self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str, *arguments: Any) -> Any:
        try:
            self._pipe.send_bytes(pickle.dumps((what, arguments), pickle.HIGHEST_PROTOCOL))
            is_error, answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            code = self._process.poll()
            raise TrainError(
                "the trainer's process has died"
                + ("" if code is None else f" ({_how_it_ended(code)})"),
                hints=[
                    "the same command with --resume goes on from the last checkpoint",
                    "trainer.runs_in=thread keeps the trainer in the main process",
                ],
            ) from error
        if is_error:
            raise answer
        return answer


def main() -> None:
    """The worker: serves one `ProcessLearner`, and ends with it."""
    pipe = Connection(os.dup(sys.stdin.fileno()))
    learner: Any = None
    answer: Any
    while True:
        try:
            what, arguments = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        is_error, answer = False, None
        try:
            if what == "begin":
                learner = _begin(*arguments)
            elif what == "score":
                answer = [score.tolist() for score in learner.score(*arguments)]
            else:
                answer = getattr(learner, what)(*arguments)
        except GymError as error:
            is_error, answer = True, error
        except Exception as error:
            message = f"the trainer failed: {type(error).__name__}: {error}"
            is_error, answer = True, TrainError(message)
        try:
            pipe.send_bytes(pickle.dumps((is_error, answer), pickle.HIGHEST_PROTOCOL))
        except OSError:
            return


def _begin(
    learner_class: Callable[..., Any],
    shape: DecoderConfig,
    config: TrainerConfig,
    file: str,
    arguments: dict[str, Any],
) -> Any:
    torch.set_num_threads(config.num_threads)
    decoder = Decoder(shape)
    _map(decoder, Path(file))
    return learner_class(decoder, config, **arguments)


def _share(decoder: Decoder, file: Path) -> None:
    """Move the weights into `file`, mapped; the values stay as they are."""
    values = {name: tensor.clone() for name, tensor in decoder.named_parameters()}
    file.write_bytes(b"\0" * 4 * sum(tensor.numel() for tensor in values.values()))
    _map(decoder, file)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])


def _map(decoder: Decoder, file: Path) -> None:
    """Let the parameters be `file`: what one process writes, the other one reads."""
    size = sum(parameter.numel() for parameter in decoder.parameters())
    flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
    start = 0
    for parameter in decoder.parameters():
        part = flat[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = part
        start += parameter.numel()


def _slim(group: Group) -> Group:
    """The group without what no learner reads: texts and task rows."""
    task = Task(id=group.task.id, data={}, split=group.task.split)
    return replace(
        group,
        task=task,
        trajectories=tuple(replace(t, task=task, messages=(), metrics={}) for t in group),
    )


def _memory_directory() -> str | None:
    """A file system in memory, where there is one; else the usual place for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}" + (": out of memory?" if code == -signal.SIGKILL else "")
