"""A trainer in processes of its own: one, or several ranks.

    rollouts, engine            this process: `ProcessTrainer`        a worker for each rank
        groups ------------------> step(groups, version) --pipes-------> Trainer.step
        weights <----------------- weights() <--- one mapped file ------ whole weights

In threads of one interpreter, a step's training took two to three times as long beside rollouts as
alone. One worker's parameters are the mapped file, so that nothing is copied for a publication.
Several workers are the ranks of FSDP2, each with a part of the weights; the first writes the whole
ones to the file after each step. Workers work only inside a call, and the weights are read between
calls. They are started as programs, not forked, because threads are running already, and end when
this process does.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import TrainError
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.out_of_memory import DEATH_HINTS
from areal_gym.trainer.parallel.remote_trainer import (
    RemoteTrainer,
    Serving,
    TrainerRecipe,
    readable,
)
from areal_gym.utils.statistics import rss_mb

_END_S = 10.0
"""How long a worker may take to end by itself."""


class ProcessTrainer(RemoteTrainer):
    """A trainer in `config.num_ranks` child processes; with `device="cuda"`, worker i takes GPU i.

    Each worker calls `trainer_class`, importable by name, with further `arguments`. The weights of
    `decoder`, on the CPU, move into shared memory, and change with each step.

    Raises:
        GymError: what `trainer_class` raised.
        TrainError: a worker did not start.
    """

    def __init__(
        self,
        trainer_class: Callable[..., Any],
        decoder: Decoder,
        config: TrainerConfig,
        *,
        device: str = "cpu",
        **arguments: Any,
    ) -> None:
        super().__init__(decoder)
        self._workers: list[_Worker] = []
        # Where the ranks find each other, as long as they live.
        num_bytes = 4 * sum(parameter.numel() for parameter in decoder.parameters())
        self._home = tempfile.TemporaryDirectory(dir=memory_directory(num_bytes))
        file = Path(self._home.name) / "weights"
        recipe = TrainerRecipe(
            trainer_class=trainer_class,
            decoder_class=type(decoder),
            decoder_config=decoder.config,
            config=config,
            device=device,
            meeting=f"file://{self._home.name}/ranks",
            arguments=arguments,
        )
        try:
            _share(decoder, file)
            self._workers += [_Worker(rank) for rank in range(config.num_ranks)]
            self._ask("begin", recipe, file)
            file.unlink()  # mapped by all of them
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
        message = pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL)
        try:
            for worker in self._workers:
                worker.pipe.send_bytes(message)
            return self._answer()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _answer(self) -> Any:
        answers: dict[int, Any] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        error: BaseException | None = None
        while waiting:
            # What one rank raises, all raise, as a rule; if not, the others wait for it in vain.
            ready = wait(list(waiting), timeout=None if error is None else _END_S)
            if not ready:
                self._kill()
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                is_error, answer = pickle.loads(pipe.recv_bytes())
                answers[waiting.pop(pipe)] = answer
                if is_error:
                    error = error or answer
        if error is not None:
            raise error
        return answers[0]

    def _wait_for_checkpoint(self) -> None:
        try:
            error: BaseException | None = pickle.loads(self._workers[0].saved.recv_bytes())
        except (EOFError, OSError) as lost:
            raise self._death() from lost
        if error is not None:
            raise error

    def _death(self) -> TrainError:
        code = self._exit_code()
        self._kill()  # the others wait for the dead one
        return TrainError(
            "the trainer's process has died" + (f" ({_describe_exit(code)})" if code else ""),
            hints=DEATH_HINTS,
        )

    def _exit_code(self) -> int | None:
        # A process is gone a moment after its pipe has closed.
        deadline_s = time.monotonic() + 2.0
        while True:
            codes = [code for worker in self._workers if (code := worker.process.poll())]
            if codes or time.monotonic() > deadline_s:
                return codes[0] if codes else None
            time.sleep(0.01)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()


class _Worker:
    """A process and two pipes to it: for calls, and for news of checkpoints, which are written
    while it works on another call.
    """

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        ours_saved, theirs_saved = socket.socketpair()
        with ours, theirs, ours_saved, theirs_saved:
            code = f"from {__name__} import main; main()"
            pipes = (theirs.fileno(), theirs_saved.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, (rank, *pipes))],
                stdin=subprocess.DEVNULL,
                pass_fds=pipes,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                # Ctrl-C is for this process, which lets the workers finish their step.
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
            message = pipe.recv_bytes()
            is_error, answer = False, None
            try:
                method, arguments = pickle.loads(message)
                if serving is None:
                    recipe, file = arguments
                    serving = Serving(recipe, rank, partial(_map, file), tell)
                else:
                    answer = serving.call(method, *arguments)
            except Exception as error:
                is_error, answer = True, readable(error)
            pipe.send_bytes(pickle.dumps((is_error, answer), pickle.HIGHEST_PROTOCOL))
    if torch.distributed.is_initialized():
        os._exit(0)  # the others may have died: no farewell that could wait for them


def _share(decoder: Decoder, file: Path) -> None:
    """Move the weights into `file`, mapped; the values stay as they are."""
    values = {name: tensor.clone() for name, tensor in decoder.named_parameters()}
    with file.open("wb") as stream:
        # All of it is set aside now: a page that is not there later would be a bus error.
        os.posix_fallocate(stream.fileno(), 0, 4 * sum(t.numel() for t in values.values()))
    _map(file, decoder)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])


def _map(file: Path, decoder: Decoder) -> None:
    """Let the parameters be `file`: what one process writes, the other one reads."""
    parameters = list(decoder.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.from_file(str(file), shared=True, size=sum(sizes), dtype=torch.float32)
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.data = part.view(parameter.shape)


def memory_directory(num_bytes: int, place: Path = Path("/dev/shm")) -> str | None:
    """Return a file system in memory, where there is one; None is the usual temporary directory.

    Raises:
        TrainError: it is there, and has no room for `num_bytes`.
    """
    if not os.access(place, os.W_OK):
        return None
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        size = f"{max(1, math.ceil(2 * num_bytes / 1e9))}g"
        raise TrainError(
            f"{place} has {free / 1e6:.0f} MB left, but trainer and engine share weights of "
            f"{num_bytes / 1e6:.0f} MB there",
            hints=[
                f"in a container: docker run --shm-size={size}",
                f"or: mount -o remount,size={size} {place}",
                "or train in the same process: trainer.runs_in=thread",
            ],
        )
    return str(place)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}" + (": out of memory?" if code == -signal.SIGKILL else "")
