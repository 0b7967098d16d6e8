"""What is read of a run; it decides how far each pass must go."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..data.tokens import TokenBatch
from ..edits.constructors import ORDER
from ..edits.metrics import Metric
from ..models.lens import LensModel, check_layers_have_site
from ..models.sites import SITES
from .cells import Cell, Touches


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """All that is read of a run, as a ``Metric`` says it."""

    keys: tuple[int, ...]
    """Positions whose attention and stream are read."""
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    loss: bool
    logits: bool
    state: bool
    whole: bool
    """True if something behind the last layer is read."""
    positions: tuple[int, ...] | None
    """Positions of logits, below 0 from the last real token; None is all."""
    together: bool = False
    """True if a metric or an edit needs all sequences in one pass."""

    @classmethod
    def of_metrics(
        cls, metrics: Sequence[Metric], *, lens: LensModel, cells: Sequence[Cell] = ()
    ) -> "Needs":
        """Collect all that the metrics read, and what the edits of ``cells`` need."""
        for metric in metrics:
            if metric.positions and not metric.state and not lens.shows_pattern:
                raise lens.uneditable_error("pattern")
            for site in metric.sites:
                check_layers_have_site(lens, metric.layers or (), site=site)
        layers = {layer for metric in metrics for layer in metric.read_layers(lens.n_layers)}
        scored = {metric.scored for metric in metrics if metric.logits}
        whole = any(metric.reads_past_layers for metric in metrics)
        loss = any(metric.loss for metric in metrics)
        return cls(
            keys=tuple(dict.fromkeys(key for metric in metrics for key in metric.positions)),
            layers=tuple(sorted(layers)) or (lens.n_layers - 1,),
            sites=tuple(dict.fromkeys(site for metric in metrics for site in metric.sites)),
            loss=loss,
            logits=any(metric.logits for metric in metrics) or (whole and not loss),
            state=any(metric.state and metric.read_layers(lens.n_layers) for metric in metrics),
            whole=whole,
            positions=None
            if loss or None in scored or not scored
            else tuple(sorted(p for p in scored if p is not None)),
            together=any(one.whole_batch for one in (*metrics, *cells)),
        )

    @property
    def n_layers_needed(self) -> int:
        return max(self.layers) + 1

    @property
    def attention_only(self) -> bool:
        """True if only the attention is read of the last layer that is computed."""
        sites = any(not SITES[site].observed for site in self.sites)
        return not (self.whole or self.state or sites)

    @property
    def makes_logits(self) -> bool:
        """A loss alone is computed from the states before the unembedding."""
        return self.logits or not self.loss

    def scored_positions(self, part: TokenBatch) -> tuple[int, ...] | None:
        """Return the positions at which logits are read in any sequence, counted from 0; None means all."""
        if self.positions is None:
            return None
        lengths = part.lengths.tolist()
        found = {
            length + position if position < 0 else position
            for position in self.positions
            for length in lengths
        }
        return tuple(sorted(position for position in found if 0 <= position < part.n_positions))

    def is_changed_by(self, touches: Touches, *, n_layers: int) -> bool:
        """Check whether edits there change anything that is read."""
        if self.whole:
            return True
        for site, layers in touches:
            if not SITES[site].per_layer:
                continue
            after = 1 + min(range(n_layers) if layers is None else layers)
            if after < self.n_layers_needed:
                return True
            early = self.state or self.sites or ORDER[site] <= ORDER["pattern"]
            if after == self.n_layers_needed and early:
                return True
        return False
