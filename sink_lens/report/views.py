"""CircuitsVis views of attention, tokens and neurons: offline, in a notebook, in a file, in the report.

The components come from the JavaScript bundle in the circuitsvis package, whose Python side is not used: it imports
torch, asks the network whether it is there, and lets tokens be read as HTML. A page holds the bundle once, packed, for
all its views.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sink_lens.errors import InputError
from sink_lens.records import Run
from sink_lens.report import frame, shown

_BUNDLE = Path("dist", "cdn", "iife.js")
_DRAW = """const canvas = document.createElement("canvas");
  const flat = !(canvas.getContext("webgl2") || canvas.getContext("webgl"));
  for (const [id, kind, props] of %s)
    CircuitsVis.render(id, CircuitsVis[flat && kind === "AttentionPatterns" ? "AttentionHeads" : kind], props);"""
"""AttentionPatterns draws with WebGL; where the browser has none, the same patterns are shown as AttentionHeads."""
_LINE, _CHARACTERS = 26, 90
"""Pixels of a line of tokens, and how many characters it holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """A component of CircuitsVis and what it shows; a notebook shows it by itself."""

    kind: str
    """Name of the component."""
    props: Mapping[str, Any] = field(repr=False)
    """What it is given: texts, numbers and lists."""
    height: int
    """Pixels of its frame in a notebook."""

    @property
    def html(self) -> str:
        """A whole page with the view, which opens with no network."""
        return page({"view": self})

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        return frame.framed(self.html, height=self.height, title=f"CircuitsVis {self.kind}")


