"""PyPI's torchvision beside a torch for CPUs: its import needs two operators of its CUDA library.

Python imports this file when it starts, in every process that has this folder in PYTHONPATH: real
servers spawn processes of their own that import torchvision. Resizing pictures, which is all that
servers do with it, calls none of its operators.
"""

import importlib.machinery
import sys

ABSENT = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
kept = []
"""The definitions, which end with the objects that made them."""


class TorchvisionFinder:
    """Defines the absent operators before torchvision is imported, and finds no module itself."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            return None
        import torch

        try:
            torch.ops.load_library(f"{spec.submodule_search_locations[0]}/_C.so")
        except OSError:  # it is linked with CUDA
            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in ABSENT:
                library.define(schema)
            kept.append(library)
        return None


sys.meta_path.insert(0, TorchvisionFinder())
