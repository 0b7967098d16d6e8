"""Estimate what finding a circuit costs before it begins: edges, scores, the curve, memory.

On the CPU it comes from the headers of the model's files, from the tokenizer's file and from the speed of one product
of matrices, so that no weights are loaded; elsewhere ``timed_estimate`` times a pass. Which pairs the model gets right
only the model can tell: their tokens are those of all pairs.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.cost import LIBRARIES, about, bytes_of_a_layer, conversion, runs_on_gpu, seconds_a_token, size
from ..models.bundled import files_of
from ..models.header import Header, read_header
from ..models.prompt_tokens import tokenizer_of
from .config import REST, CircuitConfig
from .graph import Graph
from .pairs import pairs_that_fit

PASSES_A_POINT, _PASSES_A_CIRCUIT, _PASSES_A_PAIR = 2.5, 1.25, 3
"""Forward passes that one point of the scores takes for a pair (a forward, its backward and each reader's stream), that
one circuit takes, and that read what is replaced."""
_NODE_PAIRS = 4
"""Pairs on which every node is patched, at most."""
_STACKS = 4
"""Copies of what all writers add to the pairs of a pass."""
_TRIED = 8
"""Pairs whose tokens are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitCost:
    """What the cost of a circuit is made of."""

    graph: Graph
    n_positions: int
    """Tokens of the longest pair that was looked at."""
    seconds_a_pair: float
    """A forward pass of one pair."""
    bytes_peak: int
    """Peak memory of the process, without the scores."""
    before: str = ""
    """Sentence on the conversion of a GGUF file, which comes before the first pass; empty if there is none."""


def estimate(config: CircuitConfig) -> tuple[str, ...]:
    """Say what a run would cost.

    Raises:
        ModelError, InputError: what the run would refuse before it scores, as far as it is known.
    """
    config.check_together()
    cost = _cost_by_header(config)
    source = "the model's size and the speed of a product of matrices: expect a factor of 2"
    if cost is None:
        from .timed_estimate import timed_cost

        cost, source = timed_cost(config), "one timed pass"
    graph, a_pair = cost.graph, cost.seconds_a_pair
    points = {"eap": 1, "gim": 1, "eap-corrupted": 1, "clean-corrupted": 2}.get(config.method, 2 * config.steps)
    if config.method == "eap-ig-activations":
        points = config.steps * (2 * graph.n_layers + 1)
    if config.method == "exact":
        points = graph.n_edges // 3
    circuits = len(config.sizes) * (1 + config.nodes) + config.random * sum(one < 1 for one in config.sizes)
    scoring = a_pair * (PASSES_A_POINT * points + _PASSES_A_PAIR) * config.pairs
    judging = a_pair * _PASSES_A_CIRCUIT * config.pairs / 2 * circuits
    patches = config.check_pairs * config.check
    if config.check and config.method != "exact":
        patches += min(config.check_pairs, _NODE_PAIRS) * len(graph.writers)
    held = 4 * config.pairs * graph.n_edges
    return (
        f"{graph.n_edges:,} edges of {config.model}, {config.pairs} pairs of up to {cost.n_positions} tokens",
        f"scores ({config.method}, about {points} points per pair): {about(scoring)}; more where sums are not complete",
        f"curve ({circuits} circuits): {about(judging)}",
        f"real patches of edges and nodes: {about(a_pair * patches / 2)}",
        f"memory: about {size(cost.bytes_peak + held)} at its peak; scores by pair take {size(held)} of it and of disk",
        *filter(None, [cost.before]),
        f"times are from {source}",
    )


def _cost_by_header(config: CircuitConfig) -> CircuitCost | None:
    """The cost on the CPU, by the headers of the model's files; None where it takes the model itself."""
    path = None if runs_on_gpu(config.device) else files_of(config.model)
    header = path and read_header(path)
    if path is None or header is None or not _is_plain(header):
        return None
    n_positions = _longest(config, header, path=path)
    if n_positions is None:
        return None
    graph = Graph.of_sizes(
        header,
        parallel=header.family.attn_norm is not None and header.family.attn_norm == header.family.mlp_norm,
        neurons=config.neurons_by_layer,
        spans=(*(name for name in config.positions_by_span if name != REST), REST) if config.spans else ("",),
    )
    pairs = min(config.pairs, graph.pairs_a_pass(n_positions=n_positions, copies=3))
    of_token = seconds_a_token(header, whole=config.reads != "sink_mass", rows=pairs * n_positions)
    stacks = 4 * _STACKS * pairs * n_positions * len(graph.writers) * graph.d_model
    kept = header.n_layers * bytes_of_a_layer(header, tokens=pairs * n_positions)
    return CircuitCost(
        graph=graph,
        n_positions=n_positions,
        seconds_a_pair=n_positions * of_token,
        bytes_peak=LIBRARIES + header.bytes_as(config.dtype) + stacks + kept,
        before=conversion(header, path=path),
    )


def _is_plain(header: Header) -> bool:
    """Check whether the row of the family says what the blocks look like; of some only the configuration does."""
    family = header.family
    return family.head_out is None and family.mixer is None and family.architecture != "GPTNeoXForCausalLM"


def _longest(config: CircuitConfig, header: Header, *, path: Path) -> int | None:
    """Tokens of the longest of some pairs; None without the tokenizer's file."""
    if config.task == "text":
        return config.length
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        return None
    drawn = {"pairs": min(config.pairs, _TRIED), "generator": np.random.default_rng([config.seed, 0])}
    tried = pairs_that_fit(
        config.task, tokenizer, d_vocab=header.d_vocab, file=config.pairs_file, bos=config.bos, **drawn
    )
    return max((len(clean) for clean, *_ in tried), default=None)
