"""The configuration of ``trace``: a frozen record, written whole into ``run.json``."""

import math
from dataclasses import dataclass, field, fields, replace

from ..configuration import check_at_least, check_at_most, check_field_types
from ..data.described import TOKENS_TABLE, BosCondition, TokenKind, check_input_config
from ..errors import InputError
from ..schema import (
    DEFAULT_MODEL,
    LEAST_SINK_THRESHOLD,
    MIN_SINK_RATE,
    SINK_THRESHOLD,
    KernelChoice,
)

__all__ = ["CONTROLS", "TraceConfig"]

CONTROLS = 19
"""Draws of random controls, unless others are asked for: to beat the largest of 19 is a test at 5%."""
MOST_CONTROLS = 10_000
FEW_CONTROLS = 5
"""Draws of controls whose mean or loss is read, of random sets of makers (beating all five is a test at 1 in 6), and
first ones of an intervention that answers no question of its link."""
CONTROL_SEQUENCES, QUICK_CONTROL_SEQUENCES = 8, 4
"""Maximum number of sequences for controls, out of those of the interventions: in a full and in a quick trace."""
CHOOSING_SEQUENCES, QUICK_CHOOSING_SEQUENCES = 12, 8
"""The same for sequences on which makers are searched."""
CONTROL_LENGTH, CONTROL_MARGIN = 24, 0.1
"""Positions from the edited one on that controls are run on first. Where the largest, if it moved this share of the
sink more or less, could pass an end of its intervention's interval, those that could are run on all positions."""
PATH_LENGTH, PATH_CONTROLS = 24, 3
"""Positions from the sink on that the paths are read at, and most draws of their controls."""
_FULL_AND_QUICK = {"intervention_sequences": (20, 8), "controls": (CONTROLS, FEW_CONTROLS)}
"""Option -> its default in a full and in a quick trace."""
EVERY_INTERVENTION = "intervention"
"""Name of the floor that every intervention's share of the sink must lie over."""
THRESHOLDS = (
    "threshold",
    "min_sink_rate",
    "growth_factor",
    "dominance_threshold",
    "energy_frac",
    "max_outliers",
    "super_share",
)
"""Fields that say what counts as a sink, as growth, as an outlier dimension and as a super neuron; the verdicts' error
rates were measured with their defaults, and with those of ``floors``."""


