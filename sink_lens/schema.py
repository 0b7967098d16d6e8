"""Names that rooms share: links, nodes and verdicts of the chain, thresholds, and the columns of every table.

A table is described once, here: `TABLES` says of each kind of run which tables it writes, what a row is, and of each
column its type, unit and meaning. The tests refuse a table that is written otherwise, and the documentation's
reference is made from it. To add a column: write it where the table is made, and its line here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

NODES = (
    "value aggregation",
    "variance discrepancy",
    "variance after W_O",
    "super neurons",
    "outlier dimension",
    "the sink's key",
    "attention sink",
)
"""What the chain's links join, in order."""
LINKS = {
    "aggregation_variance": "Averaging over more tokens lowers the variance of what attention reads, so the "
    "first token keeps the most.",
    "variance_preserved": "The attention output projection W_O passes that difference on.",
    "variance_neurons": "The difference makes super neurons fire at the sink token only.",
    "neurons_dimension": "Super neurons write the outlier dimension of the sink token.",
    "dimension_key": "After the norm, the outlier dimension alone fixes the sink's key.",
    "key_sink": "Queries meet that key, so attention goes to it.",
}
"""Name of a link -> what it claims; one more node of NODES each."""
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "mixed": "±", "not applicable": "∅", "not measured": "–"}
"""Verdict -> its sign."""
HOLDS = ("z", "neurons", "dimensions", "key")
"""What mediation keeps at its clean value, in the order of the chain."""

SINK_THRESHOLD = 0.3
"""A head has a sink where its sink score is above this, unless asked otherwise (Gu et al., arXiv 2410.10781)."""
MIN_SINK_RATE = 0.05
"""A position is a sink position where at least this share of (layer, head, sequence) has its sink there."""
LEAST_SINK = 0.05
"""Where the model's own sink has less attention than this over uniform attention, a share of it means nothing."""
INTERVENTION_FLOOR = 0.25
"""An intervention shows its link where it makes or removes more than this share of the sink."""
LOST_FRAC = 0.5
"""A sink is gone from a position that lost at least this share of its mass."""
GAINED_FRAC = 0.25
"""A sink has come to a position that gained at least this share of what the old one had."""
ANOTHER_PATH = 0.5
"""A link does not carry the sink where more than this share survives while it is held."""
LEAST_ADDED = 0.02
"""Where an intervention adds less attention than this, shares of it mean nothing."""
NORM_ALONE = 2.0
"""Where the norm-only control brings this many times the attention, it is said."""

