"""``run_with`` runs forward passes of the bridge under edits and reads tensors and metrics from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.forward import never_fired_error, resolve
from ..data.given import as_given
from ..data.tokens import (
    Prompts,
    TokenBatch,
    positions_in_texts,
    refuse_integer_positions,
)
from ..edits.constructors import Edit, EditError
from ..edits.hooks import Applied, edits_for_model, edits_in_texts
from ..edits.outcome import Outcome
from ..errors import InputError, SiteError
from ..measures.attention import row_shares, sink_mass
from ..models.lens import LensModel, check_layers, layers_from_zero
from ..models.load import ModelLike
from ..models.memory import copy_lists_to_cpu, copy_to_device
from ..models.running import prepare_pass
from ..models.sites import SITES, bridge_hook_name, site_of
from ..models.unembedding import losses_from_states, next_token_losses
from ..progress import tqdm
from .needs import Needs

_TOKENS_A_FORWARD = 1024
"""Small, since the bridge's eager patterns grow with the squared length."""


def run_with(
    model: ModelLike,
    tokens: Prompts,
    edits: Sequence[Edit] | Edit = (),
    *,
    positions: Sequence[int] = (0,),
    layers: Sequence[int] | None = None,
    sites: Sequence[str] = (),
    loss: bool = True,
    logits: bool = False,
    batch_size: int | None = None,
    quiet: bool = False,
    progress: bool = True,
) -> Outcome:
    """Run the bridge with edits and return the quantities that are read; without edits this is the baseline run.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        tokens: sequences, texts, or what a tokenizer or a collator returns; a plain tensor is taken to have no padding.
            What is of each token lies in the outcome where the token was given, nan elsewhere.
        edits: applied in this order; one that changes nothing causes a warning.
        positions: positions in each text whose attention mass and residual stream are read; 0 is its first token, -1
            its last.
        layers: layers at which mass, stream and sites are read, in this order, -1 the last; None means all.
        sites: sites whose tensors are also kept, as they are after the edits.
        loss: compute the next-token loss, which runs all layers; else a pass ends after the last layer that is read.
        logits: keep the logits.
        batch_size: sequences per forward pass; None chooses it by their length.
        quiet: do not warn about edits that change nothing, which is normal for random controls.
        progress: show a progress bar.

    Raises:
        SiteError: the family lacks a site, or edits of a site have no effect on this bridge.
        InputError: layers, positions, heads or units do not exist; or ``positions`` or edits name positions from 0 on,
            and the rows were given with padding on the left or hold several texts.
        EditError: an edit, or the run under the edits, gave values that are not finite.
    """
    lens, batch = resolve(model, tokens)
    given = edits_for_model(lens, edits_in_texts(edits, batch), n_positions=batch.n_positions)
    if layers is None:
        read = tuple(range(lens.n_layers))
    else:
        read = tuple(dict.fromkeys(layers_from_zero(layers, lens.n_layers)))
    check_layers(read, lens)
    if not read:
        raise InputError("no layers were given; need at least one to read")
    if not positions:
        raise InputError("no positions were given; need at least one to read")
    # 0, the default, is the first token
    refuse_integer_positions(batch, filter(None, positions), of="positions")
    places = positions_in_texts(positions, batch)
    keys, which = places.unique(return_inverse=True)
    for name in sites:
        site_of(name, family=lens.family)
        if not SITES[name].per_layer and not (loss or logits):
            raise SiteError(
                f"{name!r} is computed after the last layer; need loss=True or logits=True to read it"
            )
        if name in lens.uneditable:
            raise lens.uneditable_error(name)
    applied = Applied(lens=lens, edits=given, n_sequences=batch.n_sequences)
    needs = Needs(
        keys=tuple(keys.tolist()),
        layers=read,
        sites=tuple(dict.fromkeys(sites)),
        state=True,
        positions=None,
        loss=loss,
        logits=logits,
        whole=loss or logits,
    )
    (outcome,) = run_checked_edits(
        lens, [(batch, applied)], needs, batch_size=batch_size, progress=progress
    )
    if not quiet:
        applied.warn_of_edits_without_effect()
    rows = torch.arange(batch.n_sequences)[:, None]
    mass = outcome.mass.transpose(2, 3)[:, rows, which].transpose(2, 3)
    state = outcome.state[:, rows, which]
    found = replace(outcome, positions=tuple(positions), mass=mass, state=state, notes=lens.notes)
    return found.as_given(batch.given)


def baseline_logits(model: ModelLike, tokens: TokenBatch) -> Float[Tensor, "batch position vocab"]:
    """Return the logits of every token without edits, where it was given."""
    logits = run_with(model, tokens, layers=(0,), loss=False, logits=True, progress=False).logits
    assert logits is not None  # they were asked for
    return as_given(logits, tokens.given)


