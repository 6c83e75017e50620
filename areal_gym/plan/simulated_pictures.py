"""Pictures of a simulated step: how many a micro-batch shows, and towers that see no values.

A task has one picture of 640 x 480 pixels, or less where `images.max_pixels` or the room for a
prompt says so. A micro-batch is filled with as many as `trainer.patches_per_microbatch` and the
prompts of its rows have room for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from areal_gym.chat.vision import FAMILIES, PatchGrid
from areal_gym.config import RunConfig
from areal_gym.message_types import ImageRef
from areal_gym.models.hf.hf_vision import HFVision, Pixels
from areal_gym.plan.memory_tracker import MemoryTracker
from areal_gym.plan.model_to_plan import PlannedModel

USUAL_PIXELS = 640 * 480
_USUAL_SIZE = (640, 480)
_OF_GRIDS = "get_vision_"
"""How transformers' functions begin that compute positions and lengths from grids of patches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPictures:
    """The pictures of a step, all of one size."""

    length: int
    """Placeholders of one picture."""
    grid: tuple[int, int, int] | None
    num_patches: int
    """Patches of one picture."""
    num_each: int
    """Pictures of each row of a micro-batch, all distinct."""
    num_rows: int
    """Rows of a micro-batch."""

    @property
    def patches_per_microbatch(self) -> int:
        """The patches that the tower sees in one pass of a micro-batch."""
        return self.num_patches * self.num_each * self.num_rows

    def of_row(self, number: int) -> tuple[ImageRef, ...]:
        """Return the references of a row's pictures, which stand at its beginning."""
        return tuple(
            ImageRef(f"{number}/{place}", place * self.length, self.length, self.grid)
            for place in range(self.num_each)
        )


def planned_pictures(config: RunConfig, model: PlannedModel) -> PlannedPictures | None:
    """Return the pictures of a step; None where model, objective or context take texts only."""
    kind = getattr(model, "model_type", None)
    if kind not in FAMILIES or config.objective in ("rm", "distill"):
        return None
    vision: Any = model.vision_config  # type: ignore[union-attr]
    longest = config.engine.max_context  # a row is never cut
    room = max(1, longest - 1 - config.rollout.max_new_tokens)
    budget = max(longest, config.trainer.tokens_per_microbatch)
    grid = None
    if (merge := getattr(vision, "spatial_merge_size", None)) is not None:
        unit = vision.patch_size * merge
        most = min(config.images.max_pixels or USUAL_PIXELS, USUAL_PIXELS, room * unit**2)
        # Rounding may lead beyond the room: larger pictures are scaled down, never up.
        geometry = PatchGrid(
            patch_size=vision.patch_size, merge_size=merge, min_pixels=0, max_pixels=most
        )
        length, grid = geometry.size_of(*_USUAL_SIZE)
        num_patches = length * merge**2
    else:
        length = model.mm_tokens_per_image  # type: ignore[union-attr]
        num_patches = (vision.image_size // vision.patch_size) ** 2
    if length >= longest:
        return None  # no prompt with a picture has room
    num_rows = budget // longest
    # Trainers count placeholders where there is no grid.
    limit = config.trainer.patches_per_microbatch // (num_patches if grid else length)
    num_rows = max(1, min(num_rows, limit))
    num_each = max(1, min(limit // num_rows, room // length, config.images.max_images))
    return PlannedPictures(
        length=length, grid=grid, num_patches=num_patches, num_each=num_each, num_rows=num_rows
    )


class SimulatedVision(HFVision):
    """The parts of a network that see, run on pixels without values.

    Operations of the tower are counted in `tracker.costs.tower_flops` as well.
    """

    def __init__(
        self, network: Any, pictures: PlannedPictures, mode: FakeTensorMode, tracker: MemoryTracker
    ) -> None:
        super().__init__(network, None)
        self._tracker = tracker
        vision: Any = network.config.vision_config
        sizes: tuple[int, ...]
        grid: Tensor | None = None
        if pictures.grid is None:
            sizes = (1, vision.num_channels, vision.image_size, vision.image_size)
        else:
            num_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            sizes = (pictures.num_patches, num_values)
            with unset_fake_temporarily():  # sizes of parts are read from it
                grid = torch.tensor([pictures.grid])
        with mode:
            self._shown = Pixels(torch.zeros(sizes), grid)

    def _pixels_of(self, sha256: str) -> Pixels:
        return self._shown

    def _embedded(self, refs: Sequence[ImageRef], embedded_1NC: Tensor) -> Mapping[str, Any]:
        given = super()._embedded(refs, embedded_1NC)
        if "visual_pos_masks" not in given:
            return given
        with unset_fake_temporarily():  # as many places are read as it marks
            is_seen_1N = torch.zeros(embedded_1NC.shape[:2], dtype=torch.bool)
            for image in refs:
                is_seen_1N[0, image.start : image.start + image.length] = True
        return {**given, "visual_pos_masks": is_seen_1N}

    def _features(self, *args: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
        before = self._tracker.costs.flops
        with _real_grids(self.tower):
            features = super()._features(*args)
        self._tracker.costs.tower_flops += self._tracker.costs.flops - before
        return features


@contextmanager
def _real_grids(tower: Any) -> Iterator[None]:
    """Let the tower read lengths and positions, which follow from grids, in this context."""
    module = sys.modules[type(tower).__module__]
    names = [name for name in vars(module) if name.startswith(_OF_GRIDS)]
    with ExitStack() as stack:
        for name in names:
            before = getattr(module, name)
            stack.callback(setattr, module, name, before)
            setattr(module, name, _outside(before))
        yield


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call
