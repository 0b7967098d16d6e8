"""Mechanisms with a task, whose edges are known: what each needs under each ablation follows from its wiring.

`wire("induction", seed=3, family="olmo2")` returns the model, pairs of prompts, and the edges. Every prompt is BOS and
eight tokens; words of the two prompts of a pair are disjoint. An edge is *needed* where its ablation alone changes the
answer. The edges of parts that stand in for each other, or wait for another to fail, are *spare*: each alone changes
little, all of a set do. They are neither right nor wrong to name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sink_lens.edits import metrics
from sink_lens.edits.metrics import Metric
from sink_lens.errors import ModelError

from .wiring import BOS, CHANGED, LENGTH, N_CODES, Wiring, vocabulary

Row = tuple[list[int], int, list[int], int]
"""A clean prompt and its answer, a corrupted prompt and its answer."""
Parts = dict[str, Any]
"""What a mechanism adds: `put`, and of `idle`, `awake`, `replaced`, `covered` and `sink_layer` what it has."""
HALF = N_CODES // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """A model with a task, and the edges that it needs."""

    name: str
    family: str
    seed: int
    model: Any
    """In float64: beside a constant of 60, float32 has too few digits for a LayerNorm."""
    edges: Mapping[str, Mapping[str, str]]
    """Name of every edge of the mechanism -> the features that it carries -> answer, place or constant."""
    idle: tuple[str, ...] = ()
    """Nodes and readers whose edges are spare."""
    awake: tuple[str, ...] = ()
    """Features that keep such a part idle: the edges that carry them to it are needed."""
    replaced: tuple[str, ...] = ()
    """Edges that carry the answer and the constant that keeps a part idle: without both, that part answers."""
    covered: tuple[str, ...] = ()
    """Edges without which a part that stays idle answers."""
    draw: Callable[[torch.Generator], Row]
    """One pair of prompts."""
    sink_layer: int | None = None
    """The layer whose attention to the first position is the task; None where an answer is."""

    def carrying(self, ablation: str) -> set[str]:
        """All edges of the mechanism that carry what an ablation changes."""
        return self._of(ablation, lambda edge, feature: True)

    def needed(self, ablation: str) -> set[str]:
        """Those whose ablation alone changes the answer."""
        awake = (*self.awake, "beside")
        found = self._of(
            ablation, lambda edge, feature: feature in awake or not self._is_idle(edge)
        )
        return (
            found
            - set(self.covered)
            - set(self.replaced if ablation in CHANGED["constant"] else ())
        )

    def spare(self, ablation: str) -> set[str]:
        """Those whose ablation alone changes nothing."""
        return self.carrying(ablation) - self.needed(ablation)

    def unjudged(self, ablation: str, edges: Iterable[str]) -> set[str]:
        """Edges that are neither right nor wrong: the spare ones, and those that zero takes the constant from.

        Where the constant is gone, a norm raises what is left, noise too, sixtyfold.
        """
        lost = {edge for edge in edges if ablation == "zero" and edge.startswith("input->")}
        return (self.spare(ablation) | lost) - self.needed(ablation)

    def _of(self, ablation: str, chosen: Callable[[str, str], bool]) -> set[str]:
        return {
            edge
            for edge, features in self.edges.items()
            if any(
                ablation in CHANGED[kind] and chosen(edge, feature)
                for feature, kind in features.items()
            )
        }

    def _is_idle(self, edge: str) -> bool:
        writer, _, reader = edge.partition("->")
        return writer in self.idle or reader in self.idle

    def rows(self, n: int, *, generator: torch.Generator) -> list[Row]:
        """Pairs of prompts and their answers."""
        return [self.draw(generator) for _ in range(n)]

    def prompts(
        self, rows: Sequence[Row]
    ) -> tuple[Int[Tensor, "pair position"], Int[Tensor, "pair position"], Metric]:
        """Clean and corrupted prompts, and the metric."""
        clean, corrupted = (
            torch.tensor([row[0] for row in rows]),
            torch.tensor([row[2] for row in rows]),
        )
        if self.sink_layer is not None:
            return clean, corrupted, metrics.sink_mass(0, layers=[self.sink_layer])
        right, wrong = [vocabulary(row[1]) for row in rows], [vocabulary(row[3]) for row in rows]
        return clean, corrupted, metrics.logit_difference(right, wrong)

    def pairs(
        self, n: int, *, generator: torch.Generator
    ) -> tuple[Int[Tensor, "pair position"], Int[Tensor, "pair position"], Metric]:
        """The same for fresh pairs."""
        return self.prompts(self.rows(n, generator=generator))


class _Prompt:
    """Eight words after BOS, with marks."""

    def __init__(self, words: Sequence[int], generator: torch.Generator) -> None:
        self.words = [words[at % HALF] for at in range(LENGTH - 1)]
        self.variants = ["plain"] * (LENGTH - 1)
        self.first = BOS
        self.generator = generator

    def pick(self, *options: int) -> int:
        """One of some positions; BOS is at 0."""
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def mark(self, position: int, variant: str = "marked") -> int:
        """Mark a word; the word."""
        self.variants[position - 1] = variant
        return self.words[position - 1]

    @property
    def tokens(self) -> list[int]:
        """Token ids."""
        return [
            self.first,
            *(vocabulary(*one) for one in zip(self.words, self.variants, strict=True)),
        ]


Prompts = Callable[[_Prompt, bool], int]
"""Put the task into a prompt, clean or corrupted; the answer."""


def _draw(put: Prompts) -> Callable[[torch.Generator], Row]:
    def drawn(generator: torch.Generator) -> Row:
        words = [int(one) for one in torch.randperm(N_CODES, generator=generator)]
        clean, corrupted = _Prompt(words[:HALF], generator), _Prompt(words[HALF:], generator)
        answers = put(clean, True), put(corrupted, False)
        return clean.tokens, answers[0], corrupted.tokens, answers[1]

    return drawn


def _marked(prompt: _Prompt, clean: bool) -> int:
    return prompt.mark(prompt.pick(2, 4, 6) if clean else prompt.pick(1, 3, 5, 7))


def _two_marks(prompt: _Prompt, clean: bool) -> int:
    """Two marks in the clean prompt, none in the corrupted one; the answers are words 0 and 1."""
    if clean:
        first = prompt.pick(4, 5)
        prompt.mark(first)
        prompt.mark(prompt.pick(6, 7), "second")
    return 0 if clean else 1


def _first_token(prompt: _Prompt, clean: bool) -> int:
    if not clean:
        prompt.first = vocabulary(prompt.words[-2])
    return 0


_TO_MARK: Any = {"q": {"flag": {"constant": 1.0}}, "k": {"flag": {"mark": 1.0}}}
_TO_SECOND: Any = {"q": {"flag": {"constant": 1.0}}, "k": {"flag": {"second": 1.0}}}
_AFTER_SAME: Any = {"q": {"code": {"tok": 1.0}}, "k": {"code": {"prev": 1.0}}}


def copy(wiring: Wiring) -> Parts:
    """A head attends to the marked word and copies it."""
    wiring.head(0, **_TO_MARK, v={("tok", "out"): 1.0})
    return {"put": _marked}


def relay(wiring: Wiring) -> Parts:
    """A head copies the marked word to a second mark, from where another head fetches it."""
    wiring.head(0, **_TO_MARK, v={("tok", "mid"): 1.0})
    wiring.head(1, **_TO_SECOND, v={("mid", "out"): 1.0})

    def put(prompt: _Prompt, clean: bool) -> int:
        prompt.mark(prompt.pick(5, 6, 7) if clean else prompt.pick(2, 3), "second")
        return prompt.mark(4 if clean else 1)

    return {"put": put}


def induction(wiring: Wiring) -> Parts:
    """A previous-token head, and a head that attends to what came after the same word."""
    wiring.head(0, back=1, v={("tok", "prev"): 1.0})
    wiring.head(1, **_AFTER_SAME, v={("tok", "out"): 1.0})
    return {"put": _repeated}


def _repeated(prompt: _Prompt, clean: bool) -> int:
    at = prompt.pick(*range(1, 7))
    prompt.words[-1] = prompt.words[at - 1]
    return prompt.words[at]


def two_step(wiring: Wiring) -> Parts:
    """Induction twice: what came after the last word, and what came after that."""
    wiring.head(0, back=1, v={("tok", "prev"): 1.0})
    wiring.head(1, **_AFTER_SAME, v={("alt", "mid"): 1.0})
    wiring.head(2, q={"code": {"mid": 1.0}}, k={"code": {"prev": 1.0}}, v={("tok", "out"): 1.0})

    def put(prompt: _Prompt, clean: bool) -> int:
        first, second = [(1, 3), (1, 4), (2, 5), (3, 6), (4, 1), (5, 2), (6, 3)][
            prompt.pick(*range(7))
        ]
        words = prompt.words
        words[first] = words[second - 1]
        prompt.mark(first + 1, "second")
        words[-1] = words[first - 1]
        return words[second]

    return {"put": put}


def ioi(wiring: Wiring) -> Parts:
    """Two names, one of which comes again: the other is the answer, and a backup head waits until the mover fails."""
    names: Any = {"flag": {"constant": 1.0}, "code": {"mid": -1.0}}
    keys: Any = {"flag": {"mark": 1.0}, "code": {"tok": 1.0}}
    wiring.head(0, back=2, v={("tok", "mid"): 1.0})
    mover = wiring.head(1, q=names, k=keys, v={("tok", "out"): 1.0, ("constant", "done"): 1.0})
    waits = {"q": names | {"other": {"done": 2.0}}, "k": keys | {"other": {"bos": 1.0}}}
    backup = wiring.head(2, **waits, v={("tok", "out"): 2.0})

    def put(prompt: _Prompt, clean: bool) -> int:
        answer, again = (2, 4) if prompt.pick(0, 1) else (4, 2)
        prompt.words[5] = prompt.words[again - 1]
        for position in (2, 4, 6):
            prompt.mark(position)
        return prompt.words[answer - 1]

    replaced = f"input->{wiring.reader(1, int(mover[-1]), 'v')}"
    return {"put": put, "idle": (backup,), "awake": ("done", "bos"), "replaced": (replaced,)}


def suppression(wiring: Wiring) -> Parts:
    """(copy), and a head that attends to the word that is foretold and takes half of it away."""
    wiring.head(0, **_TO_MARK, v={("tok", "out"): 1.0})
    wiring.head(1, q={"code": {"out": 1.0}}, k={"code": {"tok": 1.0}}, v={("tok", "out"): -0.5})
    return {"put": _marked}


def redundant(wiring: Wiring) -> Parts:
    """(induction) with two previous-token heads, either of which is enough."""
    carriers = [wiring.head(0, back=1, v={("tok", "prev"): 1.0}) for _ in range(2)]
    wiring.head(1, **_AFTER_SAME, v={("tok", "out"): 1.0})
    return {"put": _repeated, "idle": carriers}


def cancellation(wiring: Wiring) -> Parts:
    """Two heads copy the marked word, and a third takes what one of them writes away again."""
    for layer, size in ((0, 1.0), (0, 1.0), (1, -1.0)):
        wiring.head(layer, **_TO_MARK, v={("tok", "out"): size})
    return {"put": _marked}


def opposed(wiring: Wiring) -> Parts:
    """A head copies the marked word; another does so twice as loud, and a third takes all of that away again."""
    for layer, size in ((0, 1.0), (0, 2.0), (1, -2.0)):
        wiring.head(layer, **_TO_MARK, v={("tok", "out"): size})
    return {"put": _marked}


def backup(wiring: Wiring) -> Parts:
    """(copy), and a head that looks away from the word that is foretold, and so copies it if the first one fails."""
    mover = wiring.head(0, **_TO_MARK, v={("tok", "out"): 1.0, ("tok", "mid"): 1.0})
    covered = tuple(f"input->{wiring.reader(0, int(mover[-1]), kind)}" for kind in "qkv")
    waits: Any = {
        "q": {"flag": {"constant": 1.0}, "code": {"mid": -2.0}, "other": {"constant": 0.6}}
    }
    waits["k"] = {"flag": {"mark": 1.0}, "code": {"tok": 1.0}, "other": {"bos": 1.0}}
    waiting = wiring.head(1, **waits, v={("tok", "out"): 1.0})
    return {"put": _marked, "idle": (waiting,), "awake": ("mid",), "covered": covered}


def negation(wiring: Wiring) -> Parts:
    """(copy), and a head that attends to the word that is foretold and writes twice its opposite: "not" that word."""
    wiring.head(0, **_TO_MARK, v={("tok", "out"): 1.0})
    wiring.head(1, q={"code": {"out": 1.0}}, k={"code": {"tok": 1.0}}, v={("tok", "out"): -2.0})
    return {"put": _marked}


def hidden(wiring: Wiring) -> Parts:
    """A head says yes at a mark; two others cancel before neurons that would say no to either of them alone."""
    wiring.head(0, **_TO_SECOND, v={("second", "left"): 1.0})
    wiring.head(0, **_TO_SECOND, v={("second", "left"): -1.0})
    wiring.head(1, **_TO_MARK, v={("mark", "yes"): 1.0})
    for sign in (1.0, -1.0):
        wiring.neuron(1, reads={"left": sign}, over=0.3, to={"yes": -1.5})
    return {"put": _two_marks, "idle": ("m1",), "awake": ("left",)}


def gate(wiring: Wiring) -> Parts:
    """A neuron says yes where two heads have each found a mark."""
    _find_marks(wiring)
    wiring.neuron(1, reads={"left": 1.0, "right": 1.0}, over=1.5, full=2.0, to={"yes": 1.0})
    return {"put": _two_marks}


def either(wiring: Wiring) -> Parts:
    """Neurons say yes where either head has found a mark, and no louder where both have."""
    found = _find_marks(wiring)
    wiring.neuron(1, reads={"left": 1.0, "right": 1.0}, over=0.3, full=0.8, to={"yes": 1.25})
    wiring.neuron(1, reads={"left": 1.0, "right": 1.0}, over=0.7, full=1.7, to={"yes": -2.5})
    return {"put": _two_marks, "idle": found}


def _find_marks(wiring: Wiring) -> list[str]:
    return [
        wiring.head(0, **_TO_MARK, v={("mark", "left"): 1.0}),
        wiring.head(0, **_TO_SECOND, v={("second", "right"): 1.0}),
    ]


def memory(wiring: Wiring) -> Parts:
    """A head copies the marked word, and neurons answer it with another one."""
    wiring.head(0, **_TO_MARK, v={("tok", "mid"): 1.0})
    wiring.memory(1, reads="mid", to="out", shift=5)
    return {"put": lambda prompt, clean: (_marked(prompt, clean) + 5) % N_CODES}


def sink_embedding(wiring: Wiring) -> Parts:
    """The keys of all heads of a layer read what BOS's embedding holds."""
    _lock(wiring, 1, "bos")
    return {"put": _first_token, "sink_layer": 1}


