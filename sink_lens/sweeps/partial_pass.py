"""A pass of the plain module under edits, from a given layer to a given layer: what a sweep repeats thousands of times.

The sites are those of the bridge, at their other address (``models.sites``). Edits of the scores and the pattern have
no address there, and run on the bridge. With the eager kernel the numbers are those of the bridge, to the last bit in
families with the same products (``models.families``), which the runner checks before it relies on it; with the fused
one they differ in the last places.

Three things are skipped: the layers before the first, what of the first layer no edit changes (``Known``), and what
lies behind the last attention where nothing else is read.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..activations.attention import Watch, choose_kernel, observed
from ..engine.hooks import Act
from ..models.evaluating import evaluating
from ..models.families import Family
from ..models.lens import LensModel
from ..models.sites import SITES, Address, read

Take = Callable[[Tensor], None]


class _EndedError(Exception):
    """Ends a forward pass where nothing more of it is needed."""


@dataclass(slots=True, kw_only=True)
class Visit:
    """What is done at one site of one layer, each to some rows of the batch: the edits in order, then the readers."""

    edits: list[tuple[slice, Act]] = field(default_factory=list)
    readers: list[tuple[slice, Take]] = field(default_factory=list)

    def edited(self, raw: Tensor, *, view: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The edited tensor, None where nothing was changed; ``view`` shows a tensor with the site's axes."""
        found = None
        seen = view(raw)
        for rows, act in self.edits:
            new = act(seen[rows])
            if new is not None:
                if found is None:
                    found = raw.clone()
                    seen = view(found)
                seen[rows] = new
        for rows, take in self.readers:
            take(seen[rows])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the first layer of a pass computes without an edit, once for all cells that begin there."""

    layer: int
    stream: Float[Tensor, "batch position d_model"]
    """Before the layer."""
    after: Float[Tensor, "batch position d_model"]
    """After the layer."""
    attention: Float[Tensor, "batch position d_model"]
    """What the attention module gives, before a norm behind it."""
    z: Float[Tensor, "batch position value"]
    """Input of W_O, the heads side by side."""
    neurons: Float[Tensor, "batch position d_mlp"] | None
    """Input of the down-projection; None in a mixture of experts, and where the layer has no MLP module."""

    def repeated(self, copies: int) -> "Known":
        """The same for several copies of the batch, one under the other."""
        neurons = None if self.neurons is None else self.neurons.repeat(copies, 1, 1)
        rest = {name: getattr(self, name).repeat(copies, 1, 1) for name in ("stream", "after", "attention", "z")}
        return Known(layer=self.layer, neurons=neurons, **rest)


_BEFORE_Z = frozenset({"resid_pre", "attn_in", "q", "k", "v", "scores", "pattern"})
_Z = frozenset({"z_raw", "z"})
_BEFORE_NEURONS = frozenset({"attn_out", "mlp_in", "gate", "up"})


def skipped(sites: frozenset[str], *, known: Known, family: Family) -> frozenset[str]:
    """What need not be computed in a layer where these sites are the only ones edited."""
    if sites & _BEFORE_Z or ("z_raw" in sites and family.head_out is not None):
        return frozenset()
    if sites & _Z:
        return frozenset({"pattern"})
    if sites & _BEFORE_NEURONS or known.neurons is None:
        return frozenset({"pattern", "attention"})
    return frozenset({"pattern", "attention", "neurons"})


def plain_pass(
    lens: LensModel,
    tokens: Int[Tensor, "batch position"],
    *,
    first: int,
    last: int,
    visits: Mapping[tuple[str, int], Visit],
    stream: Tensor | None = None,
    known: Known | None = None,
    skip: frozenset[str] = frozenset(),
    patterns: Mapping[int, Take] | None = None,
    columns: Watch | None = None,
    attention_only: bool = False,
    logits_at: Sequence[int] | None = None,
    taps: Sequence[tuple[nn.Module, str, Take]] = (),
) -> Tensor | None:
    """Layers ``first`` to ``last`` - 1 of the plain model; the logits if ``last`` is its number of layers + 1.

    Args:
        lens: the model.
        tokens: the batch; its ids matter where the pass begins at layer 0, its shape always.
        first: the layer to begin at; the number of layers is the last norm.
        last: the layer to end before.
        visits: (site, layer) -> what is done there.
        stream: before the first layer; None computes it from the tokens, and then ``first`` is 0.
        known: of the layer ``first``, repeated to the batch; needed where something of it is skipped.
        skip: what ``skipped`` gave.
        patterns: layer -> called with its attention pattern; of the eager kernel only.
        columns: how the fused kernel reads attention; None runs the eager one.
        attention_only: of the last layer, no more than the attention.
        logits_at: positions at which to unembed; None is all.
        taps: submodules whose input or output is handed over as it is.
    """
    layers = lens.layers
    with contextlib.ExitStack() as stack:
        for block in list(layers)[:first]:
            stack.enter_context(_instead(block, _hand_on))
        if stream is not None:
            entry = layers[first] if first < len(layers) else lens.plain.get_submodule(lens.family.final_norm)
            stack.callback(_before(entry, lambda _: stream).remove)
        if known is not None and skip:
            _skip(lens, known, skip=skip, stack=stack)
        ordered = sorted(visits.items(), key=lambda item: tuple(SITES).index(item[0][0]))
        for (site, layer), visit in ordered:
            address = SITES[site].address(lens.family)
            assert address is not None  # scores and pattern run on the bridge, and others were refused
            root = layers[layer] if SITES[site].per_layer else lens.plain
            view = partial(_view, lens=lens, address=address, batch=len(tokens))
            change = partial(visit.edited, view=view)
            module = root.get_submodule(address.module)
            stack.callback((_before if address.side == "input" else _after)(module, change).remove)
        for module, side, take in taps:
            stack.callback((_before if side == "input" else _after)(module, take).remove)
        attention = lens.family.attention
        for layer, take in (patterns or {}).items():
            stack.callback(_pattern_of(layers[layer].get_submodule(attention), take).remove)
        if last <= lens.n_layers:
            module = layers[last - 1].get_submodule(attention) if attention_only else layers[last - 1]
            stack.callback(module.register_forward_hook(_end).remove)
        if columns is not None:
            stack.enter_context(observed(lens.plain, watch=columns))
        stack.enter_context(evaluating(lens.plain))
        stack.enter_context(torch.no_grad())
        stack.enter_context(contextlib.suppress(_EndedError))
        ids = tokens.to(lens.device)
        if last <= lens.n_layers:
            lens.plain.base_model(input_ids=ids, use_cache=False)
        else:
            keep = {} if logits_at is None else {"logits_to_keep": torch.tensor(list(logits_at), device=lens.device)}
            out: Tensor = lens.plain(input_ids=ids, use_cache=False, **keep).logits
            return out
    return None


@contextlib.contextmanager
def eager(lens: LensModel) -> Iterator[None]:
    """Within it, the plain model runs its eager attention, which gives a pattern."""
    before = str(lens.plain.config._attn_implementation)
    lens.plain.set_attn_implementation("eager")
    try:
        yield
    finally:
        lens.plain.set_attn_implementation(before)


def fused_columns(lens: LensModel, *, keys: tuple[int, ...], take: Mapping[int, Take]) -> Watch:
    """How the fused kernel reads the keys' columns of the pattern at some layers."""
    names = frozenset({"mass"})
    return Watch(
        kernel=choose_kernel(lens.family, device=lens.device),
        names=lambda layer: names if layer in take else frozenset(),
        keys=keys,
        rows=None,
        put=lambda layer, name, tensor: take[layer](tensor),
    )


