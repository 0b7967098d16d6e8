"""Activation, path and attribution patching: put activations of one run into another run."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .activation import PatchResult as PatchResult
    from .activation import patch as patch
    from .activation import patch_shard as patch_shard
    from .attribution import attribution_patch as attribution_patch
    from .config import PatchConfig as PatchConfig
    from .path import path_patch as path_patch

_NAMES = {
    "PatchConfig": "config",
    "PatchResult": "activation",
    "attribution_patch": "attribution",
    "patch": "activation",
    "patch_shard": "activation",
    "path_patch": "path",
}
"""Public name -> the module that defines it."""

__all__ = [
    "PatchConfig",
    "PatchResult",
    "attribution_patch",
    "patch",
    "patch_shard",
    "path_patch",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
