"""Pictures in the rows of a vision-language model of transformers.

    references (hash, place, grid) --store, image processor--> pixels of each distinct picture
    pixels --tower and projector, one call--> features --> the places that the references name

Features are placed by references, never by ids: a policy may sample the id of a placeholder, which
then is a token like any other. Positions of Qwen's families have three axes (M-RoPE, Qwen2-VL,
arXiv:2409.12191, section 2.1) and follow from the references alone.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel

from areal_gym.chat.vision import FAMILIES, has_image_processor
from areal_gym.errors import ConfigError, TrainError
from areal_gym.images import image_store
from areal_gym.images.reading import pillow
from areal_gym.message_types import ImageRef
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.hf.qwen_pixels import QwenPixels

TrainedVision = Literal["frozen", "projector", "full"]
"""What is trained of the parts that see: nothing, what maps features to tokens, or all."""
_CACHED_BYTES = 512_000_000
"""Pixels that are kept for later passes; one picture of 640 x 480 takes 7 MB."""
_BANNED = -1e4
"""The logit of ids that no policy may sample: finite, so that an entropy of zero is no NaN."""
_TOWERS = ("visual", "vision_tower")
_PROJECTORS = ("visual.merger", "visual.deepstack_merger_list", "multi_modal_projector")


class Pixels(NamedTuple):
    """A picture as a tower takes it."""

    values: Tensor
    """[patches, values of a patch] (Qwen), or [1, channels, height, width]."""
    grid: Tensor | None
    """[1, 3]: patches in time, height and width."""


class PlacedPictures(NamedTuple):
    """The pictures of one flat axis of N tokens."""

    refs: tuple[ImageRef, ...]
    """In order; `start` counts from the beginning of the axis."""
    positions_3N: Tensor | None
    """The positions of all tokens in time, height and width; None for plain positions."""
    pictures_N: Tensor | None
    """The number of each token's picture, -1 for texts; None where pictures are read causally."""


def rope_positions(num_tokens: int, images: Sequence[ImageRef], merge_size: int) -> Tensor:
    """Return the positions of one row's tokens in time, height and width, [3, num_tokens].

    A text after a picture goes on behind the largest position on any axis.
    """
    positions_3T = torch.empty(3, num_tokens, dtype=torch.long)
    place = position = 0
    for image in images:
        assert image.grid is not None
        num_before = image.start - place
        positions_3T[:, place : image.start] = torch.arange(position, position + num_before)
        position += num_before
        time, height, width = (
            image.grid[0],
            image.grid[1] // merge_size,
            image.grid[2] // merge_size,
        )
        axes = [torch.arange(size) for size in (time, height, width)]
        place = image.start + image.length
        positions_3T[:, image.start : place] = position + torch.stack(
            torch.meshgrid(*axes, indexing="ij")
        ).flatten(1)
        position += max(time, height, width)
    positions_3T[:, place:] = torch.arange(position, position + num_tokens - place)
    return positions_3T


