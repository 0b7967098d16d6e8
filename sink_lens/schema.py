"""Names that several packages share: the chain's links, nodes and verdicts, thresholds, and every table's columns.

Each table is described once, here. `TABLES` lists, for each kind of run, the tables that it writes, what one row is,
and the type, unit and meaning of each column. The tests refuse a table that does not match its description, and the
reference in the documentation is generated from it. To add a column, write it where the table is made and describe it
here.
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
"""The nodes that the chain's links join, in order."""
LINKS = {
    "aggregation_variance": "Averaging over more tokens lowers the variance of what attention reads, so the "
    "first token keeps the most.",
    "variance_preserved": "The attention output projection W_O passes that difference on.",
    "variance_neurons": "The difference makes super neurons fire at the sink token only.",
    "neurons_dimension": "Super neurons write the outlier dimension of the sink token.",
    "dimension_key": "After the norm, the outlier dimension alone fixes the sink's key.",
    "key_sink": "Queries meet that key, so attention goes to it.",
}
"""Name of a link -> its claim; link i joins the nodes i and i + 1 of ``NODES``."""
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "mixed": "±", "not applicable": "∅", "not measured": "–"}
"""Verdict -> its sign."""
FROZEN = ("z", "neurons", "dimensions", "key")
"""Quantities that mediation freezes at their clean value, in the order of the chain."""

SINK_THRESHOLD = 0.3
"""Default threshold: a head has a sink where its sink score is above this (Gu et al., arXiv 2410.10781)."""
MIN_SINK_RATE = 0.05
"""A position is a sink position if at least this share of all (layer, head, sequence) have their sink at it."""
LEAST_SINK = 0.05
"""Where the model's own sink has less attention than this over uniform attention, a share of it means nothing."""
INTERVENTION_FLOOR = 0.25
"""An intervention confirms its link if it makes or removes more than this share of the sink."""
LOST_FRAC = 0.5
"""A sink counts as removed from a position that lost at least this share of its mass."""
GAINED_FRAC = 0.25
"""A sink counts as made at a position that gained at least this share of the mass of the model's own sink."""
ANOTHER_PATH = 0.5
"""A link does not carry the sink if more than this share of the sink survives while the link is frozen."""
LEAST_ADDED = 0.02
"""Surviving shares are undefined if an intervention adds less attention than this."""
NORM_ALONE = 2.0
"""The page warns if the norm-only control multiplies the attention by at least this factor."""

ANSWERS = ("yes", "no", "undecided", "not applicable")
"""What a question about a link may be answered."""
QUESTIONS = {
    "present": "Does what the link leads to stand out at the sink position, over its nulls?",
    "necessary_or_sufficient": "Does breaking the link remove the sink (for the first link: does isolating another "
    "position make one), over the largest of its controls?",
    "carries": "Does the sink go where what the link leads to is mean ablated, over the largest of its controls?",
}
"""Question about a link -> what it asks."""
DERIVED: tuple[tuple[str, str, str, str], ...] = (
    ("not applicable", "any", "any", "not applicable"),
    ("any", "not applicable", "any", "not applicable"),
    ("no", "any", "any", "fails"),
    ("any", "no", "any", "fails"),
    ("yes", "yes", "no", "undecided"),
    ("yes", "yes", "any", "holds"),
    ("any", "any", "any", "undecided"),
)
"""The verdict on a link from its three answers, in the order of QUESTIONS: the first row that fits."""
COSTLY = 0.25
"""An intervention is off-distribution where the lower end of its loss, over that of masking the sink, is above this
many nats."""
ERROR_RATES = (
    "0 of 2,200 intact links were said to fail, 0 of 1,400 broken ones to hold, and 0 of 660 models without a sink to "
    "have one, on 1,260 traces of models whose mechanism was written by hand (docs/zoo.md, with the answers that are "
    "wrong more often). None of these models is larger than a few million parameters."
)
"""How often verdicts with default floors and 20 sequences were wrong (``analyses/verdict_calibration``)."""
TELLING_LOSS = 0.9
"""Cost is asked only of models whose clean loss is below this share of the loss of uniform guessing."""

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
        "dB": "decibels, ten times the logarithm to base 10 of a ratio of energies",
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
"""Unit -> its meaning. Columns use only these units."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    dtype: Dtype
    unit: str
    """One of `UNITS`."""
    meaning: str
    """One sentence: what the number is, what it is averaged over, and when it is nan."""
    optional: bool = False
    """Whether some runs of this kind write the table without this column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a run folder."""

    name: str
    """File name without the ending; * stands for a number."""
    row: str
    """What one row describes."""
    columns: tuple[Column, ...]
    when: str = ""
    """Which runs write the table; all of them if empty."""
    file: Literal["parquet", "csv"] = "parquet"
    open: bool = False
    """Whether the caller may add columns of its own, or put its own values into the optional columns."""

    def column(self, name: str) -> Column:
        """The column with this name."""
        return next(column for column in self.columns if column.name == name)


def table_of(kind: str, name: str) -> Table | None:
    """The table that a kind of run writes under this name; None if no such table is described."""
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
    """Make a table from lines of the form `name: type, unit. Meaning.`; a long line continues on the next one.

    A name that ends in `?` is an optional column. `low/high` makes two columns, the ends of an interval.
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
                Column(name=each, meaning=f"{end} end of the {meaning[:-1]}; nan if there is no interval.", **given)
                for each, end in ((first, "Lower"), (last, "Upper"))
            ]
        else:
            columns.append(Column(name=first, meaning=meaning, **given))
    return Table(name=name, row=row, columns=tuple(columns), when=when, file=file, open=open)


_TARGET = "the target position, where the edit tries to make a sink"

