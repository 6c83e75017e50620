"""A trainer in child processes, one for each rank.

    rollouts, engine            this process: `ProcessTrainer`        a worker for each rank
        groups ------------------> step(groups, version) --pipes-------> Trainer.step
        weights <----------------- weights() <--- part by part --------- Trainer.weights

In threads of one interpreter, a training step beside rollouts took two to three times as long as
alone. Several workers are ranks of FSDP2: each reads its part of the weights from the checkpoint,
and none of the weights are in this process. Workers run only inside a call. They are started as
programs, not forked, because threads are running already, and end when this process does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import LostRankError, TrainError
from areal_gym.models.backend import AUTO, ModelLoader
from areal_gym.trainer.out_of_memory import DEATH_HINTS
from areal_gym.trainer.parallel.messages import Message
from areal_gym.trainer.parallel.remote_trainer import (
    RemoteTrainer,
    Serving,
    TrainerRecipe,
    readable,
)
from areal_gym.utils.child_python import import_path, python_argv
from areal_gym.utils.statistics import rss_mb

_END_S = 10.0
"""Seconds in which a worker must end by itself."""


class ProcessTrainer(RemoteTrainer):
    """A trainer in `config.num_ranks` child processes; worker i uses accelerator i, if any.

    Args:
        trainer_class: called in each worker; it must be importable by name.
        policy: the checkpoint with the initial weights.
        config: the trainer's settings.
        loader: reads the checkpoint.
        device: "cpu" or an accelerator.
        arguments: further arguments of `trainer_class`.

    Raises:
        GymError: `trainer_class` raised it.
        LostRankError: a worker did not start.
    """

    def __init__(
        self,
        trainer_class: Callable[..., Any],
        policy: Path,
        config: TrainerConfig,
        *,
        loader: ModelLoader = AUTO,
        device: str = "cpu",
        **arguments: Any,
    ) -> None:
        super().__init__(policy, loader, trainer_class, config)
        self._workers: list[_Worker] = []
        # The directory where the ranks find each other, as long as they live.
        self._home = tempfile.TemporaryDirectory()
        recipe = TrainerRecipe(
            trainer_class=trainer_class,
            policy=policy.absolute(),
            loader=loader,
            config=config,
            device=device,
            meeting=f"file://{self._home.name}/ranks",
            arguments=arguments,
        )
        try:
            self._workers += [_Worker(rank) for rank in range(config.num_ranks)]
            self._ask("begin", recipe)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end()
        self._saving.shutdown()  # a thread that still waits for a checkpoint reads the pipe's end
        for worker in self._workers:
            worker.saved.close()
        self._home.cleanup()

    def _held_mb(self) -> float:
        return sum(rss_mb(worker.process.pid) or 0.0 for worker in self._workers)

    def _ask(self, method: str, *arguments: Any) -> Any:
        message = Message.of((method, arguments))
        return self._send([message] * len(self._workers))

    def _ask_each(self, method: str, arguments: Sequence[Any]) -> None:
        self._send(Message.of((method, (argument,))) for argument in arguments)

    def _send(self, messages: Iterable[Message]) -> Any:
        try:
            for worker, message in zip(self._workers, messages, strict=True):
                message.send(worker.pipe)
            return self._answer()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _answer(self) -> Any:
        answers: dict[int, Any] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        error: BaseException | None = None
        while waiting:
            # Usually all ranks raise the same error; if not, the others would wait in vain.
            ready = wait(list(waiting), timeout=None if error is None else _END_S)
            if not ready:
                self._kill()
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                is_error, answer = Message.receive(pipe).value()
                answers[waiting.pop(pipe)] = answer
                if is_error:
                    error = error or answer
        if error is not None:
            raise error
        return answers[0]

    def _wait_for_checkpoint(self) -> None:
        first = self._workers[0].saved
        try:
            # Only the first worker reports; from the others, only the pipe's end can be read.
            if wait([worker.saved for worker in self._workers]) != [first]:
                raise EOFError
            error: BaseException | None = pickle.loads(first.recv_bytes())
        except (EOFError, OSError) as lost:
            raise self._death() from lost
        if isinstance(error, TrainError) and self._find_dead() is not None:
            raise self._death() from error  # the first rank reports that it has lost another
        if error is not None:
            raise error

    def _death(self) -> LostRankError:
        dead = self._find_dead()
        self._kill()  # the others would wait for the dead one
        who = "the trainer's process has died"
        if dead is not None and len(self._workers) > 1:
            where = f"{self._workers[dead].process.pid} on {socket.gethostname()}"
            who = f"rank {dead} of the trainer has died: process {where}"
        code = None if dead is None else self._workers[dead].process.returncode
        return LostRankError(
            who + (f" ({_describe_exit(code)})" if code else ""), hints=DEATH_HINTS
        )

    def _find_dead(self) -> int | None:
        """Return the rank whose death most likely caused that of the others."""
        # A process ends a moment after its pipe has closed.
        deadline_s = time.monotonic() + 2.0
        while True:
            codes = {rank: worker.process.poll() for rank, worker in enumerate(self._workers)}
            dead = {rank: code for rank, code in codes.items() if code}
            if dead:
                return min(dead, key=lambda rank: _rank_as_cause(dead[rank]))
            if time.monotonic() > deadline_s:
                return None
            time.sleep(0.01)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()


class _Worker:
    """A worker process with two pipes: for calls, and for news of checkpoints, which are written
    during other calls.
    """

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        ours_saved, theirs_saved = socket.socketpair()
        with ours, theirs, ours_saved, theirs_saved:
            rarely = "from areal_gym.utils.garbage import collect_rarely; collect_rarely()"
            code = f"{rarely}; from {__name__} import main; main()"
            pipes = (theirs.fileno(), theirs_saved.fileno())
            self.process = subprocess.Popen(
                python_argv("-c", code, *map(str, (rank, *pipes))),
                stdin=subprocess.DEVNULL,
                pass_fds=pipes,
                env=os.environ | import_path(),
                # Ctrl-C is for this process only, which lets the workers finish their step.
                start_new_session=True,
            )
            self.pipe = Connection(ours.detach())
            self.saved = Connection(ours_saved.detach())

    def end(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Serve one `ProcessTrainer` in a worker, and end with it."""
    rank, pipe_number, saved_number = map(int, sys.argv[1:])
    pipe, saved = Connection(pipe_number), Connection(saved_number)

    def tell(error: BaseException | None) -> None:
        with contextlib.suppress(OSError):
            saved.send_bytes(pickle.dumps(error, pickle.HIGHEST_PROTOCOL))

    serving: Serving | None = None
    answer: Any
    with contextlib.suppress(EOFError, OSError):  # the other end of the pipe is gone
        while True:
            message = Message.receive(pipe)
            is_error, answer = False, None
            try:
                method, arguments = message.value()
                if serving is None:
                    (recipe,) = arguments
                    serving = Serving(recipe, rank, tell)
                else:
                    answer = serving.call(method, *arguments)
            except Exception as error:
                is_error, answer = True, readable(error)
            Message.of((is_error, answer)).send(pipe)
    if torch.distributed.is_initialized():
        os._exit(0)  # other ranks may have died, and a regular end would wait for them


def _rank_as_cause(code: int) -> int:
    """Return a rank among causes, 0 for the likeliest, of a process that ended with `code`.

    A rank that loses another one raises an error, exits, or is aborted by torch's watchdogs.
    """
    if code >= 0:
        return 1
    return 2 if code == -signal.SIGABRT else 0


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}" + (": out of memory?" if code == -signal.SIGKILL else "")