def know(
    lens: LensModel, tokens: Tensor, *, layer: int, begin: tuple[int, Tensor] | None, columns: Watch | None
) -> Known:
    """What a layer computes without an edit, by a pass from an earlier layer's stream, or from the tokens."""
    family, module = lens.family, lens.layer(layer)
    attention = module.get_submodule(family.attention)
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Take:
        return lambda tensor: found.__setitem__(name, tensor)

    taps = [
        (module, "input", keep("stream")),
        (module, "output", keep("after")),
        (attention, "output", keep("attention")),
        (attention.get_submodule(family.o), "input", keep("z")),
    ]
    if family.mlp is not None and family.down is not None:
        taps.append((module.get_submodule(family.mlp).get_submodule(family.down), "input", keep("neurons")))
    first, stream = (0, None) if begin is None else begin
    plain_pass(lens, tokens, first=first, last=layer + 1, visits={}, stream=stream, columns=columns, taps=taps)
    return Known(layer=layer, neurons=found.pop("neurons", None), **found)


def _skip(lens: LensModel, known: Known, *, skip: frozenset[str], stack: contextlib.ExitStack) -> None:
    """Hand on what is known of the first layer instead of computing it."""
    family, block = lens.family, lens.layer(known.layer)
    attention = block.get_submodule(family.attention)
    if "attention" in skip:
        stack.enter_context(_instead(attention, lambda *a, **k: (known.attention, None)))
    elif "pattern" in skip:
        output = attention.get_submodule(family.o)
        stack.enter_context(_instead(attention, lambda *a, **k: (output(known.z), None)))
    if "neurons" in skip:
        assert family.mlp is not None
        assert family.down is not None
        mlp = block.get_submodule(family.mlp)
        down = mlp.get_submodule(family.down)
        stack.enter_context(_instead(mlp, lambda *a, **k: down(known.neurons)))


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        object.__delattr__(module, "forward")


def _hand_on(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _view(raw: Tensor, *, lens: LensModel, address: Address, batch: int) -> Tensor:
    sizes = {"n_heads": lens.n_heads, "n_kv_heads": lens.n_kv_heads, "d_head": lens.d_head}
    return read(raw, address=address, family=lens.family, batch=batch, **sizes)


def _before(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            new = change(args[0])
            return None if new is None else ((new, *args[1:]), kwargs)
        new = change(kwargs["hidden_states"])
        return None if new is None else (args, kwargs | {"hidden_states": new})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            new = change(output[0])
            return None if new is None else (new, *output[1:])
        return change(output)

    return module.register_forward_hook(hook)


def _pattern_of(module: nn.Module, take: Take) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        take(output[1])

    return module.register_forward_hook(hook)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    raise _EndedError