Dtype = Literal["int", "float", "bool", "str", "any"]
"""Family of a column's type, of any width; *any* holds numbers and text. An *int* with missing values may be stored
as whole floats, as pandas does."""

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
        "weights": "the units of the parameters",
        "directions": "a number of directions, 1 or more",
        "index": "a number counted from 0",
        "rank": "a number counted from 1, the largest first",
        "keys": "a number of keys",
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
"""Unit -> what it is; the closed list."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    dtype: Dtype
    unit: str
    """One of `UNITS`."""
    meaning: str
    """A sentence: what the number is, over what it is averaged, and when it is nan."""
    optional: bool = False
    """Some runs of this kind write the table without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a run folder."""

    name: str
    """Its file without the ending; * stands for a number."""
    row: str
    """What one row is."""
    columns: tuple[Column, ...]
    when: str = ""
    """Which runs have it; all if empty."""
    file: Literal["parquet", "csv"] = "parquet"
    open: bool = False
    """The caller may have named further columns, or put values of its own into the optional ones."""

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.columns if column.name == name)


def table_of(kind: str, name: str) -> Table | None:
    """The table that a kind of run writes under a name; None where none is described."""
    for table in TABLES.get(kind, ()):
        start, star, end = table.name.partition("*")
        if name == table.name or (star and name.startswith(start) and name.endswith(end)):
            return table
    return None


_LINE = re.compile(r"(\w+)(?:/(\w+))?(\??): (int|float|bool|str|any), ([^.]+)\. (.+)")


def _table(
    name: str,
    row: str,
    text: str,
    *,
    when: str = "",
    file: Literal["parquet", "csv"] = "parquet",
    open: bool = False,
) -> Table:
    """A table whose columns are lines `name: type, unit. Meaning.`; a long line goes on in the next one.

    `name?` is optional. `low/high` are two columns: the ends of the interval that the line names.
    """
    lines: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if _LINE.match(line):
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    columns: list[Column] = []
    for line in lines:
        first, last, optional, dtype, unit, meaning = _LINE.fullmatch(line).groups()  # type: ignore[union-attr]
        given = {"dtype": dtype, "unit": unit, "optional": bool(optional)}
        if last:
            columns += [
                Column(name=each, meaning=f"{end} end of the {meaning[:-1]}; nan where there is none.", **given)
                for each, end in ((first, "Lower"), (last, "Upper"))
            ]
        else:
            columns.append(Column(name=first, meaning=meaning, **given))
    return Table(name=name, row=row, columns=tuple(columns), when=when, file=file, open=open)


_NEW = "the position where the edit is to make a sink"

_OLD = "the model's own sink position"

_TOKENS = _table(
    "tokens",
    "one token of one sequence; padding has no row",
    """
    sequence: int, index. Sequence of the run.
    position: int, index. Position in the sequence.
    token_id: int, token id. The token's id.
    text: str, text. The token decoded alone; `<id>` where the tokenizer does not know it.
    """,
)

_HEADS = _table(
    "heads",
    "one head at one sink position; numbers are means over sequences",
    """
    layer: int, index. Layer.
    head: int, index. Query head.
    position: int, index. Sink position; the studied one is in the first rows.
    sink_score: float, attention. Mean attention to the position from the queries at and after it that can see it;
        nan where the layer's window is so short that uniform attention alone passes the threshold.
    sink_rate: float, share. Share of sequences whose sink score is above the run's threshold; nan likewise.
    sink_mass: float, attention. Mean attention to the position from the queries after it that can see it.
    key_rank: float, keys. How many keys draw more attention than the position, over later queries that can see it.
    value_norm_ratio: float, 1. Norm of the position's value after W_O over the mean of the other positions' norms.
    positive_share: float, share. Share of later queries whose product with the position's key, before rotation, is
        positive.
    entropy: float, nats. Entropy of an attention row, mean over sampled rows.
    gini: float, 1. Gini coefficient of an attention row over its visible keys, 0 where uniform, mean over sampled rows
        of the first few sequences.
    null_mass: float, attention. 1 less the sum of an attention row; nan where rows are no softmax.
    stable_rank: float, directions. Stable rank of what the head writes over a sequence, mean over the first few
        sequences.
    qk_alignment: float, cosine. Magnitude of the cosine between the direction that most queries share and the key that
        the strongest outlier dimension of the studied position writes; nan where no outlier dimension enters the layer.
    label: str, name. What a sink head writes: no-op (value_norm_ratio up to 0.2), broadcast (above), or undecided;
        empty where the head has no sink here.
    """,
)

_TRACE = (
    _TOKENS,
    _table(
        "chain",
        "one link of the chain, in its order",
        """
        order: int, index. Place of the link in the chain.
        link: str, name. Name of the link.
        source: str, name. Node that the link leads from.
        target: str, name. Node that the link leads to.
        sentence: str, text. What the link claims.
        question: str, text. What its primary statistic asks.
        """,
    ),
    _HEADS,
    _table(
        "positions",
        "one sampled position at one site after one layer; numbers are means over sequences",
        """
        layer: int, index. Layer.
        site: str, name. Where it is read: z, attn_out, mlp_out or resid_post.
        position: int, index. Sampled position: all up to 64 positions, else the first and some later.
        s1: float, stream. S1: standard deviation over sequences, mean over values; nan where fewer than two sequences
            reach.
        s2: float, stream. S2: standard deviation within the token.
        norm: float, stream. Euclidean norm of the token.
        """,
    ),
    _table(
        "layers",
        "one layer at the studied position; numbers are means over sequences, and of attention over heads",
        """
        layer: int, index. Layer.
        position: int, index. Sink position that is studied.
        sink_score: float, attention. Mean attention to it from the queries at and after it that can see it.
        sink_mass: float, attention. Mean attention to it from the queries after it that can see it.
        norm: float, stream. Norm of its residual stream after the layer.
        norm_ratio: float, 1. That norm over the median norm of the other positions from 8 on.
        outlier_dimension: int, index. Dimension with the most energy after the layer.
        outlier_value: float, stream. Value of that dimension.
        dominance_ratio: float, 1. Largest magnitude of its stream over the mean magnitude.
        dominance_ratio_fixed: float, 1. Mean magnitude of that one dimension over the mean magnitude of the others: a
            ratio of means.
        dominance_elsewhere: float, 1. Median dominance ratio of the positions from 8 on.
        massive_ratio: float, 1. Largest magnitude of its stream over the median magnitude.
        massive_activations: float, count. Entries of its stream over 100 in magnitude and at least 1000 times the
            median.
        effective_rank: float, directions. Effective rank of a sequence's states after the layer, mean over the first
            few sequences.
        effective_rank_without: float, directions. The same without the studied position.
        value_std: float, stream. Standard deviation within a value vector, positions from 8 on.
        z_std: float, stream. Standard deviation within its aggregated value z (its S2).
        """,
    ),
    _table(
        "law",
        "one query position in one layer",
        """
        layer: int, index. Layer.
        position: int, index. Sampled query position.
        s2: float, stream. S2 of the aggregated value z there, mean over sequences.
        uniform_law: float, stream. What uniform attention would give: value_std over sqrt(position + 1).
        weighted_law: float, stream. What the real attention would give over independent values: value_std times the
            root of the mean sum of squared weights.
        """,
    ),
    _table(
        "dimensions",
        "one of the strongest dimensions of one sink position after one layer, the strongest first",
        """
        layer: int, index. Layer.
        position: int, index. Sink position.
        dimension: int, index. Dimension of the residual stream.
        value: float, stream. Its value there, mean over sequences.
        dominance_ratio: float, 1. Dominance ratio of the whole token there, mean over sequences.
        is_outlier: bool, yes or no. Whether it is an outlier dimension by the run's thresholds.
        """,
    ),
    _table(
        "growth_steps",
        "one growth step of the studied position; no row where there is none",
        """
        step: int, index. Number of the growth step.
        first_layer: int, index. First layer of the step.
        last_layer: int, index. Last layer of the step.
        ratio_before: float, 1. Norm ratio of the position before the first layer.
        ratio_after: float, 1. Norm ratio of the position after the last layer.
        position: int, index. Sink position that is studied.
        outlier_dimension: int, index. Dimension with the most energy after the last layer.
        split_error: float, share. Largest gap between the sum of the neurons' contributions and the MLP's output, over
            the change of the dimension; nan where neurons have no site.
        """,
    ),
    _table(
        "neurons",
        "one neuron of a growth layer at one sink position; numbers are means over sequences",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP.
        position: int, index. Sink position.
        activation: float, stream. Activation there, as the down-projection reads it.
        spike_ratio: float, 1. Mean magnitude of the activation there over that at the positions that are no sink;
            infinite for a neuron that is silent elsewhere, nan for one that is always silent.
        contribution: float, stream. What the neuron adds to the step's outlier dimension there.
        contribution_share: float, share. Contribution over the layer's change of that dimension, a ratio of means; nan
            where nothing changes.
        outlier_dimension: int, index. The growth step's outlier dimension.
        gate_norm_rank: int, rank. Rank of the norm of its gate row in the layer; missing where the MLP has no gate.
        up_norm_rank: int, rank. Rank of the norm of its up row in the layer.
        column_kurtosis: float, 1. Excess kurtosis of its down-projection column, 0 for a Gaussian one; nan for a
            constant one.
        top_dimension: int, index. Dimension that its down-projection column writes most to.
        is_super: bool, yes or no. Whether it is a super neuron, at any of the sink positions.
        """,
    ),
    _table(
        "selectivity",
        "one super neuron at one sampled position; numbers are means over sequences",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP.
        position: int, index. Position in the sequence.
        cosine: float, cosine. Cosine of the MLP's input with the gate row (the up row without gate).
        up: float, stream. Projection of the MLP's input on the up row.
        gate: float, stream. Projection on the gate row (the up row without gate), pre-activation.
        """,
    ),
    _table(
        "columns",
        "one of the largest entries of a super neuron's down-projection column, the largest first",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP.
        dimension: int, index. Dimension that the entry writes to.
        weight: float, weights. The entry.
        energy_share: float, share. Its square over the column's sum of squares; nan for zeros.
        """,
    ),
    _table(
        "criteria",
        "one other criterion for super neurons in one growth layer that has them",
        """
        layer: int, index. Layer.
        criterion: str, name. gate_norm, up_norm, spike_ratio or column_kurtosis.
        n_super: int, count. Super neurons of the layer; as many of the criterion's top are looked at.
        found: int, count. Super neurons among them.
        missed: str, list. Super neurons that are not among them, as layer.neuron.
        invented: str, list. Neurons among them that are not super, as layer.neuron.
        """,
    ),
    _table(
        "key_split",
        "one layer that outlier dimensions enter; numbers are means over sequences and heads",
        """
        layer: int, index. Layer.
        key_cosine_sink: float, cosine. Magnitude of the cosine between the studied key and what its outlier dimensions
            alone make of it.
        key_cosine_random_dimensions: float, cosine. The same with as many random dimensions.
        key_cosine_other_positions: float, cosine. The same at the positions from 8 on.
        dimension: float, logits. Part of the key's logit, over later queries, that its outlier dimensions make; nan
            where the key is rotated.
        rest: float, logits. Part that all other dimensions make; nan where the key is rotated.
        bias: float, logits. Part that the key's bias makes; nan where the key is rotated.
        random_dimensions: float, logits. Part that as many random dimensions make; nan likewise.
        logit_advantage_sink: float, logits. Logit of the key over the mean logit of the other keys that a later query
            sees.
        logit_advantage_other_positions: float, logits. The same of five other keys.
        """,
    ),
    _table(
        "arms",
        "one BOS arm: the traced one, and the other where the tokenizer has BOS",
        """
        arm: str, name. with or without BOS.
        chosen: bool, yes or no. Whether the other tables are of this arm.
        position: int, index. The arm's studied position: its strongest sink on all sequences, 0 where it has none.
        sink_rate: float, share. Share of (layer, head, sequence) whose sink score at that position is above the
            threshold.
        s2_ratio: float, 1. S2 of z at the sink position over the median of other positions, in the layers that feed the
            growth (the growth layers, else the first quarter).
        outlier_dimensions: str, list. Outlier dimensions, those of most layers first.
        growth_steps: str, list. Layers of the growth steps.
        loss_nats: float, nats. Mean next-token loss.
        """,
    ),
    _table(
        "links",
        "one statistic of one link beside one null",
        """
        link: str, name. Name of the link.
        statistic: str, name. Name of the statistic; cut_share is the intervention's.
        value: float, of the measure. The statistic; nan where it is undefined.
        ci_low/ci_high: float, of the measure. 95% interval of the value over sequences.
        null_name: str, name. What the value is compared with; none where there is nothing.
        null_value: float, of the measure. The statistic there.
        criterion: str, text. When the link holds.
        is_primary: bool, yes or no. Whether the measured verdict hangs on this statistic.
        n: int, count. Sequences that the numbers are taken over.
        verdict: str, name. holds, fails or undecided: measured and intervened, the same on all rows; not applicable
            where no position is a sink.
        measured: str, name. holds, fails or undecided: the primary statistic alone, with a sink and without.
        cut: str, name. The same of the intervention alone; not cut where there was none.
        """,
    ),
    _table(
        "summary",
        "one headline number or text",
        """
        quantity: str, name. What it is.
        value: any, of the row. The number, text, or empty where there is none.
        ci_low/ci_high: float, of the row. 95% interval of the value over sequences.
        unit: str, text. Unit of the row's numbers.
        note: str, text. How to read it.
        """,
        file="csv",
    ),
    replace(
        _HEADS, name="twin_heads", row="the same as heads, of the randomly initialised model", when="with the twin"
    ),
    _table(
        "twin_links",
        "one statistic of one link, of the randomly initialised model",
        """
        link: str, name. Name of the link.
        statistic: str, name. Name of the statistic.
        value: float, of the measure. The statistic; nan where it is undefined.
        """,
        when="with the twin",
    ),
    _table(
        "amplification",
        "one factor from one centre",
        """
        centre: str, name. What is amplified away from: values, aggregated, or none (norm only).
        factor: float, 1. Factor; 1 is no edit.
        layers: str, list. Layers that are edited.
        position: int, index. Position that is edited.
        read_layers: str, list. Layers in which attention is read: at most five after the first step.
        baseline_mass: float, attention. Attention to the position without an edit.
        mass: float, attention. Attention to the position with the edit.
        times: float, 1. mass over baseline_mass; nan where that is 0.
        n: int, count. Sequences that the numbers are taken over.
        """,
        when="with interventions",
    ),
    _table(
        "effects",
        "one intervention on one link",
        f"""
        link: str, name. Link that is broken or made.
        edit: str, text. What is done.
        layers: str, list. Layers that are edited.
        position: int, index. Position that is edited.
        read_layers: str, list. Layers in which attention is read.
        baseline_mass_new: float, attention. Attention without an edit to {_NEW}.
        sink_mass_new: float, attention. The same with the edit.
        baseline_mass_old: float, attention. Attention without an edit to {_OLD}.
        sink_mass_old: float, attention. The same with the edit.
        uniform_mass_old: float, attention. What uniform attention would give {_OLD}, its rows summing to what the
            model's sum to.
        baseline_loss_nats: float, nats. Mean next-token loss without an edit.
        loss_nats: float, nats. Mean next-token loss with the edit.
        control_of: str, text. The edit that this one is a control of; empty for all others.
        control_mean: float, attention. Mean over controls of the attention to the position that is judged; nan
            without controls.
        control_sd: float, attention. Standard deviation over controls; nan with fewer than two.
        n_controls: int, count. Matched random controls.
        share: float, share. Attention that came to the new position, or left the old one, over what the old one has
            without an edit; a ratio of means.
        ci_low/ci_high: float, share. 95% interval of the share over sequences.
        control_share: float, share. Mean share of the controls; nan without controls.
        outcome: str, name. What became of the sink: removed, relocated, shared or unchanged.
        is_primary: bool, yes or no. Whether the link's verdict hangs on it.
        n: int, count. Sequences that the numbers are taken over.
        """,
        when="with interventions",
    ),
    _table(
        "mediation",
        "one quantity held under one intervention, in the layers after one growth step",
        f"""
        intervention: str, name. What makes the sink: isolation, amplification, or natural.
        hold: str, name. What is held: {", ".join(HOLDS)}.
        step: int, index. Growth step whose sink is read; -1 where the model has none.
        position: int, index. Position of the sink that is read.
        layers_from: int, index. First layer in which attention is read.
        layers_to: int, index. Last layer in which attention is read.
        baseline_mass: float, attention. Attention to the position in the clean run; for the natural sink, to an
            ordinary position.
        mass_without_hold: float, attention. Attention under the intervention, nothing held.
        mass: float, attention. Attention under the intervention with the quantity held.
        surviving_share: float, share. What survives of the attention that the intervention adds; nan where it adds
            less than {LEAST_ADDED:g}.
        control_mean: float, attention. Mean attention with random holds of the same size.
        control_sd: float, attention. Standard deviation over those; nan with fewer than two.
        control_surviving_share: float, share. Share that survives in their mean; nan likewise.
        n_controls: int, count. Random holds.
        size: int, count. Numbers of a token that are held.
        n: int, count. Sequences that the numbers are taken over.
        """,
        when="with interventions",
    ),
    _table(
        "placement",
        "one kind of token at one position",
        """
        position: int, index. Where it stands: 0 or the interior position.
        token: str, name. ordinary, or bos where the tokenizer has it.
        isolated: bool, yes or no. Whether the attention mask isolates the position.
        sink_mass: float, attention. Attention to it, mean over the layers in which the sink is read.
        ordinary_mass: float, attention. Mean attention to up to five other positions in that run.
        norm_ratio: float, 1. Norm there over the median norm of those, at the layer where it is largest; nan without
            others.
        loss_nats: float, nats. Mean next-token loss of that run.
        is_sink: bool, yes or no. Whether sink_mass is over 0.1 and over four times ordinary_mass.
        n: int, count. Sequences that the numbers are taken over.
        """,
        when="with interventions",
    ),
)

