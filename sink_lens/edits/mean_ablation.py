"""Mean ablation: a part of a site is set to a mean of the baseline run. There are three means; ``MEANS`` defines them.

With a sink whose norm is a hundred times the others', they differ grossly, so every output names its own.
"""

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Bool
from torch import Tensor

from ..activations.forward import resolve
from ..activations.record import capture_batch
from ..activations.sink_mask import mark_sinks
from ..data.tokens import Prompts, TokenBatch
from ..errors import InputError
from ..models.lens import LensModel, layers_from_zero
from ..models.load import ModelLike
from ..models.sites import SITES
from ..schema import Mean
from .constructors import At, Edit, freeze
from .part import Part, Where, indices_of_argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The tokens that a mean is taken over."""

    mean: Mean
    mask: Bool[Tensor, "batch position"]
    """True at the tokens that count."""
    n_sinks: int

    @property
    def words(self) -> str:
        """The mean and its tokens, such as ``mean_ordinary: 42 tokens without 4 sinks``."""
        real = f"{int(self.mask.sum()) + self.n_sinks:,} tokens"
        if self.mean != "mean_ordinary":
            return f"{self.mean}: all of {real}"
        if not self.n_sinks:
            return f"{self.mean}: no sink was found among {real}, so all of them"
        return f"{self.mean}: {real} without {self.n_sinks:,} sink{'s' if self.n_sinks > 1 else ''}"

    def mean_of(self, values: Tensor) -> Tensor:
        """Compute the mean of ``values`` (batch position ...) over these tokens; averaged axes stay, with size 1.

        ``mean_aligned`` keeps the positions, and is 0 where no sequence has a token.
        """
        mask = self.mask.to(values.device)
        if self.mean != "mean_aligned":
            return values[mask].double().mean(0).to(values.dtype)[None, None]
        mask = mask.view(*mask.shape, *[1] * (values.dim() - 2))
        total = torch.where(mask, values.double(), 0.0).sum(0)
        return (total / mask.sum(0).clamp(min=1)).to(values.dtype)[None]


def tokens_to_average(
    lens: LensModel,
    tokens: TokenBatch,
    mean: Mean = "mean_ordinary",
    *,
    sinks: Bool[Tensor, "batch position"] | None = None,
) -> Averaged:
    """Find the tokens that ``mean`` is taken over; ``mean_ordinary`` is refused if every token is a sink.

    It needs one pass of the model to find the sinks with ``sink_mask``, unless ``sinks`` are given.
    """
    valid = tokens.valid.cpu()
    if mean != "mean_ordinary":
        return Averaged(mean=mean, mask=valid, n_sinks=0)
    ordinary = valid & ~(mark_sinks(lens, tokens, by="either")[0] if sinks is None else sinks).cpu()
    n_sinks = int(valid.sum()) - int(ordinary.sum())
    if not ordinary.any():
        raise InputError(
            f"no position is left for mean_ordinary: all {n_sinks} tokens are sinks; need sequences with other tokens, "
            "or mean_all"
        )
    return Averaged(mean=mean, mask=ordinary, n_sinks=n_sinks)


def mean_ordinary(model: ModelLike, tokens: Prompts, site: str, **where: Unpack[Where]) -> Edit:
    """Make an edit that sets a part of a site to its mean over the baseline run's tokens that are no sink.

    The sinks are those that ``sink_mask(..., by="either")`` finds. The label of the edit says how many were left out.
    Padding is left out too. The site needs an axis of token positions. Cost: one pass of the bridge, which keeps the
    site's tensors of the chosen layers, and one of the plain model, which finds the sinks.

    Raises:
        SiteError: the family lacks the site.
        InputError: the site has no positions, an index does not exist, or every token is a sink.
    """
    return _mean_ablation(model, tokens, site, mean="mean_ordinary", where=where)


def mean_all(model: ModelLike, tokens: Prompts, site: str, **where: Unpack[Where]) -> Edit:
    """Make an edit that sets a part of a site to its mean over all tokens of the baseline run, sinks included.

    A single sink can make up most of this mean. Arguments and errors are those of ``mean_ordinary``.
    """
    return _mean_ablation(model, tokens, site, mean="mean_all", where=where)


def mean_aligned(model: ModelLike, tokens: Prompts, site: str, **where: Unpack[Where]) -> Edit:
    """Make an edit that sets each position of a site to that position's mean over the baseline run's sequences.

    It keeps what all sequences share at a position, such as a sink. Arguments and errors are those of
    ``mean_ordinary``.
    """
    return _mean_ablation(model, tokens, site, mean="mean_aligned", where=where)


def _mean_ablation(
    model: ModelLike, tokens: Prompts, site: str, *, mean: Mean, where: Where
) -> Edit:
    if swept := [
        name
        for name, given in where.items()
        if name != "label" and isinstance(given, str) and given == "each"
    ]:
        raise InputError(
            f"{mean} has {swept[0]}='each'; need a list of numbers, or a sweep, whose mean is over its own tokens: "
            f"sweep(model, Grid.of(EditGrid(kind={mean!r}, site={site!r}, {swept[0]}='each')), tokens=...)"
        )
    lens, batch = resolve(model, tokens)
    if site in SITES and not SITES[site].by_token:
        raise InputError(
            f"{site!r} has the axes {SITES[site].axes!r}; need a site with positions, such as resid_post"
        )
    over = tokens_to_average(lens, batch, mean)
    having = lens.layers_with(site) if site not in SITES or SITES[site].per_layer else (0,)
    chosen = indices_of_argument("layers", where.get("layers"))
    layers = list(having if chosen is None else layers_from_zero(chosen, lens.n_layers))
    where["layers"] = layers
    found = capture_batch(lens, batch, sites=[site], layers=layers, path="bridge")
    where.setdefault("label", f"{site}, {over.words}")
    means = {layer: over.mean_of(found[site, layer]) for layer in layers}
    part = Part.of_site(site, where)
    made = freeze(site, {layer: part.select(mean) for layer, mean in means.items()}, **where)

    def change(x: Tensor, at: At) -> Tensor:  # of a random control, at.part is not ``part``
        return freeze(site, {at.layer: at.part.select(means[at.layer])}).change(x, at)

    return replace(made, change=change, holds_values=False, laid=None)
