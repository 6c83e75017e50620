"""A trainer in processes of its own: one, or several ranks.

    rollouts, engine            this process: `ProcessTrainer`        a worker for each rank
        groups ------------------> step(groups, version) --pipes-------> Trainer.step
        weights <----------------- weights() <--- one mapped file ------ whole weights

    fixed data                  `ProcessSupervised`: step(examples) ---> Supervised.step

One worker keeps training and rollouts from sharing an interpreter: with nothing but threads, which
take turns at every small operation, a step's training took two to three times as long beside
rollouts as alone. Its parameters are the mapped file, so that nothing is copied for a publication.
Several workers are the ranks of FSDP2, each with a part of the weights; the first writes the whole
ones to the file after each step. Workers work only inside a call, and whoever reads the weights
does so between calls.

They are started as programs, not forked: threads are running already. They end when this process
does.
"""

from __future__ import annotations

import contextlib
import io
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import GymError, TrainError
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.batch.examples import Example
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.out_of_memory import MEMORY_HINTS, out_of_memory
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.types import Group, Task
from areal_gym.utils.statistics import rss_mb

_END_S = 10.0
"""How long a worker may take to end by itself."""


class RemoteTrainer:
    """A trainer that works in other processes: what all trainers have in common.

    Args:
        trainer_class: what is registered as the trainer; made in each worker.
        decoder: the policy, on the CPU; its weights move into shared memory, and change with each
            step.
        config: the trainer's settings; `num_ranks` says how many workers there are.
        device: "cpu", or "cuda": worker i takes GPU i.
        arguments: further arguments of `trainer_class`, which must be importable by name.

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
        self.decoder = decoder
        self._workers: list[_Worker] = []
        self._saving = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-saved")
        # Where the ranks find each other, as long as they live.
        needed = 4 * sum(parameter.numel() for parameter in decoder.parameters())
        self._home = tempfile.TemporaryDirectory(dir=memory_directory(needed))
        file = Path(self._home.name) / "weights"
        try:
            _share(decoder, file)
            self._workers += [_Worker() for _ in range(config.num_ranks)]
            shape = (type(decoder), decoder.config)
            self._ask("begin", trainer_class, shape, config, device, self._home.name, arguments)
            file.unlink()  # mapped by all of them
        except BaseException:
            self.close()
            raise

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and the live tensors; copy them before the next step."""
        for name, tensor in self.decoder.state_dict().items():
            yield name, tensor.detach()

    def save(self, directory: Path) -> Future[None]:
        """See `Trainer.save`. The workers can take steps while this is written."""
        self._ask("save", directory)
        return self._saving.submit(self._saved)

    def checkpoint_bytes(self) -> int:
        """See `Trainer.checkpoint_bytes`."""
        needed: int = self._ask("checkpoint_bytes")
        return needed

    def load(self, directory: Path) -> None:
        """See `Trainer.load`."""
        self._ask("load", directory)

    def close(self) -> None:
        """End the workers. Idempotent."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end()
        self._saving.shutdown()  # who reads of a checkpoint still, reads of the end
        for worker in self._workers:
            worker.saved.close()
        self._home.cleanup()

    def _held_mb(self) -> float:
        held_mb = [rss_mb(worker.process.pid) for worker in self._workers]
        return sum(filter(None, held_mb))

    def _ask(self, what: str, *arguments: Any) -> Any:
        """The first worker's answer, once all have answered."""
        message = pickle.dumps((what, arguments), pickle.HIGHEST_PROTOCOL)
        try:
            for rank, worker in enumerate(self._workers):
                rank_first = pickle.dumps(rank) if what == "begin" else b""
                worker.pipe.send_bytes(rank_first + message)
            return self._answer()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _saved(self) -> None:
        """Wait until the first worker tells that all of them have written, or what is wrong."""
        try:
            error: BaseException | None = pickle.loads(self._workers[0].saved.recv_bytes())
        except (EOFError, OSError) as lost:
            raise self._death() from lost
        if error is not None:
            raise error

    def _death(self) -> TrainError:
        codes = self._exit_codes()
        self._kill()  # the others wait for the dead one
        return TrainError(
            "the trainer's process has died" + (f" ({_how_it_ended(codes[0])})" if codes else ""),
            hints=[
                "the same command with --resume goes on from the last checkpoint",
                *MEMORY_HINTS,
            ],
        )

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

    def _exit_codes(self) -> list[int]:
        """Of the workers that have died; its pipe closes a moment before a process is gone."""
        deadline_s = time.monotonic() + 2.0
        while True:
            codes = [code for worker in self._workers if (code := worker.process.poll())]
            if codes or time.monotonic() > deadline_s:
                return codes
            time.sleep(0.01)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()


