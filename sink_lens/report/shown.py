"""What a view is made from: attention, activations and tokens of arrays, captures and runs, as plain arrays and texts.

A capture is told by its ``tensors`` and a token batch by its ``tokens``, since a report never imports torch.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from sink_lens.errors import InputError, RunError
from sink_lens.records import Run
from sink_lens.report.columns import at, by_size, floats, need, numbers, select
from sink_lens.report.findings import find_story, studied
from sink_lens.report.words import token

MOST_NUMBERS = 600_000
"""Of one view: more make a browser slow."""
_STRONGEST, _WEAKEST = 6, 2
_MOST_NEURONS = 12
_JOINER = "\N{WORD JOINER}"
"""Between < or & and what follows: HTML then reads both as text, and nothing is seen of it, on a canvas neither."""


def array(source: Any) -> np.ndarray:
    """The numbers of an array, a list, or a tensor of any type and device."""
    source = source.detach().cpu().float() if hasattr(source, "detach") else source
    return np.asarray(source, dtype=float)


def harmless(text: object, *, limit: int = 24) -> str:
    """A token as it is shown, which no parser takes for markup."""
    return re.sub("[<&]", lambda found: found[0] + _JOINER, token(text, limit=limit, counted=False))


def texts(tokens: Any, *, length: int, sequence: int = 0, tokenizer: Any = None) -> list[str]:
    """What some positions hold, harmless; their numbers where there are no tokens.

    Args:
        tokens: texts, or a token batch.
        length: how many positions.
        sequence: of a batch.
        tokenizer: what reads a batch.

    Raises:
        InputError: a batch without a tokenizer, or another number of tokens.
    """
    if tokens is None:
        tokens = range(length)
    elif hasattr(tokens, "tokens"):
        if tokenizer is None:
            raise InputError("a token batch holds numbers; need what reads them. Pass tokenizer=lens.tokenizer")
        tokens = [tokenizer.decode([one]) for one in tokens.tokens[sequence].tolist()]
    if len(tokens) != length:
        raise InputError(f"there are {len(tokens)} tokens for {length} positions; need one each")
    return [harmless(text) for text in tokens]


def patterns(
    source: Any, *, sequence: int, layers: Sequence[int] | None, heads: Sequence[Any] | None
) -> tuple[np.ndarray, list[str]]:
    """Patterns (head, query, key) and the names of their heads.

    Raises:
        InputError: the shapes do not fit, what is asked for is not there, or there is too much.
        RunError: the run has no patterns.
    """
    if isinstance(source, Run):
        found, names = _of_run(source, heads)
    elif hasattr(source, "tensors"):
        there, captured = _captured(source, "pattern", sequence=sequence, layers=layers)
        chosen = _existing(heads, len(captured[0]), what="head")
        found = np.stack([one[head] for one in captured for head in chosen])
        names = [f"{layer}.{head}" for layer in there for head in chosen]
    else:
        found = array(source)
        found = found[None] if found.ndim == 2 else found
        names = [f"head {head}" for head in range(len(found))]
    if found.ndim != 3 or found.shape[1] != found.shape[2] or not found.size:
        raise InputError(f"patterns are (head, query, key), with as many queries as keys; found {found.shape}")
    return _bounded(found), names


def run_tokens(run: Run, *, length: int) -> list[str]:
    """The texts of the first positions of a run's first sequence."""
    table = need(run, "tokens", columns=["sequence", "position", "text"])
    table = select(table, floats(table, "sequence") == floats(table, "sequence").min())
    return select(table, np.argsort(floats(table, "position")))["text"].tolist()[:length]


def neurons(
    source: Any, *, sequence: int, layers: Sequence[Any] | None, neurons: Sequence[Any] | None
) -> tuple[np.ndarray, Sequence[Any], Sequence[Any]]:
    """Activations (position, layer, neuron), and the names of the layers and the neurons.

    Of a capture, by default the twelve neurons with the largest activations in the layers.

    Raises:
        InputError: the shapes do not fit, what is asked for is not there, or there is too much.
    """
    if not hasattr(source, "tensors"):
        found = array(source)
        if found.ndim != 3:
            raise InputError(f"activations are (position, layer, neuron); found {found.shape}. Add the missing axes")
        layers = range(found.shape[1]) if layers is None else layers
        neurons = range(found.shape[2]) if neurons is None else neurons
        if (len(layers), len(neurons)) != found.shape[1:]:
            raise InputError(f"{len(layers)} layers and {len(neurons)} neurons are named; found {found.shape[1:]}")
        return _bounded(found), layers, neurons
    there, captured = _captured(source, "neurons", sequence=sequence, layers=layers)
    found = np.stack(captured, axis=1)
    if neurons is None:
        neurons = np.argsort(-np.abs(found).max(axis=(0, 1)), kind="stable")[:_MOST_NEURONS].tolist()
    chosen = _existing(neurons, found.shape[2], what="neuron")
    return _bounded(found[:, :, chosen]), there, chosen


