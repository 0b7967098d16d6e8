"""A pass of the plain module under edits, over some layers and positions: what many cells repeat thousands of times.

The sites are those of the bridge, at their other address (``models.sites``). Edits of the scores and the pattern have
no address there, and run on the bridge. With the eager kernel the numbers are those of the bridge, to the last bit in
families with the same products (``models.families``), which the runner checks before it relies on it.

Four things are skipped: the layers before the first; the positions before the first, whose keys and values are those
of the clean run (``Keys``), since a causal model cannot change them; what of the first layer no edit changes
(``Known``); and what lies behind the last attention where nothing else is read.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..models.evaluating import evaluating
from ..models.families import Family
from ..models.lens import LensModel
from ..models.sites import SITES, Address, read
from .hooks import Act

Take = Callable[[Tensor], None]


class _EndedError(Exception):
    """Raised to end a forward pass once nothing more of it is needed."""


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
    attention: Float[Tensor, "batch position d_model"]
    """What the attention module gives, before a norm behind it."""
    z: Float[Tensor, "batch position value"]
    """Input of W_O, the heads side by side."""
    neurons: Float[Tensor, "batch position d_mlp"] | None
    """Input of the down-projection; None in a mixture of experts, and where the layer has no MLP module."""

    def repeated(self, copies: int, *, begin: int) -> "Known":
        """Repeat these values from a position on, for several copies of the batch, one after the other."""
        names = ("stream", "attention", "z", "neurons")
        found = {name: getattr(self, name) for name in names}
        parts = {name: None if one is None else one[:, begin:].repeat(copies, 1, 1) for name, one in found.items()}
        return Known(layer=self.layer, **parts)


class _KeysOfLayer(CacheLayerMixin):
    """The keys and values of a layer: those before a position are given, the others are computed."""

    is_sliding = False

    def __init__(self, *, begin: int, held: tuple[Tensor, Tensor] | None, keep: bool) -> None:
        super().__init__()
        self._begin, self._held, self._keep = begin, held, keep

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made in advance."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give all keys and values, where those from the first position on have just been computed."""
        if self._keep:
            self.keys, self.values = key_states, value_states
        if self._held is None or not self._begin:
            return key_states, value_states
        keys, values = (
            _joined(held, new, begin=self._begin)
            for held, new in zip(self._held, (key_states, value_states), strict=True)
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys, and the position of the first."""
        return self._begin + query_length, 0

    def get_seq_length(self) -> int:
        """The number of positions that are given."""
        return self._begin

    def get_max_length(self) -> int:
        """No limit."""
        return -1


def _joined(held: Tensor, new: Tensor, *, begin: int) -> Tensor:
    """The held values up to a position for each copy of the batch, and the new ones after it."""
    copies = len(new) // len(held)
    whole = new.new_empty(*new.shape[:2], begin + new.shape[2], new.shape[3])
    whole.unflatten(0, (copies, -1))[..., :begin, :] = held[:, :, :begin]
    whole[:, :, begin:] = new
    return whole


class Keys(Cache):
    """Keys and values of a pass that begins at a position, with those of the clean run before it."""

    def __init__(self, n_layers: int, *, begin: int = 0, held: "Keys | None" = None, keep: bool = False) -> None:
        layers = []
        for layer in range(n_layers):
            given = None
            if held is not None:
                kept = held.layers[layer]
                assert isinstance(kept, _KeysOfLayer)
                given = None if kept.keys is None or kept.values is None else (kept.keys, kept.values)
            layers.append(_KeysOfLayer(begin=begin, held=given, keep=keep))
        super().__init__(layers=layers)


_BEFORE_Z = frozenset({"resid_pre", "attn_in", "q", "k", "v", "scores", "pattern"})
_Z = frozenset({"z_raw", "z"})
_BEFORE_NEURONS = frozenset({"attn_out", "mlp_in", "gate", "up"})


def skipped(sites: frozenset[str], *, known: Known, family: Family) -> frozenset[str]:
    """The parts of a layer that need not be computed if only these sites are edited."""
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
    keys: Keys | None = None,
    known: Known | None = None,
    skip: frozenset[str] = frozenset(),
    patterns: Mapping[int, Take] | None = None,
    attention_only: bool = False,
    logits_at: Sequence[int] | None = None,
    taps: Sequence[tuple[nn.Module, str, Take]] = (),
) -> Tensor | None:
    """Layers ``first`` to ``last`` - 1 of the plain model; the logits if ``last`` is its number of layers + 1.

    Args:
        lens: the model.
        tokens: the batch, from the first position on; its ids matter where no stream is given, its shape always.
        first: the layer to begin at; the number of layers is the last norm.
        last: the layer to end before.
        visits: (site, layer) -> what is done there.
        stream: before the first layer; None computes it from the tokens, and then ``first`` is 0.
        keys: keeps the keys and values of the pass, or gives those before its first position.
        known: of the layer ``first``, repeated to the batch; needed where something of it is skipped.
        skip: what ``skipped`` gave.
        patterns: layer -> called with its attention pattern.
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
        stack.enter_context(evaluating(lens.plain))
        stack.enter_context(torch.no_grad())
        stack.enter_context(contextlib.suppress(_EndedError))
        ids = tokens.to(lens.device)
        if last <= lens.n_layers:
            lens.plain.base_model(input_ids=ids, past_key_values=keys, use_cache=False)
        else:
            keep = {} if logits_at is None else {"logits_to_keep": torch.tensor(list(logits_at), device=lens.device)}
            out: Tensor = lens.plain(input_ids=ids, past_key_values=keys, use_cache=False, **keep).logits
            return out
    return None


@contextlib.contextmanager
def eager(lens: LensModel) -> Iterator[None]:
    """Within the block, the plain model runs eager attention, which gives a pattern."""
    before = str(lens.plain.config._attn_implementation)
    lens.plain.set_attn_implementation("eager")
    try:
        yield
    finally:
        lens.plain.set_attn_implementation(before)


def know(lens: LensModel, tokens: Tensor, *, layer: int, begin: tuple[int, Tensor] | None) -> Known:
    """What a layer computes without an edit, by a pass from an earlier layer's stream, or from the tokens."""
    family, module = lens.family, lens.layer(layer)
    attention = module.get_submodule(family.attention)
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Take:
        return lambda tensor: found.__setitem__(name, tensor)

    taps = [
        (module, "input", keep("stream")),
        (attention, "output", keep("attention")),
        (attention.get_submodule(family.o), "input", keep("z")),
    ]
    if family.mlp is not None and family.down is not None:
        taps.append((module.get_submodule(family.mlp).get_submodule(family.down), "input", keep("neurons")))
    first, stream = (0, None) if begin is None else begin
    plain_pass(lens, tokens, first=first, last=layer + 1, visits={}, stream=stream, taps=taps)
    return Known(layer=layer, neurons=found.pop("neurons", None), **found)


def _skip(lens: LensModel, known: Known, *, skip: frozenset[str], stack: contextlib.ExitStack) -> None:
    """Return the known values of the first layer instead of computing them."""
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
