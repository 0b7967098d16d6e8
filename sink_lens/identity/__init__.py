"""What is there before training: token preference, contraction, and the seed that a model keeps."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from .config import ContractionConfig as ContractionConfig
    from .config import FingerprintConfig as FingerprintConfig
    from .config import PreferenceConfig as PreferenceConfig
    from .fingerprints import Fingerprint as Fingerprint
    from .fingerprints import fingerprint as fingerprint
    from .state_contraction import contraction as contraction
    from .token_preference import preference as preference
    from .untrained_models import UntrainedConfig as UntrainedConfig
    from .untrained_models import untrained as untrained

_NAMES = {
    "Fingerprint": "fingerprints",
    "FingerprintConfig": "config",
    "ContractionConfig": "config",
    "PreferenceConfig": "config",
    "UntrainedConfig": "untrained_models",
    "contraction": "state_contraction",
    "fingerprint": "fingerprints",
    "preference": "token_preference",
    "untrained": "untrained_models",
}
"""Public name -> the module that defines it."""

__all__ = [
    "ContractionConfig",
    "Fingerprint",
    "FingerprintConfig",
    "PreferenceConfig",
    "UntrainedConfig",
    "contraction",
    "fingerprint",
    "preference",
    "untrained",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
