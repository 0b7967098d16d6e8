"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .config import ContractionConfig as ContractionConfig
from .config import FingerprintConfig as FingerprintConfig
from .config import PreferenceConfig as PreferenceConfig
from .contraction import contraction as contraction
from .fingerprint import Fingerprint as Fingerprint
from .fingerprint import fingerprint as fingerprint
from .preference import preference as preference
from .untrained_models import UntrainedConfig as UntrainedConfig
from .untrained_models import untrained as untrained
