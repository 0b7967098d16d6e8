"""What ``isolate``, ``amplify`` and ``ablate`` are asked: one frozen record each; torch is not needed to read it."""

from dataclasses import dataclass, field, fields

from ..chain.config import CONTROLS, Question, TraceConfig
from ..errors import InputError
from ..renamed import renamed_fields
from ..schema import CENTRES, FACTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig(Question):
    """What the three studies share. Never made by itself."""

    sequences: int = 8
    """How many sequences."""
    intervention_sequences: int | None = None
    """The most sequences that are edited. Default: as many as --sequences says."""
    intervention_length: int | None = field(default=None, metadata={"metavar": "T"})
    """The most positions of them that are edited, counted from the sink on. Default: the length, at least 16."""

    def question(self) -> TraceConfig:
        """The same as a trace has it: what the sink and the setting of the edits are found with."""
        shared = [one.name for one in fields(Question)] + ["controls"] * hasattr(self, "controls")
        return TraceConfig(
            intervention_sequences=self.sequences
            if self.intervention_sequences is None
            else self.intervention_sequences,
            intervention_length=max(16, self.length) if self.intervention_length is None else self.intervention_length,
            **{name: getattr(self, name) for name in shared},
        )


@renamed_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class IsolateConfig(StudyConfig):
    """Which positions are isolated, and where."""

    target_positions: tuple[int, ...] = field(default=(), metadata={"option": "target_position"})
    """A position to isolate, from 1 on; repeat for several. Default: a third of the length."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """In which layers, as 0-11 or 3,5. Default: all."""


@renamed_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AmplifyConfig(StudyConfig):
    """Which position is amplified, where, how much, and away from what."""

    target_position: int | None = None
    """The position that is amplified. Default: a third of the length."""
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


@renamed_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AblateConfig(StudyConfig):
    """Where the sets of neurons are looked for."""

    controls: int = CONTROLS
    """Draws of random sets, of each of the two kinds."""
