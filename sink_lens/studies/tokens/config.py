"""Configuration of ``sink-lens tokens``: a frozen record, written whole into ``run.json``; torch is not imported."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...chain.config import ReadConfig
from ...configuration import check_at_least
from ...errors import InputError
from ...schema import KernelChoice

if TYPE_CHECKING:
    from ... import estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig(ReadConfig):
    """Model, sequences, and what counts as a sink, a massive activation and a residual sink."""

    sequences: int = 32
    """Number of sequences."""
    length: int = field(default=256, metadata={"metavar": "T"})
    """Tokens per sequence, BOS included."""
    sink_threshold: float | None = None
    """A token is a sink if it receives this many times its fair share of attention. Default: the middle of the largest
    gap between scores."""
    massive_threshold: float | None = None
    """A token is massive if its norm is this many times the median of its sequence. Default: the middle of the largest
    gap between norms."""
    gap: float = 1.5
    """A gap separates the scores of tokens if its upper edge is at least this many times its lower one."""
    least_share: float = 2.5
    """Without sink_threshold: the tokens above the gap are sinks only if their median score is at least this."""
    least_norm: float = 4.0
    """Without massive_threshold: tokens above the gap are massive only if their median norm ratio is at least this."""
    energy_frac: float = 0.8
    """The outlier dimensions of a token are the fewest that hold this share of its energy."""
    max_outliers: int = 8
    """Maximum number of outlier dimensions of a token; if energy_frac needs more, none are reported."""
    dimension_factor: float = 20.0
    """A dimension is an outlier on a token if it is above this many times the token's median magnitude."""
    coverage: float = 0.5
    """A residual sink is a dimension that is an outlier on at least this share of the tokens that are not marked."""
    kernel: KernelChoice = "auto"
    """Attention kernel of the measuring pass."""
    seed: int = 0
    """Seed of random tokens."""

    def __post_init__(self) -> None:
        ReadConfig.__post_init__(self)
        check_at_least(self, 1, "max_outliers")
        for name in ("energy_frac", "coverage"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is {getattr(self, name)}; need a share above 0, at most 1"
                )
        for name in (
            "gap",
            "dimension_factor",
            "least_share",
            "least_norm",
            "sink_threshold",
            "massive_threshold",
        ):
            value = getattr(self, name)
            if value is not None and not value > 1:
                raise InputError(
                    f"{name} is {value}; need a number above 1, which is the ordinary token's"
                )

    @property
    def given_thresholds(self) -> dict[str, float | None]:
        """Score -> the threshold that was asked for."""
        return {"attention": self.sink_threshold, "norm": self.massive_threshold}

    @property
    def least_scores(self) -> dict[str, float]:
        """Score -> the least median of marked tokens."""
        return {"attention": self.least_share, "norm": self.least_norm}


def count_token_passes(config: TokensConfig, sizes: "estimate.Sizes") -> "estimate.PassCounts":
    from ..passes import passes_over_sequences

    return passes_over_sequences(config, sizes, forwards=1)
