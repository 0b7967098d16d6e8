"""Names that several packages share: verdicts and thresholds, and every table's columns.

Each table is described once, as data: a kind of run (`sink_lens.kinds`) names a TOML file that lists its tables, what
one row is, and the type, unit and meaning of each column. The tests refuse a table that does not match its description,
and the reference in the documentation is generated from it.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Literal, get_args

from ..kinds import all_kinds

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Name of the bundled model; no model on the hub has this name."""
NOT_IN_BASIS = "not in this basis"
"""Verdict on a link about single dimensions where none dominates, and what is written holds in its own direction."""
VERDICTS = {
    "holds": "✓",
    "in part": "◐",
    "fails": "✗",
    NOT_IN_BASIS: "∠",
    "present, not tested": "○",
    "absent": "◌",
    "undecided": "?",
    "mixed": "±",
    "not applicable": "∅",
    "not asked": "·",
    "not measured": "–",
}
"""Verdict -> its sign. *Holds*, *in part* and *fails* are said of what was intervened on, and of nothing else."""
UNTESTED = {"yes": "present, not tested", "no": "absent"}
"""Whether a link is present -> the verdict on it if it was not intervened on."""
FROZEN = ("z", "neurons", "dimensions", "key")
"""Quantities that mediation freezes at their baseline value, in the order of the chain."""

SINK_THRESHOLD = 0.3
"""Default threshold: a head has a sink where its sink score is above this (Gu et al., arXiv 2410.10781)."""
LEAST_SINK_THRESHOLD = 2 / 64
"""Lowest threshold at which a trace or a card can tell sinks: they sample 64 queries, and it takes 2 / threshold."""
COUNTED_QUERIES = 16
"""Queries after a position from which on an attention to it can tell a late sink from looking back a little."""
MIN_SINK_RATE = 0.05
"""A position is a sink position if at least this share of all (layer, head, sequence) have their sink at it."""
LEAST_SINK = 0.05
"""Where the model's own sink has less attention than this over uniform attention, a share of it means nothing."""
LEAST_SHARE = 0.05
"""An intervention that makes or removes less than this share of the sink does nothing."""
INTERVENTION_FLOOR = 0.25
"""An intervention confirms its link if it makes or removes more than this share of the sink."""
LOST_FRAC = 0.5
"""A sink counts as removed from a position that lost at least this share of its mass."""
GAINED_FRAC = 0.25
"""A sink counts as made at a position that gained at least this share of the mass of the model's own sink."""
ANOTHER_PATH = 0.5
"""A link does not carry the sink if more than this share of the sink survives while the link is frozen."""
ALL_STEPS = -2
"""Number that stands for all growth steps together, where a row is of one growth step."""
SIZE = "value averages at the ordinary size"
DIRECTION = "value averages in the ordinary direction"
DISTANCE = "value averages at the ordinary distance from the text's mean"
"""The three interventions on the sink's value averages: their size alone, their direction alone, and both by their
distance from the mean over ordinary tokens."""
PATH = "what super neurons write into the outlier dimensions, taken from the key"
"""The intervention that the key alone sees."""
OWN_RATIO = "own_direction_ratio"
"""The statistic of the links about dimensions where no dimension dominates: the sink token's length in its own few
principal directions, over the norm of other tokens."""
WRITTEN = "what super neurons write, taken from the key"
OWN = "the token's own directions, mean ablated"
OWN_IN_KEY = "the token's own directions in the key, mean ablated"
"""The interventions of the links about dimensions where no dimension dominates."""
SPAN, RESCALED = (
    "span of what the makers write, mean ablated",
    "rescaled to the norm without that span",
)
"""The intervention on a direction, and its control that takes the norm away and not the direction."""
ALL_BUT = "all but the outlier dimensions in the key, mean ablated"
"""The intervention beside that on the dimensions' part of the key."""
FEW = 5
"""Intervals over fewer sequences than these are marked where they are shown."""
LEAST_PATH = 0.05
"""A path that moves less of the sink than this has no controls and is not drawn; the tables have it."""
LEAST_ADDED = 0.02
"""Surviving shares are undefined if an intervention adds less attention than this."""

