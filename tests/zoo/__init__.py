"""Models with a known mechanism: each is written by hand and comes with the correct answers about it.

`build("variance", seed=3, family="olmo2")` returns the model, the sequences to run it on, and its truth. Detectors and
verdicts are tested against this truth; sink_lens itself uses none of them. The page `docs/zoo.md` draws each mechanism.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sink_lens.errors import ModelError
from tests.tiny_families import TINY_FAMILIES

from .easily_missed import (
    behind_bos,
    common_beside_direction,
    common_dimension,
    either_embedding,
    held_down,
    second,
    some,
    two_sinks,
)
from .hybrids import in_mixer_layer, mixer_spike, state_sink
from .latent import latent_key
from .read_wrongly import (
    attention_step,
    bystanders,
    embedding_or_neuron,
    expert_neuron,
    four_dimensions,
    half_logits,
    heads_in_a_step,
    known_by_dimension,
    late_stop,
    part_of_key,
    small_dimension,
    small_stream,
    zero_values,
)
from .seen_in_trained import (
    beside,
    bimodal,
    bos_without,
    cancelled_bias,
    early_variance,
    either_layer,
    elsewhere,
    eraser,
    head_feeds,
    regrowth,
    upstream,
)
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
from .writing import LATER, NORMED_BEFORE, WRITTEN

__all__ = ["LINKS", "ZOO", "Answers", "Maker", "Species", "Truth", "ZooModel", "build"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Species:
    """One kind of model of the zoo."""

    letter: str
    """Letter of the model in the documentation's list; `broken` for the six models with one broken link."""
    families: tuple[str, ...]
    """The architectures in which the model can be written; the first is the default."""
    write: Callable[..., ZooModel]
    """Function that builds the model from `seed` and `family`."""


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
    "eraser": _written("p", eraser, *LATER),
    "regrowth": _written("q", regrowth, *LATER),
    "cancelled_bias": _written("r", cancelled_bias, "llama", "qwen2", "qwen3", "gemma3"),
    "beside": _written("s", beside, *LATER),
    "either_layer": _written("t", either_layer, *LATER),
    "head_feeds": _written("u", head_feeds, *LATER),
    "upstream": _written("v", upstream, *LATER),
    "bimodal": _written("w", bimodal, "llama", "qwen2", "qwen3", "olmo2"),
    "elsewhere": _written("x", elsewhere, *LATER),
    "early_variance": _written("y", early_variance, "llama", "qwen2", "qwen3", "olmo2"),
    "bos_without": _written("z", bos_without, "llama", "qwen2", "qwen3", "olmo2"),
    "half_of_sequences": _written("aa", partial(some, "half_of_sequences", 2), *NORMED_BEFORE),
    "sixth_of_sequences": _written("ab", partial(some, "sixth_of_sequences", 6), *NORMED_BEFORE),
    "two_sinks": _written("ac", two_sinks, *NORMED_BEFORE),
    "second": _written("ad", second, *NORMED_BEFORE),
    "behind_bos": _written("ae", behind_bos, *NORMED_BEFORE),
    "either_embedding": _written("af", either_embedding, *NORMED_BEFORE),
    "held_down": _written("ag", held_down, *NORMED_BEFORE),
    "common_dimension": _written("ah", common_dimension, *NORMED_BEFORE),
    "common_beside_direction": _written("ai", common_beside_direction, *NORMED_BEFORE),
    "in_mixer_layer": _written("aj", in_mixer_layer, "lfm2", "jamba"),
    "mixer_spike": _written("ak", mixer_spike, "lfm2", "jamba"),
    "state_sink": _written("al", state_sink, "jamba", "bamba"),
    "latent_key": _written("am", latent_key, "youtu", "deepseek_v2"),
    "bystanders": _written("an", bystanders, "olmo2", "llama"),
    "part_of_key": _written("ao", part_of_key, "llama", "qwen2"),
    "small_dimension": _written("ap", small_dimension, *NORMED_BEFORE),
    "four_dimensions": _written("aq", four_dimensions, *NORMED_BEFORE),
    "zero_values": _written("ar", zero_values, *NORMED_BEFORE),
    "embedding_or_neuron": _written("as", embedding_or_neuron, "llama", "qwen2"),
    "known_by_dimension": _written("at", known_by_dimension, *NORMED_BEFORE),
    "heads_in_a_step": _written("au", heads_in_a_step, *NORMED_BEFORE),
    "expert_neuron": _written("av", expert_neuron, "mixtral", "qwen3_moe", "qwen2_moe"),
    "attention_step": _written("aw", attention_step, *NORMED_BEFORE),
    "late_stop": _written("ax", late_stop, *NORMED_BEFORE),
    "half_logits": _written("ay", half_logits, "gpt_oss", "headnorm"),
    "small_stream": _written("az", small_stream, "starcoder2", "stablelm"),
    **{f"broken_{link}": _written("broken", partial(broken, link)) for link in BREAKS},
}
"""Name -> the kind of model."""


def build(name: str, *, seed: int = 0, family: str | None = None) -> ZooModel:
    """Build one model of the zoo, float32, on the CPU; the caller's random state does not change.

    Args:
        name: One of `ZOO`.
        seed: Seed of the weights; it also changes every planted index and sign.
        family: The architecture; by default the first in which the model can be written.

    Raises:
        ModelError: The zoo has no such model, or the model cannot be written in this family.
    """
    if name not in ZOO:
        raise ModelError(f"no model {name!r} in the zoo; need one of {', '.join(ZOO)}")
    species = ZOO[name]
    if family is not None and family not in species.families:
        raise ModelError(
            f"{name!r} cannot be written in {family!r}; need one of {', '.join(species.families)}"
        )
    return species.write(seed=seed, family=family or species.families[0])
