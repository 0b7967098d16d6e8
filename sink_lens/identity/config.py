"""Configurations of ``preference``, ``contraction`` and ``fingerprint``; torch is not imported."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ..configuration import check_field_types
from ..data.described import BosCondition
from ..errors import InputError
from ..schema import NULLS, NullName

SAME, NOT_SHOWN, NO_ANSWER = "same lineage", "no common lineage shown", "no answer"
"""Verdicts on a pair. *Not shown* is no proof of different seeds: training can wash a print out."""
FEWEST_SHARED = 8
"""Coordinates in common below which there is no answer: a mean over fewer is not one."""
InputKind = Literal["tokens", "embeddings", "released_embeddings"]
"""Kinds of inputs: token ids; normal embeddings of one deviation (ours); normal embeddings with the mean and deviation
of the first model's embedding matrix (released code of arXiv 2509.26404)."""
_SEEDS: dict[str, Any] = {"written": "ranges", "metavar": "0-4"}

NOTHING = "nothing to measure; need a model, a folder of sink-lens train, or untrained='gpt2'"
"""What is said where no model is given."""
TWO = "need two or more to compare: names, folders, or untrained='gpt2' with seeds=(0, 1)"
"""The same of a fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """Fields that all configurations of this file share."""

    models: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "MODEL"})
    """Names, folders of save_pretrained, .gguf files, or folders of sink-lens train (their checkpoints)."""
    untrained: tuple[str, ...] = field(default=(), metadata={"metavar": "STYLE[,FIELD=VALUE]..."})
    """An untrained model: a style (gpt2, llama, qwen) and fields, such as gpt2,activation=relu,n_layers=4; repeat."""
    seeds: tuple[int, ...] = field(default=(0,), metadata=_SEEDS)
    """Seeds of the untrained models' weights."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Type of the weights of models that are loaded. Default: float32."""