_SINK = "the model's own sink position"

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
    sink_position: int, index. Sink position; the studied one is in the first rows.
    sink_score: float, attention. Mean attention to the position from the queries at and after it that can see it;
        nan where the layer's window is so short that uniform attention alone passes the threshold.
    sink_rate: float, share. Share of sequences whose sink score is above the run's threshold; nan likewise.
    sink_mass: float, attention. Mean attention to the position from the queries after it that can see it.
    key_rank: float, keys. How many keys draw more attention than the position, over later queries that can see it.
    value_norm_ratio: float, 1. Norm of the position's value after W_O over the mean of the other positions' norms.
    positive_share: float, share. Share of later queries whose product with the position's real key, before rotation,
        is positive; figure 12 of arXiv 2605.06611 takes the column of W_K of one dimension instead.
    entropy: float, nats. Entropy of an attention row, mean over sampled rows.
    gini: float, 1. Gini coefficient of an attention row over its visible keys, 0 where uniform, mean over sampled rows
        of the first few sequences.
    null_mass: float, attention. 1 minus the sum of an attention row; nan if the attention is not a softmax.
    stable_rank: float, directions. Stable rank of the head's outputs over the positions of a sequence, mean over the
        first few sequences.
    qk_alignment: float, cosine. Magnitude of the cosine between the direction that the queries share most and the key
        made by the strongest outlier dimension of the sink position; nan if no outlier dimension enters the layer.
    label: str, name. Type of sink head: no-op (value_norm_ratio at most 0.2), broadcast (above 0.2) or undecided;
        empty if the head has no sink at the position.
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
        question: str, text. Question that the link's primary statistic answers.
        """,
    ),
    _HEADS,
    _table(
        "positions",
        "one sampled position at one site after one layer; numbers are means over sequences",
        """
        layer: int, index. Layer.
        site: str, name. Site that is read: z, attn_out, mlp_out or resid_post.
        position: int, index. Sampled position: every position up to 64 positions, else the first and some later ones.
        s1: float, stream. S1: standard deviation over sequences, mean over coordinates; nan if fewer than two sequences
            reach the position.
        s2: float, stream. S2: standard deviation over the coordinates of one token.
        norm: float, stream. Euclidean norm of the token's vector.
        """,
    ),
    _table(
        "layers",
        "one layer at the sink position under study; numbers are means over sequences, attention also over heads",
        """
        layer: int, index. Layer.
        sink_position: int, index. Sink position that is studied.
        sink_score: float, attention. Mean attention to it from the queries at and after it that can see it.
        sink_mass: float, attention. Mean attention to it from the queries after it that can see it.
        norm: float, stream. Norm of its residual stream after the layer.
        norm_ratio: float, 1. That norm over the median norm of the other positions from 8 on.
        outlier_dimension: int, index. Dimension with the most energy after the layer.
        outlier_value: float, stream. Value of that dimension.
        dominance_ratio: float, 1. Largest magnitude of its stream over the mean magnitude.
        dominance_ratio_fixed: float, 1. Mean magnitude of that one dimension over the mean magnitude of the others: a
            ratio of means, of the residual stream; table 1 of arXiv 2605.06611 takes it after the next attention's
            input norm.
        dominance_elsewhere: float, 1. Median dominance ratio of the positions from 8 on.
        massive_ratio: float, 1. Largest magnitude of the position's residual stream over its median magnitude.
        massive_activations: float, count. Number of entries of the position's residual stream above 100 in magnitude
            and at least 1000 times the median magnitude.
        effective_rank: float, directions. Effective rank of a sequence's states after the layer, mean over all
            sequences; at most the number of sampled positions.
        effective_rank_without: float, directions. The same without the studied position.
        value_std: float, stream. Standard deviation within a value vector, positions from 8 on.
        z_std: float, stream. Standard deviation within the position's aggregated value z (its S2).
        """,
    ),
    _table(
        "law",
        "one query position in one layer",
        """
        layer: int, index. Layer.
        position: int, index. Sampled query position.
        s2: float, stream. S2 of the aggregated value z at the position, mean over sequences.
        uniform_law: float, stream. S2 predicted for uniform attention, value_std over sqrt(position + 1).
        weighted_law: float, stream. S2 predicted for the measured attention over independent values, value_std times
            the square root of the mean sum of squared attention weights.
        """,
    ),
    _table(
        "dimensions",
        "one of the strongest dimensions of one sink position after one layer, the strongest first",
        """
        layer: int, index. Layer.
        sink_position: int, index. Sink position.
        dimension: int, index. Dimension of the residual stream.
        value: float, stream. Value of the dimension at the position, mean over sequences.
        dominance_ratio: float, 1. Dominance ratio of the token at the position, mean over sequences.
        is_outlier: bool, yes or no. Whether the dimension is an outlier dimension by the run's thresholds.
        """,
    ),
    _table(
        "writing",
        "one outlier dimension of the sink position under study in one layer; numbers are means over sequences",
        """
        dimension: int, index. Outlier dimension, in any layer.
        layer: int, index. Layer; -1 is the embedding.
        value: float, stream. Value of the dimension at the position after the layer.
        change: float, stream. What the layer adds to it.
        share: float, share. Growth of its magnitude over the layer, over its largest magnitude in any layer.
        is_outlier: bool, yes or no. Whether the dimension is an outlier dimension after the layer.
        writes: bool, yes or no. Whether the layer writes the dimension: its magnitude grows by at least a tenth,
            whatever other tokens do.
        """,
    ),
    _table(
        "growth_steps",
        "one growth step of the sink position under study; no rows if there is no growth step",
        """
        step: int, index. Number of the growth step.
        first_layer: int, index. First layer of the step.
        last_layer: int, index. Last layer of the step.
        ratio_before: float, 1. Norm ratio of the position before the first layer.
        ratio_after: float, 1. Norm ratio of the position after the last layer.
        sink_position: int, index. Sink position under study.
        outlier_dimension: int, index. Dimension with the most energy after the last layer.
        split_error: float, share. Largest difference between the sum of the neurons' contributions and the MLP's
            output, over the change of the outlier dimension; nan if the model's neurons cannot be read.
        """,
    ),
    _table(
        "neurons",
        "one neuron of a growth layer at one sink position; numbers are means over sequences",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP; in a mixture of experts counted over all of its experts.
        expert?: int, index. The neuron's expert, in a mixture of experts.
        sink_position: int, index. Sink position.
        activation: float, stream. Activation at the position, as the down-projection reads it; that of an expert times
            the router's weight.
        spike_ratio: float, 1. Mean magnitude of the activation at the sink position over its mean magnitude at
            positions without a sink; infinite for a neuron that is silent elsewhere, nan for an always silent neuron.
        contribution: float, stream. Amount that the neuron adds to the step's outlier dimension at the position.
        contribution_share: float, share. contribution over the layer's change of the outlier dimension, a ratio of
            means; nan if the dimension does not change.
        outlier_dimension: int, index. The growth step's outlier dimension.
        gate_norm_rank: int, rank. Rank, within the layer, of the norm of the neuron's gate row; missing if the MLP has
            no gate.
        up_norm_rank: int, rank. Rank, within the layer, of the norm of the neuron's up row.
        column_kurtosis: float, 1. Excess kurtosis of the neuron's down-projection column, 0 for Gaussian entries; nan
            for a constant column.
        top_dimension: int, index. Dimension that the neuron's down-projection column writes to most strongly.
        is_super: bool, yes or no. Whether the neuron is a super neuron at any of the sink positions.
        """,
    ),
    _table(
        "experts",
        "one expert of a growth layer at one sink position, in a mixture of experts; numbers are means over sequences",
        """
        layer: int, index. Layer.
        expert: int, index. Routed expert.
        sink_position: int, index. Sink position.
        routed_share: float, share. Share of the sequences whose token at the position is sent to the expert.
        contribution: float, stream. Amount that its neurons add to the step's outlier dimension at the position.
        contribution_share: float, share. contribution over the layer's change of the outlier dimension, a ratio of
            means; nan if the dimension does not change.
        outlier_dimension: int, index. The growth step's outlier dimension.
        is_super: bool, yes or no. Whether it makes at least the share of the change that makes a neuron a super neuron.
        """,
    ),
    _table(
        "selectivity",
        "one super neuron at one sampled position; numbers are means over sequences",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP.
        position: int, index. Position in the sequence.
        cosine: float, cosine. Cosine between the MLP's input and the gate row (the up row if there is no gate).
        up: float, stream. Projection of the MLP's input on the up row.
        gate: float, stream. Pre-activation, which is the projection of the MLP's input on the gate row (the up row if
            there is no gate).
        """,
    ),
    _table(
        "columns",
        "one of the largest entries of a super neuron's down-projection column, the largest first",
        """
        layer: int, index. Layer.
        neuron: int, index. Neuron of the layer's MLP.
        dimension: int, index. Dimension that the entry writes to.
        weight: float, weights. Value of the entry.
        energy_share: float, share. Square of the entry over the column's sum of squares; nan for a column of zeros.
        """,
    ),
    _table(
        "criteria",
        "one alternative criterion for super neurons, in one growth layer that has super neurons",
        """
        layer: int, index. Layer.
        criterion: str, name. gate_norm, up_norm, spike_ratio or column_kurtosis.
        n_super: int, count. Super neurons of the layer; the same number of neurons is taken from the criterion's top.
        found: int, count. Super neurons among the criterion's top neurons.
        missed: str, list. Super neurons that are not among the criterion's top neurons, as layer.neuron.
        invented: str, list. Neurons among the criterion's top that are no super neurons, as layer.neuron.
        """,
    ),
    _table(
        "key_split",
        "one layer; numbers are means over sequences and heads; those of outlier dimensions are nan where none enters",
        """
        layer: int, index. Layer.
        key_cosine_sink: float, cosine. Magnitude of the cosine between the sink's key and the key computed from its
            outlier dimensions alone.
        key_cosine_random_dimensions: float, cosine. The same cosine with equally many random dimensions instead.
        key_cosine_other_positions: float, cosine. The same cosine, with the outlier dimensions, at positions from 8 on.
        dimension: float, logits. Part of the sink key's logit, over later queries, that comes from its outlier
            dimensions; nan if the key is rotated.
        rest: float, logits. Part of the logit that comes from all other dimensions; nan if the key is rotated.
        bias: float, logits. Part of the logit that comes from the key's bias; nan if the key is rotated.
        random_dimensions: float, logits. Part of the logit that comes from equally many random dimensions; nan if the
            key is rotated.
        logit_advantage_sink: float, logits. Logit of the sink's key minus the mean logit of the other keys that a later
            query sees.
        logit_advantage_other_positions: float, logits. The same difference, computed for five other keys.
        """,
    ),
    _table(
        "arms",
        "one BOS condition: the traced one, and the other one if the tokenizer has BOS",
        """
        condition: str, name. with or without BOS.
        chosen: bool, yes or no. Whether the other tables are of this condition.
        sink_position: int, index. The condition's studied position: its strongest sink on all sequences, 0 where it has
            none.
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
        statistic: str, name. Name of the statistic; intervention_share is the share of the sink that the intervention
            moves.
        value: float, of the measure. Value of the statistic; nan if it is undefined.
        ci_low/ci_high: float, of the measure. 95% interval of the value over sequences.
        null_name: str, name. What the value is compared with; none where there is nothing.
        null_value: float, of the measure. The statistic there.
        criterion: str, text. When the link holds.
        is_primary: bool, yes or no. Whether the measured verdict hangs on this statistic.
        n: int, count. Sequences that the numbers are taken over.
        verdict: str, name. holds, fails, undecided or not applicable: derived from the three answers, the same on all
            rows of a link; not applicable where no position is a sink.
        present: str, name. yes, no, undecided or not applicable: whether what the link leads to stands out.
        necessary_or_sufficient: str, name. The same: whether breaking the link removes the sink, or making it makes
            one.
        carries: str, name. The same: whether the sink goes where what the link leads to is mean ablated.
        measured: str, name. holds, fails or undecided: the primary statistic alone, with a sink and without.
        intervened: str, name. The same of the intervention alone; no intervention where there was none.
        floors: str, name. calibrated; not calibrated if the user moved a floor or threshold, so that the measured error
            rates of the verdicts do not apply.
        """,
    ),
    _table(
        "summary",
        "one headline number or text",
        """
        quantity: str, name. Name of the quantity.
        value: any, of the row. The number or text; empty if the quantity has no value.
        ci_low/ci_high: float, of the row. 95% interval of the value over sequences.
        unit: str, text. Unit of the row's numbers.
        note: str, text. How to read it.
        """,
        file="csv",
    ),
    replace(
        _HEADS,
        name="twin_heads",
        row="like heads, for the random-init baseline",
        when="with the random-init baseline",
    ),
    _table(
        "twin_links",
        "one statistic of one link, measured on the random-init baseline",
        """
        link: str, name. Name of the link.
        statistic: str, name. Name of the statistic.
        value: float, of the measure. Value of the statistic; nan if it is undefined.
        """,
        when="with the random-init baseline",
    ),
    _table(
        "makers",
        "one part of the model that writes to the sink position, the strongest first; the first of the ranking, and "
        "all that belong to a set",
        """
        rank: int, rank. Rank among all parts of the model, by score.
        kind: str, name. neuron, head, embedding, position embedding, key bias or sink logit.
        layer: int, index. Layer; -1 for an embedding.
        unit: int, index. Neuron, head, key-value head (key bias), token id (embedding; -1 where sequences differ) or
            position (position embedding).
        integrated: float, share. Effect on the target, over the largest one, integrated from what the stream is at
            other positions to what it is at the sink position; an embedding's is its direct effect.
        gradient: float, share. The same to first order in the clean model.
        contribution: float, share. Largest share of an outlier dimension that the part writes, over the largest one.
        score: float, share. The largest magnitude of these three.
        sets: str, list. Sets that the part belongs to.
        is_maker: bool, yes or no. Whether it belongs to the set of all makers.
        is_super: bool, yes or no. Whether it is a super neuron by contribution.
        removed_alone: float, share. Share of the target that ablating it alone removes, on the sequences on which it
            was chosen; nan for parts of no set.
        target: str, name. What the makers make: sink, outlier dimensions or sink logit.
        """,
        when="with interventions",
    ),
    _table(
        "maker_sets",
        "one set of parts that is ablated together, or a random set of the same size and layers",
        """
        set: str, name. half, four fifths, all makers, super neurons or random.
        control_of: str, name. Set that a random set is a control of; empty for a set.
        size: int, count. Number of parts.
        parts: str, list. The parts: layer.neuron for a neuron, else with its kind.
        target: str, name. What is to be removed: sink, outlier dimensions or sink logit.
        removed: float, share. Share of it that is removed on sequences on which the set was not chosen; a ratio of
            means.
        ci_low/ci_high: float, share. 95% interval of that share over sequences.
        control_largest: float, share. Largest share that one of its random sets removes; nan without random sets.
        n_controls: int, count. Number of random sets.
        baseline: float, of the measure. The target without an edit: attention, or magnitude of the dimensions.
        value: float, of the measure. The target with the set ablated.
        baseline_loss_nats: float, nats. Mean next-token loss without an edit.
        loss_nats: float, nats. Mean next-token loss with the set ablated.
        control_loss_nats: float, nats. Mean loss with a random set ablated; nan without random sets.
        n: int, count. Sequences that the numbers are averaged over; random sets take fewer.
        """,
        when="with interventions",
    ),
    _table(
        "amplification",
        "one amplification factor and one centre",
        """
        centre: str, name. Mean that the deviation is taken from: values, aggregated, or none (norm only).
        factor: float, 1. Factor by which the deviation is multiplied; 1 is no edit.
        layers: str, list. Layers that are edited.
        target_position: int, index. Position that is edited.
        read_layers: str, list. Layers in which attention is read, at most five after the first growth step.
        baseline_mass: float, attention. Attention to the position without an edit.
        mass: float, attention. Attention to the position with the edit.
        times: float, 1. mass over baseline_mass; nan if baseline_mass is 0.
        change: float, attention. mass minus baseline_mass.
        change_low/change_high: float, attention. 95% interval of the change over sequences.
        n: int, count. Sequences that the numbers are averaged over.
        """,
        when="with interventions",
    ),
    _table(
        "effects",
        "one intervention on one link",
        f"""
        link: str, name. Link that the intervention breaks or makes.
        edit: str, text. What the intervention does.
        layers: str, list. Layers that are edited.
        position: int, index. Position that is edited.
        read_layers: str, list. Layers in which attention is read.
        baseline_target_mass: float, attention. Attention without an edit to {_TARGET}.
        target_mass: float, attention. Attention with the edit to {_TARGET}.
        baseline_sink_mass: float, attention. Attention without an edit to {_SINK}.
        sink_mass: float, attention. The same with the edit.
        uniform_sink_mass: float, attention. What uniform attention would give {_SINK}, its rows summing to what the
            model's sum to.
        baseline_loss_nats: float, nats. Mean next-token loss without an edit.
        loss_nats: float, nats. Mean next-token loss with the edit.
        control_of: str, text. Edit that this row is a control of; empty if the row is no control.
        control_mean: float, attention. Mean over controls of the attention to the position that decides the verdict;
            nan without controls.
        control_sd: float, attention. Standard deviation over controls; nan with fewer than two controls.
        n_controls: int, count. Number of matched random controls.
        share: float, share. Attention that the target position gained, or that the sink position lost, over the
            unedited attention to the sink position; a ratio of means.
        ci_low/ci_high: float, share. 95% interval of the share over sequences.
        control_share: float, share. Mean share of the controls; nan without controls.
        outcome: str, name. What happened to the sink: removed, relocated, shared or unchanged.
        is_primary: bool, yes or no. Whether this intervention answers if the link is necessary or sufficient.
        carries: bool, yes or no. Whether this intervention answers if the link carries the sink.
        control_largest: float, share. Largest share of a control, which a yes must beat; nan without controls.
        control_loss_nats: float, nats. Mean next-token loss over at most five controls; nan without controls.
        masked_loss_nats: float, nats. Mean next-token loss where no query, but for the first few, may attend to the
            sink.
        beyond_masking_nats: float, nats. Lower end of the 95% interval of the loss minus that with the sink masked.
        uniform_loss_nats: float, nats. Loss of guessing every token alike.
        n: int, count. Sequences that the numbers are averaged over.
        control_n: int, count. How many of these the controls are made on; 0 without controls. Attention and loss of
            controls are what they change on these, added to the run without them on all.
        sinks_left_out: int, count. Tokens that mean_ordinary leaves out, for the finder marks them as sinks; 0 if it
            found none.
        """,
        when="with interventions",
    ),
    _table(
        "mediation",
        "one quantity frozen under one intervention, with attention read after one growth step",
        f"""
        intervention: str, name. What makes the sink: isolation, amplification, or natural.
        frozen: str, name. Quantity that is frozen: {", ".join(FROZEN)}.
        step: int, index. Growth step whose sink is read; -1 if the model has no growth step.
        position: int, index. Position of the sink that is read.
        layers_from: int, index. First layer in which attention is read.
        layers_to: int, index. Last layer in which attention is read.
        baseline_mass: float, attention. Attention to the position in the clean run; for the natural sink, attention to
            an ordinary position.
        mass_without_freeze: float, attention. Attention under the intervention with nothing frozen.
        mass: float, attention. Attention under the intervention with the quantity frozen.
        surviving_share: float, share. Share of the attention added by the intervention that survives the freezing; nan
            if the intervention adds less than {LEAST_ADDED:g}.
        control_mean: float, attention. Mean attention when random quantities of the same size are frozen.
        control_sd: float, attention. Standard deviation over the random controls; nan with fewer than two controls.
        control_surviving_share: float, share. Mean surviving share of the random controls; nan if the intervention adds
            less than {LEAST_ADDED:g}.
        n_controls: int, count. Number of random controls.
        size: int, count. Numbers per token that are frozen.
        n: int, count. Sequences that the numbers are averaged over.
        control_n: int, count. How many of these the controls are made on; 0 without controls. Attention and loss of
            controls are what they change on these, added to the run without them on all.
        """,
        when="with interventions",
    ),
    _table(
        "placement",
        "one kind of token at one position",
        """
        position: int, index. Position of the token, either 0 or an interior position.
        token: str, name. Kind of token, either ordinary or (if the tokenizer has it) bos.
        isolated: bool, yes or no. Whether the attention mask isolates the position.
        sink_mass: float, attention. Attention to the position, mean over the layers in which the sink is read.
        ordinary_mass: float, attention. Mean attention to up to five other positions in the same run.
        norm_ratio: float, 1. Norm at the position over the median norm at those other positions, in the layer where the
            ratio is largest; nan without other positions.
        loss_nats: float, nats. Mean next-token loss of the run.
        is_sink: bool, yes or no. Whether sink_mass is over 0.1 and over four times ordinary_mass.
        n: int, count. Sequences that the numbers are averaged over.
        """,
        when="with interventions",
    ),
)

_EDITED_LAYERS = f"""
layer: int, index. Layer.
outlier_dimension: int, index. Dimension with the most energy at {_SINK}, unedited.
baseline_target_mass: float, attention. Attention without an edit to the edited position.
baseline_target_norm: float, stream. The edited position's norm after the layer, unedited.
baseline_target_value: float, stream. The edited position's value in the outlier dimension, unedited.
target_mass: float, attention. Attention with the edit to the edited position.
target_norm: float, stream. The edited position's norm after the layer, edited.
target_value: float, stream. The edited position's value in the outlier dimension, edited.
baseline_sink_mass: float, attention. Attention without an edit to {_SINK}.
baseline_sink_norm: float, stream. The model's own sink position's norm after the layer, unedited.
baseline_sink_value: float, stream. The model's own sink position's value in the outlier dimension, unedited.
sink_mass: float, attention. Attention with the edit to {_SINK}.
sink_norm: float, stream. The model's own sink position's norm after the layer, edited.
sink_value: float, stream. The model's own sink position's value in the outlier dimension, edited.
"""

_EDITED = f"""
layers: str, list. Layers that are edited, or all.
read_layers: str, list. Layers in which attention is read.
baseline_target_mass: float, attention. Attention without an edit to the edited position.
target_mass: float, attention. Attention with the edit to the edited position.
baseline_sink_mass: float, attention. Attention without an edit to {_SINK}.
sink_mass: float, attention. Attention with the edit to {_SINK}.
outcome: str, name. What happened to the sink: removed, relocated, shared or unchanged.
baseline_loss_nats: float, nats. Mean next-token loss without an edit.
loss_nats: float, nats. Mean next-token loss with the edit.
loss_change_nats: float, nats. Paired change of the loss, edited minus unedited.
loss_change_low/loss_change_high: float, nats. 95% interval of the change of the loss over sequences.
n: int, count. Sequences that the numbers are averaged over.
"""

_CENTRED = """
centre: str, name. Mean that the deviation is taken from: values, aggregated, or none (norm only).
factor: float, 1. Factor by which the deviation is multiplied; 1 is no edit.
"""

_ISOLATE = (
    _TOKENS,
    _table(
        "layers",
        "one layer and isolated position; numbers are means over sequences",
        f"""
        {_EDITED_LAYERS}
        target_position: int, index. Position that is isolated.
        """,
    ),
    _table(
        "summary",
        "one isolated position",
        f"""
        target_position: int, index. Position that is isolated.
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
        times: float, 1. target_mass over baseline_target_mass; nan if baseline_target_mass is 0.
        change: float, attention. target_mass minus baseline_target_mass.
        change_low/change_high: float, attention. 95% interval of the change over sequences.
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
        kind: str, name. Kind of set: set (the smallest that removes the sink), single, leave one out, or one of two
            kinds of random sets.
        neurons: str, list. Neurons, as layer.neuron.
        size: int, count. Number of neurons in the set.
        method: str, name. What the neurons are set to, either mean_ordinary or zero.
        what: str, name. Which outputs of the neurons are ablated, either column (all of them) or scalar (only the
            outlier dimension).
        where: str, name. Positions of the ablation, either sink (the sink position) or everywhere.
        layers_from: int, index. First layer in which attention is read.
        layers_to: int, index. Last layer in which attention is read; layers after the next growth step are left out.
        baseline_mass: float, attention. Attention to the sink without an ablation.
        mass: float, attention. Attention to the sink with the ablation.
        removed_share: float, share. Attention lost through the ablation over baseline_mass; a ratio of means.
        ci_low/ci_high: float, share. 95% interval of removed_share over sequences.
        baseline_loss_nats: float, nats. Mean next-token loss without an ablation.
        loss_nats: float, nats. Mean next-token loss with the ablation; nan if the loss was not requested.
        n: int, count. Sequences that the numbers are averaged over.
        """,
    ),
    _table(
        "summary",
        "one growth step",
        f"""
        step: int, index. Growth step whose sink is to be removed.
        neurons: str, list. Neurons, as layer.neuron.
        size: int, count. Number of neurons in the set.
        removes: bool, yes or no. Whether ablating the set removes at least {LOST_FRAC:g} of the sink.
        removed_share: float, share. Share of the sink that the ablation removes.
        best_single: float, share. Largest share removed by one neuron of the set alone; nan for a set of one.
        random_mean: float, share. Mean share removed by random sets of the same size.
        random_max: float, share. Largest share removed by such a random set.
        read_layers: str, list. Layers in which attention is read.
        """,
        file="csv",
    ),
)

_PATCHED = """
layer?: int, index. Layer of the patch, if layers are swept.
position?: int, index. Position of the patch (the query position for scores and pattern), if positions are swept.
head?: int, index. Head of the patch, if heads are swept.
key?: int, index. Key position of the patched scores or pattern, if keys are swept.
unit?: int, index. Neuron or dimension of the patch, if units are swept.
"""

_PATCHES = f"""
{_PATCHED}
value?: float, of the metric. Metric of the patched run, mean over sequences; absent with --approximate.
effect?: float, of the metric. value minus the metric of the unpatched run; absent with --approximate.
normalised_effect?: float, 1. effect over the difference between the source run and the unpatched run: 0 means as
    unpatched, 1 means as the source run; nan if the two runs have the same metric.
