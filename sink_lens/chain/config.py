"""What ``trace`` is asked: one frozen record, written whole into ``run.json``."""

from dataclasses import dataclass

from ..data.described import BOS_ARMS, TOKEN_KINDS, check_described
from ..errors import InputError
from ..schema import MIN_SINK_RATE, SINK_THRESHOLD

__all__ = ["BOS_ARMS", "CONTROLS", "TOKEN_KINDS", "TraceConfig"]

CONTROLS = 5
"""Draws of every random control, unless others are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The question that a trace answers."""

    model: str
    """Default model's name, folder, GGUF file or hub name."""
    tokens: str = "text"
    """text, random (uniform ids) or repeated (one id a sequence)."""
    text: str | None = None
    """A text file to cut sequences from; None is the bundled prose."""
    prompts: tuple[str, ...] = ()
    """Prompts, one sequence each, instead of ``tokens``."""
    bos: str = "auto"
    """auto (what the tokenizer does), with, or without."""
    sequences: int = 32
    """How many sequences."""
    length: int = 64
    """Tokens a sequence, BOS included."""
    threshold: float = SINK_THRESHOLD
    """A head has a sink where its sink score is above it (Gu et al., arXiv 2410.10781)."""
    min_sink_rate: float = MIN_SINK_RATE
    """A position is a sink position where at least this share of (layer, head) has its sink there."""
    growth_factor: float = 2.0
    """A layer grows where the sink token's norm ratio is multiplied by at least this."""
    dominance_threshold: float = 25.0
    """A layer has outlier dimensions where max|h| / mean|h| of the sink token passes it."""
    energy_frac: float = 0.8
    """Outlier dimensions are the fewest that hold this share of the sink token's energy."""
    max_outliers: int = 8
    """Where more dimensions than this are needed for that energy, there are no outlier dimensions."""
    super_share: float = 0.05
    """A super neuron makes at least this share of its layer's change of the outlier dimension."""
    kernel: str = "auto"
    """Attention kernel of the measuring passes: auto, fused or eager."""
    batch_size: int | None = None
    """Sequences a forward; by length if None."""
    twin: bool = True
    """Measure the randomly initialised twin too, as a null."""
    cuts: bool = True
    """Cut every link too, and let a link hold only where measuring and cutting agree."""
    cut_sequences: int = 8
    """The most sequences that cuts use."""
    cut_length: int = 64
    """The most positions of them that cuts use, counted from the sink on."""
    position: int | None = None
    """The interior position at which cuts make a sink; None is a third of the sequences' length."""
    controls: int = CONTROLS
    """Draws of every random control: neurons, dimensions, positions."""
    device: str | None = None
    """Where the model goes; None picks."""
    dtype: str | None = None
    """Type of the weights; None is float32."""
    seed: int = 0
    """Seed of every generator of the run: tokens, bootstrap, controls, twin."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        check_described(self)
        if self.kernel not in ("auto", "fused", "eager"):
            raise InputError(f"kernel is {self.kernel!r}; need auto, fused or eager")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; need at least 1")
        if self.cut_sequences < 1:
            raise InputError(f"cut_sequences is {self.cut_sequences}; need at least 1")
        if self.cut_length < 16:
            raise InputError(f"cut_length is {self.cut_length}; need at least 16, so that there are other positions")
        if self.position is not None and self.position < 1:
            raise InputError(f"position is {self.position}; need an interior position, from 1 on")
        if self.controls < 1:
            raise InputError(f"controls is {self.controls}; need at least 1 draw")
        if self.max_outliers < 1:
            raise InputError(f"max_outliers is {self.max_outliers}; need at least 1")
        for name in ("threshold", "min_sink_rate", "energy_frac", "super_share"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise InputError(f"{name} is {value}; need a number between 0 and 1, both excluded")
        if not self.growth_factor > 1:
            raise InputError(f"growth_factor is {self.growth_factor}; need a factor above 1")
        if not self.dominance_threshold > 1:
            raise InputError(f"dominance_threshold is {self.dominance_threshold}; need a ratio above 1")