_EDITED_LAYERS = f"""
layer: int, index. Layer.
outlier_dimension: int, index. Dimension with the most energy at {_OLD}, unedited.
baseline_mass_new: float, attention. Attention without an edit to the edited position.
baseline_norm_new: float, stream. The edited position's norm after the layer, unedited.
baseline_value_new: float, stream. The edited position's value in the outlier dimension, unedited.
mass_new: float, attention. Attention with the edit to the edited position.
norm_new: float, stream. The edited position's norm after the layer, edited.
value_new: float, stream. The edited position's value in the outlier dimension, edited.
baseline_mass_old: float, attention. Attention without an edit to {_OLD}.
baseline_norm_old: float, stream. The model's own sink position's norm after the layer, unedited.
baseline_value_old: float, stream. The model's own sink position's value in the outlier dimension, unedited.
mass_old: float, attention. Attention with the edit to {_OLD}.
norm_old: float, stream. The model's own sink position's norm after the layer, edited.
value_old: float, stream. The model's own sink position's value in the outlier dimension, edited.
"""

_EDITED = f"""
layers: str, list. Layers that are edited; all where every one is.
read_layers: str, list. Layers in which attention is read.
baseline_mass_new: float, attention. Attention without an edit to the edited position.
mass_new: float, attention. Attention with the edit to the edited position.
baseline_mass_old: float, attention. Attention without an edit to {_OLD}.
mass_old: float, attention. Attention with the edit to {_OLD}.
outcome: str, name. What became of the sink: removed, relocated, shared or unchanged.
baseline_loss_nats: float, nats. Mean next-token loss without an edit.
loss_nats: float, nats. Mean next-token loss with the edit.
loss_change_nats: float, nats. Paired change of the loss, edited less unedited.
loss_change_low/loss_change_high: float, nats. 95% interval of the change of the loss over sequences.
n: int, count. Sequences that the numbers are taken over.
"""

