"""CircuitsVis views of attention, tokens and neurons: offline, in a notebook or in a file.

The components come from the JavaScript bundle in the circuitsvis package, whose Python side is not used: it imports
torch, asks the network whether it is there, and lets tokens be read as HTML. Whatever a token says, it can reach
neither the notebook nor the network: the content policy names the hashes of the page's own scripts, and its frame has
no origin.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..arguments import value_in_words
from ..errors import InputError, RunError
from ..lazy import import_object
from ..records import Run
from ..records.provenance import plain_json
from ..text import as_text, head_name, neuron_name, plural, token_text
from .offline import frame_html, script_hashes, unpacking_script, write_page
from .page import run_label
from .patterns import first_token_texts, read_patterns, strongest_and_weakest_heads

_STYLE = (
    "h1 { font-size: 1rem; margin: 0 0 8px; } "
    "body { font-family: system-ui, sans-serif; margin: 12px; background: #fff; color: #111; }"
)
_DRAW = """const canvas = document.createElement("canvas");
  const flat = !(canvas.getContext("webgl2") || canvas.getContext("webgl"));
  const [kind, props] = %s;
  CircuitsVis.render("view", CircuitsVis[flat && kind === "AttentionPatterns" ? "AttentionHeads" : kind], props);"""
"""AttentionPatterns draws with WebGL; where the browser has none, the same patterns are shown as AttentionHeads."""
_LINE, _CHARACTERS = 26, 90
"""Pixels of a line of tokens, and how many characters it holds."""
_STRONGEST, _WEAKEST = 6, 2
_MOST_NEURONS = 8
_FEWEST = 8
"""Queries that must come after a token for its mean attention to be shown."""
_JOINER = "\N{WORD JOINER}"
"""Between < or & and what follows: HTML then reads both as text, and nothing is seen of it, on a canvas neither."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """An interactive view of attention or tokens, drawn by CircuitsVis; a notebook shows it by itself."""

    kind: str
    """Name of the component."""
    props: Mapping[str, Any] = field(repr=False)
    """What it is given."""
    height: int
    """Pixels of its frame in a notebook."""
    title: str = ""
    """A line above it."""

    @property
    def html(self) -> str:
        """The HTML of a page with the view, which opens with no network.

        Raises:
            InputError: the circuitsvis package is not there.
        """
        props = dict(self.props)
        for key, one in props.items():
            if isinstance(one, np.ndarray):  # with four digits, undefined numbers as 0
                props[key] = np.round(np.nan_to_num(one, posinf=0, neginf=0), 4).tolist()
        drawn = plain_json([self.kind, props])
        data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        code = unpacking_script(read_javascript(), name="CircuitsVis", then=_DRAW % data)
        allowed = f"style-src 'unsafe-inline'; img-src data: blob:; script-src {script_hashes(code, read_javascript())}"
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {allowed}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>CircuitsVis</title>\n<style>{_STYLE}</style></head>\n"
            f'<body>\n<h1>{html.escape(self.title)}</h1>\n<div id="view"></div>\n<script>{code}</script>\n'
            "</body></html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page to a file that ends with .html and belongs to no run; return its path."""
        return write_page(self.html, path)

    def _repr_html_(self) -> str:
        return frame_html(self.html, height=self.height, title=f"CircuitsVis {self.kind}")

    def __str__(self) -> str:
        return self.html