ANSWERS = ("yes", "in part", "no", "undecided", "not applicable", "not tested", "not asked")
"""What a question about a link may be answered."""
QUESTIONS = {
    "present": "Does what the link leads to stand out at the sink position, over its nulls?",
    "necessary_or_sufficient": "Does breaking the link remove the sink (for the first link: does isolating another "
    "position make one), over the largest of its controls?",
    "carries": "Does the sink go where what the link leads to is mean ablated (for the first link: where the value "
    "average gets the ordinary distance from the mean), over the largest of its controls?",
}
"""Question about a link -> what it asks."""
DERIVED: tuple[tuple[str, str, str, str], ...] = (
    ("not applicable", "any", "any", "not applicable"),
    ("any", "not applicable", "any", "not applicable"),
    ("not asked", "any", "any", "not asked"),
    ("any", "no", "any", "fails"),
    ("no", "any", "no", "fails"),
    ("yes", "yes", "yes", "holds"),
    ("yes", "yes", "in part", "in part"),
    ("yes", "in part", "yes", "in part"),
    ("yes", "in part", "in part", "in part"),
    ("any", "any", "any", "undecided"),
)
"""The verdict on a link from its three answers, in the order of QUESTIONS: the first row that fits. Only an answer that
is undecided can change with more sequences, and then the verdict was undecided too."""
COSTLY = 0.25
"""An intervention is off-distribution where the lower end of its loss, over that of masking the sink, is above this
many nats."""
ERROR_RATES = (
    "0 of 507 intact links were said to fail, 0 of 261 others to hold, and 0 of 45 models without a sink to have one; "
    "0 of 175 headlines had an untrue phrase. On 175 traces of models whose mechanism was written by hand, one for "
    "each model and architecture (docs/zoo.md, with the answers that are wrong more often). None of these models is "
    "larger than a few million parameters."
)
"""How often verdicts with default floors and 20 sequences were wrong (the analysis ``verdict_calibration``)."""
FINGERPRINT_ERRORS = (
    "How often this answer is wrong: of 183 pairs of unrelated models of 0.3M and 3.4M parameters, 2 were said to have "
    "begun with the same weights."
)
"""With random tokens and the relabelled null at p < .01 (the analysis ``fingerprint_calibration``)."""
TELLING_LOSS = 0.9
"""Cost is asked only of models whose baseline loss is below this share of the loss of uniform guessing."""

Dtype = Literal["int", "float", "bool", "str", "any"]
"""The kinds of column type, whatever their width; *any* holds numbers and text. An *int* column with missing values may
be stored as whole floats, as pandas does."""

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "1": "a pure number, such as a ratio",
        "share": "a part of a whole, 0 to 1; a part of a change has either sign and may pass 1",
        "attention": "attention that a position receives, 0 to 1: the weight itself in every softmax (with a learned "
        "sink logit, rows sum to less than 1), a share of what the row sums to in sigmoid attention; averaged over the "
        "queries whose sliding window reaches the position",
        "cosine": "-1 to 1",
        "tau": "Kendall's tau-b, -1 to 1",
        "nats": "natural-log units of loss",
        "logits": "attention scores before the softmax",
        "p": "a p-value, 0 to 1",
        "log10 p": "the logarithm to base 10 of a p-value, 0 or less",
        "stream": "the units of the activations at the site",
        "directions": "a number of directions, 1 or more",
        "index": "a number counted from 0",
        "rank": "a number counted from 1, the largest first",
        "count": "how many",
        "tokens": "a number of tokens",
        "steps": "optimiser steps",
        "seconds": "seconds",
        "token id": "a row of the model's vocabulary",
        "yes or no": "true or false",
        "name": "one of a few words",
        "text": "for people to read",
        "list": "values in one text, with commas or ranges",
        "hash": "a SHA-256 in hexadecimal digits",
        "of the row": "stated in the column `unit` of the same row",
        "of the measure": "the unit of the statistic or measure that the row names",
        "of the metric": "the unit of the metric",
    }
)
"""Unit -> its meaning. Columns use only these units."""


@dataclass(frozen=True, slots=True)
class Column:
    """The description of one column of a table: name, type, unit and meaning."""

    name: str
    dtype: Dtype
    unit: str
    """One of `UNITS`."""
    meaning: str
    """One sentence: what the number is, what it is averaged over, and when it is nan."""
    optional: bool = False
    """True if some runs of this kind write the table without this column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The description of one table of a kind of run: its file, what a row describes, and its columns."""

    name: str
    """File name without the ending; * stands for a number."""
    row: str
    """What one row describes."""
    columns: tuple[Column, ...]
    when: str = ""
    """Which runs write the table; all of them if empty."""
    file: Literal["parquet", "csv"] = "parquet"
    open: bool = False
    """True if the caller may add columns of its own, or put its own values into the optional columns."""


