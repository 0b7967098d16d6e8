"""Direct logit attribution: what each layer, head or neuron adds to the logit of an answer, or to a difference of two.

The stream after the last layer is the sum of what was written into it. The last norm divides it by one number s, and
multiplies it by a gain g; with the number of the run itself, the norm and the unembedding are linear:

    logit = sum over writers of (c(w) g / s) . u  +  (b_norm . u + b_unembed),

where u is the answer's row of the unembedding, and c subtracts the mean in a LayerNorm. So nothing is folded into the
weights, and the contributions sum to the logit, which is checked in every run. A norm behind a sublayer (Gemma, OLMo 2)
is linear in its heads and neurons likewise. Gemma 2 caps its logits: its contributions sum to the logit before the cap.

Reference: nostalgebraist 2020, "interpreting GPT: the logit lens"; Wang et al., arXiv 2211.00593.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ..activations.forward import resolve
from ..data.described import BosCondition
from ..data.token_ids import answer_id
from ..data.tokens import Prompts, TokenBatch, refuse_integer_positions
from ..edits.constructors import Edit
from ..edits.hooks import Applied, edits_for_model, edits_in_texts
from ..edits.metrics import positions_from_start
from ..engine.forward import run_checked_edits
from ..engine.needs import Needs
from ..engine.trust import TOLERANCE
from ..errors import InputError, ModelError
from ..models.family import ADDED
from ..models.lens import LensModel
from ..models.load import ModelLike
from ..models.packed import MOST_ROUNDING, packed_kinds
from ..models.sites import site_of
from ..models.unembedding import uncapped_logits, unembedding_vectors
from ..models.weights import final_norm, mlp_weights, norm_weights, output_weights
from ..records import display
from ..stats import sort_by_magnitude, t_intervals
from .stream import post_norm_factor

By = Literal["layer", "head", "neuron"]
_READ: Mapping[By, tuple[str, ...]] = {
    "layer": (),
    "head": ("z",),
    "neuron": ("neurons", "down_out"),
}
"""Sites that are read beside the stream and what layers add to it."""
_PARTS = {
    "attn_out": "attention",
    "mixer_out": "mixer",
    "mlp_out": "mlp",
    "per_layer_out": "layer input",
}
"""Site of what a layer adds -> the part that writes it."""
_EDITED: Mapping[By, frozenset[str]] = {
    "layer": frozenset({"resid_pre", "resid_post"}),
    "head": frozenset({"resid_pre", "resid_post", "attn_out"}),
    "neuron": frozenset({"resid_pre", "resid_post", "down_out", "mlp_out"}),
}
_TOKENS_A_FORWARD = 1024
Label = tuple[str, int | None, int | None, int | None]
"""Part, layer, head and neuron."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAttribution:
    """The contribution of each part of the model to a logit."""

    frame: pd.DataFrame
    """One row per part: ``part`` (embedding, attention, head, mixer, mlp, neuron, layer input, bias, edit), ``layer``,
    ``head``, ``neuron``, ``contribution`` (mean over sequences) with its 95% interval over sequences, ``n``."""
    values: Float[Tensor, "sample batch"] = field(repr=False)
    """The contribution of each row by sequence."""
    logits: Float[Tensor, " batch"]
    """The logit, or the difference of two, of each sequence, before a cap; the sum of its column of ``values``."""
    what: str
    """The answers, in words."""
    notes: tuple[str, ...] = ()
    """Notes on the model, such as that its weights are quantised."""

    def strongest(self, n: int = 10) -> pd.DataFrame:
        """Return the ``n`` rows of ``frame`` with the largest absolute contributions."""
        return sort_by_magnitude(self.frame, "contribution").head(n).reset_index(drop=True)

    def _repr_html_(self) -> str:
        said = f"{self.what}: {float(self.logits.mean()):.4g}, the sum of {len(self.frame)} contributions."
        return display.result_html(
            said, self.strongest().dropna(axis=1, how="all"), notes=self.notes
        )


