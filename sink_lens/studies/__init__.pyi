"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from ..chain.trace import Trace as Trace
from .card import card as card
from .card_table import cards as cards
from .config import AblateConfig as AblateConfig
from .config import AmplifyConfig as AmplifyConfig
from .config import CardConfig as CardConfig
from .config import IsolateConfig as IsolateConfig
from .config import QuantiseConfig as QuantiseConfig
from .interventions import ablate as ablate
from .interventions import amplify as amplify
from .interventions import isolate as isolate
from .quantise import quantise as quantise
from .study import Study as Study
from .tokens.config import TokensConfig as TokensConfig
from .tokens.run import sink_tokens as sink_tokens