def attention_heads(
    source: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> View:
    """Attention of several heads, one of them large: choose a head, hover for its numbers.

    Args:
        source: an array of (head, query, key) or (query, key); a ``capture`` of ``pattern``; or a traced run.
        tokens: what the positions hold: texts, or a token batch, then with ``tokenizer``. By default a run's own, else
            the positions.
        sequence: of a capture and a token batch.
        layers: of a capture; None is all.
        heads: of a capture, in each layer, None is all; of a run pairs of layer and head, by default six with the
            highest and two with the lowest sink score.
        names: of the heads; layer.head by default.
        tokenizer: what reads a token batch.

    Raises:
        InputError: the shapes do not fit, or there are too many numbers for a browser.
        RunError: the run has no patterns.
    """
    patterns, found = shown.patterns(source, sequence=sequence, layers=layers, heads=heads)
    props = {
        "attention": patterns,
        "tokens": _texts(source, tokens, length=patterns.shape[-1], sequence=sequence, tokenizer=tokenizer),
        "attentionHeadNames": _names(found if names is None else names, len(patterns)),
        "maskUpperTri": True,
        "minValue": 0,
        "maxValue": 1,
    }
    return View(kind="AttentionHeads", props=props, height=900)


def attention_patterns(
    source: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    tokenizer: Any = None,
) -> View:
    """Attention of several heads over the text: choose a token to see what it attends to, or what attends to it.

    Arguments and errors are those of ``attention_heads``, which a browser without WebGL shows in its place. Where WebGL
    is drawn without a graphics card, eight heads of 64 tokens take many seconds: choose fewer.
    """
    of = {"sequence": sequence, "layers": layers, "heads": heads, "names": names, "tokenizer": tokenizer}
    props = dict(attention_heads(source, tokens, **of).props)
    lines = sum(len(text) for text in props["tokens"]) // _CHARACTERS
    height = 420 + 110 * (len(props["attention"]) // 9) + _LINE * lines
    return View(kind="AttentionPatterns", props=props | {"headLabels": props["attentionHeadNames"]}, height=height)


def colored_tokens(
    source: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[int] | None = None,
    heads: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> View:
    """The text, each token coloured by its number.

    Args:
        source: numbers, one a position; or a capture of ``pattern`` or a traced run: then the attention that a token
            gets from those after it, the mean over the heads.
        tokens: see ``attention_heads``, and so the others.
        sequence: of a capture and a token batch.
        layers: of a capture.
        heads: of a capture or run.
        tokenizer: what reads a token batch.

    Raises:
        InputError: the shapes do not fit, or there are too many numbers for a browser.
        RunError: the run has no patterns.
    """
    if isinstance(source, Run) or hasattr(source, "tensors"):
        patterns, _ = shown.patterns(source, sequence=sequence, layers=layers, heads=heads)
        later = np.tril(np.ones(patterns.shape[1:]), -1)
        values = (patterns.mean(0) * later).sum(0) / np.maximum(later.sum(0), 1)
    else:
        values = shown.array(source)
    if values.ndim != 1 or not len(values):
        raise InputError(f"colours need one number a token; found an array of {values.shape}. Choose one row of it")
    texts = _texts(source, tokens, length=len(values), sequence=sequence, tokenizer=tokenizer)
    low, high = float(np.nanmin(values, initial=0)), float(np.nanmax(values, initial=1e-9))
    props = {"tokens": texts, "values": values, "minValue": low, "maxValue": high}
    return View(kind="ColoredTokens", props=props, height=90 + _LINE * (sum(map(len, texts)) // _CHARACTERS))


def neuron_activations(
    source: Any,
    tokens: Any = None,
    *,
    sequence: int = 0,
    layers: Sequence[Any] | None = None,
    neurons: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> View:
    """The text, each token coloured by the activation of a neuron, which is chosen by layer and number.

    Args:
        source: an array of (position, layer, neuron); a ``capture`` of ``neurons``; or a traced run, of whose super
            neurons gate, up-projection and cosine are shown by position, means over sequences.
        tokens: see ``attention_heads``; a run shows positions, since its numbers are means.
        sequence: of a capture and a token batch.
        layers: of a capture, None is all; of an array their names.
        neurons: of a capture, by default the twelve with the largest activations; of an array their names.
        tokenizer: what reads a token batch.

    Raises:
        InputError: the shapes do not fit, or there are too many numbers for a browser.
        RunError: the run has no table of super neurons.
    """
    if isinstance(source, Run):
        values, first, second = shown.selectivity(source)
        titles = ("Super neuron", "Quantity")
    else:
        values, first, second = shown.neurons(source, sequence=sequence, layers=layers, neurons=neurons)
        titles = ("Layer", "Neuron")
    texts = shown.texts(tokens, length=len(values), sequence=sequence, tokenizer=tokenizer)
    props = {"tokens": texts, "activations": values}
    for name, title, labels in zip(("first", "second"), titles, (first, second), strict=True):
        props |= {f"{name}DimensionName": title, f"{name}DimensionLabels": [shown.harmless(one) for one in labels]}
    height = 190 + _LINE * (sum(map(len, texts)) // _CHARACTERS)
    return View(kind="TextNeuronActivations", props=props, height=height)


def page(views: Mapping[str, View], *, title: str = "CircuitsVis") -> str:
    """A whole page of views, the bundle in it once.

    Args:
        views: id of an element -> what is drawn in it.
        title: of the page.

    Raises:
        InputError: a name that can be no id, or the circuitsvis package is not there.
    """
    body = "\n".join(f'<div id="{_id(name)}"></div>' for name in views)
    return frame.page(body, code=script(views), bundle=bundle(), title=title)


def script(views: Mapping[str, View]) -> str:
    """The content of one script that draws each view into the element of that id; the bundle is in it.

    A content policy allows it by ``frame.hashes(script(views), bundle())``.
    """
    drawn = [
        [_id(name), view.kind, {key: _plain(one) for key, one in view.props.items()}] for name, view in views.items()
    ]
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return frame.script(bundle(), name="CircuitsVis", then=_DRAW % data)


@cache
def bundle() -> str:
    """The JavaScript of the components, which sets the global variable CircuitsVis.

    Raises:
        InputError: the circuitsvis package, or its bundle, is not there.
    """
    found = find_spec("circuitsvis")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (path := Path(folder) / _BUNDLE).is_file():
            return re.sub(r"\n//# sourceMappingURL=.*\s*$", "\n", path.read_text(encoding="utf-8"))
    raise InputError("the bundle of circuitsvis was not found; need it for views. pip install 'circuitsvis>=1.43'")


def _texts(source: Any, tokens: Any, *, length: int, sequence: int, tokenizer: Any) -> list[str]:
    """What the positions hold, by default a run's tokens."""
    if tokens is None and isinstance(source, Run):
        tokens = shown.run_tokens(source, length=length)
    return shown.texts(tokens, length=length, sequence=sequence, tokenizer=tokenizer)


def _names(names: Sequence[str], n: int) -> list[str]:
    if len(names) != n:
        raise InputError(f"there are {len(names)} names for {n} heads; need one each")
    return [shown.harmless(name, limit=16) for name in names]


def _id(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise InputError(f"{name!r} can be no id of an element; need a letter, then letters, digits, - and _")
    return name


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers to four digits, undefined ones as 0."""
    if isinstance(value, np.ndarray):
        return np.round(np.nan_to_num(value, posinf=0, neginf=0), 4).tolist()
    return value
