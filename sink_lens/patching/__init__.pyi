"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .activation import PatchResult as PatchResult
from .activation import patch as patch
from .activation import patch_shard as patch_shard
from .attribution import attribution_patch as attribution_patch
from .config import PatchConfig as PatchConfig
from .path import path_patch as path_patch