approximation?: float, of the metric. First-order approximation of effect; only with --approximate or --screen.
changed: bool, yes or no. Whether the patched-in values differ from the values that they replace.
n: int, count. Sequences for which the metric is defined.
"""

_GAP = """
loss_nats: float, nats. Mean next-token loss.
perplexity: float, 1. Exponential of the mean loss.
change_nats: float, nats. Paired change of the loss from the clean run.
change_low/change_high: float, nats. 95% interval of the change over sequences.
closed_share: float, share. Share of the gap that is closed; nan where the gap is no cost.
closed_low/closed_high: float, share. 95% interval of the closed share over sequences.
n: int, count. Sequences that the numbers are averaged over.
"""

_QUANTISE = (
    _TOKENS,
    _table(
        "conditions",
        "one part of the text and what is not rounded",
        f"""
        part: str, name. The half of the sequences: choose (sets are chosen on it) or judge (held out).
        kept: str, name. What is not rounded: clean (everything), weights (all but the weights), all (nothing is kept),
            tokens, channels, both, inputs (of linear layers), or random (tokens and channels).
        sink_tokens: bool, yes or no. Whether the sink tokens are kept, or as many random ones.
        channels: int, count. Channels that are kept at each site and layer.
        inputs: int, count. Inputs of linear layers that are left alone, those with the least signal-to-noise ratio.
        draw: int, index. Draw of a random control; nan for the others.
        {_GAP}
        """,
    ),
    _table(
        "channels",
        "one of the largest channels of a site in a layer",
        """
        site: str, name. Site whose channels are listed.
        layer: int, index. Layer.
        tokens: str, name. Tokens that are looked at: all, or ordinary (those that are no sinks).
        rank: int, rank. Rank of the channel by its largest magnitude.
        channel: int, index. Channel of the site, with its heads joined into one axis.
        largest: float, stream. Largest magnitude on the first half of the sequences.
        over_median: float, 1. The same over the median of the site's channels; nan where that is 0.
        """,
    ),
    _table(
        "sqnr",
        "one site in one layer",
        """
        site: str, name. Site that is rounded.
        layer: int, index. Layer.
        format: str, name. Format that the site is rounded to.
        sqnr_db: float, dB. Signal-to-noise ratio of the rounding over all tokens.
        ordinary_sqnr_db: float, dB. The same over the tokens that are no sinks.
        kept_sqnr_db: float, dB. The same over the tokens that are no sinks where the sinks are kept.
        """,
    ),
    _table(
        "sinks",
        "one token that is a sink",
        """
        sequence: int, index. Sequence of the run.
        position: int, index. Position in the sequence.
        token_id: int, token id. The token's id.
        """,
    ),
    _table(
        "summary",
        "the decision; its losses are those of the held-out half",
        """
        verdict: str, name. keep, keep a part (the goal is not reached), halves disagree, no small set, nothing to keep.
        sentence: str, text. The decision.
        format: str, name. Format of the activations.
        clean_loss_nats: float, nats. Loss without rounding.
        quantised_loss_nats: float, nats. Loss where everything is rounded.
        cost_nats: float, nats. Paired change from the first to the second.
        cost_low/cost_high: float, nats. 95% interval of the cost over sequences.
        sink_tokens: float, tokens. Sink tokens a sequence that are to be kept; 0 for none.
        channels: int, count. Channels that are to be kept at each site and layer.
        kept_loss_nats: float, nats. Loss where the chosen set is kept; nan where none was chosen.
        closed_share: float, share. Share of the gap that the chosen set closes; nan where none was chosen.
        closed_low/closed_high: float, share. 95% interval of the closed share over sequences.
        random_most: float, share. Largest share that a random set closes; nan without random sets.
        rival_sink_tokens: bool, yes or no. Whether the set that contradicts the chosen one keeps the sink tokens.
        rival_channels: int, count. Channels of that set; 0 where no set contradicts the choice.
        rival_closed_share: float, share. Share of the gap that it closes; nan where there is none.
        controls: int, count. Random sets of the same number of tokens and channels.
        ignored: int, count. Inputs of linear layers that are left alone where only whole layers can be kept.
        ignored_closed_share: float, share. Share of the gap that leaving them alone closes; nan where there are none.
        ignored_closed_low/ignored_closed_high: float, share. 95% interval of that share over sequences.
        n: int, count. Held-out sequences.
        """,
        file="csv",
    ),
)

_STREAMING = (
    _TOKENS,
    _table(
        "losses",
        "one part of the text and the tokens that the cache keeps",
        f"""
        part: str, name. The half of the sequences: choose (the number is chosen on it) or judge (held out).
        kept: str, name. Tokens that are never evicted: a number of first ones, sink_mask (the sinks), random, or full
            (a cache that holds everything).
        tokens: float, tokens. Kept tokens a sequence; nan for a full cache.
        draw: int, index. Draw of a random control; nan for the others.
        {_GAP}
        """,
    ),
    _table(
        "positions",
        "one position and the tokens that the cache keeps, on the held-out half",
        """
        kept: str, name. Tokens that are never evicted, as in `losses`.
        position: int, index. Position of the query that predicts.
        loss_nats: float, nats. Mean loss of its prediction over sequences.
        n: int, count. Sequences that have the position.
        """,
    ),
    _table(
        "summary",
        "the decision; its losses are those beyond the window on the held-out half",
        """
        verdict: str, name. keep, keep none, or not confirmed (chosen, but no gain on the held-out half).
        sentence: str, text. The decision.
        recommended: int, tokens. First tokens that a cache should keep.
        chosen: int, tokens. The number that was chosen on the first half.
        window: int, tokens. Size of the cache.
        positions: str, name. stay, or reindexed (a token's position is its place in the cache).
        full_loss_nats: float, nats. Loss with a cache that holds everything.
        none_loss_nats: float, nats. Loss where no token is kept.
        kept_loss_nats: float, nats. Loss where the chosen number of first tokens is kept.
        gain_nats: float, nats. Paired difference of the last two.
        gain_low/gain_high: float, nats. 95% interval of the gain over sequences.
        closed_share: float, share. Share of the gap to a full cache that is closed; nan where the gap is no cost.
        closed_low/closed_high: float, share. 95% interval of the closed share over sequences.
        cost_nats: float, nats. Paired difference of the kept loss and that of a full cache.
        cost_low/cost_high: float, nats. 95% interval of that difference over sequences.
        sink_mask_tokens: float, tokens. Sink tokens a sequence; nan where keeping them was not tried.
        sink_mask_loss_nats: float, nats. Loss where the sink tokens are kept; nan where it was not tried.
        random_loss_nats: float, nats. Mean loss where as many random tokens are kept; nan without controls.
        controls: int, count. Draws of random tokens.
        n: int, count. Held-out sequences.
        """,
        file="csv",
    ),
)

_CARD = (
    _TOKENS,
    _table(
        "layers",
        "one layer; means over sequences",
        """
        layer: int, index. Layer.
        sink_attention: float, attention. Attention to the first token from the later queries, mean over heads; nan
            where no query reaches it.
        norm_ratio: float, 1. Norm of the first token after the layer over the median norm of those from position 8 on.
        max_abs: float, stream. Largest magnitude in the residual stream after the layer.
        kurtosis: float, 1. Excess kurtosis of a token's dimensions, mean over tokens.
        dominance_ratio: float, 1. Largest magnitude of the studied token over its mean magnitude.
        """,
    ),
    _table(
        "heads",
        "one head; means over sequences",
        """
        layer: int, index. Layer.
        head: int, index. Query head.
        sink_score: float, attention. Mean attention to the first token, its own query included; nan where the window is
            too short to tell.
        sink_mass: float, attention. Mean attention to the first token from the later queries.
        entropy: float, nats. Entropy of an attention row, mean over sampled rows.
        output_ratio: float, 1. Norm of what the head adds to the stream over its layer's mean, means over tokens.
        value_norm_ratio: float, 1. Norm of the first token's value after W_O over the mean of the others.
        inactive: bool, yes or no. Whether output_ratio is at most 0.25, so that the head does next to nothing.
        """,
    ),
    _table(
        "dimensions",
        "one dimension that is large",
        """
        kind: str, name. outlier (of the studied token) or residual (large on most tokens after the first).
        dimension: int, index. Dimension of the residual stream.
        layers: str, list. Layers after which it is one; empty where only the embedding has it.
        value: float, stream. Its value where it is largest, mean over sequences; of a residual one its magnitude.
        coverage: float, share. Share of the tokens after the first on which it is large; nan for an outlier.
        """,
    ),
    _table(
        "writers",
        "one part that writes an outlier dimension in a growth layer, or one super weight",
        """
        layer: int, index. Layer.
        dimension: int, index. Dimension that is written.
        part: str, name. attention, MLP, expert, neuron or super weight.
        unit: int, index. Expert or neuron, of a super weight the column of the down-projection; else missing.
        share: float, share. Share of the layer's change of the dimension, for a super weight of what the MLP writes.
        """,
    ),
    _table(
        "maxima",
        "the largest entry of one site",
        """
        site: str, name. Site that is read.
        value: float, stream. The entry.
        layer: int, index. Layer in which it is.
        position: int, index. Position of its token.
        channel: int, index. Channel of the site, with its heads joined into one axis.
        over_median: float, 1. Its magnitude over the median magnitude of its token at the site.
        """,
    ),
    _table(
        "losses",
        "one condition",
        """
        condition: str, name. clean, zeroed (outlier dimensions of the studied position at 0) or mean_aligned (at
            their mean over sequences; set_to_mean in earlier versions).
        loss_nats: float, nats. Mean next-token loss.
        change_nats: float, nats. Paired change of the loss from the clean run.
        change_low/change_high: float, nats. 95% interval of the change over sequences.
        n: int, count. Sequences that the numbers are averaged over.
        """,
    ),
    _table(
        "summary",
        "the card in one row",
        """
        sentence: str, text. The conclusion.
        sink_rate: float, share. Share of (layer, head, sequence) with their sink at the first token.
        sink_rate_low/sink_rate_high: float, share. 95% interval of the sink rate over sequences.
        threshold: float, attention. Threshold of the sink rate.
        sink_positions: str, list. Sink positions; empty where there are none.
        outlier_dimensions: str, list. Outlier dimensions of the studied position.
        loss_nats: float, nats. Mean next-token loss.
        inactive_heads: int, count. Heads that do next to nothing.
        """,
        file="csv",
    ),
)

_VERIFY = (
    _TOKENS,
    _table(
        "facts",
        "one published fact about the model",
        """
        id: str, name. Name of the fact.
        quantity: str, name. Quantity of ours that it is about; empty where there is none.
        meaning: str, text. Definition of that quantity.
        verdict: str, name. agree, disagree or not comparable.
        published: str, text. Published number ± its tolerance, or indices.
        measured: str, text. Measured number with its interval, or indices; empty where nothing was measured.
        value: float, of the measure. Measured number; nan for indices and where nothing was measured.
        low/high: float, of the measure. 95% interval of the measured number over sequences.
        condition: str, text. Conditions of the published number.
        reason: str, text. Why it cannot be compared, or what the model lacks; empty for the others.
        source: str, text. Where it was published.
        """,
    ),
    _table(
        "summary",
        "the verdict on the model",
        """
        sentence: str, text. The conclusion.
        agree: int, count. Facts that agree.
        disagree: int, count. Facts that disagree.
        not_comparable: int, count. Facts about the model that cannot be compared.
        known: int, count. Facts about any model.
        """,
        file="csv",
    ),
)

_DIFF = (
    _TOKENS,
    _table(
        "changes",
        "one quantity of both models",
        """
        quantity: str, name. Quantity that is compared.
        unit: str, text. Unit of the row's numbers.
        first: float, of the row. Number of the first model; nan for indices.
        second: float, of the row. Number of the second model; nan for indices.
        change: float, of the row. Second minus first, mean of paired differences over sequences; nan for indices.
        change_low/change_high: float, of the row. 95% interval of the change over sequences.
        first_indices: str, list. Indices of the first model; empty for numbers.
        second_indices: str, list. Indices of the second model; empty for numbers.
        alarm: bool, yes or no. Whether the change is more than a healthy fine-tune makes.
        """,
    ),
    _table(
        "positions",
        "one position",
        """
        position: int, index. Position of the token that is predicted, counted in the first model's sequences.
        first: float, nats. Mean loss of the first model.
        second: float, nats. Mean loss of the second model.
        change: float, nats. Second minus first, mean of paired differences.
        change_low/change_high: float, nats. 95% interval of the change over sequences.
        """,
    ),
    _table(
        "checks",
        "one check of the inputs or of the configuration",
        """
        check: str, name. Check that was made.
        alarm: bool, yes or no. Whether it found something wrong.
        said: str, text. What it found.
        line: str, text. What to change, and where; empty where nothing is wrong.
        """,
    ),
    _table(
        "tensors",
        "one tensor of weights that changed",
        """
        tensor: str, name. Name of the parameter.
        change: float, 1. Norm of the difference over the norm of the first model's tensor.
        """,
        when="with --by weights",
    ),
    _table(
        "summary",
        "the verdict",
        """
        sentence: str, text. The conclusion.
        by: str, name. What the two differ by: weights, dtype or bos.
        alarms: int, count. Changes and checks that are alarming.
        loss_change_nats: float, nats. Paired change of the loss.
        loss_change_low/loss_change_high: float, nats. 95% interval of that change over sequences.
        n: int, count. Sequences.
        """,
        file="csv",
    ),
)

_PATCH = (
    _table(
        "patches",
        "one patch",
        _PATCHES,
    ),
    _table(
        "check",
        "one patch that was both approximated and really run",
        f"""
        {_PATCHED}
        approximation: float, of the metric. First-order approximation of the effect.
        effect: float, of the metric. Effect of the real patch.
        error: float, of the metric. approximation minus effect.
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
        metric: str, text. Metric of the patch.
        direction: str, name. Either denoising (clean values into the corrupted run) or noising (the reverse).
        unpatched: float, of the metric. Metric of the patched run before it is patched.
        source: float, of the metric. Metric of the run that the patched-in values come from.
        """,
        file="csv",
    ),
)

_CELLS = _table(
    "cells",
    "one cell of the grid and one metric",
    """
    cell: int, index. Number of the cell.
    name?: str, text. Name of a cell that the caller defined.
    kind?: str, name. Kind of edit.
    site?: str, name. Site that is edited.
    where?: str, text. Edited layers, positions, heads and units, in words; empty if everything is edited.
    layer?: int, index. Layer of the edit; missing unless exactly one layer is edited.
    position?: int, index. Position of the edit; missing unless exactly one position is edited.
    head?: int, index. Head of the edit; missing unless exactly one head is edited.
    unit?: int, index. Unit of the edit, such as a neuron; missing unless exactly one unit is edited.
    key?: int, index. Key position of the edit; missing unless exactly one key is edited.
    factor?: float, 1. Strength of the edit; nan for a kind of edit without a strength.
    seed?: int, index. Seed of the edit's random draw; missing for a kind of edit without a random draw.
    centre?: str, name. Mean that the amplified deviation is taken from; missing for a kind of edit without a centre.
    metric: str, text. Metric of the row.
    metric_unit: str, text. Unit of the metric; empty for a pure number.
    baseline: float, of the metric. Metric of the unedited run, mean over sequences.
    value: float, of the metric. Metric of the cell, mean over sequences; nan if the cell failed.
    effect: float, of the metric. Paired difference, value minus baseline.
    ci_low/ci_high: float, of the metric. 95% interval of the effect over sequences.
    control_effect: float, of the metric. Mean effect of the cell's random controls; nan without controls.
    control_sd: float, of the metric. Standard deviation over the random controls; nan with fewer than two controls.
    n_controls: int, count. Random controls for which the metric is defined.
    over_control: float, of the metric. Paired difference, effect minus control_effect; nan without controls.
    over_low/over_high: float, of the metric. 95% interval of over_control over sequences.
    changed: bool, yes or no. Whether the edit changed any tensor in the run.
    n: int, count. Sequences for which the metric is defined in both runs.
    error: str, text. Why the cell failed; missing if it did not fail.
    """,
    open=True,
)

_SWEEP = (
    _table(
        "baseline",
        "one sequence and metric of the unedited run",
        """
        sequence: int, index. Sequence of the run.
        metric: str, text. Metric of the row.
        value: float, of the metric. Value of the metric; nan if it is undefined.
        """,
    ),
    _table(
        "block-*",
        "one sequence and metric of one cell, as one block of the sweep wrote it",
        """
        cell: int, index. Number of the cell; cells and controls share one numbering.
        sequence: int, index. Sequence of the run; -1 if the cell failed.
        metric: str, text. Metric of the row; empty if the cell failed.
        value: float, of the metric. Value of the metric; nan if it is undefined.
        changed: bool, yes or no. Whether the edit changed any tensor in the run.
        error: str, text. Why the cell failed; missing if it did not fail.
        """,
    ),
    _CELLS,
    replace(
        _CELLS,
        name="controls",
        row="one random control and one metric; a control has its own number in the column cell and no controls itself",
    ),
    _table(
        "values",
        "one sequence and metric of one cell",
        """
        cell: int, index. Number of the cell in cells.
        sequence: int, index. Sequence of the run.
        metric: str, text. Metric of the row.
        value: float, of the metric. Value of the metric; nan if it is undefined.
        """,
    ),
)

_WATCHED = _table(
    "watch",
    "one measure of one checkpoint",
    """
    step: int, steps. Optimiser steps so far.
    tokens: int, tokens. Tokens trained on so far; missing where they were not counted.
    measure: str, name. Name of the measure, or error if the checkpoint could not be read.
    layer: int, index. Layer, or -1 for the stream before the first layer; missing for measures of the whole model.
    position: int, index. Position that s2 is measured at; missing for other measures.
    threshold: float, attention. Threshold of the sink score for sink_rate; nan for other measures.
    value: float, of the row. Value of the measure, mean over sequences; nan if it is undefined.
    unit: str, text. Unit of the row's numbers.
    error: str, text. Why the checkpoint could not be read; missing if it could.
    tokens_sha256: str, hash. Hash of the sequences that were read.
    """,
)

_TRAIN = (
    _table(
        "log",
        "one logged step",
        """
        step: int, steps. Optimiser steps so far.
        tokens: int, tokens. Tokens trained on so far.
        loss: float, nats. Training loss, mean over the steps since the previous row.
        lr: float, 1. Learning rate of the step.
        grad_norm: float, 1. Norm of the gradient before clipping; nan if it was not computed.
        seconds: float, seconds. Time spent in training so far.
        eval_loss: float, nats. Loss on the held-out sequences; nan if it was not evaluated at this step.
        """,
    ),
    replace(_WATCHED, when="that were watched"),
)

_MONITOR = (
    _table(
        "monitor",
        "one key of one reading",
        """
        step: int, steps. Optimiser steps that the weights have made.
        key: str, name. Key of the monitor, without its prefix.
        layer: int, index. Layer, or -1 for the stream before the first layer; missing for the whole model.
        value: float, of the row. Value of the key over the sequences that were read.
        unit: str, text. Unit of the row's numbers.
        """,
    ),
    _table(
        "alarms",
        "one alarm",
        """
        step: int, steps. Step of the reading at which the rule passed its limit.
        rule: str, name. Name of the change-point rule.
        sentence: str, text. What was found, and in which layers.
        """,
    ),
)

_COMPARE = (
    _table(
        "curves",
        "one run at one number of tokens",
        """
        variant: str, name. Training variant, shared by its runs with different seeds.
        seed: int, index. Seed of the run.
        curve: str, name. evaluation, or training (smoothed).
        tokens: float, tokens. Tokens trained on so far.
        loss: float, nats. The run's loss.
        difference: float, nats. Loss minus the loss of the baseline's run with the same seed.
        """,
    ),
    _table(
        "bands",
        "one variant at one number of tokens",
        """
        variant: str, name. Training variant, shared by its runs with different seeds.
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
        "the end of one run, on one curve",
        """
        variant: str, name. Training variant, shared by its runs with different seeds.
        seed: int, index. Seed of the run.
        curve: str, name. evaluation, or training (smoothed).
        tokens: float, tokens. Tokens at the run's last point.
        loss: float, nats. Loss at the run's last point.
        difference: float, nats. Loss minus the final loss of the baseline with the same seed.
        target: float, nats. Final loss of the baseline with the same seed.
        reached: float, tokens. Tokens after which the run's loss stays at or below the target; nan if it never does.
        baseline_reached: float, tokens. Tokens after which the baseline's loss stays at or below the target.
        acceleration: float, 1. baseline_reached over reached; nan if the target was not reached.
        """,
    ),
    _table(
        "differences",
        "the final loss of one variant minus the baseline's, paired by seed, on one curve",
        """
        variant: str, name. Training variant, shared by its runs with different seeds.
        curve: str, name. evaluation, or training (smoothed).
        mean: float, nats. Mean difference.
        low: float, nats. Lower end of the 95% t interval over seeds; nan for one seed.
        high: float, nats. Upper end of the 95% t interval over seeds; nan for one seed.
        boot_low/boot_high: float, nats. 95% bootstrap interval of the mean over seeds.
        t_p: float, p. Two-sided p of the paired t test; nan where all differences are equal.
        flip_p: float, p. Two-sided p of the sign-flip test; nan for one seed.
        flip_smallest: float, p. Smallest p that the sign-flip test can give with this number of seeds.
        n: int, count. Seeds that the mean is taken over.
        """,
    ),
    _table(
        "measures",
        "one measure of one variant at the last checkpoint that all runs have",
        """
        measure: str, name. Name of the measure.
        threshold: float, attention. Threshold of the sink score for sink_rate; nan for other measures.
        variant: str, name. Training variant, shared by its runs with different seeds.
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
        "one measure of one variant at one checkpoint",
        """
        variant: str, name. Training variant, shared by its runs with different seeds.
        measure: str, name. Name of the measure.
        threshold: float, attention. Threshold of the sink score for sink_rate; nan for other measures.
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
        variant: str, name. Training variant, shared by its runs with different seeds.
        seed: int, index. Seed of the run.
        threshold: float, attention. Threshold of the sink score.
        step: int, steps. First checkpoint from which the sink rate stays at or above {MIN_SINK_RATE:g}; missing if no
            checkpoint does.
        tokens: int, tokens. Tokens trained on at that checkpoint; missing if no checkpoint does.
        rate: float, share. Sink rate at the last checkpoint.
        mass: float, attention. Attention to position 0 at the last checkpoint, in the layer with the most attention.
        layer: int, index. Layer with the most attention to position 0 at the last checkpoint.
        sentence: str, text. Summary of the row in words.
        """,
        when="that compare watched runs",
    ),
)

_SUBJECT = """
model: str, text. Name of the model.
variant: str, text. Variant of the model, shared by its repetitions with other seeds.
seed: int, index. Seed of the weights; missing if it is not known.
step: int, steps. Training step of the checkpoint; missing for a model that is no checkpoint.
"""

_MODELS = _table(
    "models",
    "one model",
    f"""
    {_SUBJECT}
    n_layers: int, count. Layers; missing if the model failed.
    d_model: int, count. Width of the residual stream; missing if the model failed.
    d_vocab: int, count. Size of the vocabulary; missing if the model failed.
    weights_sha256: str, hash. Hash of the weights; missing if the model failed.
    seconds: float, seconds. Time that the measurement took; nan if the model failed.
    error: str, text. Why the model failed; missing if it did not fail.
    """,
    file="csv",
)

_COMPARED = """
n: int, count. Models (seeds) that the mean is taken over.
mean: float, of the measure. Mean over seeds.
low/high: float, of the measure. 95% interval of the mean over seeds.
difference: float, of the measure. Mean difference to the first variant, paired by seed; nan for the first variant.
difference_low/difference_high: float, of the measure. 95% interval of the difference over seeds.
p: float, p. Two-sided p of the paired t test; nan for the first variant and for a single seed.
"""

_ARMS = _table(
    "arms",
    "one measure of one variant; training checkpoints are left out, since they are no repetitions",
    f"""
    measure: str, name. Name of the measure.
    variant: str, text. Variant; the others are compared with the first one.
    {_COMPARED}
    """,
    file="csv",
)

_NULL = """
null: float, of the row. Mean of the measure under chance.
null_low: float, of the row. Lower end of the range that holds 95% of the values under chance.
null_high: float, of the row. Upper end of the range that holds 95% of the values under chance.
"""

_MEASURED = """
measure: str, name. Name of the measure.
value: float, of the row. Value of the measure.
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
        "one model and one number of most frequent tokens",
        f"""
        {_SUBJECT}
        kind: str, name. argmax (the most probable token) or argmin (the least probable).
        tokens: int, count. Number of most frequently predicted tokens.
        share: float, share. Share of the sequences whose predicted token is one of these tokens.
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
        count: int, count. Sequences after which the token is predicted.
        share: float, share. Share of the sequences after which the token is predicted.
        probability_ratio: float, 1. Mean probability of the token times the size of the vocabulary.
        text: str, text. The decoded token; `<id>` if no tokenizer knows it.
        """,
    ),
    _ARMS,
)

