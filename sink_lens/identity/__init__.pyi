"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .config import ContractionConfig as ContractionConfig
from .config import FingerprintConfig as FingerprintConfig
from .config import PreferenceConfig as PreferenceConfig
from .fingerprints import Fingerprint as Fingerprint
from .fingerprints import fingerprint as fingerprint
from .state_contraction import contraction as contraction
from .token_preference import preference as preference
from .untrained_models import UntrainedConfig as UntrainedConfig
from .untrained_models import untrained as untrained
