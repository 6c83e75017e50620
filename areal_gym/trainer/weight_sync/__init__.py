"""Weight syncs, which bring new weights to the engine: plugins of kind `weight-syncs`."""

from areal_gym.trainer.base import WeightSync
from areal_gym.trainer.weight_sync.base import make_weight_sync, takes_adapter, weights_for

__all__ = ["WeightSync", "make_weight_sync", "takes_adapter", "weights_for"]