_PLACE = """
layer: int, index. Layer; -1 for the embedding, the number of layers for the final norm.
stage: str, name. Step after which the state is read: embedding, attention, mlp or final (the final norm).
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
        floor: float, cosine. Mean cosine between the states before the first layer.
        excess: float, cosine. value minus floor.
        excess_low/excess_high: float, cosine. 95% interval of the excess over sequences.
        gain: float, cosine. value minus the value at the previous step; 0 at the first step.
        """,
    ),
    _table(
        "positions",
        "one position of one model after one sublayer",
        f"""
        {_SUBJECT}
        {_PLACE}
        position: int, index. Position: 0, the powers of two, and the last.
        inter: float, cosine. Mean cosine between the states of two sequences at the position.
        excess: float, cosine. inter minus its value at the same position before the first layer.
        norm: float, stream. Mean norm of the states.
        """,
    ),
    _table(
        "alignment",
        "one token or dimension that the contraction direction of one model is compared with",
        f"""
        {_SUBJECT}
        what: str, text. A preferred token, or the largest dimension of position 0 together with its layer.
        which: int, index. Token id, or index of the dimension.
        cosine: float, cosine. Cosine of the token's unembedding, or of the dimension's axis, with the direction.
        rank: int, rank. Rank of this cosine among all tokens or dimensions, the most aligned first.
        of: int, count. Number of tokens or dimensions that are ranked.
        event_frac: float, share. Share of sequences that predict the token; nan for a dimension.
        """,
    ),
    _ARMS,
    _table(
        "agreement",
        "two models of the same width, at one stage",
        """
        a: str, text. Name of the first model.
        b: str, text. Name of the second model.
        stage: str, name. last (after the last layer) or final (after the last norm).
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
        effect: float, of the row. value minus the value without calibration.
        effect_low/effect_high: float, of the row. 95% interval of the effect over sequences.
        unit: str, text. Unit of the row's numbers.
        tokens: str, text. Where the sequences come from.
        """,
        file="csv",
    ),
    _table(
        "arms",
        "one measure of one variant under one calibration",
        f"""
        measure: str, name. Name of the measure.
        calibration: str, name. Calibration; the others are compared with none.
        {_COMPARED}
        variant: str, text. Variant that the models share.
        """,
        file="csv",
    ),
)

