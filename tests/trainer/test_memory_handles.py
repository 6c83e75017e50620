"""Weights for servers of this machine: which of them map memory, and what is sent to the others."""

import asyncio
import base64
import hashlib
import os
import pickle
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch

from areal_gym.config import PluginConfig
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.models.device import visible_gpu
from areal_gym.trainer.weight_sync import make_weight_sync
from areal_gym.trainer.weight_sync.flat_buckets import flat_buckets
from areal_gym.trainer.weight_sync.local_servers import find_local_server, is_descendant
from areal_gym.trainer.weight_sync.memory_handles import handle_of, host_buffer, metadata_of
from areal_gym.trainer.weight_sync.pickled_buckets import encoded
from areal_gym.trainer.weight_sync.tensor import _Post, _Routes
from tests._support.rank_processes import on_ranks
from tests._support.sglang_servers import POLICY, fake, serving, website

WEIGHTS = {
    "small": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "odd": torch.tensor([1, -2, 3], dtype=torch.int8),
    "large": torch.linspace(-1, 1, 30_000).reshape(100, 300).bfloat16(),
}
LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
ROUTE = "/update_weights_from_tensor"
OPEN_BUCKET = """
import base64, io, pickle, sys
import torch
from torch.multiprocessing import reductions

def rebuild(*arguments):
    ids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*arguments[:6], ids.index(arguments[6]), *arguments[7:])

class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)

content = Unpickler(io.BytesIO(base64.b64decode(sys.stdin.readline()))).load()
flat = content["flattened_tensor"]
assert flat.is_cuda
print([(m.name, m.start_idx, m.end_idx) for m in content["metadata"]])
print(flat.cpu().numpy().tobytes().hex())
"""


@pytest.mark.parametrize(
    ("handles", "bucket_mb", "limit"),
    [(True, 1, 1500), (True, 0.01, 1500), (False, 1, None)],
)
def test_server_of_this_run_gets_handles_only(tmp_path, handles, bucket_mb, limit):
    sizes = []

    async def note(request):
        if request.path == ROUTE:
            sizes.append(len(await request.read()))

    async def play():
        async with fake() as server, website(note, behind=server) as url:
            engine = SGLangEngine(POLICY, urls=[url])
            await engine.start()
            settings = PluginConfig(
                id="tensor", kwargs={"handles": handles, "bucket_mb": bucket_mb}
            )
            sync = make_weight_sync(engine, settings, directory=tmp_path)
            for version in (1, 2):  # the second one fills the same buffers
                weights = {name: tensor * version for name, tensor in WEIGHTS.items()}
                await sync.publish(weights.items(), version)
                assert server._weights.keys() == weights.keys()
                for name, tensor in weights.items():
                    assert torch.equal(server._weights[name], tensor), name
            await engine.aclose()

    asyncio.run(play())
    if limit is None:
        assert max(sizes) > 60_000
    else:
        assert max(sizes) < limit, sizes