def check_least_threshold(threshold: float) -> None:
    if threshold < LEAST_SINK_THRESHOLD:
        raise InputError(
            f"threshold is {threshold}; need at least {LEAST_SINK_THRESHOLD}: below, the sampled queries of a sequence "
            "are too few to tell a sink"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """Base of every configuration that reads one model on sequences: model, tokens, device and seed."""

    model: str = field(default=DEFAULT_MODEL, metadata={"positional": True})
    """The default model's name, a folder written by save_pretrained, a .gguf file or a hub name."""
    text: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Text file (UTF-8) to cut the sequences from. Default: bundled prose."""
    prompts: tuple[str, ...] = field(default=(), metadata={"option": "prompt"})
    """A prompt, one sequence; repeat for several. Instead of text."""
    tokens: TokenKind = field(default="text", metadata={"table": TOKENS_TABLE})
    """Text, uniformly random ids, or one id repeated."""
    bos: BosCondition = "auto"
    """First token of each sequence: as the tokenizer puts it (auto), BOS (with), or no BOS (without)."""
    sequences: int = 16
    """Number of sequences."""
    length: int = field(default=64, metadata={"metavar": "T"})
    """Tokens per sequence, BOS included."""
    batch_size: int | None = None
    """Sequences per forward pass. Default: by length."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16 or float64. Default: float32."""
    seed: int = 0
    """Seed of every random choice: tokens, bootstrap, controls."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_input_config(self)
        check_at_least(self, 1, "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(ReadConfig):
    """Configuration of a trace."""

    sequences: int = 32
    """Number of sequences."""
    threshold: float = SINK_THRESHOLD
    """A head has a sink if its sink score is above this (Gu et al., arXiv 2410.10781)."""
    min_sink_rate: float = MIN_SINK_RATE
    """A position is a sink position if at least this share of (layer, head) has its sink there."""
    growth_factor: float = 2.0
    """A layer is part of a growth step if it multiplies the sink token's norm ratio by at least this."""
    dominance_threshold: float = 25.0
    """A layer has outlier dimensions if max|h| / mean|h| of the sink token is above this, or if they leave at most a
    quarter of the energy that as many of the largest dimensions of a random token leave."""
    energy_frac: float = 0.8
    """Outlier dimensions are the fewest that hold this share of the sink token's energy."""
    max_outliers: int = 8
    """Maximum number of outlier dimensions; if energy_frac needs more, none are reported."""
    kernel: KernelChoice = "auto"
    """Attention kernel of the measuring passes."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16, float64, or auto: the checkpoint's own. Default: float32."""
    device_map: str | None = field(default=None, metadata={"metavar": "NAME"})
    """auto spreads the model over GPUs, memory and disk. A model that is partly on disk gets no interventions."""
    max_memory: str | None = field(default=None, metadata={"metavar": "SIZE"})
    """Maximum main memory for the weights, such as 8GB, with device_map. Default: what is free."""
    revision: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Branch, tag or commit of a hub name."""
    seed: int = 0
    """Seed of every random choice: tokens, bootstrap, controls, and a trace's random-init baseline."""

    at: str | None = field(default=None, metadata={"file_only": True})
    """Trace a sink that is a token and not a position: its text, its id, or auto for the token that draws the most
    attention away from position 0. Sequences are cut so that each has one occurrence, all at the same position."""
    super_share: float = 0.05
    """A super neuron makes at least this share of its layer's change of the outlier dimension."""
    random_init: bool = True
    """Measure the random-init baseline too (the same configuration, fresh weights), as a null."""
    interventions: bool = True
    """Intervene on every link too; a link then holds only if measurement and intervention agree."""
    quick: bool = False
    """Quick look: interventions on 8 sequences and 5 controls on 4 of them, unless other numbers are asked for."""
    intervention_sequences: int = None  # type: ignore[assignment]  # resolved below
    """Maximum number of sequences for interventions, spread over the text; makers are searched on the others, and on
    the same ones where no others are left. Default: 20, and 8 in a quick trace."""
    intervention_length: int = field(default=64, metadata={"metavar": "T"})
    """Maximum number of positions of each of these sequences, counted from the sink on."""
    target_position: int | None = None
    """Interior position at which interventions make a sink. Default: a third of the length."""
    controls: int = None  # type: ignore[assignment]
    """Number of draws of random controls that an answer hangs on: neurons, dimensions, directions, positions. Others,
    and random sets of makers, have at most 5. Default: 19, and 5 in a quick trace."""
    floors: tuple[str, ...] | None = field(
        default=None, metadata={"option": "floor", "metavar": "LINK=VALUE", "written": "pairs"}
    )
    """Floor of a link's primary statistic, such as variance_preserved=0.2, or of the share of the sink that each
    intervention must move, such as intervention=0.5; repeat for several."""

    def __post_init__(self) -> None:
        for name, numbers in _FULL_AND_QUICK.items():
            if getattr(self, name) is None:  # what is no bool is refused with the other fields
                object.__setattr__(self, name, numbers[self.quick is True])
        ReadConfig.__post_init__(self)
        check_at_least(self, 1, "intervention_sequences", "max_outliers", "controls")
        check_at_most(self, MOST_CONTROLS, "controls")
        check_at_least(self, 16, "intervention_length")  # so that there are other positions
        for name in ("threshold", "min_sink_rate", "energy_frac", "super_share"):
            if not 0 < (value := getattr(self, name)) < 1:
                raise InputError(f"{name} is {value}; need a number between 0 and 1, both excluded")
        check_least_threshold(self.threshold)
        for name in ("growth_factor", "dominance_threshold"):
            if not (value := getattr(self, name)) > 1:
                raise InputError(f"{name} is {value}; need a number above 1")
        if not isinstance(self.at, str | None):
            raise InputError(f"at is {self.at!r}; need a text: a token, its id in digits, or auto")
        if self.target_position is not None and self.target_position < 1:
            raise InputError(
                f"target_position is {self.target_position}; need an interior position, from 1 on"
            )
        for pair in self.floors or ():
            name, _, number = pair.partition("=")
            try:
                finite = name.strip() != "" and math.isfinite(float(number))
            except ValueError:
                finite = False
            if not finite:
                raise InputError(
                    f"a floor is {pair!r}; need LINK=NUMBER, such as variance_preserved=0.2"
                )

    def quickly(self) -> "TraceConfig":
        """Return the configuration of a quick trace: defaults of a full one are replaced by the quick one's."""
        unasked = [
            name for name, (full, _) in _FULL_AND_QUICK.items() if getattr(self, name) == full
        ]
        return replace(self, quick=True, **dict.fromkeys(unasked))  # type: ignore[arg-type]

    @property
    def most_control_sequences(self) -> int:
        return QUICK_CONTROL_SEQUENCES if self.quick else CONTROL_SEQUENCES

    @property
    def most_choosing_sequences(self) -> int:
        return QUICK_CHOOSING_SEQUENCES if self.quick else CHOOSING_SEQUENCES

    @property
    def floors_by_link(self) -> dict[str, float]:
        """Link (or ``EVERY_INTERVENTION``) -> the floor that the user set."""
        pairs = (pair.partition("=") for pair in self.floors or ())
        return {name.strip(): float(value) for name, _, value in pairs}

    @property
    def changed_thresholds(self) -> tuple[str, ...]:
        """Names of the floors and thresholds that are not the defaults."""
        defaults = {one.name: one.default for one in fields(self)}
        return tuple(
            name
            for name in (*THRESHOLDS, "floors")
            if (getattr(self, name) or None) != (defaults[name] or None)
        )
