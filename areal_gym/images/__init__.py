"""Pictures: how foreign ones are read, and the store that has their bytes by hash."""

from areal_gym.images.image_store import (
    ImageStore,
    hashes_in,
    hashes_in_files,
    hashes_of,
    image_store,
    use_image_store,
)
from areal_gym.images.reading import (
    ImageLimits,
    data_url,
    encode_png,
    image_limits,
    read_data_url,
    read_image,
    set_image_limits,
)

__all__ = [
    "ImageLimits",
    "ImageStore",
    "data_url",
    "encode_png",
    "hashes_in",
    "hashes_in_files",
    "hashes_of",
    "image_limits",
    "image_store",
    "read_data_url",
    "read_image",
    "set_image_limits",
    "use_image_store",
]
