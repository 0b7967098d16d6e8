"""One question, one run folder: isolate, amplify, ablate."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..chain.trace import Trace as Trace
    from .ablation import ablate as ablate
    from .amplification import amplify as amplify
    from .config import AblateConfig as AblateConfig
    from .config import AmplifyConfig as AmplifyConfig
    from .config import IsolateConfig as IsolateConfig
    from .isolation import isolate as isolate
    from .study import Study as Study

_NAMES = {
    "AblateConfig": "config",
    "AmplifyConfig": "config",
    "IsolateConfig": "config",
    "Study": "study",
    "Trace": ".chain.trace",
    "ablate": "ablation",
    "amplify": "amplification",
    "isolate": "isolation",
}
"""Public name -> the module that defines it."""

__all__ = [
    "AblateConfig",
    "AmplifyConfig",
    "IsolateConfig",
    "Study",
    "Trace",
    "ablate",
    "amplify",
    "isolate",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