_CENTRED = """
centre: str, name. What is amplified away from: values, aggregated, or none (norm only).
factor: float, 1. Factor; 1 is no edit.
"""

_ISOLATE = (
    _TOKENS,
    _table(
        "layers",
        "one layer and isolated position; numbers are means over sequences",
        f"""
        {_EDITED_LAYERS}
        position: int, index. Position that is isolated.
        """,
    ),
    _table(
        "summary",
        "one isolated position",
        f"""
        position: int, index. Position that is isolated.
        {_EDITED}
        """,
        file="csv",
    ),
)

_AMPLIFY = (
    _TOKENS,
    _table(
        "layers",
        "one layer, centre and factor; numbers are means over sequences",
        f"""
        {_EDITED_LAYERS}
        {_CENTRED}
        """,
    ),
    _table(
        "summary",
        "one centre and factor",
        f"""
        {_CENTRED}
        times: float, 1. mass_new over baseline_mass_new; nan where that is 0.
        {_EDITED}
        """,
        file="csv",
    ),
)

_ABLATE = (
    _TOKENS,
    _table(
        "ablations",
        "one set of neurons ablated in one way",
        """
        step: int, index. Growth step whose sink is to be removed.
        kind: str, name. set (the smallest that removes the sink), single, leave one out, or one of two kinds of random
            sets.
        neurons: str, list. Neurons, as layer.neuron.
        size: int, count. How many neurons they are.
        method: str, name. What they are set to: their mean over other positions, or zero.
        what: str, name. column (all that they write) or scalar (into the outlier dimension alone).
        where: str, name. sink (at its position) or everywhere.
        layers_from: int, index. First layer in which attention is read.
        layers_to: int, index. Last layer in which attention is read; a next step's are left out.
        baseline_mass: float, attention. Attention to the sink without an ablation.
        mass: float, attention. Attention to the sink with it.
        removed_share: float, share. Attention that is gone over baseline_mass; a ratio of means.
        ci_low/ci_high: float, share. 95% interval of removed_share over sequences.
        baseline_loss_nats: float, nats. Mean next-token loss without an ablation.
        loss_nats: float, nats. Mean next-token loss with it; nan where it was not asked for.
        n: int, count. Sequences that the numbers are taken over.
        """,
    ),
    _table(
        "summary",
        "one growth step",
        f"""
        step: int, index. Growth step whose sink is to be removed.
        neurons: str, list. Neurons, as layer.neuron.
        size: int, count. How many neurons they are.
        removes: bool, yes or no. Whether the set removes at least {LOST_FRAC:g} of the sink.
        removed_share: float, share. Share of the sink that the set removes.
        best_single: float, share. The most that one of them removes alone; nan for a set of one.
        random_mean: float, share. Mean that random sets of the same size remove.
        random_max: float, share. The most that one of those removes.
        read_layers: str, list. Layers in which attention is read.
        """,
        file="csv",
    ),
)

