"""Edits change a site in a forward pass: zero, means, scale, freeze, isolate, amplify, normalise, quantise, window."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
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
    from .constructors import set_value as set
    from .constructors import zero as zero
    from .effects import effect as effect
    from .eviction import window as window
    from .hooks import from_hook as from_hook
    from .hooks import fwd_hooks as fwd_hooks
    from .isolation import isolate as isolate
    from .mean_ablation import mean_aligned as mean_aligned
    from .mean_ablation import mean_all as mean_all
    from .mean_ablation import mean_ordinary as mean_ordinary
    from .normalisation import head_rms_norm as normalise
    from .normalisation import variance_calibration as calibrate
    from .part import Part as Part
    from .quantisation import quantisation as quantise
    from .quantisation import quantised_weights as quantised_weights

_NAMES = {
    "At": "constructors",
    "CentringMeans": "amplification",
    "Edit": "constructors",
    "MEANS": ".schema",
    "Part": "part",
    "Site": ".models.sites",
    "amplify": "amplification",
    "bake": "baking",
    "calibrate": "normalisation:variance_calibration",
    "centring_means": "amplification",
    "clamp": "constructors",
    "edit": "constructors",
    "effect": "effects",
    "freeze": "constructors",
    "from_hook": "hooks",
    "fwd_hooks": "hooks",
    "isolate": "isolation",
    "mean_aligned": "mean_ablation",
    "mean_all": "mean_ablation",
    "mean_ordinary": "mean_ablation",
    "normalise": "normalisation:head_rms_norm",
    "quantise": "quantisation:quantisation",
    "quantised_weights": "quantisation",
    "resample": "constructors",
    "scalar": "constructors",
    "scale": "constructors",
    "set": "constructors:set_value",
    "window": "eviction",
    "zero": "constructors",
}
"""Public name -> the module that defines it."""

__all__ = [
    "MEANS",
    "At",
    "CentringMeans",
    "Edit",
    "Part",
    "Site",
    "amplify",
    "bake",
    "calibrate",
    "centring_means",
    "clamp",
    "edit",
    "effect",
    "freeze",
    "from_hook",
    "fwd_hooks",
    "isolate",
    "mean_aligned",
    "mean_all",
    "mean_ordinary",
    "normalise",
    "quantise",
    "quantised_weights",
    "resample",
    "scalar",
    "scale",
    "set",
    "window",
    "zero",
]
__getattr__, __dir__ = exported(__name__, _NAMES)
