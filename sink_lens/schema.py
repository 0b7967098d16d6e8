"""Names that tables, figures and pages share: the nodes, links and verdicts of the chain."""

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
VERDICTS = {"holds": "✓", "fails": "✗", "undecided": "?", "mixed": "±", "not measured": "–"}
"""Verdict -> its sign."""