def run_checked_edits(
    lens: LensModel,
    runs: Sequence[tuple[TokenBatch, Applied]],
    needs: Needs,
    *,
    prompts: slice = slice(0, None),
    batch_size: int | None = None,
    progress: bool = False,
) -> list[Outcome]:
    """Run batches of one shape in shared forwards, each under its own checked edits; return what ``needs`` says.

    ``prompts`` are their indices among all sequences; a forward has ``batch_size`` of each.
    """
    if lens.own_attention is not None and len(runs) > 1:  # it may read other sequences of its pass
        alone = partial(
            run_checked_edits,
            lens,
            needs=needs,
            prompts=prompts,
            batch_size=batch_size,
            progress=progress,
        )
        return [outcome for one in runs for outcome in alone([one])]
    last = lens.n_layers if needs.whole else needs.n_layers_needed
    first = runs[0][0]
    collectors = [RunCollector(lens=lens, keys=needs.keys, by_token=[]) for _ in runs]
    if batch_size is not None:
        size = batch_size
    elif any(one.whole_batch for _, applied in runs for one in applied.edits):
        size = first.n_sequences
    else:
        size = max(1, _TOKENS_A_FORWARD // (first.n_positions * len(runs)))
    done, n_sequences = 0, max(runs[0][1].n_sequences, first.n_sequences)
    scored = needs.scored_positions(first) if needs.logits else None
    ends: dict[str, Any] = {} if last == lens.n_layers else {"stop_at_layer": last}
    if scored is not None:
        ends["logits_to_keep"] = torch.tensor(scored, device=lens.device)
    with tqdm(
        total=first.n_sequences, desc="edited run", unit="seq", disable=not progress, leave=False
    ) as bar:
        for parts in zip(*(batch.batches(size) for batch, _ in runs), strict=True):
            n, hooks = parts[0].n_sequences, list[Any]()
            own = range(n_sequences)[prompts][done : done + n]
            own = slice(own.start, own.stop, None if own.step == 1 else own.step)
            for number, (part, (_, applied), collector) in enumerate(
                zip(parts, runs, collectors, strict=True)
            ):
                rows = slice(number * n, (number + 1) * n)
                for name, act in applied.fwd_hooks(
                    sequences=own, valid=part.valid, layers=range(last)
                ):
                    hooks.append((name, partial(_edit_rows, act=act, rows=rows)))
                for site, layer, take in collector.make_site_callbacks(
                    read=needs.layers, sites=needs.sites, valid=part.valid.to(lens.device)
                ):
                    name = bridge_hook_name(SITES[site], family=lens.family, layer=layer)
                    hooks.append((name, lambda x, hook, take=take, rows=rows: take(x[rows])))
            tokens = torch.cat([part.tokens for part in parts]).to(lens.device)
            with prepare_pass(lens), torch.no_grad():
                out = lens.bridge.run_with_hooks(tokens, fwd_hooks=hooks, use_cache=False, **ends)
            for part, collector, its in zip(parts, collectors, out.split(n), strict=True):
                collector.store_results(
                    its, part=part, loss=needs.loss, logits=needs.logits, scored=scored
                )
            done += n
            bar.update(n)
    found = []
    for (batch, applied), collector in zip(runs, collectors, strict=True):
        applied.refuse_edits_whose_hook_never_fired(range(last))
        valid = batch.valid.cpu()
        outcome = collector.outcome(needs.layers, valid=valid, edits=applied.edits, scored=scored)
        found.append(outcome)
    return found


def _edit_rows(
    x: Tensor, hook: object, *, act: Callable[..., Tensor | None], rows: slice
) -> Tensor | None:
    new = act(x[rows], hook)
    if new is None or len(new) == len(x):
        return new
    found = x.clone()
    found[rows] = new
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Early:
    """The baseline run's numbers, for the positions before a run that begins at a later one."""

    outcome: Outcome
    columns: Mapping[int, Sequence[Float[Tensor, "batch head query"]]]
    """Layer -> the attention of every query to each key that is read."""
    losses: Float[Tensor, "batch target"] | None


@dataclass(slots=True, kw_only=True)
class RunCollector:
    """Collects what a run reads, and joins the results of its passes."""

    lens: LensModel
    keys: tuple[int, ...]
    begin: int = 0
    early: Early | None = None
    """Stands at the positions before ``begin``."""
    keep: bool = False
    """For runs that continue this one, keep the attention of every query and the loss of every token."""
    by_token: list[Tensor] | None = None
    """Takes the loss of every token; nan at padding."""
    mass: dict[int, list[Tensor]] = field(default_factory=dict)
    columns: dict[int, list[Tensor]] = field(default_factory=dict)
    state: dict[int, list[Tensor]] = field(default_factory=dict)
    kept: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    asked: set[tuple[str, int]] = field(default_factory=set)
    losses: list[Tensor] = field(default_factory=list)
    token_losses: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    early_logits: Tensor | None = None
    bad: list[Tensor] = field(default_factory=list)
    """For each pass, whether a value at its end was nan."""

    def make_site_callbacks(
        self, *, read: Sequence[int], sites: Sequence[str], valid: Tensor
    ) -> list[tuple[str, int, Callable[[Tensor], None]]]:
        """Make the functions that store what a pass shows, each with its site and layer."""
        places: list[tuple[str, int, Callable[[Tensor], None]]] = []
        for layer in read:
            own = {"layer": layer, "valid": valid}
            if layer in self.lens.attention_layers and self.lens.shows_pattern:
                places.append(("pattern", layer, partial(self.store_attention, **own)))
            else:
                shape = (len(valid), self.lens.n_heads, len(self.keys))
                nothing = torch.full(shape, torch.nan, dtype=torch.float32)
                self.mass.setdefault(layer, []).append(nothing)
            places.append(("resid_post", layer, partial(self.store_stream, **own)))
        for site in sites:
            having = self.lens.layers_with(site)
            chosen = [one for one in read if one in having] if SITES[site].per_layer else (0,)
            for layer in chosen:
                self.asked.add((site, layer))
                places.append((site, layer, partial(self._store_site_tensor, place=(site, layer))))
        return places

    def store_attention(self, pattern: Tensor, *, layer: int, valid: Tensor) -> None:
        """Store the mean attention of later ``valid`` tokens to each key; of sigmoid attention, of shares of rows."""
        if self.lens.family.sigmoid:
            pattern = row_shares(pattern)
        columns = [pattern[..., key] for key in self.keys]
        if self.begin and self.early is not None:
            before = (column[..., : self.begin] for column in self.early.columns[layer])
            columns = [torch.cat(both, dim=-1) for both in zip(before, columns, strict=True)]
        found = [
            sink_mass(column.float(), valid=valid, key=key, reach=self.lens.reach(layer))
            for column, key in zip(columns, self.keys, strict=True)
        ]
        if self.keep:
            self.columns[layer] = [column.clone() for column in columns]
        self.mass.setdefault(layer, []).append(torch.stack(found, dim=-1))

    def store_stream(self, x: Tensor, *, layer: int, valid: Tensor) -> None:
        """Store a layer's stream at each position that is read; nan where that is padding."""
        late = [key for key in self.keys if key >= self.begin]
        ended = ~_select_positions(valid, late).to(x.device)
        own = _select_positions(x, [key - self.begin for key in late])
        state = own.float().masked_fill(ended[..., None], torch.nan)
        if len(late) < len(self.keys):
            assert self.early is not None
            outcome, places = self.early.outcome, iter(range(len(late)))
            before = outcome.state[outcome.layers.index(layer)].to(x.device)
            columns = [
                state[:, next(places)] if key >= self.begin else before[:, at]
                for at, key in enumerate(self.keys)
            ]
            state = torch.stack(columns, 1)
        self.state.setdefault(layer, []).append(state)

    def _store_site_tensor(self, x: Tensor, *, place: tuple[str, int]) -> None:
        found = x.detach().to("cpu", copy=True)
        if self.begin:
            assert self.early is not None
            axis = SITES[place[0]].position_axis
            before = self.early.outcome.tensors[place].narrow(axis, 0, self.begin)
            found = torch.cat([before, found], dim=axis)
        self.kept.setdefault(place, []).append(found)

    def store_results(
        self,
        out: Tensor,
        *,
        part: TokenBatch,
        loss: bool,
        logits: bool,
        scored: tuple[int, ...] | None = None,
        unembedded: bool = True,
    ) -> tuple[int, ...] | None:
        """Store the loss and the logits of a pass, if they are asked for, and whether a value is nan.

        ``out`` is the logits at the ``scored`` positions (None: all), the states that the unembedding would read, or
        the stream if the pass stopped earlier. Returns the positions of the stored logits, with the baseline's before
        ``begin``.
        """
        real = part.valid[:, self.begin :] if scored is None else part.valid[:, list(scored)]
        is_nan = out.detach().amax(dim=-1).isnan()
        self.bad.append((is_nan & copy_to_device(real, out.device)).any())
        early = self.early if self.begin else None
        if loss:
            if unembedded:
                losses = next_token_losses(out, part.tokens[:, self.begin :])
            else:
                losses = self._losses_of_states(out, part)
                self.bad.append(losses.detach().isnan().any())  # infinite states
            if early is not None:
                assert early.losses is not None  # of the same metrics
                losses = torch.cat([early.losses[:, : self.begin], losses], dim=1)
            if self.keep:
                self.token_losses = losses
            self.losses.append(mean_loss(losses, part))
            if self.by_token is not None:
                padding = ~part.predicted.cpu()
                self.by_token.append(losses.detach().cpu().masked_fill(padding, torch.nan))
        if logits:
            self.logits.append(out.detach().clone() if out.device.type == "cpu" else out.detach())
            if early is not None:
                assert early.outcome.logits is not None
                own = range(self.begin) if early.outcome.scored is None else early.outcome.scored
                before = [at for at, position in enumerate(own) if position < self.begin]
                self.early_logits = early.outcome.logits[:, before]
                if scored is not None:
                    scored = (*(own[at] for at in before), *scored)
        return scored

    def _losses_of_states(self, states: Tensor, part: TokenBatch) -> Float[Tensor, "batch target"]:
        own = slice(self.begin + 1, None)
        targets = copy_to_device(part.tokens[:, own], states.device)
        predicted = part.valid[:, own].flatten().nonzero()[:, 0]
        index = copy_to_device(predicted, states.device)  # a mask on the GPU would be waited for
        losses = torch.zeros(targets.shape, device=states.device, dtype=torch.float32)
        rows = states[:, :-1].flatten(0, 1)[index]
        losses.view(-1)[index] = losses_from_states(self.lens, rows, targets.flatten()[index])
        return losses

    def outcome(
        self,
        read: tuple[int, ...],
        *,
        valid: Tensor,
        edits: Sequence[Edit],
        scored: tuple[int, ...] | None = None,
    ) -> Outcome:
        """Join what all passes stored at the layers ``read``; refuse values that are not finite, naming ``edits``."""
        if read and not self.mass:
            raise SiteError(
                "this bridge delegates its attention to a kernel that gives no pattern; need the eager one, or a "
                "model from load or wrap(model) of Hugging Face, not a stock bridge"
            )
        if self.early is None:  # else what a pass skips is the baseline's
            for site, layer in self.asked - self.kept.keys():
                raise never_fired_error([site], layer=layer, lens=self.lens)
        copy_to_cpu([self])
        if any(map(bool, self.bad)):
            raise not_finite_error(edits)
        n, n_keys = len(valid), len(self.keys)
        mass = [torch.cat(self.mass[layer]) for layer in read]
        state = [torch.cat(self.state[layer]) for layer in read]
        logits = torch.cat(self.logits) if self.logits else None
        if logits is not None and self.early_logits is not None:
            logits = torch.cat([self.early_logits, logits], dim=1)
        return Outcome(
            positions=self.keys,
            layers=read,
            valid=valid,
            mass=torch.stack(mass) if read else torch.empty(0, n, 0, n_keys, dtype=torch.float32),
            state=torch.stack(state) if read else torch.empty(0, n, n_keys, 0, dtype=torch.float32),
            loss=torch.cat(self.losses) if self.losses else None,
            token_loss=torch.cat(self.by_token) if self.by_token else None,
            logits=logits,
            tensors={place: torch.cat(parts) for place, parts in self.kept.items()},
            scored=scored,
        )


def copy_to_cpu(collectors: Sequence[RunCollector]) -> None:
    """Move what the collectors store to the CPU, all in one copy."""
    lists = [parts for one in collectors for parts in (*one.mass.values(), *one.state.values())]
    lists += [parts for one in collectors for parts in (one.losses, one.logits, one.bad)]
    copy_lists_to_cpu(lists)


def _select_positions(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Select on axis 1 by slices, since a list as index would be copied to the GPU each time."""
    return torch.stack([x[:, position] for position in positions], dim=1) if positions else x[:, :0]


def not_finite_error(edits: Sequence[Edit]) -> EditError:
    names = ", ".join(repr(edit.label) for edit in edits) or "none"
    return EditError(
        f"the run's final values are not finite under the edits {names}; need finite edits"
    )


def mean_loss(losses: Float[Tensor, "batch target"], part: TokenBatch) -> Float[Tensor, " batch"]:
    """Compute each sequence's mean of ``losses`` where tokens are predicted; nan where none is."""
    predicted = copy_to_device(part.predicted, losses.device)
    return torch.where(predicted, losses, 0.0).sum(1) / predicted.sum(1)
