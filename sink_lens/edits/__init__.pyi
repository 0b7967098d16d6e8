"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from ..models.sites import Site as Site
from ..schema import MEANS as MEANS
from .amplification import CentringMeans as CentringMeans
from .amplification import amplify as amplify
from .amplification import centring_means as centring_means
from .baking import bake as bake
from .constructors import At as At
from .constructors import Edit as Edit
from .constructors import clamp as clamp
from .constructors import edit as edit
from .constructors import freeze as freeze
from .constructors import resample as resample
from .constructors import scalar as scalar
from .constructors import scale as scale
from .constructors import zero as zero
from .effects import effect as effect
from .eviction import window as window
from .hooks import from_hook as from_hook
from .hooks import fwd_hooks as fwd_hooks
from .isolation import isolate as isolate
from .mean_ablation import mean_aligned as mean_aligned
from .mean_ablation import mean_all as mean_all
from .mean_ablation import mean_ordinary as mean_ordinary
from .part import Part as Part
from .quantisation import quantised_weights as quantised_weights
