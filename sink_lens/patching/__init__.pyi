"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .attribution import attribution_patch as attribution_patch
from .config import PatchConfig as PatchConfig
from .patch import patch as patch
from .path import PathConfig as PathConfig
from .path import path_patch as path_patch
from .results import PatchResult as PatchResult
