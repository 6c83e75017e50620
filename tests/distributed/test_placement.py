"""What is placed together on a node: by arithmetic, and on a Ray of several (virtual) nodes."""

from __future__ import annotations

import asyncio

import pytest

from areal_gym.config import Layout, load_config
from areal_gym.distributed.placement import Node, arrange, by_node, fits, rank_pieces
from areal_gym.errors import InfrastructureError


def config_of(*overrides, address="auto"):
    return load_config(overrides=[f"cluster.address={address}", *overrides])


def nodes_of(*gpus, taken=0.0):
    return [
        Node(
            name=f"n{i}",
            total={"CPU": 32.0, "GPU": float(n)},
            free={"CPU": 32.0, "GPU": n - taken},
        )
        for i, n in enumerate(gpus)
    ]


def ranks_of(bundles):
    return [bundle.members for bundle in bundles if bundle.role == "rank"]


def spans(*sizes):
    begin, result = 0, []
    for size in sizes:
        result.append(tuple(range(begin, begin + size)))
        begin += size
    return result


@pytest.mark.parametrize(
    ("gpus", "overrides", "sizes"),
    [
        # A replica within a node.
        ((8, 8), ["trainer.num_ranks=16", "trainer.parallel.replicate=2"], (8, 8)),
        ((8, 8), ["trainer.num_ranks=8", "trainer.parallel.replicate=2"], (4, 4)),
        # A replica larger than a node: whole nodes, then the rest.
        ((8, 8), ["trainer.num_ranks=16"], (8, 8)),
        ((8, 8), ["trainer.num_ranks=12"], (8, 4)),
        # No node is known yet: the cluster grows when asked.
        ((0,), ["trainer.num_ranks=3"], (1, 1, 1)),
        # Replicas of three do not fit beside each other here, single ranks do.
        ((4, 2), ["trainer.num_ranks=6", "trainer.parallel.replicate=2"], (1,) * 6),
    ],
)
def test_replicas_stay_within_nodes_where_they_fit(gpus, overrides, sizes):
    bundles = arrange(config_of(*overrides), "cuda", nodes_of(*gpus))
    assert ranks_of(bundles) == spans(*sizes)
    assert all(bundle.resources["GPU"] == len(bundle.members) for bundle in bundles)


def test_ranks_that_compute_the_same_rows_are_not_divided():
    layout = Layout(shard=3, tensor=2, context=2)
    assert rank_pieces(layout, "cuda", nodes_of(6, 6, 6)) == [4, 4, 4]
    assert rank_pieces(layout, "cuda", nodes_of(16)) == [12]
    # Unless a node is too small for them.
    assert rank_pieces(Layout(tensor=8), "cuda", nodes_of(6, 6)) == [6, 2]


def test_what_is_free_now_goes_before_what_others_may_leave():
    config = config_of("trainer.num_ranks=8")
    assert ranks_of(arrange(config, "cuda", nodes_of(8, 8))) == spans(8)
    # Four of each node's eight are taken by others.
    assert ranks_of(arrange(config, "cuda", nodes_of(8, 8, taken=4))) == spans(*[1] * 8)
    # All are: the run waits for a whole node.
    assert ranks_of(arrange(config, "cuda", nodes_of(8, 8, taken=8))) == spans(8)


def test_servers_and_workers_have_bundles_of_their_own():
    config = config_of(
        *("engine.id=sglang", "cluster.servers=2", "cluster.gpus_per_server=4"),
        *("trainer.num_ranks=8", "cluster.rollout_workers=3"),
    )
    bundles = arrange(config, "cuda", nodes_of(8, 8))
    assert [(b.role, b.resources.get("GPU")) for b in bundles] == [
        ("rank", 8),
        *[("server", 4)] * 2,
        *[("worker", None)] * 3,
    ]
    assert fits(bundles, [node.total for node in nodes_of(8, 8)])
    assert not fits(bundles, [node.total for node in nodes_of(8, 4, 3)])


def test_ranks_are_numbered_along_the_nodes():
    bundles = arrange(config_of("trainer.num_ranks=4"), "cuda", nodes_of(0))
    assert ranks_of(by_node(bundles, ["b", "a", "b", "a"])) == [(0,), (2,), (1,), (3,)]
    # Unequal pieces of a replica stay as they are.
    uneven = arrange(config_of("trainer.num_ranks=12"), "cuda", nodes_of(8, 8))
    assert by_node(uneven, ["b", "a"]) == uneven


# ---- on a Ray of three nodes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def three_nodes():
    """A head without GPUs, and two nodes that say they have four each."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **store})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=8, num_gpus=4, **store)
        yield cluster
    finally:
        cluster.shutdown()


async def nodes_of_ranks(cluster, num_ranks):
    """The node of each rank's actor, and the GPU that it has there."""
    import ray

    class Where:
        def tell(self):
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    actors = [
        ray.remote(Where).options(**cluster.options("rank", i)).remote() for i in range(num_ranks)
    ]
    return [await actor.tell.remote() for actor in actors]


@pytest.mark.slow
def test_replicas_are_placed_by_node(three_nodes):
    from areal_gym.distributed.cluster import open_cluster

    config = config_of(
        *("trainer.device=cuda", "trainer.num_ranks=4", "trainer.parallel.replicate=2"),
        *("engine.id=sglang", "cluster.servers=2", "cluster.gpus_per_server=2"),
        address=three_nodes.address,
    )
    said = []

    async def place():
        async with open_cluster(config, timeout_s=120, say=said.append) as cluster:
            return await nodes_of_ranks(cluster, 4)

    places = asyncio.run(place())
    nodes = [node for node, _ in places]
    assert nodes[0] == nodes[1]
    assert nodes[2] == nodes[3]
    assert len(set(map(str, places))) == 4  # each has a GPU of its own
    assert any("placed on 2 machines" in line and "rank 0-1" in line for line in said)


@pytest.mark.slow
def test_places_that_no_node_has_are_named(three_nodes):
    from areal_gym.distributed.cluster import open_cluster

    config = config_of(
        *("trainer.device=cuda", "trainer.num_ranks=2"),
        *("engine.id=sglang", "cluster.servers=1", "cluster.gpus_per_server=6"),
        address=three_nodes.address,
    )

    async def place():
        async with open_cluster(config, timeout_s=7, say=said.append):
            pass

    said = []
    with pytest.raises(InfrastructureError) as caught:
        asyncio.run(place())
    message = str(caught.value)
    assert "8 GPUs (8 there are, 8 free)" in message
    assert "1 x 2 ranks (2 CPU + 2 GPU on one node)" in message
    assert "1 x 1 server (1 CPU + 6 GPU on one node)" in message
    assert message.count("8 CPU + 4 GPU, free 8 CPU + 4 GPU") == 2
    assert any("cluster.gpus_per_server" in hint for hint in caught.value.hints)
    assert any("waiting up to 7 s for places on Ray: 1 x 2 ranks" in line for line in said)
