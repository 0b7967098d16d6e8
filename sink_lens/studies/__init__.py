"""One question, one run folder: isolate, amplify, ablate, sink_tokens, card, quantise; cards has many models."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..chain.trace import Trace as Trace
    from .ablation import ablate as ablate
    from .amplification import amplify as amplify
    from .cards import cards as cards
    from .config import AblateConfig as AblateConfig
    from .config import AmplifyConfig as AmplifyConfig
    from .config import CardConfig as CardConfig
    from .config import IsolateConfig as IsolateConfig
    from .config import QuantiseConfig as QuantiseConfig
    from .isolation import isolate as isolate
    from .model_card import card as card
    from .quantisation import quantise as quantise
    from .study import Study as Study
    from .token_scan import sink_tokens as sink_tokens
    from .tokens_config import TokensConfig as TokensConfig

_NAMES = {
    "AblateConfig": "config",
    "AmplifyConfig": "config",
    "CardConfig": "config",
    "IsolateConfig": "config",
    "QuantiseConfig": "config",
    "Study": "study",
    "TokensConfig": "tokens_config",
    "Trace": ".chain.trace",
    "ablate": "ablation",
    "amplify": "amplification",
    "card": "model_card",
    "cards": "cards",
    "isolate": "isolation",
    "quantise": "quantisation",
    "sink_tokens": "token_scan",
}
"""Public name -> the module that defines it."""

__all__ = [
    "AblateConfig",
    "AmplifyConfig",
    "CardConfig",
    "IsolateConfig",
    "QuantiseConfig",
    "Study",
    "TokensConfig",
    "Trace",
    "ablate",
    "amplify",
    "card",
    "cards",
    "isolate",
    "quantise",
    "sink_tokens",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