def table_of(kind: str, name: str) -> Table | None:
    for table in tables_of(kind):
        start, star, end = table.name.partition("*")
        if name == table.name or (star and name.startswith(start) and name.endswith(end)):
            return table
    return None


def column_names(kind: str, name: str) -> list[str]:
    table = table_of(kind, name)
    assert table is not None, (kind, name)
    return [column.name for column in table.columns]


def column_meanings(kind: str, columns: Iterable[str]) -> dict[str, str]:
    """Return column -> meaning for those of ``columns`` that stand in the kind's table which has most of them."""
    asked = set(columns)
    known = [
        {one.name: one.meaning for one in table.columns if one.name in asked}
        for table in tables_of(kind)
    ]
    return max(known, key=len, default={})


_COLUMN = re.compile(r"(int|float|bool|str|any), ([^.]+)\. (.+)")
_NAME = re.compile(r"(\w+)(?:/(\w+))?(\??)")


def tables_of(kind: str) -> tuple[Table, ...]:
    return _read_tables(kind) if kind in all_kinds() else ()


@functools.cache
def _read_tables(kind: str) -> tuple[Table, ...]:
    """Read the descriptions of a kind of run's tables from its TOML file.

    A column is `name = "type, unit. Meaning."`; a name that ends in `?` is an optional column, and `low/high` makes two
    columns, the ends of an interval.
    """
    package, _, file = all_kinds()[kind].tables.partition(":")
    described = tomllib.loads(resources.files(package).joinpath(file).read_text(encoding="utf-8"))
    tables = []
    for name, rest in described.items():
        columns = [
            column for line in rest.pop("columns").items() for column in _parse_column_line(*line)
        ]
        tables.append(Table(name=name, columns=tuple(columns), **rest))
    return tuple(tables)


def _parse_column_line(name: str, text: str) -> list[Column]:
    first, last, optional = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    dtype, unit, meaning = _COLUMN.fullmatch(text).groups()  # type: ignore[union-attr]
    meanings = {first: meaning}
    if last:
        ends = ((first, "Lower"), (last, "Upper"))
        meanings = {
            each: f"{end} end of the {meaning[:-1]}; nan if there is no interval."
            for each, end in ends
        }
    given = {"dtype": dtype, "unit": unit, "optional": bool(optional)}
    return [Column(name=each, meaning=meaning, **given) for each, meaning in meanings.items()]


NullName = Literal["analytical", "matrices", "pipeline", "shuffled", "relabelled"]
NULLS: tuple[NullName, ...] = get_args(NullName)
"""Null distributions for the mean Kendall tau of a fingerprint; the published nulls come first."""
Centre = Literal["values", "aggregated", "none"]
"""What the variance of a token is amplified away from: the mean of the values, of the aggregated ones, or nothing."""
CENTRES: tuple[Centre, ...] = get_args(Centre)
FACTORS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)
"""Factors of the amplification, those of arXiv 2605.06611."""
Mean = Literal["mean_ordinary", "mean_all", "mean_aligned"]

MEANS: Mapping[Mean, str] = {
    "mean_ordinary": "the mean over all sequences and positions of the baseline run; left out are the sinks that "
    "sink_mask finds there by attention or by norm, padding, and nothing else",
    "mean_all": "the mean over all sequences and positions of the baseline run, sinks included; padding is left out",
    "mean_aligned": "the mean over the sequences of the baseline run at the same position; padding is left out",
}
"""Name of a mean -> what a part is set to."""
CARD_SCHEMA = "sink_lens.card/1"
"""Version of a card's JSON; the number grows where a field goes or changes its meaning."""
QuantisedFormat = Literal[
    "int8_tensor",
    "int8_token",
    "int8_group",
    "int4_tensor",
    "int4_token",
    "int4_group",
    "fp8_e4m3_tensor",
    "fp8_e4m3_token",
    "fp8_e4m3_group",
    "fp8_e5m2_tensor",
    "fp8_e5m2_token",
    "fp8_e5m2_group",
    "mxfp4",
    "nvfp4",
]
"""Simulated formats: the element type and what shares a scale."""
QUANTISED_FORMATS: tuple[QuantisedFormat, ...] = get_args(QuantisedFormat)
LINEAR_INPUTS = ("attn_in", "z", "mlp_in", "neurons")
"""Sites that linear layers read."""
KernelChoice = Literal["auto", "fused", "eager"]
"""Attention kernel that is asked for; auto takes the fused one if it is exact (``activations.attention``)."""
WORTH_KEEPING_NATS = 0.01
"""A loss that rises by less than this, 1% in perplexity, is not worth a protection."""
