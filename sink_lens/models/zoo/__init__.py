"""Models whose mechanism is known: each is written by hand and carries its truth.

`build("variance", seed=3, family="olmo2")` returns the model, the sequences that it is meant for, and what is true of
it. Finders and verdicts are judged by it; nothing here uses them. The page `docs/zoo.md` draws each mechanism.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ...errors import ModelError
from ..tiny import TINY_FAMILIES
from .truth import LINKS, Answers, Maker, Truth, ZooModel
from .variance import BREAKS, broken, first_window, unread_variance, variance
from .with_sink import (
    bos_neuron,
    delimiter,
    direction,
    embedding,
    key_bias,
    redundant,
    sink_logit,
    slow_growth,
    two_dimensions,
)
from .without_sink import sigmoid, spike, untrained
from .writing import WRITTEN

__all__ = ["LINKS", "ZOO", "Answers", "Maker", "Species", "Truth", "ZooModel", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Species:
    """One kind of model of the zoo."""

    letter: str
    """As in the list of the documentation; `broken` for the six in which a link is broken."""
    families: tuple[str, ...]
    """The architectures in which it can be written, the first one being the default."""
    write: Callable[..., ZooModel]
    """Takes `seed` and `family`."""


def _written(letter: str, write: Callable[..., ZooModel], *families: str) -> Species:
    return Species(letter=letter, families=families or WRITTEN, write=write)


ZOO: Mapping[str, Species] = {
    "embedding": _written("a", embedding),
    "bos_neuron": _written("b", bos_neuron),
    "variance": _written("c", variance),
    "slow_growth": _written("d", slow_growth),
    "two_dimensions": _written("e", two_dimensions),
    "direction": _written("f", direction),
    "key_bias": _written("g", key_bias),
    "delimiter": _written("h", delimiter),
    "sink_logit": _written("i", sink_logit, "gpt_oss", "headnorm"),
    "redundant": _written("j", redundant),
    "unread_variance": _written("k", unread_variance),
    "spike": _written("l", spike),
    "sigmoid": _written("m", sigmoid, "headnorm"),
    "first_window": _written("n", first_window, "mistral"),
    "untrained": _written("o", untrained, *TINY_FAMILIES),
    **{f"broken_{link}": _written("broken", partial(broken, link)) for link in BREAKS},
}
"""Name -> the kind of model."""


def build(name: str, *, seed: int = 0, family: str | None = None) -> ZooModel:
    """One model of the zoo, float32, on the CPU; the caller's random state is not touched.

    Args:
        name: One of `ZOO`.
        seed: Same seed, same weights; it moves every place and sign.
        family: The architecture; the first one that the model can be written in if not given.

    Raises:
        ModelError: There is no such model, or it cannot be written in this family.
    """
    if name not in ZOO:
        raise ModelError(f"no model {name!r} in the zoo; need one of {', '.join(ZOO)}")
    species = ZOO[name]
    if family is not None and family not in species.families:
        raise ModelError(f"{name!r} cannot be written in {family!r}; need one of {', '.join(species.families)}")
    return species.write(seed=seed, family=family or species.families[0])
