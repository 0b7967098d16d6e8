"""``capture`` keeps tensors; ``stream`` keeps only numbers computed from them."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import psutil
import torch
from jaxtyping import Int
from torch import Tensor

from ..data.given import as_given
from ..data.tokens import (
    Prompts,
    TokenBatch,
    check_positions,
    positions_in_texts,
    refuse_integer_positions,
)
from ..errors import InputError, SiteError
from ..models.lens import (
    LensModel,
    check_layers,
    check_layers_have_site,
    layers_from_zero,
    missing_sites_text,
)
from ..models.load import ModelLike
from ..models.memory import copy_lists_to_cpu, return_freed_memory
from ..models.private_apis import kernel_of
from ..models.sites import SITES, site_of
from ..progress import tqdm
from ..schema import KernelChoice
from .attention import OBSERVED, choose_kernel
from .forward import bridge_forward, forward, never_fired_error, resolve, sequences_per_forward
from .views import Captured, LayerView, Reading, Streamed

__all__ = ["Captured", "LayerView", "Reading", "Streamed", "bytes_to_capture", "capture", "stream"]

_MEMORY_FRAC = 0.8


def stream(
    model: ModelLike,
    tokens: Prompts,
    readings: Sequence[Reading],
    *,
    keys: Sequence[int] = (0,),
    rows: Int[Tensor, " row"] | None = None,
    kernel: KernelChoice = "auto",
    batch_size: int | None = None,
    progress: bool = True,
    label: str = "reading",
) -> Streamed:
    """Compute readings of every layer, over any number of sequences, in bounded memory.

    This takes one pass of the bridge's blocks, without the unembedding, up to the last layer that a reading needs; a
    layer's tensors are dropped once they were read. The observed attention function replaces the bridge's own, and
    dropout is off. Hooks that the caller put on the bridge act; those at the scores or the pattern are refused, since
    this pass makes neither.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        tokens: the sequences, or texts; a plain tensor has no padding. However they were given, a reading sees a text a
            row, from position 0 on and padded on the right, and its results lie so.
        readings: computed in this pass; their names must differ.
        keys: key positions for ``mass`` and ``key_scores``, from each text's first token on.
        rows: query positions for ``rows``.
        kernel: ``fused``, ``eager``, or ``auto``, which takes the fused kernel if it is exact.
        batch_size: sequences per forward pass; None takes as many as have 2,048 positions together.
        progress: show a progress bar.
        label: its text.

    Raises:
        SiteError: the family lacks a site, or its hook point did not fire.
        KernelError: ``fused`` was requested but is not exact.
        InputError: a layer, key or row does not exist, two readings have the same name, a reading names no site, a
            result does not have the sequences as its first axis, or what is read of a token is nan.
    """
    lens, batch = resolve(model, tokens)
    for name, positions in (
        ("keys", filter(None, keys)),
        ("rows", () if rows is None else rows.tolist()),
    ):
        refuse_integer_positions(batch, positions, of=name)
    return stream_batch(
        lens,
        batch,
        readings,
        keys=keys,
        rows=rows,
        kernel=kernel,
        batch_size=batch_size,
        progress=progress,
        label=label,
    )


def stream_batch(
    lens: LensModel,
    batch: TokenBatch,
    readings: Sequence[Reading],
    *,
    keys: Sequence[int] = (0,),
    rows: Int[Tensor, " row"] | None = None,
    kernel: KernelChoice = "auto",
    batch_size: int | None = None,
    progress: bool = False,
    label: str = "reading",
    sequences: Sequence[int] | None = None,
) -> Streamed:
    """Do as ``stream`` with checked tokens; errors number the sequences by ``sequences`` (None: from 0 on)."""
    wanted = _names_to_read(lens, readings)
    check_positions([*keys, *([] if rows is None else rows.tolist())], batch)
    needed = {name for names in wanted.values() for name in names}
    if "rows" in needed and (rows is None or len(rows) == 0):
        raise InputError(
            "a reading needs 'rows' and no query positions were given; pass rows=torch.tensor([...])"
        )
    if needed & {"mass", "key_scores"} and not keys:
        raise InputError("a reading needs the columns of keys and no key was given; pass keys=(0,)")
    chosen = None
    if not needed.isdisjoint(OBSERVED):
        chosen = choose_kernel(lens.family, device=lens.device, asked=kernel)
    found: dict[str, dict[int, list[Tensor]]] = {reading.name: {} for reading in readings}
    numbers = range(batch.n_sequences) if sequences is None else sequences
    with tqdm(
        total=batch.n_sequences, desc=label, unit="seq", disable=not progress, leave=False
    ) as bar:
        for part in batch.batches(sequences_per_forward(batch_size, batch.n_positions)):
            reading_pass = _ReadingPass(
                readings, lens=lens, wanted=wanted, part=part, rows=rows, found=found
            )
            forward(
                lens,
                part,
                wanted=wanted,
                put=reading_pass.add,
                keys=tuple(keys),
                rows=rows,
                kernel=chosen,
            )
            reading_pass.check_all_read()
            reading_pass.refuse_nan(numbers[: part.n_sequences])
            numbers = numbers[part.n_sequences :]
            copy_lists_to_cpu([parts for by_layer in found.values() for parts in by_layer.values()])
            return_freed_memory()
            bar.update(part.n_sequences)
    values = {
        name: {layer: torch.cat(parts) for layer, parts in by_layer.items()}
        for name, by_layer in found.items()
    }
    skipped = {one.name: said for one in readings if (said := missing_sites_text(lens, one.sites))}
    used = chosen if chosen and lens.own_attention is None else kernel_of(lens.plain.config)
    return Streamed(
        values=values, kernel=used, skipped=skipped, n_layers=lens.n_layers, notes=lens.notes
    )


def capture(
    model: ModelLike,
    tokens: Prompts,
    *,
    sites: Sequence[str],
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    path: Literal["auto", "plain", "bridge"] = "auto",
    batch_size: int | None = None,
    progress: bool = True,
) -> Captured:
    """Keep the tensors of sites for all sequences, on the CPU, in the model's type.

    A capture that would take over 80% of the free memory is refused.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        tokens: sequences, texts, or what a tokenizer or a collator returns, whose tensors lie where their tokens were
            given, nan elsewhere (and between texts that are packed into a row). Padding of a batch is captured too.
        sites: names from ``sink_lens.models.sites``.
        layers: -1 is the last; None means all (in a hybrid, those that have the sites).
        positions: positions in each text (of queries for scores and pattern), 0 its first token and -1 its last; the
            first axis is then the texts, nan where a text has ended. None means all.
        path: ``bridge`` runs the bridge with its own attention, ``plain`` the plain module. ``auto`` runs the bridge's
            blocks with a fused kernel, or with the bridge's own attention if scores or pattern are read. It runs the
            plain module if there is no bridge, or if the bridge does not show a site as the model uses it.
        batch_size: sequences per forward pass; None takes as many as have 2,048 positions together.
        progress: show a progress bar.

    Raises:
        SiteError: the family or a layer lacks a site, or this model's bridge does not show it, or its hook point did
            not fire.
        InputError: layers or positions do not exist, or the result would be larger than allowed.
    """
    lens, batch = resolve(model, tokens)
    found = capture_batch(
        lens,
        batch,
        sites=sites,
        layers=layers,
        positions=positions,
        path=path,
        batch_size=batch_size,
        progress=progress,
    )
    for (site, layer), tensor in found.tensors.items():
        asked = "position" if positions is None else "asked"
        axes = [asked if one == "position" else one for one in SITES[site].axis_names]
        found.tensors[site, layer] = as_given(tensor, batch.given, axes=axes)
    return found


def capture_batch(
    lens: LensModel,
    batch: TokenBatch,
    *,
    sites: Sequence[str],
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    path: Literal["auto", "plain", "bridge"] = "auto",
    batch_size: int | None = None,
    progress: bool = False,
) -> Captured:
    """Do as ``capture`` with checked tokens, but leave each text in a row, from position 0 on."""
    names = tuple(dict.fromkeys(sites))
    for name in names:
        site_of(name, family=lens.family)
    layers = lens.layers_with(*names) if layers is None else layers_from_zero(layers, lens.n_layers)
    chosen = sorted(set(layers))
    check_layers(chosen, lens)
    for name in names:
        check_layers_have_site(lens, chosen, site=name)
    # 0 is each text's first token
    refuse_integer_positions(batch, filter(None, positions or ()), of="positions")
    places = None if positions is None else positions_in_texts(positions, batch)
    needed = bytes_to_capture(lens, batch, sites=names, layers=chosen, positions=positions)
    allowed = int(psutil.virtual_memory().available * _MEMORY_FRAC)
    if needed > allowed:
        raise InputError(
            f"the capture would keep {needed:,} bytes and {allowed:,} are allowed; "
            "choose fewer sites, layers or positions, or use stream, which keeps only numbers"
        )
    hidden = [name for name in names if name in lens.uneditable]
    if path == "bridge" and hidden:
        raise lens.uneditable_error(hidden[0])
    observed = any(SITES[name].observed for name in names)
    which = path
    if path == "auto":
        which = "plain" if hidden or lens.why_measured_only is not None else "bridge"
    wanted = {layer: frozenset(name for name in names if SITES[name].per_layer) for layer in chosen}
    if "final" in names:
        wanted[lens.n_layers] = frozenset({"final"})
    kept: dict[tuple[str, int], list[Tensor]] = {}
    n_done = 0

    def put(layer: int, name: str, tensor: Tensor) -> None:
        if places is not None:
            axis = SITES[name].position_axis
            own = places[n_done : n_done + len(tensor)].to(tensor.device)
            shape = [1] * tensor.dim()
            shape[0], shape[axis] = own.shape
            ended = own >= batch.lengths[n_done : n_done + len(own), None].to(own.device)
            tensor = tensor.take_along_dim(own.view(shape), dim=axis)
            tensor = tensor.masked_fill(ended.view(shape), torch.nan)
        own = tensor.detach().to("cpu", lens.dtype, copy=places is None)
        kept.setdefault((name, layer if SITES[name].per_layer else 0), []).append(own)

    kernel = None
    if which == "plain" and observed:
        kernel = choose_kernel(lens.family, device=lens.device)
    with tqdm(
        total=batch.n_sequences, desc="capturing", unit="seq", disable=not progress, leave=False
    ) as bar:
        for part in batch.batches(sequences_per_forward(batch_size, batch.n_positions)):
            if which == "bridge" and (path == "bridge" or observed):
                bridge_forward(lens, part, wanted=wanted, put=put)
            else:
                forward(lens, part, wanted=wanted, put=put, kernel=kernel, plain=which == "plain")
            n_done += part.n_sequences
            bar.update(part.n_sequences)
    for layer, asked in wanted.items():
        lost = {name for name in asked if (name, layer if SITES[name].per_layer else 0) not in kept}
        if lost:
            raise never_fired_error(lost, layer=layer, lens=lens)
    tensors = {}
    for site, layer in sorted(kept):
        parts = kept.pop((site, layer))
        tensors[site, layer] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return Captured(
        tensors=tensors,
        positions=None if positions is None else tuple(positions),
        path=which,
        notes=lens.notes,
    )


def bytes_to_capture(
    lens: LensModel,
    batch: TokenBatch,
    *,
    sites: Sequence[str],
    layers: Sequence[int],
    positions: Sequence[int] | None = None,
) -> int:
    """Compute the size in bytes of the tensors that ``capture`` would keep."""
    n_values = 0
    shape = (batch.n_sequences, batch.n_positions) if batch.given is None else batch.given.shape
    for site in (SITES[name] for name in sites):
        for layer in layers if site.per_layer else (None,):
            sizes = lens.axis_sizes(site.axes, n_positions=shape[1], layer=layer)
            if positions is not None:
                sizes = [
                    len(positions) if name == "position" else size
                    for name, size in zip(site.axis_names, sizes, strict=True)
                ]
            n_values += prod(sizes)
    return n_values * (shape[0] if positions is None else batch.n_sequences) * lens.dtype.itemsize


class _ReadingPass:
    """The tensors of one pass: each reading gets those that it waits for, and all others are dropped."""

    def __init__(
        self,
        readings: Sequence[Reading],
        *,
        lens: LensModel,
        wanted: Mapping[int, frozenset[str]],
        part: TokenBatch,
        rows: Tensor | None,
        found: dict[str, dict[int, list[Tensor]]],
    ) -> None:
        self.waiting = {
            layer: [
                one for one in readings if one.reads_layer(layer) and names.issuperset(one.sites)
            ]
            for layer, names in wanted.items()
        }
        self.held: dict[int, dict[str, Tensor]] = {layer: {} for layer in wanted}
        self.lens, self.rows, self.found, self.part = lens, rows, found, part
        self.valid, self.tokens = part.valid.to(lens.device), part.tokens.to(lens.device)
        self.labelled = None if part.labelled is None else part.labelled.to(lens.device)
        self.nan: dict[tuple[int, str], Tensor] = {}
        """Layer and name -> True where the tensor is nan, by sequence and position (of ``rows``: by row)."""

    def add(self, layer: int, name: str, tensor: Tensor) -> None:
        held = self.held[layer]
        held[name] = tensor
        axis = SITES[name].position_axis if name in SITES else 2
        others = [one for one in range(1, tensor.dim()) if one != axis]
        self.nan[layer, name] = tensor.detach().isnan().any(dim=others)
        ready = [one for one in self.waiting[layer] if held.keys() >= set(one.sites)]
        if not ready:
            return
        view = LayerView(
            layer=layer,
            tensors=held,
            valid=self.valid.to(tensor.device),
            tokens=self.tokens.to(tensor.device),
            rows=None if self.rows is None else self.rows.to(tensor.device),
            reach=self.lens.reach(layer) if layer < self.lens.n_layers else None,
            labelled=None if self.labelled is None else self.labelled.to(tensor.device),
        )
        for reading in ready:
            self.waiting[layer].remove(reading)
            result: Any = reading.read(view)
            if result is None:
                continue
            is_tensor = isinstance(result, Tensor)
            if not is_tensor or result.dim() == 0 or len(result) != len(self.tokens):
                gave = (
                    f"a tensor of shape {tuple(result.shape)}"
                    if is_tensor
                    else type(result).__name__
                )
                raise InputError(
                    f"the reading {reading.name!r} gave {gave} for {len(self.tokens)} sequences; need the "
                    "sequences as its first axis"
                )
            # on the GPU until the pass is done: each copy from there would wait
            self.found[reading.name].setdefault(layer, []).append(result.detach().clone())
        awaited = {site for reading in self.waiting[layer] for site in reading.sites}
        for done in held.keys() - awaited:
            del held[done]

    def check_all_read(self) -> None:
        for layer, waiting in self.waiting.items():
            for reading in waiting:
                raise never_fired_error(
                    set(reading.sites) - self.held[layer].keys(), layer=layer, lens=self.lens
                )

    def refuse_nan(self, sequences: Sequence[int]) -> None:
        """Refuse a pass in which what was read of a real token is nan.

        A nan in the stream spreads to later tokens, so the stream is read once more to find the first.
        """
        flags = list(self.nan.values())
        copy_lists_to_cpu([flags])
        valid, rows = self.part.valid.cpu(), None if self.rows is None else self.rows.cpu()
        for (layer, name), flag in zip(self.nan, flags, strict=True):
            found = flag & (valid[:, rows] if name == "rows" and rows is not None else valid)
            if not bool(found.any()):
                continue
            sequence, position = found.nonzero()[0].tolist()
            said = f"{name} of layer {layer}" if layer < self.lens.n_layers else name
            streams: dict[int, Tensor] = {}

            def keep(
                layer: int, name: str, tensor: Tensor, streams: dict[int, Tensor] = streams
            ) -> None:
                streams[layer] = tensor.detach().isnan().any(dim=-1).cpu() & valid

            before = range(min(layer + 1, self.lens.n_layers))
            wanted = dict.fromkeys(before, frozenset({"resid_pre"}))
            forward(self.lens, self.part, wanted=wanted, put=keep, kernel=None)
            first = min((one for one in streams if bool(streams[one].any())), default=None)
            if first is not None:
                sequence, position = streams[first].nonzero()[0].tolist()
                said = f"the stream before layer {first}"
            raise InputError(
                f"{said} is nan in sequence {sequences[sequence]} at token {position} of {self.lens.name}; need "
                "numbers. Look at the weights, or load the model in a wider type: float16 ends at 65,504"
            )


def _names_to_read(lens: LensModel, readings: Sequence[Reading]) -> dict[int, frozenset[str]]:
    """Return layer -> the sites and observed names to read there; the final norm's output is at layer ``n_layers``."""
    names = [reading.name for reading in readings]
    if len(set(names)) != len(names):
        raise InputError(f"readings have the same name: {sorted(names)}; need different ones")
    wanted: dict[int, set[str]] = {}
    for reading in readings:
        if not reading.sites:
            raise InputError(f"the reading {reading.name!r} names no site; need at least one")
        for name in reading.sites:
            if name not in OBSERVED:
                site_of(name, family=lens.family)
        if "final" in reading.sites:
            if set(reading.sites) != {"final"}:
                raise SiteError(
                    f"{reading.name!r} reads 'final' beside {reading.sites}; need a reading of 'final' alone"
                )
            wanted.setdefault(lens.n_layers, set()).add("final")
            continue
        check_layers(reading.layers or (), lens)
        for layer in lens.layers_with(*reading.sites):
            if reading.reads_layer(layer):
                wanted.setdefault(layer, set()).update(reading.sites)
    return {layer: frozenset(names) for layer, names in sorted(wanted.items())}