_PATCHED = """
layer?: int, index. Layer of the patch, where layers are swept.
pos?: int, index. Position of the patch (the query of scores and pattern), where positions are swept.
head_index?: int, index. Head of the patch, where heads are swept.
src_pos?: int, index. Key of the patched scores or pattern, where keys are swept.
"""

_PATCHES = f"""
{_PATCHED}
value?: float, of the metric. Metric of the patched run, mean over sequences; not with --approximate.
effect?: float, of the metric. value less the unpatched run's; not with --approximate.
normalised_effect?: float, 1. effect over that of taking the whole other run: 0 as unpatched, 1 as the run that values
    come from; nan where both are equal.
approximation?: float, of the metric. First-order approximation of effect; only with --approximate.
changed: bool, yes or no. Whether the values that were put there differ from those that stood there.
n: int, count. Sequences that have a number.
"""

_PATCH = (
    _table(
        "patches",
        "one patch",
        _PATCHES,
    ),
    _table(
        "check",
        "one patch that was approximated and really made",
        f"""
        {_PATCHED}
        approximation: float, of the metric. First-order approximation of the effect.
        effect: float, of the metric. Effect of the real patch.
        error: float, of the metric. approximation less effect.
        """,
        when="with --approximate",
    ),
    _table(
        "differences",
        "one position at which the two runs' tokens differ",
        """
        sequence: int, index. Sequence of the run.
        position: int, index. Position in the sequence.
        clean: str, text. Token of the clean run.
        corrupted: str, text. Token of the corrupted run.
        """,
    ),
    _table(
        "summary",
        "one of the strongest patches, the strongest first",
        f"""
        {_PATCHES}
        site: str, name. Site that is patched.
        metric: str, text. What is measured.
        direction: str, name. denoising (clean into corrupted) or noising.
        unpatched: float, of the metric. Metric of the run that is patched, without a patch.
        source: float, of the metric. Metric of the run that the values come from.
        """,
        file="csv",
    ),
)

_CELLS = _table(
    "cells",
    "one cell of the grid and one metric",
    """
    cell: int, index. Number of the cell.
    name?: str, text. Name of a cell of one's own.
    kind?: str, name. Kind of edit.
    site?: str, name. Site that is edited.
    place?: str, text. Where, in words; empty where everything is edited.
    layer?: int, index. Layer, where one is edited; else missing.
    position?: int, index. Position, where one is edited; else missing.
    head?: int, index. Head, where one is edited; else missing.
    unit?: int, index. Unit, such as a neuron, where one is edited; else missing.
    key?: int, index. Key, where one is edited; else missing.
    factor?: float, 1. Strength of the edit; nan for a kind without one.
    seed?: int, index. Seed of the edit's random draw; missing for a kind without one.
    centre?: str, name. What is amplified away from; missing for a kind without one.
    metric: str, text. What is measured.
    metric_unit: str, text. Unit of the metric; empty for a pure number.
    baseline: float, of the metric. Metric of the unedited run, mean over sequences.
    value: float, of the metric. Metric of the cell, mean over sequences; nan where it failed.
    effect: float, of the metric. Paired difference of the two.
    ci_low/ci_high: float, of the metric. 95% interval of the effect over sequences.
    control_effect: float, of the metric. Mean effect of the cell's random controls; nan without.
    control_sd: float, of the metric. Standard deviation over those; nan with fewer than two.
    n_controls: int, count. Random controls that have a number.
    over_control: float, of the metric. effect less control_effect, paired; nan without controls.
    over_low/over_high: float, of the metric. 95% interval of over_control over sequences.
    changed: bool, yes or no. Whether the edit changed anything that was run.
    n: int, count. Sequences that have a number in both runs.
    error: str, text. Why the cell failed; missing where it did not.
    """,
    open=True,
)