def selectivity(run: Run) -> tuple[np.ndarray, list[str], list[str]]:
    """Gate, up-projection and cosine (position, super neuron, quantity) of a run, and the names of both.

    Raises:
        RunError: the run has no such table, or found no super neuron.
    """
    quantities = ["gate", "up", "cosine"]
    table = need(run, "selectivity", columns=["layer", "neuron", "position", *quantities])
    names = [f"{layer:.0f}.{neuron:.0f}" for layer, neuron in numbers(table, ["layer", "neuron"])]
    table = table.assign(name=names).sort_values("position")
    found = list(dict.fromkeys(names))
    if not found:
        raise RunError("the run found no super neuron, so there is none to show.")
    grids = [table.pivot(index="position", columns="name", values=one)[found] for one in quantities]
    return np.stack(grids, axis=2), found, quantities


def _of_run(run: Run, heads: Sequence[tuple[int, int]] | None) -> tuple[np.ndarray, list[str]]:
    """The patterns that a run keeps, and their names: of the strongest heads and the weakest if none is named."""
    kept = next((tensor for tensor in run.tensors("patterns").values() if tensor.ndim == 4), None)
    if kept is None:
        raise RunError("patterns.safetensors holds no array of layer, head, query and key. Run again to see it.")
    if heads is None:
        table = at(need(run, "heads", columns=["layer", "head", "position", "sink_score"]), studied(find_story(run)))
        ranked = [(int(layer), int(head)) for layer, head in numbers(by_size(table, "sink_score"), ["layer", "head"])]
        ranked = [(layer, head) for layer, head in ranked if layer < kept.shape[0] and head < kept.shape[1]]
        heads = ranked[:_STRONGEST] + ranked[_STRONGEST:][-_WEAKEST:]
    for layer, head in heads:
        if not (0 <= layer < kept.shape[0] and 0 <= head < kept.shape[1]):
            raise InputError(
                f"head {layer}.{head} is not kept; need layer under {kept.shape[0]}, head under {kept.shape[1]}"
            )
    if not heads:
        raise RunError("no head of patterns.safetensors has a sink score. Run again to see it.")
    return np.stack([kept[layer, head] / 255 for layer, head in heads]), [f"{layer}.{head}" for layer, head in heads]


def _captured(
    source: Any, site: str, *, sequence: int, layers: Sequence[int] | None
) -> tuple[list[int], list[np.ndarray]]:
    """The layers of a site that were captured and are wanted, and what they hold of one sequence."""
    there = sorted(layer for name, layer in source.tensors if name == site)
    chosen = there if layers is None else list(layers)
    if not chosen or set(chosen) - set(there):
        raise InputError(
            f"the capture has {site!r} of layers {there}; need {chosen or 'one at least'}. Capture it there"
        )
    n = len(source.tensors[site, chosen[0]])
    if not 0 <= sequence < n:
        raise InputError(f"sequence {sequence} was not captured; need 0 to {n - 1}")
    return chosen, [array(source.tensors[site, layer][sequence]) for layer in chosen]


def _existing(chosen: Sequence[int] | None, n: int, *, what: str) -> list[int]:
    """The heads or neurons that are wanted, all by default."""
    found = list(range(n) if chosen is None else chosen)
    if outside := [one for one in found if not 0 <= one < n]:
        raise InputError(f"{what} {outside[0]} does not exist; need 0 to {n - 1}")
    return found


def _bounded(found: np.ndarray) -> np.ndarray:
    if found.size > MOST_NUMBERS:
        raise InputError(
            f"{found.size:,} numbers are too many for a browser; need {MOST_NUMBERS:,} at most. "
            "Choose fewer positions, layers, heads or neurons"
        )
    return found
