"""Direct logit attribution: what each layer, head or neuron adds to the logit of an answer, or to a difference of two.

The stream after the last layer is the sum of what was written into it. The last norm divides it by one number s, and
multiplies it by a gain g; with the number of the run itself, the norm and the unembedding are linear:

    logit = sum over writers of (c(w) g / s) . u  +  (b_norm . u + b_unembed),

where u is the answer's row of the unembedding, and c subtracts the mean in a LayerNorm. Every run checks that the
contributions sum to the logit. A norm behind a sublayer (Gemma, OLMo 2) is linear in its heads and neurons likewise.
Gemma 2 caps its logits: its contributions sum to the logit before the cap.

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
from .stream import Tensors, post_norm_factor

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
    """On the model, such as that its weights are quantised."""

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
    added = (site for site in ADDED if lens.layers_with(site))
    refuse_integer_positions(batch, [position], of="position")
    at = positions_from_start(batch.lengths.cpu(), position)
    what, signed = f"logit of {answer!r}", [(+1, _answer_ids(lens, batch, answer, at=at))]
    if incorrect is not None:
        what += f" minus that of {incorrect!r}"
        signed.append((-1, _answer_ids(lens, batch, incorrect, at=at)))
    edited = {
        layer
        for one in given
        if one.site in _EDITED[by]
        for layer in one.edited_layers(lens.n_layers)
    }
    applied = Applied(lens=lens, edits=given, n_sequences=batch.n_sequences)
    needs = Needs(
        keys=(0,),
        layers=tuple(range(lens.n_layers)),
        sites=("resid_pre", *_READ[by], *added, "resid_post", "final"),
        state=True,
        positions=None,
        loss=False,
        logits=False,
        whole=True,  # to the last norm
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
    return _make_checked_result(
        lens, labels, torch.cat(values, dim=1), torch.cat(logits), what=what
    )


def _part_contributions(
    lens: LensModel,
    tensors: Tensors,
    signed: Sequence[tuple[int, Tensor]],
    *,
    by: By,
    edited: Collection[int],
) -> list[tuple[Label, Float[Tensor, " batch"]]]:
    """Return (label, contribution to the logit of each sequence) for each part of the model, in float64.

    ``tensors``: those where the answer is predicted. ``signed``: (1, right ids) and (-1, wrong ids). ``edited``: layers
    whose stream is edited, which have a row of their own.
    """
    read = {place: tensor.double() for place, tensor in tensors.items()}
    last, norm = read["resid_post", lens.n_layers - 1], final_norm(lens)
    wanted = _signed_sum(lambda ids: unembedding_vectors(lens, ids)[0], signed)
    constant = _signed_sum(lambda ids: unembedding_vectors(lens, ids)[1], signed)
    through = wanted * norm.gain.double().cpu()
    through = through - through.mean(-1, keepdim=True) if norm.centred else through
    centred = last - last.mean(-1, keepdim=True) if norm.centred else last
    through = through / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()

    def contribution(x: Tensor) -> Float[Tensor, " batch"]:
        return (x * through).sum(-1)

    scales = lens.remaining_scales
    before = read["resid_pre", 0] * scales[0]
    found: list[tuple[Label, Tensor]] = [(("embedding", None, None, None), contribution(before))]
    for layer in range(lens.n_layers):
        own: list[tuple[Label, Tensor]] = []
        for site in lens.added_sites(layer):
            whole, parts = contribution(read[site, layer] * scales[layer]), None
            if by == "head" and site == "attn_out":
                parts = _head_contributions(lens, read, through * scales[layer], layer=layer)
            elif by == "neuron" and site == "mlp_out":
                parts = _neuron_contributions(lens, read, through * scales[layer], layer=layer)
            if parts is not None:
                exact = _adds_exactly(lens, layer=layer, site=site)
                whole = _rest_of(*parts, whole=whole, exact=exact)
                own += [
                    ((by, layer, n, None) if by == "head" else (by, layer, None, n), x)
                    for n, x in enumerate(parts[0])
                ]
            if parts is None or bool(whole.any()):
                own.append(((_PARTS[site], layer, None, None), whole))
        after = read["resid_post", layer] * scales[layer + 1]
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
    name = family.attention if site == "attn_out" else family.mlp
    module = lens.layer(layer).get_submodule(name or "")
    if packed_kinds(module):
        return None
    if site == "attn_out" or not family.experts or family.dense:
        return True
    return not hasattr(module.get_submodule(family.experts), "down_proj_bias")


def _rest_of(
    each: Float[Tensor, "sample batch"],
    bias: Float[Tensor, " batch"],
    *,
    whole: Tensor,
    exact: bool | None,
) -> Float[Tensor, " batch"]:
    """Return what a sublayer adds beside the contributions of ``each`` part: its ``bias``, or what ``whole`` leaves.

    The small rounding of a kernel for packed weights counts to it.
    """
    left = whole - each.sum(0)
    small = ((left - bias).abs() <= MOST_ROUNDING * (each.abs().sum(0) + bias.abs())).all()
    return left if exact is False or (exact is None and bool(small)) else bias


def _head_contributions(
    lens: LensModel, read: Tensors, through: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    after, z = norm_weights(lens, layer=layer, which="attn_post_norm"), read["z", layer]
    w_o, b_o = (one.double().cpu() for one in output_weights(lens, layer=layer))
    total = torch.einsum("bhd,hdm->bm", z, w_o) + b_o
    through = through * post_norm_factor(total[:, None], after)[:, 0].double().cpu()
    return torch.einsum("bhd,hdm,bm->hb", z, w_o, through), through @ b_o


def _neuron_contributions(
    lens: LensModel, read: Tensors, through: Tensor, *, layer: int
) -> tuple[Tensor, Tensor]:
    weights = mlp_weights(lens, layer=layer)
    after = norm_weights(lens, layer=layer, which="mlp_post_norm")
    factor = post_norm_factor(read["down_out", layer][:, None], after)
    behind = through * factor[:, 0].double().cpu()
    w_down, b_down = weights.w_down.double().cpu(), weights.b_down.double().cpu()
    return (read["neurons", layer] * (behind @ w_down)).T, behind @ b_down


def _signed_sum(of_ids: Callable[[Tensor], Tensor], signed: Sequence[tuple[int, Tensor]]) -> Tensor:
    return sum(
        (sign * of_ids(ids) for sign, ids in signed), start=torch.zeros((), dtype=torch.float64)
    )


def _make_checked_result(
    lens: LensModel, labels: Sequence[Label], values: Tensor, logits: Tensor, *, what: str
) -> LogitAttribution:
    """Make the result from labelled ``values``; ModelError unless they sum to ``logits``."""
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
    found = [(one.estimate, one.low, one.high, one.n) for one in t_intervals(values.numpy())]
    frame[["contribution", "ci_low", "ci_high", "n"]] = pd.DataFrame(found)
    return LogitAttribution(frame=frame, values=values, logits=logits, what=what, notes=lens.notes)


def _answer_ids(
    lens: LensModel, batch: TokenBatch, answer: str | int | Sequence[str | int], *, at: Tensor
) -> Tensor:
    """Return the id of the answer behind position ``at`` of each sequence."""
    several = [answer] * batch.n_sequences if isinstance(answer, str | int) else list(answer)
    if len(several) != batch.n_sequences:
        raise InputError(
            f"there are {len(several)} answers for {batch.n_sequences} prompts; need one, or one for each"
        )
    ids = [
        answer_id(one, row[: end + 1].tolist(), lens.tokenizer, what="the answer")
        for one, row, end in zip(several, batch.tokens.cpu(), at.tolist(), strict=True)
    ]
    if not all(0 <= one < lens.d_vocab for one in ids):
        raise InputError(f"the answers are the ids {ids[:5]}; need 0 to {lens.d_vocab - 1}")
    return torch.tensor(ids)