_SWEEP = (
    _table(
        "baseline",
        "one sequence and metric of the unedited run",
        """
        sequence: int, index. Sequence of the run.
        metric: str, text. What is measured.
        value: float, of the metric. The metric; nan where it is undefined.
        """,
    ),
    _table(
        "block-*",
        "one sequence and metric of one cell, as a block of the sweep left it",
        """
        cell: int, index. Number of the cell among cells and controls together.
        sequence: int, index. Sequence of the run; -1 where the cell failed.
        metric: str, text. What is measured; empty where the cell failed.
        value: float, of the metric. The metric; nan where it is undefined.
        changed: bool, yes or no. Whether the edit changed anything that was run.
        error: str, text. Why the cell failed; missing where it did not.
        """,
    ),
    _CELLS,
    replace(
        _CELLS,
        name="controls",
        row="one random control, with its own number as cell, and one metric; it has no controls itself",
    ),
    _table(
        "values",
        "one sequence and metric of one cell",
        """
        cell: int, index. Number of the cell in cells.
        sequence: int, index. Sequence of the run.
        metric: str, text. What is measured.
        value: float, of the metric. The metric; nan where it is undefined.
        """,
    ),
)

_TRAIN = (
    _table(
        "log",
        "one logged step",
        """
        step: int, steps. Optimiser steps so far.
        tokens: int, tokens. Tokens trained on so far.
        loss: float, nats. Training loss, mean over the steps since the row before.
        lr: float, 1. Learning rate of the step.
        grad_norm: float, 1. Norm of the gradient before it is clipped; nan where there is none.
        seconds: float, seconds. Time spent in training so far.
        eval_loss: float, nats. Loss on the held-out sequences; nan where it was not evaluated.
        """,
    ),
    _table(
        "watch",
        "one measure of one checkpoint",
        """
        step: int, steps. Optimiser steps so far.
        tokens: int, tokens. Tokens trained on so far.
        measure: str, name. Name of the measure; error where the checkpoint could not be read.
        layer: int, index. Layer, -1 before the first; missing for the whole model.
        position: int, index. Position, for s2; missing elsewhere.
        threshold: float, attention. Threshold of the sink score, for sink_rate; nan elsewhere.
        value: float, of the row. The measure, mean over sequences; nan where it is undefined.
        unit: str, text. Unit of the row's numbers.
        error: str, text. Why the checkpoint could not be read; missing where it could.
        tokens_sha256: str, hash. Hash of the sequences that were read.
        """,
        when="that were watched",
    ),
)

_COMPARE = (
    _table(
        "curves",
        "one run at one number of tokens",
        """
        arm: str, name. What the runs of one arm have in common.
        seed: int, index. Seed of the run.
        curve: str, name. evaluation, or training (smoothed).
        tokens: float, tokens. Tokens trained on so far.
        loss: float, nats. The run's loss.
        difference: float, nats. Loss less that of the baseline's run with the same seed.
        """,
    ),
    _table(
        "bands",
        "one arm at one number of tokens",
        """
        arm: str, name. What the runs of one arm have in common.
        curve: str, name. evaluation, or training (smoothed).
        quantity: str, name. loss, or difference to the baseline.
        tokens: float, tokens. Tokens trained on so far.
        mean: float, nats. Mean over seeds.
        low/high: float, nats. 95% interval of the mean over seeds.
        n: int, count. Seeds that the mean is taken over.
        """,
    ),
    _table(
        "finals",
        "one run's end on one curve",
        """
        arm: str, name. What the runs of one arm have in common.
        seed: int, index. Seed of the run.
        curve: str, name. evaluation, or training (smoothed).
        tokens: float, tokens. Tokens at the run's last point.
        loss: float, nats. Loss there.
        difference: float, nats. Loss less the final loss of the baseline with the same seed.
        target: float, nats. The baseline's final loss.
        reached: float, tokens. Tokens from which the loss stays at the target or under; nan if never.
        baseline_reached: float, tokens. The same of the baseline.
        acceleration: float, 1. baseline_reached over reached; nan where it was not reached.
        """,
    ),
    _table(
        "differences",
        "one arm on one curve: its final loss less the baseline's, paired by seed",
        """
        arm: str, name. What the runs of one arm have in common.
        curve: str, name. evaluation, or training (smoothed).
        mean: float, nats. Mean difference.
        low: float, nats. Lower end of the 95% t interval over seeds; nan for one seed.
        high: float, nats. Upper end of the 95% t interval over seeds; nan for one seed.
        boot_low/boot_high: float, nats. 95% interval of the mean, bootstrapped, over seeds.
        t_p: float, p. Two-sided p of the paired t test; nan where all differences are equal.
        flip_p: float, p. Two-sided p of the sign-flip test; nan for one seed.
        flip_smallest: float, p. The smallest p that so many seeds can give in that test.
        n: int, count. Seeds that the mean is taken over.
        """,
    ),
    _table(
        "measures",
        "one measure of one arm at the last checkpoint that all runs have",
        """
        measure: str, name. Name of the measure.
        threshold: float, attention. Threshold of the sink score, for sink_rate; nan elsewhere.
        arm: str, name. What the runs of one arm have in common.
        step: int, steps. Optimiser steps so far.
        mean: float, of the row. Mean over seeds of the whole model's measure.
        low/high: float, of the row. 95% interval of the mean over seeds.
        difference: float, of the row. Mean difference to the baseline, paired by seed.
        difference_low/difference_high: float, of the row. 95% interval of the difference over seeds.
        unit: str, text. Unit of the row's numbers.
        n: int, count. Seeds that the mean is taken over.
        """,
        when="that compare watched runs",
    ),
    _table(
        "course",
        "one measure of one arm at one checkpoint",
        """
        arm: str, name. What the runs of one arm have in common.
        measure: str, name. Name of the measure.
        threshold: float, attention. Threshold of the sink score, for sink_rate; nan elsewhere.
        tokens: float, tokens. Tokens trained on so far.
        mean: float, of the measure. Mean over seeds.
        low/high: float, of the measure. 95% interval of the mean over seeds.
        n: int, count. Seeds that the mean is taken over.
        """,
        when="that compare watched runs",
    ),
    _table(
        "births",
        "one run",
        f"""
        arm: str, name. What the runs of one arm have in common.
        seed: int, index. Seed of the run.
        threshold: float, attention. Threshold of the sink score.
        step: int, steps. First checkpoint from which the sink rate stays at {MIN_SINK_RATE:g} or over; missing if
            none.
        tokens: int, tokens. Tokens of that checkpoint; missing if there is none.
        rate: float, share. Sink rate at the last checkpoint.
        mass: float, attention. Attention to position 0 there, in the layer that has most.
        layer: int, index. That layer.
        sentence: str, text. The same in words.
        """,
        when="that compare watched runs",
    ),
)