NULLS = ("analytical", "matrices", "pipeline", "shuffled", "relabelled")
"""Null distributions for the mean Kendall tau of a fingerprint; the published nulls come first."""

_OF_NULLS = "\n".join(
    f"z_{name}: float, 1. tau_bar minus the mean of the {name} null, in standard deviations; nan without an answer.\n"
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
        lineage: str, text. Label of the model's lineage; missing if it is not known.
        seed: int, index. Seed of the weights; missing if it is not known.
        step: int, steps. Training step of the checkpoint; missing for a model that is no checkpoint.
        d_model: int, count. Width of the residual stream.
        ids: int, count. Ordinary token ids in the model's vocabulary.
        dtype: str, name. Type of the model's weights.
        weights_sha256: str, hash. Hash of the weights.
        cached: bool, yes or no. Whether the model's states were already in the cache.
        """,
        file="csv",
    ),
    _table(
        "pairs",
        "two models",
        f"""
        {_A_AND_B}
        related: bool, yes or no. Whether the two models share an initialisation; missing if not known.
        verdict: str, name. Either same lineage, no common lineage shown, or no answer.
        why: str, text. What decided the verdict, or why there is no answer.
        shared: int, count. Identity coordinates that the two models have in common.
        expected: float, count. Number of common coordinates expected by chance; nan if the models differ in width.
        tau_bar: float, tau. Mean tau over the shared coordinates; nan without an answer.
        across: float, tau. Mean tau between different coordinates; nan without an answer.
        too_narrow: float, 1. Standard deviation of tau_bar when no coordinates match, over the formula's standard
            deviation; nan without an answer.
        scale_tau: float, tau. Kendall tau between the sizes of the two models' states; nan without an answer.
        scale_log10_p: float, log10 p. Two-sided p of scale_tau; nan without an answer.
        shares_scale: bool, yes or no. Whether the two models share only the overall size of their states, and nothing
            beyond it.
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
        z: float, 1. tau_bar minus the null's mean, in standard deviations of the null; nan if sd is 0.
        log10_p_paper: float, log10 p. One-sided p, as in the paper's text.
        log10_p_code: float, log10 p. Two-sided p, as in the paper's released code.
        p_draws: float, p. Share of the null's draws at or above tau_bar; nan for a null without draws.
        """,
    ),
    _table(
        "calibration",
        "one null over the pairs that are known to be unrelated",
        f"""
        null: str, name. One of {", ".join(NULLS)}.
        pairs: int, count. Pairs that are known to be unrelated.
        p_over_01: float, share. Share of these pairs with p above 0.01.
        p_over_05: float, share. Share of these pairs with p above 0.05.
        p_over_50: float, share. Share of these pairs with p above 0.5.
        too_narrow: float, 1. Root mean square of z, the factor by which the null is too narrow.
        largest_z: float, 1. Largest magnitude of z.
        """,
        when="with unrelated pairs",
        file="csv",
    ),
    _table(
        "scores",
        "one score that separates related from unrelated pairs, under one measure",
        """
        score: str, name. tau_bar, or z under one of the nulls.
        measure: str, name. auc, or tpr (true positives at 1% false positives).
        value: float, share. Value of the measure.
        low/high: float, share. 95% interval of the value over models.
        related: int, count. Pairs that are known to be related.
        unrelated: int, count. Pairs that are known to be unrelated.
        unanswered: int, count. Pairs of either kind without an answer, which are left out.
        """,
        when="with related and unrelated pairs",
        file="csv",
    ),
)

_DECISION = """
    kind: str, name. Kind of the token: first (position 0), delimiter (special, or without a letter or digit) or other.
    sink: bool, yes or no. Whether the token is a sink.
    massive: bool, yes or no. Whether the token is a massive activation.
"""

_RATES = """
    tokens: int, count. Number of these tokens.
    sink_rate: float, share. Share of these tokens that are sinks.
    massive_rate: float, share. Share of these tokens that are massive.
    median_share: float, 1. Median of their scores by attention, in fair shares.
    largest_share: float, 1. Largest of these scores.
    median_norm: float, 1. Median of their scores by norm, over the median norm of the sequence.
    largest_norm: float, 1. Largest of these scores.
"""

_SINK_TOKENS = (
    _TOKENS,
    _table(
        "sink_tokens",
        "one token that is a sink, a massive activation, or both",
        f"""
        sequence: int, index. Sequence of the run.
        position: int, index. Position in the sequence.
        token_id: int, token id. The token's id.
        text: str, text. The token decoded alone; `<id>` where the tokenizer does not know it.
        {_DECISION}
        norm_ratio: float, 1. Norm of its residual stream over the median of its sequence, in the layer where this is
            largest: its score by norm.
        received: float, attention. Mean attention of the sampled later queries to it, over all heads and layers; nan
            where no sampled query follows.
        share_score: float, 1. How many times its fair share of attention later tokens give it, mean over layers,
            against tokens at a similar distance: its score by attention.
        sink_layers: str, list. Layers in which it receives at least the threshold, in fair shares; empty if it is no
            sink.
        massive_layers: str, list. Layers in which its norm ratio is at least the threshold; empty if it is not massive.
        dimensions: str, list. Fewest dimensions that hold the asked share of its energy in the layer where its norm
            ratio is largest; empty if more than the asked number are needed.
        """,
    ),
    _table(
        "token_ids",
        "one token id, over its occurrences after position 0",
        f"""
        token_id: int, token id. The token's id.
        text: str, text. The token decoded alone; `<id>` where the tokenizer does not know it.
        kind: str, name. Kind of the token: delimiter (special, or without a letter or digit) or other.
        {_RATES}
        """,
    ),
    _table(
        "positions",
        "one position, over the sequences that reach it",
        f"""
        position: int, index. Position in the sequence.
        {_RATES}
        """,
    ),
    _table(
        "dimensions",
        "one dimension of the residual stream after one layer, at one kind of token; only dimensions that are outliers "
        "on at least the asked share of such tokens in some layer, without the layers in which they are never one",
        """
        kind: str, name. residual (tokens that are neither sinks nor massive) or sink token (the others).
        dimension: int, index. Dimension of the residual stream.
        layer: int, index. Layer.
        coverage: float, share. Share of the tokens of this kind on which the dimension is over the asked multiple of
            the token's median magnitude.
        tokens: int, count. Number of tokens of this kind.
        value: float, stream. Mean magnitude of the dimension on the tokens on which it is an outlier.
        ratio: float, 1. Mean of its magnitude over the token's median magnitude, on the same tokens.
        """,
    ),
    _table(
        "layers",
        "one layer and one group of tokens; numbers are means over the tokens",
        """
        layer: int, index. Layer.
        kind: str, name. marked (sinks and massive tokens), others, or all.
        tokens: int, count. Number of tokens of the group.
        kurtosis: float, 1. Excess kurtosis of the dimensions of a token's residual stream after the layer; nan if the
            group is empty.
        norm_ratio: float, 1. Norm of a token over the median of its sequence.
        received: float, attention. Mean attention of the sampled later queries to a token, over heads.
        share: float, 1. The same attention in fair shares.
        """,
    ),
    _table(
        "maxima",
        "one site in one layer: its largest magnitude over all tokens, and where it is",
        f"""
        layer: int, index. Layer.
        site: str, name. Site that is read.
        max_abs: float, stream. Largest magnitude.
        dimension: int, index. Coordinate of the site at which it is (heads concatenated).
        sequence: int, index. Sequence of the run.
        position: int, index. Position in the sequence.
        token_id: int, token id. The token's id.
        text: str, text. The token decoded alone; `<id>` where the tokenizer does not know it.
        {_DECISION}
        """,
    ),
    _table(
        "histogram",
        "one bin of one score",
        """
        by: str, name. attention (how many times its fair share a token receives) or norm (times the sequence's median).
        low: float, 1. Lower edge of the bin.
        high: float, 1. Upper edge of the bin.
        tokens: int, count. Number of tokens with such a score.
        """,
    ),
    _table(
        "gradients",
        "one token of the first few sequences after one layer; the last token of a sequence, which predicts nothing, "
        "has no row",
        """
        layer: int, index. Layer.
        sequence: int, index. Sequence of the run.
        position: int, index. Position in the sequence.
        marked: bool, yes or no. Whether the token is a sink or massive.
        gradient_ratio: float, 1. Norm of the gradient of the sequence's mean loss with respect to the token's residual
            stream, over the median of its sequence.
        """,
        when="unless `gradient_sequences` is 0",
    ),
    _table(
        "thresholds",
        "one of the two scores: the threshold and its evidence",
        """
        by: str, name. attention (marks sinks) or norm (marks massive activations).
        threshold: float, 1. Score from which a token is marked; nan if there is no gap and none was asked for.
        asked: bool, yes or no. Whether the threshold was asked for instead of found.
        gap: bool, yes or no. Whether the scores have a gap.
        gap_low: float, 1. Largest score below the gap; nan if there is no gap.
        gap_high: float, 1. Smallest score above the gap; nan if there is no gap.
        within: int, count. Number of tokens whose score is close to the middle of the gap; 0 if there is no gap.
        marked: int, count. Number of tokens that are marked.
        tokens: int, count. Number of tokens that have a score.
        statement: str, text. The same in words.
        """,
        file="csv",
    ),
    _table(
        "agreement",
        "one kind of token: how far sinks and massive activations are the same tokens",
        """
        kind: str, name. first (position 0), delimiter, other, or all.
        tokens: int, count. Number of these tokens.
        sinks: int, count. Number of sinks.
        massive: int, count. Number of massive activations.
        both: int, count. Number of tokens that are both.
        sink_only: int, count. Number of sinks that are not massive.
        massive_only: int, count. Number of massive activations that are no sinks.
        jaccard: float, share. Tokens that are both over tokens that are at least one; nan if there is none.
        """,
        file="csv",
    ),
)

TABLES: Mapping[str, tuple[Table, ...]] = MappingProxyType(
    {
        "trace": _TRACE,
        "isolate": _ISOLATE,
        "amplify": _AMPLIFY,
        "ablate": _ABLATE,
        "quantise": _QUANTISE,
        "streaming": _STREAMING,
        "card": _CARD,
        "verify": _VERIFY,
        "diff": _DIFF,
        "patch": _PATCH,
        "sweep": _SWEEP,
        "train": _TRAIN,
        "compare": _COMPARE,
        "monitor": _MONITOR,
        "watch": (_WATCHED,),
        "preference": _PREFERENCE,
        "contraction": _CONTRACTION,
        "calibration": _CALIBRATION,
        "fingerprint": _FINGERPRINT,
        "tokens": _SINK_TOKENS,
    }
)

"""Kind of run -> the tables that it writes."""
Centre = Literal["values", "aggregated", "none"]
"""What the variance of a token is amplified away from: the mean of the values, of the aggregated ones, or nothing."""
CENTRES: tuple[Centre, ...] = ("values", "aggregated", "none")
FACTORS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0)
"""Factors of the amplification, those of arXiv 2605.06611."""
CARD_SCHEMA = "sink_lens.card/1"
"""Version of a card's JSON; the number grows where a field goes or changes its meaning."""
COMPARED_BY = ("weights", "dtype", "bos")
"""What two models that ``diff`` compares may differ by."""
QUANTISED_FORMATS = (
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
)
"""Simulated formats: the element type and what shares a scale."""
LINEAR_INPUTS = ("attn_in", "z", "mlp_in", "neurons")
"""Sites that linear layers read."""
WORTH_KEEPING_NATS = 0.01
"""A loss that rises by less than this, 1% in perplexity, is not worth a protection."""
