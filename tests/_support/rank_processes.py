"""Runs a function in several processes that form a process group (gloo)."""

import multiprocessing
import os
import socket
import traceback

TIMEOUT_S = 240


def on_ranks(num_ranks, function, *arguments):
    """Return what `function(rank, *arguments)`, importable by name, returns on each rank."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, rank, num_ranks, meeting, function, arguments), daemon=True
        )
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


def _serve(pipe, rank, num_ranks, meeting, function, arguments):
    import torch

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=num_ranks
    )
    try:
        pipe.send((False, function(rank, *arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    torch.distributed.barrier()
    os._exit(0)