_SUBJECT = """
model: str, text. Name of the model.
arm: str, text. What a model has in common with its repetitions.
seed: int, index. Seed of the weights; missing where it is not known.
step: int, steps. Step of a training's checkpoint; missing for any other model.
"""

_MODELS = _table(
    "models",
    "one model",
    f"""
    {_SUBJECT}
    n_layers: int, count. Layers; missing where the model failed.
    d_model: int, count. Width of the residual stream; missing where the model failed.
    d_vocab: int, count. Size of the vocabulary; missing where the model failed.
    weights_sha256: str, hash. Hash of the weights; missing where the model failed.
    seconds: float, seconds. Time that the measuring took; nan where the model failed.
    error: str, text. Why the model failed; missing where it did not.
    """,
    file="csv",
)

_COMPARED = """
n: int, count. Models that the mean is taken over: seeds.
mean: float, of the measure. Mean over seeds.
low/high: float, of the measure. 95% interval of the mean over seeds.
difference: float, of the measure. Mean difference to the first, paired by seed; nan for the first.
difference_low/difference_high: float, of the measure. 95% interval of the difference over seeds.
p: float, p. Two-sided p of the paired t test; nan for the first, and for one seed.
"""

_ARMS = _table(
    "arms",
    "one measure of one arm; checkpoints of a training are no repetitions and are left out",
    f"""
    measure: str, name. Name of the measure.
    arm: str, text. Arm; the first is the one to compare with.
    {_COMPARED}
    """,
    file="csv",
)

_NULL = """
null: float, of the row. Mean of what chance gives.
null_low: float, of the row. Lower end of where 95% of chance lies.
null_high: float, of the row. Upper end of where 95% of chance lies.
"""

_MEASURED = """
measure: str, name. Name of the measure.
value: float, of the row. The measure.
low/high: float, of the row. 95% interval of the value over sequences.
"""

_PREFERENCE = (
    _MODELS,
    _table(
        "summary",
        "one measure of one model",
        f"""
        {_SUBJECT}
        {_MEASURED}
        {_NULL}
        unit: str, text. Unit of the row's numbers.
        """,
        file="csv",
    ),
    _table(
        "coverage",
        "one number of tokens of one model",
        f"""
        {_SUBJECT}
        kind: str, name. argmax (the most probable token) or argmin (the least probable).
        tokens: int, count. How many of the most frequent tokens.
        share: float, share. Share of the sequences whose prediction is one of them.
        {_NULL.replace("of the row", "share")}
        """,
    ),
    _table(
        "tokens",
        "one of the most frequently predicted tokens of one model",
        f"""
        {_SUBJECT}
        kind: str, name. argmax (the most probable token) or argmin (the least probable).
        token: int, token id. The token's id.
        count: int, count. Sequences after which it is predicted.
        share: float, share. The same as a share of the sequences.
        probability_ratio: float, 1. Its mean probability times the size of the vocabulary.
        text: str, text. The token decoded; `<id>` where no tokenizer knows it.
        """,
    ),
    _ARMS,
)

_PLACE = """
layer: int, index. Layer; -1 before the first, the number of layers after the last norm.
place: str, name. What it is read after: embedding, attention, mlp or final (the last norm).
"""

_CONTRACTION = (
    _MODELS,
    _table(
        "summary",
        "one measure of one model",
        f"""
        {_SUBJECT}
        {_MEASURED}
        unit: str, text. Unit of the row's numbers.
        """,
        file="csv",
    ),
    _table(
        "layers",
        "one measure of one model after one sublayer",
        f"""
        {_SUBJECT}
        {_PLACE}
        measure: str, name. inter (between the last positions of two sequences) or intra (two positions of one
            sequence).
        value: float, cosine. Mean cosine between the states.
        low/high: float, cosine. 95% interval of the value over sequences.
        floor: float, cosine. The same before the first layer.
        excess: float, cosine. value less floor.
        excess_low/excess_high: float, cosine. 95% interval of the excess over sequences.
        gain: float, cosine. value less that of the place before; 0 at the first.
        """,
    ),
    _table(
        "positions",
        "one position of one model after one sublayer",
        f"""
        {_SUBJECT}
        {_PLACE}
        position: int, index. Position: 0, the powers of two, and the last.
        inter: float, cosine. Mean cosine between the states of two sequences there.
        excess: float, cosine. inter less that of the same position before the first layer.
        norm: float, stream. Mean norm of the states.
        """,
    ),
    _table(
        "alignment",
        "one thing that the contraction direction of one model is compared with",
        f"""
        {_SUBJECT}
        what: str, text. A preferred token, or the largest dimension of position 0 and its layer.
        which: int, index. Its token id or its dimension.
        cosine: float, cosine. Cosine of its unembedding, or of its axis, with the direction.
        rank: int, rank. Rank of that among all tokens or dimensions, the most aligned first.
        of: int, count. How many tokens or dimensions there are.
        event_frac: float, share. Share of sequences that predict the token; nan for a dimension.
        """,
    ),
    _ARMS,
    _table(
        "agreement",
        "two models of one width at one place",
        """
        a: str, text. Name of the first model.
        b: str, text. Name of the second model.
        place: str, name. last (after the last layer) or final (after the last norm).
        cosine: float, cosine. Cosine of their contraction directions.
        chance: float, cosine. Standard deviation of the cosine of two random directions.
        """,
        file="csv",
    ),
)

