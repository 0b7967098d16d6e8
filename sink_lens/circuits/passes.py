"""Count the passes of finding a circuit: scores, curve and real patches, without torch."""

from dataclasses import replace

import numpy as np

from ..estimate import PassCount, PassCounts, Sizes, layer_activation_bytes
from ..text import size_text
from .config import REST, CircuitConfig
from .graph import Graph
from .methods import METHODS
from .pairs import make_token_pairs

_PASSES_A_POINT, _PASSES_A_CIRCUIT, _PASSES_A_PAIR = 1.8, 1.2, 3
"""Forward passes that one point of the scores takes for a pair (a forward, its backward and each reader's stream), that
one circuit takes, and that read what is replaced."""
_PASSES_A_PATCH, _PASSES_BEFORE = 0.55, 8
"""The same for the patch of an edge or a node, from its layer on in a pass with others, and for a pair that is patched.
"""
_ROUNDS = 3
"""Rounds of points of a trained model: 5, 10 and 20 are 35, where SmolLM2-135M takes 33 for a pair of ``ioi``."""
_SCORED_AGAIN = 8
"""Pairs that are scored again for the sink's share and for EAP-IG's own sum."""
_NODE_PAIRS = 4
"""Pairs on which every node is patched, at most."""
_STACKS = 4
"""Copies of what all writers add to the pairs of a pass."""


def count_circuit_passes(config: CircuitConfig, sizes: Sizes) -> PassCounts | None:
    """Estimate the passes and memory of a circuit's run in a model of these ``sizes``; None if the headers lack them.

    Raises:
        ModelError, InputError: what the run would refuse before it scores, as far as it is known.
    """
    config.check_together()
    header, graph = sizes.header, _make_graph(config, sizes)
    lengths = None if graph is None else _pair_lengths(config, sizes)
    if graph is None or not lengths:
        return None
    n_positions, how = max(lengths), METHODS[config.method]
    config = replace(config, pairs=max(2, min(config.pairs, len(lengths))))
    # the run's circuit, and all other edges
    circuits = config.n_curve_circuits + config.random + 2
    rounds = [len(how.points(config.steps))]
    while how.doubles and 2 * rounds[-1] <= config.most_steps:
        rounds.append(2 * rounds[-1])
    points, more = sum(rounds[:_ROUNDS]), sum(rounds[_ROUNDS:])
    at_sink = not how.patches and config.used_ablation != "resample" and config.freeze is None
    of_steps = config.steps * (how.doubles and config.used_ablation != "zero")
    again = min(config.pairs, _SCORED_AGAIN) * n_positions
    of_patches = _PASSES_A_PATCH * config.check_pairs * config.check
    if config.check:
        of_patches += _PASSES_BEFORE * config.check_pairs
        if not how.patches:
            few = min(config.check_pairs, _NODE_PAIRS)
            of_patches += _PASSES_A_PATCH * few * len(graph.writers) + _PASSES_BEFORE * few
    a_pass = config.batch_size or graph.n_pairs_per_pass(n_positions=n_positions, copies=3)
    rows = min(config.pairs, a_pass) * n_positions
    of_pairs = 4 * config.pairs * graph.n_edges
    stacks = 4 * _STACKS * rows * len(graph.writers) * graph.d_model
    tokens = config.pairs * n_positions
    scores = PassCount(
        name=f"scores ({config.method}, about {points} points per pair)",
        forwards=_PASSES_A_POINT * points + _PASSES_A_PAIR,
        tokens=tokens,
        rows=rows,
    )
    if how.patches:
        scores = PassCount(
            name="scores (exact)", forwards=_PASSES_A_PATCH * graph.n_edges, tokens=tokens
        )
    parts = [
        scores,
        PassCount(
            name="scores of some pairs again (sink, EAP-IG's own sum)",
            forwards=_PASSES_A_POINT * (points * at_sink + of_steps),
            tokens=again,
            rows=rows,
        ),
        PassCount(
            name=f"curve ({circuits} circuits)",
            forwards=_PASSES_A_CIRCUIT * circuits / 2,
            tokens=tokens,
            rows=rows,
        ),
        PassCount(name="real patches of edges and nodes", forwards=of_patches, tokens=n_positions),
        PassCount(
            name=f"scores, up to {points + more} points",
            forwards=_PASSES_A_POINT * more,
            tokens=tokens + at_sink * again,
            rows=rows,
            only_if=f"no pair's sum is complete before {rounds[-1]} points, as in a random model",
        ),
    ]
    return PassCounts(
        parts=tuple(part for part in parts if part.forwards),
        sequences=config.pairs,
        positions=n_positions,
        unit="pair",
        bytes=stacks + header.n_layers * layer_activation_bytes(header, tokens=rows) + of_pairs,
        facts={"edges": f"{graph.n_edges:,}"},
        memory=f"; scores by pair take {size_text(of_pairs)} of it and of disk",
        unembeds=config.metric_name != "sink_mass",
    )


def _make_graph(config: CircuitConfig, sizes: Sizes) -> Graph | None:
    family, neurons = sizes.header.family, config.neurons_by_layer
    spans = tuple({**config.positions_by_span, REST: ()}) if config.spans else ("",)
    if sizes.lens is not None:
        return Graph.of(sizes.lens, neurons=neurons, spans=spans)
    unlike = family.head_out is not None or family.mixer is not None
    if unlike or family.architecture == "GPTNeoXForCausalLM":
        return None  # only the configuration says what the blocks look like
    parallel = family.attn_norm is not None and family.attn_norm == family.mlp_norm
    return Graph.of_sizes(sizes.header, parallel=parallel, neurons=neurons, spans=spans)


def _pair_lengths(config: CircuitConfig, sizes: Sizes) -> list[int] | None:
    if config.task == "text":
        return [config.length] * config.pairs
    tokenizer = sizes.tokenizer()
    if tokenizer is None:
        return None
    generator = np.random.default_rng([config.seed, 0])
    made = make_token_pairs(config, tokenizer, d_vocab=sizes.header.d_vocab, generator=generator)
    return [len(one.clean) for one in made]