class ProcessTrainer(RemoteTrainer):
    """With the interface of `Trainer`."""

    def step(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """See `Trainer.step`.

        Raises:
            TrainError: a worker died, or what `Trainer.step` raises.
        """
        metrics: dict[str, float] = self._ask("step", [_slim(g) for g in groups], version)
        metrics["memory/trainer_rss_mb"] = self._held_mb()
        return metrics

    def recompute_proximal(self) -> None:
        """See `Trainer.recompute_proximal`."""
        self._ask("recompute_proximal")

    def trained_tokens(self) -> list[dict[str, Any]]:
        """See `Trainer.trained_tokens`."""
        rows: list[dict[str, Any]] = self._ask("trained_tokens")
        return rows

    def adapter(self) -> dict[str, Tensor]:
        """See `Trainer.adapter`."""
        weights: dict[str, list[Any]] = self._ask("adapter")
        return {name: torch.tensor(values) for name, values in weights.items()}

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """See `Trainer.score`."""
        scores: list[list[float]] = self._ask("score", rows)
        return [torch.tensor(score) for score in scores]


class ProcessSupervised(RemoteTrainer):
    """With the interface of `Supervised`."""

    def step(self, batch: Sequence[Example], version: int = 0) -> dict[str, float]:
        """See `Supervised.step`.

        Raises:
            TrainError: a worker died, or what `Supervised.step` raises.
        """
        metrics: dict[str, float] = self._ask("step", batch, version)
        metrics["memory/trainer_rss_mb"] = self._held_mb()
        return metrics

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """See `Supervised.evaluate`."""
        metrics: dict[str, float] = self._ask("evaluate", examples)
        return metrics


class _Worker:
    """A process and the pipes to it: for questions, and for telling that a checkpoint is written,
    which happens while it works on another question.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours_saved, theirs_saved = socket.socketpair()
        with ours, theirs, ours_saved, theirs_saved:
            code = f"from {__name__} import main; main()"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs_saved.fileno())],
                stdin=theirs.fileno(),
                pass_fds=[theirs_saved.fileno()],
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


# ---- in the worker ---------------------------------------------------------------------------


def main() -> None:
    """Serve one `RemoteTrainer`, and end with it."""
    pipe, saved = Connection(os.dup(sys.stdin.fileno())), Connection(int(sys.argv[1]))
    worker: Serving | None = None

    def tell(error: BaseException | None) -> None:
        with contextlib.suppress(OSError):
            saved.send_bytes(pickle.dumps(error, pickle.HIGHEST_PROTOCOL))

    answer: Any
    while True:
        try:
            message = io.BytesIO(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        is_error, answer = False, None
        try:
            if worker is None:
                rank = pickle.load(message)
                _, (trainer_class, shape, config, device, home, further) = pickle.load(message)
                torch.set_num_threads(config.num_threads)
                kind, decoder_config = shape
                whole = kind(decoder_config)
                _map(whole, Path(home) / "weights")
                meeting = f"file://{home}/ranks"
                worker = Serving(rank, tell, trainer_class, whole, config, device, meeting, further)
            else:
                what, arguments = pickle.load(message)
                answer = worker.do(what, *arguments)
        except Exception as error:
            is_error, answer = True, readable(error)
        try:
            pipe.send_bytes(pickle.dumps((is_error, answer), pickle.HIGHEST_PROTOCOL))
        except OSError:
            break
    if torch.distributed.is_initialized():
        os._exit(0)  # the others may have died: no farewell that could wait for them


class Serving:
    """A trainer that is one of the ranks.

    Args:
        rank: which one.
        tell: called in a thread when a checkpoint is on the disk (None), or could not be written;
            by the first rank only.
        trainer_class: makes it.
        whole: the whole weights, on the CPU; those of the first rank are kept up to date.
        config: the trainer's settings.
        device: "cpu" or "cuda"; a process that sees several GPUs takes the one of its rank.
        meeting: URL by which the ranks find each other (`torch.distributed`'s `init_method`).
        arguments: further ones of `trainer_class`.
    """

    def __init__(
        self,
        rank: int,
        tell: Callable[[BaseException | None], None],
        trainer_class: Callable[..., Any],
        whole: Decoder,
        config: TrainerConfig,
        device: str,
        meeting: str,
        arguments: dict[str, Any],
    ) -> None:
        self._whole = decoder = whole
        if config.num_ranks > 1:
            if device == "cuda":
                torch.cuda.set_device(rank % torch.cuda.device_count())
            backend = "nccl" if device == "cuda" else "gloo"
            if device == "cuda" and config.cpu_offload:
                backend = "cpu:gloo,cuda:nccl"  # the gradients' norm is summed where they are
            torch.distributed.init_process_group(
                backend,
                init_method=meeting,
                rank=rank,
                world_size=config.num_ranks,
            )
            arguments["ranks"] = Ranks(rank, config.num_ranks)
        if config.num_ranks > 1 or device == "cuda" or config.lora is not None:
            decoder = type(whole)(whole.config, device=device)
            decoder.load_state_dict(whole.state_dict())
        self._is_writer = rank == 0
        self._tell_of_checkpoint = tell
        self._trainer = trainer_class(decoder, config, **arguments)

    def do(self, what: str, *arguments: Any) -> Any:
        """Call the trainer's method; after a step, the whole weights are new."""
        if what == "score":
            return [score.tolist() for score in self._trainer.score(*arguments)]
        answer = getattr(self._trainer, what)(*arguments)
        if what == "adapter":
            return {name: tensor.tolist() for name, tensor in answer.items()}
        if what == "save":
            if self._is_writer:
                answer.add_done_callback(self._tell)
            return None
        if what in ("step", "load") and self._trainer.decoder is not self._whole:
            shared = self._whole.state_dict()
            for name, tensor in self._trainer.weights():
                if self._is_writer:
                    shared[name].copy_(tensor)
        return answer

    def _tell(self, written: Future[None]) -> None:
        error = written.exception()
        # A full disk is the disk's matter, not the trainer's: it goes as it is.
        told = error if error is None or isinstance(error, OSError) else readable(error)
        self._tell_of_checkpoint(told)


def readable(error: BaseException) -> GymError:
    """What a trainer raised, for whoever asked it."""
    if isinstance(error, GymError):
        return error
    told = out_of_memory(error)
    return told or TrainError(f"the trainer failed: {type(error).__name__}: {error}")


def _share(decoder: Decoder, file: Path) -> None:
    """Move the weights into `file`, mapped; the values stay as they are."""
    values = {name: tensor.clone() for name, tensor in decoder.named_parameters()}
    with file.open("wb") as stream:
        # All of it is set aside now: a page that is not there later would be a bus error.
        os.posix_fallocate(stream.fileno(), 0, 4 * sum(t.numel() for t in values.values()))
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
    """The group without what no trainer reads: texts and task rows."""
    task = Task(id=group.task.id, data={}, split=group.task.split)
    return replace(
        group,
        task=task,
        trajectories=tuple(replace(t, task=task, messages=(), metrics={}) for t in group),
    )


def memory_directory(needed: int, place: Path = Path("/dev/shm")) -> str | None:
    """A file system in memory, where there is one; else the usual place for temporary files.

    Args:
        needed: bytes that are going to be written there.
        place: where the system keeps shared memory.

    Raises:
        TrainError: it is there, and has too little room.
    """
    if not os.access(place, os.W_OK):
        return None
    free = shutil.disk_usage(place).free
    if free < needed:
        raise TrainError(
            f"{place} has {free / 1e6:.0f} MB left, but trainer and engine share weights of "
            f"{needed / 1e6:.0f} MB there",
            hints=[
                f"in a container: docker run --shm-size={max(1, math.ceil(2 * needed / 1e9))}g",
                f"or: mount -o remount,size={max(1, math.ceil(2 * needed / 1e9))}g {place}",
                "or train in the same process: trainer.runs_in=thread",
            ],
        )
    return str(place)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}" + (": out of memory?" if code == -signal.SIGKILL else "")
