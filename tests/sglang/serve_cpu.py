"""The unmodified SGLang of the package index, on a machine without any accelerator.

    python serve_cpu.py --model-path POLICY --port 30000 [what sglang.launch_server takes]

SGLang computes in plain torch where it finds no fast kernels, but some imports of its CPU path
need packages that exist for CUDA only. They are replaced before SGLang is imported:

    sgl_kernel    its `*_cpu` functions are looked up at import; one of them is also called, for
                  the bookkeeping of speculative decoding, which is off here
    torch.ops.sgl_kernel    its operators, which modules of vision-language models look up at import
    torchvision   asked for by multimodal configurations; text models never call it, and for
                  pictures it must be installed

SGLang spawns its workers, which import this file again: the replacements must stand at top level.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "_support" / "cpu_torchvision"))

from every_process import begin_again

if __name__ == "__main__":
    begin_again()

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # else it starts CUDA kernels on the CPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that spin take the processor from others
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # or the first pictures wait for a compiler

import torch

FLAGS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--disable-cuda-graph": None,
    "--sleep-on-idle": None,
    "--skip-server-warmup": None,
}
LORA_FLAGS = {"--lora-backend": "torch_native"}


class Absent(types.ModuleType):
    """A package that can be imported from, and whose functions say that they are absent."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name.endswith("_cpu"):

            def replacement(*args, **kwargs):
                raise NotImplementedError(f"{full} has no build for CPUs without AMX")

        else:
            # A class may be subclassed or looked for with isinstance; anything else is a package.
            replacement = type(name, (), {}) if name[:1].isupper() else Absent(full)
        setattr(self, name, replacement)
        return replacement


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.root:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


class AbsentOperators:
    """Operators that can be looked up, and that say that they are absent."""

    def __getattr__(self, name):
        if not name.endswith("_cpu"):
            raise AttributeError(name)

        def absent(*args, **kwargs):
            raise NotImplementedError(f"torch.ops.sgl_kernel.{name} has no build here")

        return absent


def replace_absent_packages():
    if importlib.util.find_spec("torchvision") is None:
        # transformers must have decided that there is none before the replacement appears.
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        sys.meta_path.append(AbsentFinder("torchvision"))
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.meta_path.append(AbsentFinder("sgl_kernel"))
        torch.ops.sgl_kernel = AbsentOperators()


def allocate_without_pinning():
    """Adapters and recorded experts ask for pinned memory, which only accelerators have."""

    def without_pinning(function):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def allocate_without_registering():
    """What records experts registers its memory with CUDA on every device."""
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory


def with_defaults(argv):
    flags = FLAGS | (LORA_FLAGS if "--enable-lora" in argv else {})
    for flag, value in flags.items():
        if flag not in argv:
            argv = [*argv, flag, *([] if value is None else [value])]
    return argv


replace_absent_packages()
if {"--enable-lora", "--enable-return-routed-experts"} & set(sys.argv):
    allocate_without_pinning()
if "--enable-return-routed-experts" in sys.argv:
    allocate_without_registering()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(with_defaults(sys.argv[1:])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
