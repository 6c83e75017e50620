"""Runs a function in several processes that form a process group (gloo).

They are forked from a server that has imported what trainers need, and done nothing else: each
starts in a tenth of a second instead of several, and shares that memory with the others.
"""

import gc
import multiprocessing
import os
import socket
import traceback

TIMEOUT_S = 240
_IMPORTED = [
    "areal_gym.models.hf.hf_loading",
    "areal_gym.trainer.checkpoint",
    "areal_gym.trainer.trainer",
    "peft",
    "torch.distributed.checkpoint",
]


def on_ranks(num_ranks, function, *arguments, start="forkserver"):
    """Return what `function(rank, *arguments)`, importable by name, returns on each rank.

    With `start="spawn"` ranks are programs of their own, which share no memory.
    """
    context = forkserver() if start == "forkserver" else multiprocessing.get_context(start)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        # The server has the environment of its start, which may be another test's.
        given = (theirs, rank, num_ranks, meeting, dict(os.environ), function, arguments)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} has not answered"
            is_error, result = pipe.recv()
            assert not is_error, f"rank {rank}: {result}"
            results.append(result)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()


def forkserver():
    """Return a context whose processes begin with what trainers need imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def each_made_once(rank, directory, makers):
    """Return what functions make, by name: each is called by one rank, and kept for later groups.

    All ranks of the group must call this.
    """
    import torch

    files = {name: directory / f"{name}.pt" for name in makers}
    for number, (name, file) in enumerate(files.items()):
        if number % torch.distributed.get_world_size() == rank and not file.exists():
            torch.save(makers[name](), file)
    torch.distributed.barrier()
    return {name: torch.load(file, weights_only=False) for name, file in files.items()}


def _serve(pipe, rank, num_ranks, meeting, environment, function, arguments):
    import torch

    os.environ.clear()
    os.environ.update(environment, LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays, and stays shared
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=num_ranks
    )
    try:
        pipe.send((False, function(rank, *arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    torch.distributed.barrier()
    os._exit(0)
