"""The closed list of axis words. Every tensor annotation names its axes with these words only."""

AXES = {
    "batch": "sequences of one batch",
    "sequence": "sequences of all cells of one pass, cell by cell",
    "position": "token positions of a sequence, 0-based",
    "target": "tokens that are predicted: all but a sequence's first",
    "query": "positions that attend",
    "key": "positions attended to",
    "row": "query positions sampled for explicit attention rows",
    "head": "query heads",
    "kv_head": "key and value heads (fewer than heads under grouped-query attention)",
    "d_model": "dimensions of the residual stream",
    "d_head": "dimensions of one head",
    "d_mlp": "neurons of one MLP, as an axis of activations",
    "neuron": "neurons, as an axis of weights and tables",
    "dimension": "residual dimensions, as an axis of tables or a chosen subset",
    "layer": "decoder layers",
    "vocab": "token ids",
    "value": "anything flattened",
    "sample": "draws or observations",
    "step": "growth steps",
}
"""Axis word -> meaning."""