class HFVision:
    """The parts of a network that see, and how pictures get into its rows.

    Args:
        network: a vision-language model of one of `areal_gym.chat.vision.FAMILIES`.
        processor: transformers' image processor of the checkpoint.
    """

    def __init__(self, network: PreTrainedModel, processor: Any) -> None:
        self.processor = processor
        self._qwen_pixels = QwenPixels(processor) if QwenPixels.is_known(processor) else None
        self.network = network
        config: Any = network.config
        self.reads_both_ways = config.model_type == "gemma3"
        """Whether a picture's tokens see each other in both directions."""
        self._merge_size: int | None = getattr(config.vision_config, "spatial_merge_size", None)
        names = ("image_token_id", "video_token_id")
        ids = [getattr(config, name, None) for name in names]
        self.banned_ids = tuple(int(id) for id in ids if id is not None)
        """Ids that no policy may sample, because engines take them for pictures."""
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._num_bytes = 0
        self.use_own_attention()

    @classmethod
    def from_checkpoint(cls, directory: Path, network: PreTrainedModel) -> HFVision | None:
        """Read the image processor of a checkpoint; None for models that do not see.

        Raises:
            ConfigError: the checkpoint has no image processor.
        """
        if network.config.model_type not in FAMILIES or _tower_of(network) is None:
            return None
        if not has_image_processor(directory):
            return None  # it is trained on texts
        try:
            pillow()
            processor = AutoImageProcessor.from_pretrained(
                directory, backend="pil", local_files_only=True
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"the image processor of {directory} cannot be read: {error}",
                hints=["pip install 'areal-gym[vision]'", "download the checkpoint again"],
            ) from error
        return cls(network, processor)

    def of(self, network: PreTrainedModel) -> HFVision:
        """Return the same for another network of the same architecture."""
        return HFVision(network, self.processor)

    @property
    def tower(self) -> nn.Module:
        """The vision tower; for Qwen's families it holds the projector, too."""
        tower = _tower_of(self.network)
        assert tower is not None
        return tower

    def use_own_attention(self) -> None:
        """Let the tower attend by torch's fused attention; only the text's tokens are packed."""
        for module in self.tower.modules():
            if (config := getattr(module, "config", None)) is not None:
                config._attn_implementation = "sdpa"

    def set_trained(self, trained: TrainedVision) -> None:
        """Freeze the parts that see, but for those that are to be trained."""
        inner = _inner_of(self.network)
        self.tower.requires_grad_(trained == "full")
        for name in _PROJECTORS:
            part = _submodule(inner, name)
            if part is not None:
                part.requires_grad_(trained != "frozen")

    # ---- places ---------------------------------------------------------------------------------

    def placed(self, batch: PackedBatch) -> PlacedPictures:
        """Return the pictures of a packed batch, each place of the flat axis once."""
        num_tokens = len(batch.token_ids_N)
        positions_3N = None
        if self._merge_size is not None:
            positions_3N = torch.empty(3, num_tokens, dtype=torch.long)
        by_start: dict[int, ImageRef] = {}
        for index, images in zip(batch.row_index, batch.images or (), strict=True):
            for image in images:
                start = int(index[image.start])  # those of one picture stay side by side
                by_start[start] = image.moved(start - image.start)
            if positions_3N is not None and self._merge_size is not None:
                row_3T = rope_positions(len(index), images, self._merge_size)
                positions_3N[:, torch.from_numpy(index)] = row_3T
        refs = tuple(by_start[start] for start in sorted(by_start))
        device = batch.token_ids_N.device
        return PlacedPictures(
            refs,
            None if positions_3N is None else positions_3N.to(device),
            self.pictures_of(refs, num_tokens, device),
        )

    def positions_of(self, num_tokens: int, images: Sequence[ImageRef]) -> Tensor | None:
        """Return the positions of a row's tokens, [3, num_tokens]; None for plain positions."""
        if self._merge_size is None:
            return None
        return rope_positions(num_tokens, images, self._merge_size)

    @property
    def has_positions(self) -> bool:
        """Whether positions have three axes."""
        return self._merge_size is not None

    def shift_behind(self, images: Sequence[ImageRef]) -> int:
        """Return how much larger a text's position is than its place behind these pictures."""
        if self._merge_size is None:
            return 0
        size = self._merge_size
        grids = [(image.grid or (1, 1, 1), image.length) for image in images]
        return sum(max(t, h // size, w // size) - length for (t, h, w), length in grids)

    def pictures_of(
        self, refs: Sequence[ImageRef], num_tokens: int, device: torch.device
    ) -> Tensor | None:
        """Return `PlacedPictures.pictures_N`."""
        if not self.reads_both_ways or not refs:
            return None
        pictures_N = torch.full((num_tokens,), -1)
        for number, image in enumerate(refs):
            pictures_N[image.start : image.start + image.length] = number
        return pictures_N.to(device)

    # ---- features -------------------------------------------------------------------------------

    @contextmanager
    def seeing(self, placed: PlacedPictures, *, keeps_pace: bool = False) -> Iterator[None]:
        """Put pictures, and positions, into the forward passes of the network in this context.

        With `keeps_pace` a pass without pictures runs the tower, too, on a picture that counts for
        nothing: ranks that share a trained tower's weights gather and reduce them together.
        """

        def see(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            kwargs = dict(kwargs)
            if placed.positions_3N is not None:
                kwargs["position_ids"] = placed.positions_3N[:, None]
            embedded_1NC = kwargs["inputs_embeds"]
            if placed.refs:
                kwargs |= self._embedded(placed.refs, embedded_1NC)
            elif keeps_pace:
                kwargs["inputs_embeds"] = embedded_1NC + self._nothing(embedded_1NC)
            return args, kwargs

        hook = _inner_of(self.network).language_model.register_forward_pre_hook(
            see, with_kwargs=True
        )
        try:
            yield
        finally:
            hook.remove()

    def _embedded(self, refs: Sequence[ImageRef], embedded_1NC: Tensor) -> Mapping[str, Any]:
        """Return what the language model is given instead of the embeddings of placeholders."""
        device, dtype = embedded_1NC.device, embedded_1NC.dtype
        hashes = list(dict.fromkeys(image.sha256 for image in refs))
        pixels = [self._pixels_of(sha256) for sha256 in hashes]
        features, deep_features = self._features(pixels, device)
        place_of = {sha256: number for number, sha256 in enumerate(hashes)}
        is_seen_N = torch.zeros(embedded_1NC.shape[1], dtype=torch.bool, device=device)
        for image in refs:
            num_features = len(features[place_of[image.sha256]])
            if num_features != image.length:
                raise TrainError(
                    f"the picture {image.sha256[:12]} has {image.length} placeholders in a row, "
                    f"and {num_features} features of this policy's tower",
                    hints=["the row was recorded with another image processor"],
                )
            is_seen_N[image.start : image.start + image.length] = True

        def in_order(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([parts[place_of[image.sha256]] for image in refs]).to(dtype)

        given: dict[str, Any] = {
            "inputs_embeds": embedded_1NC.masked_scatter(
                is_seen_N[None, :, None], in_order(features)
            )
        }
        if deep_features:  # Qwen3-VL adds features to the first layers' outputs as well
            given["visual_pos_masks"] = is_seen_N[None]
            given["deepstack_visual_embeds"] = [in_order(parts) for parts in deep_features]
        return given

    def _features(
        self, pixels: Sequence[Pixels], device: torch.device
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return each picture's features [P, C], and those for the first layers, by layer."""
        values = torch.cat([each.values for each in pixels]).to(device)
        inner = _inner_of(self.network)
        if self._merge_size is None:
            output = inner.get_image_features(values, return_dict=True)
        else:
            grids = torch.cat([each.grid for each in pixels if each.grid is not None]).to(device)
            output = inner.get_image_features(values, grids, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        return list(output.pooler_output), [list(parts) for parts in deep]

    def _nothing(self, like: Tensor) -> Tensor:
        """Return a zero whose gradient passes through every weight of the tower."""
        vision: Any = self.network.config.vision_config
        if self._merge_size is None:
            side = vision.image_size
            pixels = Pixels(torch.zeros(1, vision.num_channels, side, side), None)
        else:
            num_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            size = self._merge_size
            pixels = Pixels(torch.zeros(size**2, num_values), torch.tensor([[1, size, size]]))
        features, deep = self._features([pixels], like.device)
        total = sum(part.sum() for parts in [features, *deep] for part in parts)
        return (0 * total).to(like.dtype)  # type: ignore[union-attr]

    # ---- pixels ---------------------------------------------------------------------------------

    def _pixels_of(self, sha256: str) -> Pixels:
        """Return the pixels of a picture in the run's image store, the latest ones from memory.

        Raises:
            InfrastructureError: the store has no such picture.
        """
        if sha256 in self._pixels:
            self._pixels.move_to_end(sha256)
            return self._pixels[sha256]
        with pillow().open(io.BytesIO(image_store().read(sha256))) as picture:
            if self._qwen_pixels is not None:
                pixels = Pixels(*self._qwen_pixels(picture))
            else:
                made = self.processor(images=[picture], return_tensors="pt")
                pixels = Pixels(made["pixel_values"], made.get("image_grid_thw"))
        self._pixels[sha256] = pixels
        self._num_bytes += pixels.values.nbytes
        while self._num_bytes > _CACHED_BYTES and len(self._pixels) > 1:
            _, oldest = self._pixels.popitem(last=False)
            self._num_bytes -= oldest.values.nbytes
        return pixels

    def without_banned(self, logits_NV: Tensor) -> Tensor:
        """Return logits in which placeholders are never likely, as samplers have them."""
        if not self.banned_ids:
            return logits_NV
        is_banned_V = torch.zeros(logits_NV.shape[-1], dtype=torch.bool, device=logits_NV.device)
        is_banned_V[list(self.banned_ids)] = True
        return logits_NV.masked_fill(is_banned_V, _BANNED)


def parameters_that_see(network: PreTrainedModel) -> Iterator[nn.Parameter]:
    """Yield the parameters of the tower and of the projector, which texts do not pass."""
    if (tower := _tower_of(network)) is None:
        return
    yield from tower.parameters()
    inner = getattr(network, "model", network)
    for name in _PROJECTORS:
        if (part := _submodule(inner, name)) is not None and not name.startswith("visual."):
            yield from part.parameters()


def _inner_of(network: PreTrainedModel) -> Any:
    """Return the module that has the language model and the tower as parts."""
    inner: Any = network
    while not hasattr(inner, "language_model") or not isinstance(
        inner._modules.get("language_model"), nn.Module
    ):
        inner = inner.model
    return inner


def _tower_of(network: PreTrainedModel) -> nn.Module | None:
    inner: Any = getattr(network, "model", network)
    for name in _TOWERS:
        if isinstance(part := inner._modules.get(name), nn.Module):
            return part
    return None


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