def attention_heads(
    attention: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> View:
    """Show the attention of several heads, one of them large: choose a head, hover for its numbers.

    Args:
        attention: a model, with a text second; an array of (head, query, key) or (query, key); a ``capture`` of
            ``pattern``; or a traced run.
        tokens: of a model, a text or what ``capture`` takes. Else the texts at the positions, or a token batch, whose
            padding is left out (then give ``tokenizer`` too); by default the tokens of a run, or the positions.
        sequence: the index of the sequence in a capture and a token batch.
        layers: layers of a capture or model; None is all.
        heads: for a capture, heads of each layer, None is all; for a run or a model, pairs (layer, head), by default
            the six with the highest and the two with the lowest sink score (of a model: most and least attention to
            the first token).
        tokenizer: decodes the ids of a token batch.

    Raises:
        InputError: the shapes do not fit, or there are too many numbers for a browser.
        RunError: the run has no patterns.
    """
    if _is_model(attention):
        captured, tokens = _run_model(
            attention, tokens, site="pattern", sequence=sequence, layers=layers
        )
        patterns, names = _heads_of_model(captured, heads=heads, every=layers is not None)
    else:
        patterns, names = _patterns_of(attention, sequence=sequence, layers=layers, heads=heads)
        patterns = _without_padding(patterns, tokens, sequence=sequence)
    texts = _position_texts(
        attention, tokens, length=patterns.shape[-1], sequence=sequence, tokenizer=tokenizer
    )
    props = {
        "attention": patterns,
        "tokens": texts,
        "attentionHeadNames": [_harmless_text(name, limit=16) for name in names],
        "maskUpperTri": True,
        "minValue": 0,
        "maxValue": 1,
    }
    title = f"Attention of {plural(len(patterns), 'head')}"
    return View(kind="AttentionHeads", props=props, height=940, title=title)


def attention_patterns(
    tokens: Any = None,
    attention: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> View:
    """Show the attention of several heads over the text: ``attention_patterns(model, "The cat sat")``.

    Choose a token to see its attention, given or received. Arguments and errors are those of ``attention_heads``, which
    a browser without WebGL shows in its place; where a model is not given, their order is that of CircuitsVis, and a
    capture or a run may stand alone. Where WebGL is drawn without a graphics card, eight heads of 64 tokens take many
    seconds: choose fewer.
    """
    if attention is None or _is_model(tokens):
        tokens, attention = attention, tokens
    large = attention_heads(
        attention, tokens, sequence=sequence, layers=layers, heads=heads, tokenizer=tokenizer
    )
    props = {**large.props, "headLabels": large.props["attentionHeadNames"]}
    lines = sum(len(text) for text in props["tokens"]) // _CHARACTERS
    height = 460 + 110 * (len(props["attention"]) // 9) + _LINE * lines
    return View(kind="AttentionPatterns", props=props, height=height, title=large.title)


def colored_tokens(
    source: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> View:
    """Show a text with each token coloured by its number.

    ``source`` are numbers, one per position; or a model, a capture of ``pattern`` or a traced run: then the attention
    that a token gets from those after it, the mean over the heads. Tokens that fewer than 8 come after are not
    coloured, and the title says so. ``layers`` of a capture or model are all by default, and so are its ``heads``,
    which are plain numbers of heads of each layer; of a run, ``heads`` are pairs as in ``attention_heads``. The other
    arguments, and errors, are those of ``attention_heads``.
    """
    if _is_model(source):
        source, tokens = _run_model(
            source, tokens, site="pattern", sequence=sequence, layers=layers
        )
        sequence = 0
    if isinstance(source, Run) or hasattr(source, "tensors"):
        patterns, _ = _patterns_of(source, sequence=sequence, layers=layers, heads=heads)
        mean = _without_padding(patterns, tokens, sequence=sequence).mean(0)
        later = np.tril(np.isfinite(mean), -1)  # a capture is nan where a row of tokens has none
        queries = later.sum(0)
        received = np.where(later, mean, 0.0).sum(0) / np.maximum(queries, 1)
        values = np.where(queries >= _FEWEST, received, np.nan)
        few = int((queries < _FEWEST).sum())
        title = f"Attention that each token receives from later ones, mean over {plural(len(patterns), 'head')}"
        title += f"; the last {few} are not coloured: fewer than {_FEWEST} come after them"
    else:
        values, title = _float_array(source), "One number per token"
    if values.ndim != 1 or not len(values):
        raise InputError(
            f"colours need one number per token; found an array of {values.shape}. Choose one row of it"
        )
    texts = _position_texts(
        source, tokens, length=len(values), sequence=sequence, tokenizer=tokenizer
    )
    most = float(np.nanmax(np.abs(values), initial=1e-9))
    props = {"tokens": texts, "values": values, "minValue": -most, "maxValue": most}
    title += f"; colours from −{as_text(most)} (red) to {as_text(most)} (blue)"
    height = 130 + _LINE * (sum(map(len, texts)) // _CHARACTERS)
    return View(kind="ColoredTokens", props=props, height=height, title=title)


def neuron_activations(
    model: Any, tokens: Any, *, layer: int, neurons: Sequence[int] | None = None, sequence: int = 0
) -> View:
    """Show a text with each token coloured by the activation of a neuron, which the reader chooses.

    Args:
        model: what ``load`` takes, or a model in memory.
        tokens: a text, or what ``capture`` takes.
        layer: the layer of the neurons; -1 is the last.
        neurons: None is the eight with the largest activation anywhere in the text.
        sequence: which of several sequences is shown.

    Raises:
        InputError: a layer or neuron does not exist.
        SiteError: the layer has no neurons.
    """
    captured, texts = _run_model(model, tokens, site="neurons", sequence=sequence, layers=[layer])
    (values,) = (_float_array(one[0]) for one in captured.tensors.values())
    largest = np.argsort(-np.abs(values).max(0), kind="stable")[:_MOST_NEURONS].tolist()
    shown: list[int] = largest if neurons is None else list(neurons)
    if outside := [one for one in shown if not 0 <= one < values.shape[1]]:
        raise InputError(f"neuron {outside[0]} does not exist; need 0 to {values.shape[1] - 1}")
    ((_, at),) = captured.tensors
    names = [_harmless_text(neuron_name(at, one)) for one in shown]
    props = {
        "tokens": [_harmless_text(text) for text in texts],
        "activations": values[:, None, shown],
        "firstDimensionName": "Layer",
        "firstDimensionLabels": [str(at)],
        "secondDimensionName": "Neuron",
        "secondDimensionLabels": names,
    }
    height = 260 + _LINE * (sum(map(len, texts)) // _CHARACTERS)
    title = f"Activation over the tokens, {plural(len(names), 'neuron')} of layer {at}"
    return View(kind="TextNeuronActivations", props=props, height=height, title=title)


@cache
def read_javascript() -> str:
    """Return the JavaScript of CircuitsVis's components, which sets the global variable CircuitsVis."""
    package = find_spec("circuitsvis")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (path := Path(folder, "dist", "cdn", "iife.js")).is_file():
            return re.sub(r"\n//# sourceMappingURL=.*\s*$", "\n", path.read_text(encoding="utf-8"))
    raise InputError(
        "the bundle of circuitsvis was not found; need it for views. pip install 'circuitsvis>=1.43'"
    )


MOST_NUMBERS = 600_000


def _is_model(source: Any) -> bool:
    return hasattr(source, "plain") or hasattr(source, "forward")


def _run_model(
    model: Any, tokens: Any, *, site: str, sequence: int, layers: Sequence[int] | None
) -> tuple[Any, list[str]]:
    # by name: the rest of the report is drawn without torch
    capture = import_object("sink_lens.activations.record:capture")
    resolve = import_object("sink_lens.activations.forward:resolve")
    decode_tokens = import_object("sink_lens.data.tokens:decode_tokens")
    if tokens is None:
        raise InputError(
            "a model was given without a text; need what it reads, such as a text, as second argument"
        )
    lens, batch = resolve(model, tokens)
    if not 0 <= sequence < batch.n_sequences:
        raise InputError(f"sequence {sequence} does not exist; need 0 to {batch.n_sequences - 1}")
    own = batch[sequence : sequence + 1].cut(int(batch.lengths[sequence]))
    texts = [str(text) for text in decode_tokens(own, lens.tokenizer)["text"]]
    return capture(lens, own, sites=[site], layers=layers, progress=False), texts


def _heads_of_model(
    captured: Any, *, heads: Sequence[Any] | None, every: bool
) -> tuple[np.ndarray, list[str]]:
    pairs = [one for one in heads or () if not isinstance(one, int)]
    own = None if pairs or heads is None else heads
    patterns, names = _patterns_of_capture(captured, sequence=0, layers=None, heads=own)
    chosen = list(range(len(names)))
    if pairs:
        if unknown := [head_name(*one) for one in pairs if head_name(*one) not in names]:
            raise InputError(
                f"{unknown[0]} does not exist, or its layer was not asked for; need one such as {names[0]}"
            )
        chosen = [names.index(head_name(*one)) for one in pairs]
    elif heads is None and not every and len(names) > _STRONGEST + _WEAKEST:
        ranked = np.argsort(-patterns[:, 1:, 0].mean(1), kind="stable").tolist()
        chosen = [*ranked[:_STRONGEST], *ranked[-_WEAKEST:]]
    shown, _ = _patterns_of(patterns[chosen], sequence=0, layers=None, heads=None)
    return shown, [names[one] for one in chosen]


def _float_array(source: Any) -> np.ndarray:
    try:
        own = source.detach().cpu().float() if hasattr(source, "detach") else source
        return np.asarray(own, dtype=float)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last on the device "meta"
        raise InputError(
            f"the source is {value_in_words(source)}, without numbers; need an array of them"
        ) from error


def _harmless_text(text: object, *, limit: int = 24) -> str:
    """Return a token's text, cut to ``limit`` characters, in which no parser finds markup."""
    own = token_text(text, limit=limit, counted=False)
    return re.sub("[<&]", lambda found: found[0] + _JOINER, own)


def _position_texts(
    source: Any, tokens: Any, *, length: int, sequence: int, tokenizer: Any
) -> list[str]:
    """Return a text per position: from ``tokens``, else from a run, else the position's number."""
    if tokens is None and isinstance(source, Run):
        tokens = list(first_token_texts(source, most=length).values()) or None
    if tokens is None:
        tokens = range(length)
    elif hasattr(tokens, "tokens"):
        if tokenizer is None:
            raise InputError(
                "a token batch holds numbers; need a tokenizer to read them. Pass tokenizer=lens.tokenizer"
            )
        own = tokens.tokens[sequence][: _token_count(tokens, sequence)]
        tokens = [tokenizer.decode([one]) for one in own.tolist()]
    if not hasattr(tokens, "__len__"):
        raise InputError(
            f"tokens is a {type(tokens).__name__}; need texts, one for each position, or a token batch"
        )
    if len(tokens) != length:
        raise InputError(f"there are {len(tokens)} tokens for {length} positions; need one each")
    return [_harmless_text(text) for text in tokens]


def _token_count(tokens: Any, sequence: int) -> int | None:
    """Return the number of tokens of a sequence of a token batch; None if of no batch."""
    lengths = getattr(tokens, "lengths", None)
    return None if lengths is None else int(lengths[sequence])


def _without_padding(patterns: np.ndarray, tokens: Any, *, sequence: int) -> np.ndarray:
    n = _token_count(tokens, sequence)
    padded = n is not None and tokens.tokens.shape[1] == patterns.shape[-1]
    return patterns[:, :n, :n] if padded else patterns


def _patterns_of(
    source: Any, *, sequence: int, layers: Sequence[int] | None, heads: Sequence[Any] | None
) -> tuple[np.ndarray, list[str]]:
    if isinstance(source, Run):
        patterns, names = _patterns_of_run(source, heads)
    elif hasattr(source, "tensors"):
        patterns, names = _patterns_of_capture(
            source, sequence=sequence, layers=layers, heads=heads
        )
    else:
        patterns = _float_array(source)
        patterns = patterns[None] if patterns.ndim == 2 else patterns
        names = [f"head {head}" for head in range(patterns.shape[0] if patterns.ndim else 0)]
    if patterns.ndim != 3 or patterns.shape[1] != patterns.shape[2] or not patterns.size:
        raise InputError(
            f"patterns are (head, query, key), with as many queries as keys; found {patterns.shape}"
        )
    if patterns.size > MOST_NUMBERS:
        raise InputError(
            f"{patterns.size:,} numbers are too many for a browser; need {MOST_NUMBERS:,} at most. "
            "Choose fewer positions, layers or heads"
        )
    return patterns, names


def _patterns_of_run(
    run: Run, heads: Sequence[tuple[int, int]] | None
) -> tuple[np.ndarray, list[str]]:
    if run.kind != "trace" and not (run.folder / "patterns.safetensors").is_file():
        raise RunError(
            f"{run_label(run)}, which keeps no attention patterns; need one of sink-lens trace"
        )
    kept = read_patterns(run)
    if heads is None:
        ranked = strongest_and_weakest_heads(run, strongest=_STRONGEST, weakest=_WEAKEST)
        heads = [(layer, head) for layer, head, _ in ranked]
    if not heads:
        raise InputError("heads is empty; need pairs of layer and head, one at least")
    for layer, head in heads:
        if not (0 <= layer < kept.shape[0] and 0 <= head < kept.shape[1]):
            raise InputError(
                f"{head_name(layer, head)} is not kept; need layer under {kept.shape[0]}, head under {kept.shape[1]}"
            )
    names = [head_name(layer, head) for layer, head in heads]
    return np.stack([kept[layer, head] / 255 for layer, head in heads]), names


def _patterns_of_capture(
    source: Any, *, sequence: int, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[np.ndarray, list[str]]:
    there = sorted(layer for name, layer in source.tensors if name == "pattern")
    chosen = there if layers is None else list(layers)
    if not chosen or set(chosen) - set(there):
        raise InputError(
            f"the capture has 'pattern' of layers {there}; need {chosen or 'one at least'}. Capture it there"
        )
    n, n_heads = source.tensors["pattern", chosen[0]].shape[:2]
    if not 0 <= sequence < n:
        raise InputError(f"sequence {sequence} was not captured; need 0 to {n - 1}")
    wanted = list(range(n_heads) if heads is None else heads)
    if outside := [head for head in wanted if not 0 <= head < n_heads]:
        raise InputError(f"head {outside[0]} does not exist; need 0 to {n_heads - 1}")
    captured = [_float_array(source.tensors["pattern", layer][sequence]) for layer in chosen]
    patterns = np.stack([one[head] for one in captured for head in wanted])
    return patterns, [head_name(layer, head) for layer in chosen for head in wanted]