def test_values_are_encoded_piece_by_piece():
    """A copy of all in one step holds Python's lock, and the event loop waits for it."""
    values = torch.linspace(-1, 1, 2_500_000)
    (bucket,) = flat_buckets([("a", values[:3]), ("b", values)], 20_000_000)
    digest, length = hashlib.sha256(), 0
    tracemalloc.start()
    for piece in encoded(bucket):
        digest.update(piece)
        length += len(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length > 4 / 3 * bucket.flat.nbytes
    assert peak < bucket.flat.nbytes / 2
    whole = b"".join(encoded(bucket))
    assert hashlib.sha256(whole).digest() == digest.digest()
    content = pickle.loads(base64.b64decode(whole, validate=True))
    assert torch.equal(content["flattened_tensor"], bucket.flat)
    assert [row.name for row in content["metadata"]] == ["a", "b"]


def managers():
    """The programs of named memory that this process has started."""
    children = Path("/proc/self/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    names = [Path("/proc", pid, "comm").read_text().strip() for pid in pids]
    return names.count("torch_shm_manag")  # the kernel keeps 15 characters


def managers_at_the_start(rank):
    async def play():
        async with serving(fake()) as engine:
            before = managers()
            make_weight_sync(engine, PluginConfig(id="tensor"), directory=Path("none"))
            return before, managers()

    return asyncio.run(play())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_named_memory_is_prepared_before_episodes_are_played():
    """Its program starts with Python's lock held, for seconds on a busy machine."""
    assert on_ranks(1, managers_at_the_start) == [(0, 1)]


@pytest.fixture(scope="module")
def silent_server(tmp_path_factory):
    """A process that listens with torch, and sees two GPUs in another order."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "3,2"}
    with subprocess.Popen(
        [sys.executable, "-c", f"import torch\n{LISTEN}"], env=environment, **pipes
    ) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        process.stdin.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_process_of_a_local_server(silent_server):
    url, process = silent_server
    server = find_local_server(url)
    assert server.pid == process.pid
    assert server.is_below(os.getpid())
    assert not server.is_below(process.pid + 1)
    assert is_descendant(os.getppid())
    assert find_local_server("http://127.0.0.1:1") is None
    assert find_local_server("http://host.invalid:80") is None


def test_listener_without_torch_is_a_tunnel():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LISTEN], **pipes) as process:
        assert find_local_server(f"http://127.0.0.1:{int(process.stdout.readline())}") is None
        process.stdin.close()


@pytest.mark.parametrize(
    ("info", "gpus", "ranks"),
    [
        ({}, [":3"], [0]),
        ({"tp_size": 2}, [":2", ":3"], [1, 0]),
        ({"base_gpu_id": 1}, [":0", ":1", ":2"], [2]),
        ({"tp_size": 2}, [":3"], None),  # the second worker's GPU is no rank's
        ({"base_gpu_id": 2}, [":3", ":2"], None),
        ({}, [None], None),
    ],
)
def test_worker_gets_handles_of_the_rank_on_its_gpu(silent_server, info, gpus, ranks):
    url, _ = silent_server
    post = _Post((url,), 1, 1000, None, os.getpid())
    routes = _Routes(num_workers={url: info.get("tp_size", 1)})
    post._find_route(routes, url, info, gpus)
    if ranks is None:
        assert routes.by_memory == {url}  # through the host's memory
    else:
        assert routes.by_gpu == {url: ranks}


def test_servers_that_others_started_are_sent_values(silent_server):
    url, process = silent_server
    routes = _Routes(num_workers={url: 1})
    _Post((url,), 1, 1000, None, process.pid)._find_route(routes, url, {}, [None])
    assert not routes.by_memory
    assert not routes.by_gpu


@pytest.mark.parametrize(
    ("environment", "index", "name"),
    [
        ({}, 5, ":5"),
        ({"CUDA_VISIBLE_DEVICES": "4, 6"}, 1, ":6"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, 0, ":GPU-8932f937"),
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, "PCI_BUS_ID:0"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, None),
        ({"HIP_VISIBLE_DEVICES": "1"}, 0, None),
    ],
)
def test_names_of_gpus(environment, index, name):
    assert visible_gpu(environment, index) == name


def test_buckets_in_plain_memory_are_sent_by_value():
    post = _Post((), 1, 1000, None, None)
    shared, plain = (
        next(flat_buckets(WEIGHTS.items(), 50_000, allocate)).flat
        for allocate in (host_buffer, partial(torch.empty, dtype=torch.uint8))
    )
    assert post._in_memory(shared) is shared
    assert post._in_memory(plain) is None
    assert torch.equal(shared, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_worker_on_the_same_gpu_opens_a_bucket_by_its_handle():
    weights = {name: tensor.cuda() for name, tensor in WEIGHTS.items()}
    (bucket,) = flat_buckets((item for item in weights.items() if item[0] != "odd"), 1_000_000)
    assert bucket.flat.is_cuda
    handle = handle_of(bucket, bucket.flat).decode() + "\n"
    opened = subprocess.run(
        [sys.executable, "-c", OPEN_BUCKET],
        input=handle,
        capture_output=True,
        text=True,
        check=True,
    )
    places, content = opened.stdout.splitlines()
    assert places == str([(m.name, m.start_idx, m.end_idx) for m in metadata_of(bucket)])
    assert bytes.fromhex(content) == bucket.flat.cpu().numpy().tobytes()