_CALIBRATION = (
    _MODELS,
    _table(
        "summary",
        "one measure of one model under one calibration",
        f"""
        {_SUBJECT}
        calibration: str, name. none, amplify, attenuate or head_rms.
        {_MEASURED}
        effect: float, of the row. value less that without calibration.
        effect_low/effect_high: float, of the row. 95% interval of the effect over sequences.
        unit: str, text. Unit of the row's numbers.
        tokens: str, text. Where the sequences come from.
        """,
        file="csv",
    ),
    _table(
        "arms",
        "one measure under one calibration of one arm",
        f"""
        measure: str, name. Name of the measure.
        calibration: str, name. Calibration; none is the one to compare with.
        {_COMPARED}
        arm: str, text. What the models have in common.
        """,
        file="csv",
    ),
)

NULLS = ("analytical", "matrices", "pipeline", "shuffled", "relabelled")
"""What a mean Kendall tau is compared with in a fingerprint, the published ones first."""

_OF_NULLS = "\n".join(
    f"z_{name}: float, 1. Standard deviations of tau_bar over the {name} null's mean; nan without an answer.\n"
    f"log10_p_{name}: float, log10 p. One-sided p under the {name} null; nan without an answer."
    for name in NULLS
)
_A_AND_B = """
a: str, text. Name of the first model.
b: str, text. Name of the second model.
"""

_FINGERPRINT = (
    _table(
        "models",
        "one model",
        """
        model: str, text. Name of the model.
        lineage: str, text. Label of its lineage; missing where it is not known.
        seed: int, index. Seed of the weights; missing where it is not known.
        step: int, steps. Step of a training's checkpoint; missing for any other model.
        d_model: int, count. Width of the residual stream.
        ids: int, count. Ordinary token ids that it knows.
        dtype: str, name. Type of its weights.
        weights_sha256: str, hash. Hash of the weights.
        cached: bool, yes or no. Whether its states were in the cache.
        """,
        file="csv",
    ),
    _table(
        "pairs",
        "two models",
        f"""
        {_A_AND_B}
        related: bool, yes or no. Whether they share an initialisation; missing where not known.
        verdict: str, name. same lineage, no common lineage shown, or no answer.
        why: str, text. What decided, or why there is no answer.
        shared: int, count. Coordinates that both have for their own.
        expected: float, count. How many they would share by chance; nan for two widths.
        tau_bar: float, tau. Mean tau over the shared coordinates; nan without an answer.
        across: float, tau. The same between different coordinates; nan without an answer.
        too_narrow: float, 1. Standard deviation of tau_bar if no coordinate matched, over the formula's; nan without
            an answer.
        scale_tau: float, tau. tau of the sizes of the states; nan without an answer.
        scale_log10_p: float, log10 p. Two-sided p of scale_tau; nan without an answer.
        shares_scale: bool, yes or no. Whether inputs scale all coordinates of both alike and nothing beyond that is
            shared.
        {_OF_NULLS}
        """,
    ),
    _table(
        "nulls",
        "two models under one null",
        f"""
        {_A_AND_B}
        null: str, name. One of {", ".join(NULLS)}.
        mean: float, tau. Mean of tau_bar under the null.
        sd: float, tau. Standard deviation of tau_bar under the null.
        z: float, 1. Standard deviations of tau_bar over that mean; nan where sd is 0.
        log10_p_paper: float, log10 p. One-sided p, as in the paper's text.
        log10_p_code: float, log10 p. Two-sided p, as in the paper's released code.
        p_draws: float, p. Share of draws at tau_bar or over; nan for a null without draws.
        """,
    ),
    _table(
        "calibration",
        "one null over the pairs that are known to be unrelated",
        f"""
        null: str, name. One of {", ".join(NULLS)}.
        pairs: int, count. Pairs that are known to be unrelated.
        p_over_01: float, share. Share of them with p over 0.01.
        p_over_05: float, share. Share of them with p over 0.05.
        p_over_50: float, share. Share of them with p over 0.5.
        too_narrow: float, 1. Root mean square of z: by how much the null is too narrow.
        largest_z: float, 1. Largest magnitude of z.
        """,
        when="with unrelated pairs",
        file="csv",
    ),
    _table(
        "scores",
        "one score by which pairs are told apart",
        """
        score: str, name. tau_bar, or z under one of the nulls.
        measure: str, name. auc, or tpr (true positives at 1% false positives).
        value: float, share. The measure.
        low/high: float, share. 95% interval of the value over models.
        related: int, count. Pairs that are known to be related.
        unrelated: int, count. Pairs that are known to be unrelated.
        unanswered: int, count. Pairs of either kind without an answer, which are left out.
        """,
        when="with related and unrelated pairs",
        file="csv",
    ),
)

TABLES: Mapping[str, tuple[Table, ...]] = MappingProxyType(
    {
        "trace": _TRACE,
        "isolate": _ISOLATE,
        "amplify": _AMPLIFY,
        "ablate": _ABLATE,
        "patch": _PATCH,
        "sweep": _SWEEP,
        "train": _TRAIN,
        "compare": _COMPARE,
        "preference": _PREFERENCE,
        "contraction": _CONTRACTION,
        "calibration": _CALIBRATION,
        "fingerprint": _FINGERPRINT,
    }
)

"""Kind of run -> the tables that it writes."""
