"""Process groups between separate jobs: trainer and servers."""

from __future__ import annotations

import datetime
from typing import Any


def join_group(
    host: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
) -> Any:
    """Join a group beside the default one; return when all have joined. Rank 0 listens on `port`.

    torch has no public way to make one. SGLang calls the same private function on its side, and
    both ends must prefix the store alike.

    Raises:
        RuntimeError: not all have joined in time (torch's own errors derive from it).
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    timeout = datetime.timedelta(seconds=timeout_s)
    store, rank, world_size = next(
        rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