def _refuse_idle_seeds(config: ModelsConfig, *, own: tuple[int, ...]) -> None:
    if config.seeds != own and not config.untrained:
        raise InputError(
            "seeds=... was given and no untrained model; need one that they draw: untrained='gpt2'"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyConfig(ModelsConfig):
    """Fields that ``PreferenceConfig`` and ``ContractionConfig`` share."""

    switches: tuple[str, ...] = field(default=(), metadata={"option": "switch", "metavar": "NAME"})
    """Also measure the untrained model with every other value of one part: activation, gating, attention, mlp, norm,
    positions, init, writers or tied; repeat for several."""
    sequences: int = 1000
    """Random sequences, 50 at least."""
    length: int = field(default=64, metadata={"metavar": "T"})
    """Tokens per sequence."""
    bos: BosCondition = "without"
    """First token of each sequence: as the tokenizer puts it (auto), BOS (with), or no BOS (without)."""
    seed: int = 0
    """Seed of the sequences."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.switches and not self.untrained:
            raise InputError(
                "switches=... was given and no untrained model; need one to switch: untrained='gpt2'"
            )
        _refuse_idle_seeds(self, own=(0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceConfig(SurveyConfig):
    """Configuration of ``sink-lens preference``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractionConfig(SurveyConfig):
    """Configuration of ``sink-lens contraction``."""

    sequences: int = 128
    """Random sequences, 50 at least."""
    sinks: bool = True
    """Measure the attention to position 0 too."""

    def __post_init__(self) -> None:
        SurveyConfig.__post_init__(self)  # with slots, super() finds no class
        check_contraction_length(self.length)


def check_contraction_length(length: int) -> None:
    if length < 10:
        raise InputError(
            f"the length is {length}; need 10 tokens at least, to compare the first with those from 8 on"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintConfig(ModelsConfig):
    """Configuration of ``sink-lens fingerprint``.

    Raises:
        InputError: a value that cannot be used.
    """

    models: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "MODEL"})
    """Two or more: names, folders of save_pretrained, .gguf files, or folders of sink-lens train (the first and the
    last checkpoint)."""
    seeds: tuple[int, ...] = field(default=(0, 1), metadata=_SEEDS)
    """Seeds of the untrained models' weights."""
    inputs: InputKind = "tokens"
    """Random tokens; embeddings (normal, deviation 0.02); or released_embeddings, with the mean and deviation of the
    first model's embedding matrix, as the released code draws them. Embeddings need equal widths, and no null holds on
    them for narrow models: the stream carries an embedding's own coordinates to the end."""
    sequences: int = 2000
    """Number of random inputs, at least 50."""
    length: int = field(default=16, metadata={"metavar": "T"})
    """Tokens per input (ours: short, since only the last state is read)."""
    coordinates: int | None = field(default=None, metadata={"metavar": "M"})
    """m, the number of identity coordinates of each model. Default: 400, or all of a narrower model (paper: 10%; code:
    400). Two models share m^2 / width by chance: a tenth or a third of a narrow one leaves too few to find what
    training has left (ours: 192 wide, 600 steps, p .06 to .2 on a third, .001 on all)."""
    temperature: float = 10.0
    """Temperature of the softmax over the shared coordinates."""
    draws: int = 100
    """Number of draws of each simulated null."""
    relabellings: int = 1999
    """Number of random relabellings, beside the closed form."""
    alpha: float = 0.01
    """Two models have the same lineage if p is below this."""
    decides: NullName = field(
        default="relabelled", metadata={"option": "null", "metavar": "|".join(NULLS)}
    )
    """The null whose p decides."""
    cache: bool = True
    """Keep the states in the cache, and reuse those that are there."""
    seed: int = 0
    """Seed of the inputs and of every draw."""

    def __post_init__(self) -> None:
        check_field_types(self)
        _refuse_idle_seeds(self, own=(0, 1))
        for name, low, high in (("alpha", 0, 1), ("temperature", 0, math.inf)):
            if not low < getattr(self, name) < high:
                raise InputError(
                    f"{name} is {getattr(self, name)}; need a number over {low}, under {high}"
                )
        check_number_and_length(sequences=self.sequences, length=self.length)
        if self.coordinates is not None and self.coordinates < FEWEST_SHARED:
            raise InputError(
                f"{self.coordinates} coordinates per model; need at least {FEWEST_SHARED}"
            )
        for name in ("draws", "relabellings"):
            n = getattr(self, name)
            if 1 / (n + 1) >= self.alpha:  # the smallest p that it can give
                need = math.floor(1 / self.alpha)
                raise InputError(f"{name} is {n}; need {need} for a p under {self.alpha:g}")

    def n_coordinates(self, width: int) -> int:
        """Return how many of a model's ``width`` state dimensions are its identity coordinates.

        Raises:
            InputError: more coordinates than ``width``, or too few for any answer.
        """
        count = min(400, width) if self.coordinates is None else self.coordinates
        if not FEWEST_SHARED <= count <= width:
            raise InputError(
                f"{count} of {width} coordinates per model; need at least {FEWEST_SHARED}, and not more than all. "
                "Choose with coordinates=..."
            )
        return count


FEWEST = 50
"""Fewer sequences say little."""
MOST = 100_000_000
"""Sequences above which nobody waits for the end."""


def check_number_and_length(*, sequences: int, length: int) -> None:
    if sequences < FEWEST:
        raise InputError(
            f"{sequences} sequences were asked for; need at least {FEWEST} for shares, cosines and tau over them, and "
            "2,000 for a fingerprint with power. Ask for more"
        )
    if sequences > MOST:
        raise InputError(
            f"{sequences} sequences were asked for; need at most {MOST}. Ask for fewer"
        )
    if length < 1:
        raise InputError(f"the length is {length}; need one token or more. Ask for more")


def check_model_is_named(config: SurveyConfig | FingerprintConfig) -> None:
    if not (config.models or config.untrained):
        raise InputError(
            NOTHING if isinstance(config, SurveyConfig) else f"no model was given; {TWO}"
        )