def direct_logit_attribution(
    model: ModelLike,
    prompts: Prompts,
    answer: str | int | Sequence[str | int],
    incorrect: str | int | Sequence[str | int] | None = None,
    *,
    by: By = "layer",
    position: int = -1,
    edits: Sequence[Edit] | Edit = (),
    bos: BosCondition = "auto",
) -> LogitAttribution:
    """Split the logit of an answer, or the difference of two logits, into what each part of the model writes.

    Cost: one forward. The weights are not changed, so that nothing has to be folded before.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        prompts: texts, or tokens.
        answer: a token by its text behind the prompt, or its id; one for all prompts, or one for each.
        incorrect: a token whose logit is subtracted, given like ``answer``; None subtracts nothing.
        by: ``layer`` (embedding, attention and MLP of each layer), or ``head`` or ``neuron``, which split them further.
        position: where the answer is predicted; a negative one counts back from the last token of each sequence.
        edits: edits of the run. What is written into the stream itself has a row ``edit`` in its layer.
        bos: BOS condition of texts.

    Raises:
        InputError: an answer is no token behind its prompt, a position does not exist, or the last norm's output is
            edited, which no part writes.
        SiteError: the family has no neurons.
        ModelError: the contributions do not sum to the logit.
    """
    lens, batch = resolve(model, prompts, bos=bos)
    given = edits_for_model(lens, edits_in_texts(edits, batch), n_positions=batch.n_positions)
    if any(one.site == "final" for one in given):
        raise InputError(
            "an edit of 'final' was given, which no part of the model writes; need edits before the norm"
        )
    for site in _READ[by]:
        site_of(site, family=lens.family)
    sites = (
        "resid_pre",
        *_READ[by],
        *(site for site in ADDED if lens.layers_with(site)),
        "resid_post",
        "final",
    )
    refuse_integer_positions(batch, [position], of="position")
    at = positions_from_start(batch.lengths.cpu(), position)
    signed = [(+1, _answer_ids(lens, batch, answer, at=at))]
    signed += [] if incorrect is None else [(-1, _answer_ids(lens, batch, incorrect, at=at))]
    edited = {
        layer
        for one in given
        if one.site in _EDITED[by]
        for layer in one.edited_layers(lens.n_layers)
    }
    applied = Applied(lens=lens, edits=given, n_sequences=batch.n_sequences)
    at_end = {"loss": False, "logits": False, "whole": True}  # the last norm
    needs = Needs(
        keys=(0,),
        layers=tuple(range(lens.n_layers)),
        sites=sites,
        state=True,
        positions=None,
        **at_end,
    )
    size = max(1, _TOKENS_A_FORWARD // batch.n_positions)
    labels: list[Label] = []
    values, logits = [], []
    for first in range(0, batch.n_sequences, size):
        part = slice(first, min(first + size, batch.n_sequences))
        (run,) = run_checked_edits(lens, [(batch[part], applied)], needs, prompts=part)
        rows = torch.arange(part.stop - part.start)
        tensors = {place: tensor[rows, at[part]] for place, tensor in run.tensors.items()}
        own = [(sign, ids[part]) for sign, ids in signed]
        found = _part_contributions(lens, tensors, own, by=by, edited=edited)
        labels = [label for label, _ in found]
        values.append(torch.stack([value for _, value in found]))
        whole = uncapped_logits(lens, tensors["final", 0].to(lens.device)).detach().double().cpu()
        logits.append(_signed_sum(lambda ids, whole=whole, rows=rows: whole[rows, ids], own))
    applied.warn_of_edits_without_effect()
    what = (
        f"logit of {answer!r}"
        if incorrect is None
        else f"logit of {answer!r} minus that of {incorrect!r}"
    )
    return _make_checked_result(
        lens, labels, torch.cat(values, dim=1), torch.cat(logits), what=what
    )


def _part_contributions(
    lens: LensModel,
    tensors: Mapping[tuple[str, int], Tensor],
    signed: Sequence[tuple[int, Tensor]],
    *,
    by: By,
    edited: Collection[int],
) -> list[tuple[Label, Float[Tensor, " batch"]]]:
    """Return (label, contribution to the logit of each sequence) for each part of the model, in float64.

    ``tensors``: (site, layer) -> tensor where the answer is predicted. ``signed``: (1, right ids) and (-1, wrong ids).
    ``by``: how parts are split. ``edited``: layers whose stream is edited, which have a row of their own.
    """
    read = {place: tensor.double() for place, tensor in tensors.items()}
    last, norm, by_layer = (
        read["resid_post", lens.n_layers - 1],
        final_norm(lens),
        lens.remaining_scales,
    )
    wanted = _signed_sum(lambda ids: unembedding_vectors(lens, ids)[0], signed)
    constant = _signed_sum(lambda ids: unembedding_vectors(lens, ids)[1], signed)
    through = wanted * norm.gain.double().cpu()
    through = through - through.mean(-1, keepdim=True) if norm.centred else through
    centred = last - last.mean(-1, keepdim=True) if norm.centred else last
    through = through / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()

    def contribution(x: Tensor) -> Float[Tensor, " batch"]:
        return (x * through).sum(-1)

    before = read["resid_pre", 0] * by_layer[0]
    found: list[tuple[Label, Tensor]] = [(("embedding", None, None, None), contribution(before))]
    for layer in range(lens.n_layers):
        own: list[tuple[Label, Tensor]] = []
        for site in lens.added_sites(layer):
            whole, parts = contribution(read[site, layer] * by_layer[layer]), None
            if by == "head" and site == "attn_out":
                parts = _head_contributions(
                    lens, read["z", layer], through * by_layer[layer], layer=layer
                )
            elif by == "neuron" and site == "mlp_out":
                parts = _neuron_contributions(lens, read, through * by_layer[layer], layer=layer)
            if parts is not None:
                each, whole = (
                    parts[0],
                    _rest_of(
                        *parts, whole=whole, exact=_adds_exactly(lens, layer=layer, site=site)
                    ),
                )
                own += [
                    ((by, layer, n, None) if by == "head" else (by, layer, None, n), x)
                    for n, x in enumerate(each)
                ]
            if parts is None or bool(whole.any()):
                own.append(((_PARTS[site], layer, None, None), whole))
        after = read["resid_post", layer] * by_layer[layer + 1]
        if layer in edited:
            written = contribution(after - before)
            own.append((("edit", layer, None, None), written - sum(value for _, value in own)))
        before = after
        found += own
    return [*found, (("bias", None, None, None), wanted @ norm.bias.double().cpu() + constant)]


def _adds_exactly(lens: LensModel, *, layer: int, site: str) -> bool | None:
    """Check that a layer's heads or neurons and a bias sum to ``site``; None if its kernel rounds (packed weights).

    False if the bias is not the same at all tokens: in gpt_oss the router weights it.
    """
    family = lens.family
    module = lens.layer(layer).get_submodule(
        (family.attention if site == "attn_out" else family.mlp) or ""
    )
    if packed_kinds(module):
        return None
    experts = (
        site == "mlp_out"
        and family.experts
        and not family.dense
        and module.get_submodule(family.experts)
    )
    return not (experts and hasattr(experts, "down_proj_bias"))


def _rest_of(
    each: Float[Tensor, "sample batch"],
    bias: Float[Tensor, " batch"],
    *,
    whole: Tensor,
    exact: bool | None,
) -> Float[Tensor, " batch"]:
    """Return what a sublayer adds beside the contributions of ``each`` part: its ``bias``, or what ``whole`` leaves.

    The rounding of a kernel for packed weights counts to it, if it is small.
    """
    left = whole - each.sum(0)
    small = ((left - bias).abs() <= MOST_ROUNDING * (each.abs().sum(0) + bias.abs())).all()
    return left if exact is False or (exact is None and bool(small)) else bias


def _head_contributions(
    lens: LensModel, z: Tensor, through: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    after = norm_weights(lens, layer=layer, which="attn_post_norm")
    w_o, b_o = (one.double().cpu() for one in output_weights(lens, layer=layer))
    total = torch.einsum("bhd,hdm->bm", z, w_o) + b_o
    through = through * post_norm_factor(total[:, None], after)[:, 0].double().cpu()
    return torch.einsum("bhd,hdm,bm->hb", z, w_o, through), through @ b_o


def _neuron_contributions(
    lens: LensModel, read: Mapping[tuple[str, int], Tensor], through: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    weights, after = (
        mlp_weights(lens, layer=layer),
        norm_weights(lens, layer=layer, which="mlp_post_norm"),
    )
    behind = (
        through * post_norm_factor(read["down_out", layer][:, None], after)[:, 0].double().cpu()
    )
    w_down, b_down = weights.w_down.double().cpu(), weights.b_down.double().cpu()
    return (read["neurons", layer] * (behind @ w_down)).T, behind @ b_down


def _signed_sum(of_ids: Callable[[Tensor], Tensor], signed: Sequence[tuple[int, Tensor]]) -> Tensor:
    return sum(
        (sign * of_ids(ids) for sign, ids in signed), start=torch.zeros((), dtype=torch.float64)
    )


def _make_checked_result(
    lens: LensModel, labels: Sequence[Label], values: Tensor, logits: Tensor, *, what: str
) -> LogitAttribution:
    """Make the result from labelled ``values``; ModelError unless they sum to ``logits``. ``what`` names the logit."""
    off = (values.sum(0) - logits).abs()
    allowed = max(TOLERANCE, 8 * torch.finfo(lens.dtype).eps) * values.abs().sum(0).clamp(min=1)
    if not bool((off <= allowed).all()):
        raise ModelError(
            f"the parts of {lens.name} sum to logits that are off by {float(off.max()):.3g}; need a stream that is the "
            "sum of what attention and MLP write, and projections that read heads and neurons as they are. Take off "
            "what was put in between, such as a hook; if there is nothing, please report the model's architecture"
        )
    frame = pd.DataFrame(labels, columns=["part", "layer", "head", "neuron"])
    frame = frame.astype({"layer": "Int64", "head": "Int64", "neuron": "Int64"})
    found = t_intervals(values.numpy())
    for name, part in (
        ("contribution", "estimate"),
        ("ci_low", "low"),
        ("ci_high", "high"),
        ("n", "n"),
    ):
        frame[name] = [getattr(one, part) for one in found]
    return LogitAttribution(frame=frame, values=values, logits=logits, what=what, notes=lens.notes)


def _answer_ids(
    lens: LensModel, batch: TokenBatch, answer: str | int | Sequence[str | int], *, at: Tensor
) -> Tensor:
    """Return the id of ``answer`` as the token that follows position ``at`` of each sequence."""
    several = [answer] * batch.n_sequences if isinstance(answer, str | int) else list(answer)
    if len(several) != batch.n_sequences:
        raise InputError(
            f"there are {len(several)} answers for {batch.n_sequences} prompts; need one, or one for each"
        )
    rows = [
        row[: end + 1].tolist() for row, end in zip(batch.tokens.cpu(), at.tolist(), strict=True)
    ]
    ids = [
        answer_id(one, row, lens.tokenizer, what="the answer")
        for one, row in zip(several, rows, strict=True)
    ]
    if not all(0 <= one < lens.d_vocab for one in ids):
        raise InputError(f"the answers are the ids {ids[:5]}; need 0 to {lens.d_vocab - 1}")
    return torch.tensor(ids)