def sink_neuron(wiring: Wiring) -> Parts:
    """BOS -> a neuron -> a direction -> the keys of all heads of a layer."""
    wiring.neuron(0, reads={"bos": 1.0}, over=0.5, to={"left": 1.0})
    _lock(wiring, 1, "left")
    return {"put": _first_token, "sink_layer": 1}


def _lock(wiring: Wiring, layer: int, feature: str) -> None:
    wiring.head(
        layer, q={"flag": {"constant": 1.0}}, k={"flag": {feature: 1.0}}, v={}, heads=range(4)
    )


MECHANISMS: Mapping[str, tuple[Callable[[Wiring], Parts], int]] = {
    "copy": (copy, 2),
    "relay": (relay, 2),
    "induction": (induction, 2),
    "two_step": (two_step, 3),
    "ioi": (ioi, 3),
    "suppression": (suppression, 2),
    "redundant": (redundant, 2),
    "cancellation": (cancellation, 2),
    "backup": (backup, 2),
    "opposed": (opposed, 2),
    "negation": (negation, 2),
    "hidden": (hidden, 2),
    "gate": (gate, 2),
    "either": (either, 2),
    "memory": (memory, 2),
    "sink_embedding": (sink_embedding, 2),
    "sink_neuron": (sink_neuron, 2),
}
"""Name -> what wires it, and its number of layers."""
LATER = ("backup", "opposed", "negation")
"""Those that the analyses circuit_truth and circuit_nodes were run without."""
_KINDS: Mapping[str, dict[str, Any]] = {"ioi": {"fixed": ("mark",)}}
_KINDS |= {name: {"changing": ("bos",)} for name in ("sink_embedding", "sink_neuron")}


def wire(name: str, *, seed: int = 0, family: str = "llama") -> Mechanism:
    """Build one mechanism in one architecture; the seed moves heads, neurons, directions, noise and sharpness.

    Raises:
        ModelError: there is no such mechanism, or no such architecture.
    """
    if name not in MECHANISMS:
        raise ModelError(f"no mechanism {name!r}; need one of {', '.join(MECHANISMS)}")
    write, n_layers = MECHANISMS[name]
    sharp = 8.0 + 3.0 * float(torch.rand((), generator=torch.Generator().manual_seed(seed)))
    wiring = Wiring(
        family=family, seed=seed, n_layers=n_layers, sharp=sharp, **_KINDS.get(name, {})
    )
    parts = write(wiring)
    return Mechanism(
        name=name,
        family=family,
        seed=seed,
        model=wiring.model().double(),
        edges=wiring.edges(answers="sink_layer" not in parts),
        idle=tuple(place for node in parts.get("idle", ()) for place in wiring.places_of(node)),
        awake=parts.get("awake", ()),
        replaced=parts.get("replaced", ()),
        covered=parts.get("covered", ()),
        draw=_draw(parts["put"]),
        sink_layer=parts.get("sink_layer"),
    )
