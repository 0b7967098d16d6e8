"""What each study is asked: one frozen record each; torch is not needed to read it."""

from dataclasses import dataclass, field, fields

from ..chain.config import CONTROLS, Question, TraceConfig
from ..errors import InputError
from ..schema import CENTRES, FACTORS, QUANTISED_FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(Question):
    """What the three studies share. Never made by itself."""

    sequences: int = 8
    """How many sequences."""
    cut_sequences: int | None = None
    """The most sequences that are edited. Default: as many as --sequences says."""
    cut_length: int | None = field(default=None, metadata={"metavar": "T"})
    """The most positions of them that are edited, counted from the sink on. Default: the length, at least 16."""

    def question(self) -> TraceConfig:
        """The same as a trace has it: what the sink and the setting of the edits are found with."""
        shared = [one.name for one in fields(Question)] + ["controls"] * hasattr(self, "controls")
        return TraceConfig(
            cut_sequences=self.sequences if self.cut_sequences is None else self.cut_sequences,
            cut_length=max(16, self.length) if self.cut_length is None else self.cut_length,
            **{name: getattr(self, name) for name in shared},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolateConfig(StudyConfig):
    """Which positions are isolated, and where."""

    positions: tuple[int, ...] = field(default=(), metadata={"option": "position"})
    """A position to isolate, from 1 on; repeat for several. Default: a third of the length."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """In which layers, as 0-11 or 3,5. Default: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmplifyConfig(StudyConfig):
    """Which position is amplified, where, how much, and away from what."""

    position: int | None = None
    """The position. Default: a third of the length."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """In which layers, as 0-11 or 3,5. Default: from layer 0 to the end of the first growth step."""
    factors: tuple[float, ...] = field(default=FACTORS, metadata={"written": "commas", "metavar": "F,F"})
    """Factors, as 1,2,5,30; those under 1 attenuate."""
    centres: tuple[str, ...] = field(default=CENTRES, metadata={"option": "centre", "choices": CENTRES})
    """What is amplified away from; none is the norm-only control. Repeat for several."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        Question.__post_init__(self)
        if not self.factors or not self.centres:
            raise InputError("amplify was given no factor or no centre; need at least one of each")


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateConfig(StudyConfig):
    """Where the sets of neurons are looked for."""

    controls: int = CONTROLS
    """Draws of random sets, of each of the two kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseConfig(Question):
    """What is rounded to which format, and what is tried to be kept."""

    format: str = field(default="int8_tensor", metadata={"choices": QUANTISED_FORMATS, "metavar": "FORMAT"})
    """Format of the activations: int8, int4, fp8_e4m3 or fp8_e5m2, with _tensor (one scale a sequence), _token or
    _group (128 channels of a token) behind it; or mxfp4, nvfp4."""
    sites: tuple[str, ...] = field(default=(), metadata={"option": "site", "metavar": "SITE"})
    """A site to round; repeat for several. Default: the inputs of the linear layers (attn_in, z, mlp_in, neurons);
    resid_post is the stream."""
    cache: str | None = field(default=None, metadata={"choices": QUANTISED_FORMATS, "metavar": "FORMAT"})
    """Format of the KV cache; keys are rounded before their rotation. Default: it is not rounded."""
    weights: str | None = field(default=None, metadata={"choices": QUANTISED_FORMATS, "metavar": "FORMAT"})
    """Format of the weights, where they are not quantised already (_token is one scale an output channel). Default:
    they are not rounded."""
    channels: tuple[int, ...] = field(default=(1, 2, 4, 8, 16), metadata={"written": "commas", "metavar": "N,N"})
    """Numbers of channels that are kept at each site, as 1,2,4."""
    goal: float = 0.9
    """Share of the gap that a set must close to be chosen."""
    controls: int = 19
    """Draws of random tokens and channels of the chosen number."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        Question.__post_init__(self)
        for name in ("format", "cache", "weights"):
            value = getattr(self, name)
            if value is not None and value not in QUANTISED_FORMATS:
                raise InputError(f"{name} is {value!r}; need one of {', '.join(QUANTISED_FORMATS)}")
        if any(size < 1 for size in self.channels):
            raise InputError(f"channels are {list(self.channels)}; need numbers from 1 on")
        if not 0 < self.goal <= 1:
            raise InputError(f"goal is {self.goal}; need a share above 0, at most 1")
        if len(set(self.sites)) < len(self.sites):
            raise InputError(f"a site is named twice: {', '.join(self.sites)}; need each once")
        if self.cache is not None and {"k", "v"} & set(self.sites):
            raise InputError("k or v is named as a site, and a format of the cache was given; need one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingConfig(Question):
    """How large the cache is, and which tokens it keeps."""

    sequences: int = 16
    """How many sequences."""
    length: int = field(default=256, metadata={"metavar": "T"})
    """Tokens a sequence, BOS included; the loss is read beyond the window."""
    window: int = 64
    """Tokens that the cache holds, the kept ones and the query's own included."""
    keep: tuple[int, ...] = field(default=(0, 1, 2, 4, 8), metadata={"written": "commas", "metavar": "N,N"})
    """How many first tokens are never evicted, as 0,1,2,4,8."""
    positions: str = field(default="stay", metadata={"choices": ("stay", "reindexed")})
    """Whether a token stays at its position, or is at its place in the cache (arXiv 2309.17453; needs rotary
    positions)."""
    goal: float = 0.9
    """Share of the loss to be gained that a number of kept tokens must gain to be recommended."""
    controls: int = 5
    """Draws of random tokens that are kept instead."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        Question.__post_init__(self)
        if self.positions not in ("stay", "reindexed"):
            raise InputError(f"positions is {self.positions!r}; need stay or reindexed")
        if 0 not in self.keep or any(n < 0 for n in self.keep) or len(set(self.keep)) < max(2, len(self.keep)):
            raise InputError(f"keep is {list(self.keep)}; need 0, which the others are compared with, and others once")
        if self.window <= max(self.keep):
            raise InputError(f"a window of {self.window} cannot keep {max(self.keep)} tokens; need a larger window")
        if not 0 < self.goal <= 1:
            raise InputError(f"goal is {self.goal}; need a share above 0, at most 1")
