"""The keys of the monitor's log with their meanings, and the sums from which a reading's numbers are computed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..measures import attention
from ..measures.dimensions import dominance_ratio
from ..measures.neurons import column_kurtosis
from ..measures.reductions import median_where
from ..schema import COUNTED_QUERIES

PREFIX = "sinks/"
OTHERS_FROM = 8
"""Ordinary tokens are those from this position on."""
SAMPLED = 64
"""The most query rows, and the most ordinary tokens, of a sequence that are looked at one by one."""
COUNTED_SEQUENCES = 16
"""The strongest position is taken among those that count in this many sequences, if any does."""
UNIFORM_FACTOR = 2.0
"""A score at the strongest position must be above this many times that under uniform attention, as in short texts."""
COVERAGE_FACTOR = 20.0
"""A dimension is an outlier on a token where it exceeds this many times the token's median magnitude."""
_NOTHING = torch.full((2,), math.nan, dtype=torch.float64)
"""Sum and count of what a layer does not have, as attention in some layers of a hybrid."""


@dataclass(frozen=True, slots=True)
class Key:
    """A number that the monitor logs, for every layer as ``NAME/layer_N`` and for the whole model as ``NAME``."""

    unit: str
    whole: Literal["mean", "max", "alone"]
    """How layers are combined into the model's number; ``alone``: it is not measured by layer."""
    meaning: str


KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "rate_first": Key(
            "share",
            "mean",
            "share of (sequence, head) whose sink score at position 0 passes the threshold that was set and twice what "
            "uniform attention gives there, of sequences with at least 16 tokens after it",
        ),
        "mass_first": Key(
            "attention", "mean", "mean attention of later queries that see position 0"
        ),
        "rate_strongest": Key(
            "share",
            "mean",
            "as rate_first, at the strongest position",
        ),
        "mass_strongest": Key("attention", "mean", "as mass_first, at the strongest position"),
        "strongest_position": Key(
            "position",
            "alone",
            "the position with the largest mean sink score above uniform attention, over layers and heads, of those "
            "with at least 16 queries and a quarter of all after them",
        ),
        "strongest_sequences": Key(
            "sequences",
            "alone",
            "how many the strongest position's numbers are of, gathered over steps up to this one",
        ),
        "norm_ratio": Key(
            "1", "max", "norm of the stream at position 0 relative to the median of ordinary tokens"
        ),
        "dominance": Key(
            "1",
            "mean",
            "largest magnitude of the stream's dimensions at position 0, relative to their mean",
        ),
        "dimension": Key(
            "dimension",
            "alone",
            "the dimension with most energy at position 0, where dominance is largest",
        ),
        "max_activation": Key("of the stream", "max", "largest magnitude in the stream, any token"),
        "kurtosis": Key(
            "1", "mean", "excess kurtosis of a token's dimensions, mean over tokens; 0 = Gaussian"
        ),
        "coverage": Key(
            "share",
            "max",
            "share of ordinary tokens on which one dimension exceeds 20 times the token's median magnitude",
        ),
        "coverage_dimension": Key(
            "dimension", "alone", "that dimension, where coverage is largest"
        ),
        "entropy": Key(
            "nats", "mean", "entropy of a row of the pattern, mean over sampled queries"
        ),
        "max_logit": Key("logits", "max", "largest attention score of the sampled queries"),
        "loss": Key(
            "nats",
            "alone",
            "mean loss of a token that the model's own forward returned for the batch",
        ),
    }
)
"""Name without the prefix -> what it is."""
Reading = Mapping[tuple[str, int | None], float]
"""(Key without the prefix, layer) -> number; layer -1 is the stream before the first, None the whole model."""


Totals = dict[tuple[str, int], Tensor]
"""(Name, layer) -> sums, or largest values."""


@dataclass(slots=True, kw_only=True)
class KeySums:
    """Running totals of one reading, from which its numbers are computed."""

    threshold: float
    without_first: bool = False
    """It is not known where sequences begin: only keys that do not ask it are given."""
    added: Totals = field(default_factory=dict)
    largest: Totals = field(default_factory=dict)
    _values: Totals = field(default_factory=dict)
    """Values whose sums are taken for all layers at once."""
    _seen: dict[int | None, tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """Reach -> what ``_count_queries_by_key`` gives, the same in all such layers."""

    def add_state(
        self,
        h: Float[Tensor, "batch position d_model"],
        *,
        layer: int,
        valid: Bool[Tensor, "batch position"],
    ) -> None:
        """Add the stream ``h`` after a layer (-1: before layer 0) to the totals."""
        h = h.float()
        ordinary = valid & (torch.arange(h.shape[1], device=h.device) >= OTHERS_FROM)
        norms = h.norm(dim=-1)
        self._values["norm_ratio", layer] = (norms[:, 0] / median_where(norms, where=ordinary))[
            valid[:, 0]
        ].float()
        first = h[:, 0][valid[:, 0]]
        self._values["dominance", layer] = dominance_ratio(first).float()
        self.added["energy", layer] = first.square().sum(0)
        if layer < 0:
            return
        real = h[valid]
        self.largest["max_activation", layer] = (
            real.abs().amax() if len(real) else real.new_full((), -math.inf)
        )
        self._values["kurtosis", layer] = column_kurtosis(real.T, chunk=max(1, len(real))).float()
        some = torch.linspace(
            OTHERS_FROM, h.shape[1] - 1, SAMPLED, device=h.device, dtype=torch.float32
        )
        some = some.round().long().unique()
        some = some[(some >= OTHERS_FROM) & (some < h.shape[1])]
        magnitude = h[:, some][ordinary[:, some]].abs()
        # For each dimension, the tokens on which it exceeds the factor times their median magnitude. It can only do so
        # where the largest does: where that is over the factor times half the dimensions. The median itself is dear.
        small = magnitude * (COVERAGE_FACTOR * (1 - 1e-5)) < magnitude.amax(-1, keepdim=True)
        few = magnitude[small.sum(-1) > (magnitude.shape[1] - 1) // 2]
        counts = (few > COVERAGE_FACTOR * few.median(dim=-1, keepdim=True).values).sum(0)
        n = torch.tensor([len(magnitude)], device=h.device)
        self.added["coverage", layer] = torch.cat([counts, n]).float()

    def add_attention(
        self,
        *,
        layer: int,
        column: Float[Tensor, "batch head query"],
        logs: Float[Tensor, "batch head row key"],
        highest: Float[Tensor, "batch head row"],
        row_positions: Tensor,
        valid: Bool[Tensor, "batch position"],
        reach: int | None,
    ) -> None:
        """Add a layer's attention to the totals.

        ``column`` has the weights of all queries on position 0. The sampled queries stand at ``row_positions``:
        ``logs`` has the logarithms of their weights and ``highest`` their largest score. Other keys' numbers are
        estimated from them. A query sees a sliding window of ``reach`` positions (None: all).
        """
        self._values["mass_first", layer] = attention.sink_mass(
            column, valid=valid, key=0, reach=reach
        ).float()
        real = valid[:, row_positions]
        rows = logs.exp()
        entropy = -logs.clamp(min=-1e4).mul_(rows).sum(-1)  # 0 log 0 is 0; e^-1e4 is 0 too
        self._values["entropy", layer] = attention.mean_over_rows(entropy, row_valid=real).float()
        self.largest["max_logit", layer] = (
            highest.masked_fill(~real[:, None], -math.inf).amax().float()
        )
        if reach not in self._seen or self._seen[reach][0].device != rows.device:
            self._seen[reach] = _count_queries_by_key(
                row_positions, real=real, valid=valid, reach=reach, threshold=self.threshold
            )
        seen, seen_later, uniform, counted = (one[:, None] for one in self._seen[reach])
        total = (real[:, None, None].to(rows.dtype) @ rows)[:, :, 0]
        own = (
            rows.gather(-1, row_positions[:, None].expand(*rows.shape[:3], 1))[..., 0]
            * real[:, None]
        )
        later = total.index_add(-1, row_positions, own, alpha=-1)
        by_key, mass = total / seen, later / seen_later
        by_key[..., 0] = attention.sink_score(
            column, valid=valid, key=0, min_queries=1, reach=reach
        )
        mass[..., 0] = self._values["mass_first", layer]
        is_sink = by_key > (UNIFORM_FACTOR * uniform).clamp(min=self.threshold)
        self._values["rate_first", layer] = (
            is_sink[..., 0].float().masked_fill(~counted[..., 0], math.nan)
        )
        self._store_by_key("score_by_key", by_key - uniform, where=counted, layer=layer)
        self._store_by_key("rate_by_key", is_sink.float(), where=counted, layer=layer)
        self._store_by_key("mass_by_key", mass, where=counted, layer=layer)
        self.added["sequences_by_key", layer] = counted.sum(0).float()

    def is_complete(self, n_layers: int, *, attention: Sequence[int]) -> bool:
        """Check whether the stream of all layers and the attention of the layers ``attention`` were added."""
        read = {"kurtosis": range(n_layers), "entropy": attention}
        return all((name, one) in self._values for name, some in read.items() for one in some)

    def sum_values(self) -> None:
        """Replace the values that were collected of each layer by their sum and their count."""
        for name in sorted({name for name, _ in self._values}):
            layers = [layer for one, layer in self._values if one == name]
            device = self._values[name, layers[0]].device
            rows = [self._values[name, layer].flatten().to(device) for layer in layers]
            table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
            sums = torch.stack([table.nansum(-1), (~table.isnan()).sum(-1)], dim=-1)
            self.added |= {(name, layer): pair for layer, pair in zip(layers, sums, strict=True)}
        self._values.clear()
        self.added.setdefault(("loss", 0), torch.zeros(2))

    def add_loss(self, loss: Tensor, labels: Tensor | None, n_items: Any) -> None:
        """Add the batch's loss, which the Trainer divides by the ``n_items`` tokens of all batches of a step."""
        loss = loss.detach().float().mean().cpu()
        if n_items is not None:
            n_own = 0 if labels is None else int((labels[..., 1:] != -100).sum())
            loss = loss * float(n_items) / n_own if n_own else loss * math.nan
        if loss.isfinite():
            self.added["loss", 0] = torch.stack([loss, torch.ones(())])

    def sums_by_key(self) -> Totals:
        return {key: one for key, one in self.added.items() if "by_key" in key[0]}

    def gather(self, earlier: Totals) -> None:
        for key, one in earlier.items():
            own, other = self.added[key], one.to(self.added[key].device)
            length = max(own.shape[-1], other.shape[-1])
            own, other = (
                torch.nn.functional.pad(each, (0, length - each.shape[-1])) for each in (own, other)
            )
            self.added[key] = own + other

    def sum_over_processes(self, *, device: torch.device) -> "KeySums":
        """Return the totals over all processes, exchanged on ``device``; each must call this, after ``sum_values``."""
        distributed = torch.distributed
        by_key = self.sums_by_key()
        longest = max((one.shape[-1] for one in by_key.values()), default=0)
        length = torch.tensor([longest], device=device)
        distributed.all_reduce(length, op=distributed.ReduceOp.MAX)
        padded = self.added | {
            key: torch.nn.functional.pad(one, (0, int(length) - one.shape[-1]))
            for key, one in by_key.items()
        }
        padded["without_first", 0] = next(iter(padded.values())).new_tensor(
            [float(self.without_first)]
        )
        added = _reduce_over_processes(padded, op=distributed.ReduceOp.SUM, device=device)
        without_first = bool(added.pop(("without_first", 0)))
        largest = _reduce_over_processes(self.largest, op=distributed.ReduceOp.MAX, device=device)
        return KeySums(
            threshold=self.threshold, without_first=without_first, added=added, largest=largest
        )

    def compute_reading(self, *, n_layers: int) -> Reading:
        """Compute the reading from ``sum_values``; undefined numbers are absent."""
        added = {key: tensor.double().cpu() for key, tensor in self.added.items()}
        layers = range(n_layers)
        attention = [layer for layer in layers if ("score_by_key", layer) in added]
        by_layer = {
            name: _means(added, name, layers=layers)
            for name in ("rate_first", "mass_first", "entropy", "kurtosis")
        }
        for name in ("norm_ratio", "dominance"):
            by_layer[name] = _means(added, name, layers=range(-1, n_layers))
        for name in ("max_activation", "max_logit"):
            by_layer[name] = [float(self.largest.get((name, layer), math.nan)) for layer in layers]
        whole = {"loss": float(torch.div(*added["loss", 0]))}
        if self.without_first:  # these do not ask where a sequence begins
            anywhere = ("max_activation", "kurtosis", "entropy", "max_logit")
            known = {name: by_layer[name] for name in anywhere}
            return _finite_reading(known, whole, n_layers=n_layers)
        scores = torch.stack([added["score_by_key", layer] for layer in attention]).sum(0)
        mean = scores[0] / scores[1]
        sequences = torch.stack([added["sequences_by_key", layer][0] for layer in attention]).amax(
            0
        )
        if not mean.isnan().all():
            enough = sequences >= min(COUNTED_SEQUENCES, float(sequences.max()))
            strongest = int(mean.masked_fill(~enough, -math.inf).nan_to_num(-math.inf).argmax())
            whole |= {
                "strongest_position": strongest,
                "strongest_sequences": float(sequences[strongest]),
            }
            for name in ("rate", "mass"):
                pairs = {
                    (name, layer): added[f"{name}_by_key", layer][:, strongest]
                    for layer in attention
                }
                by_layer[f"{name}_strongest"] = _means(pairs, name, layers=layers)
        shares = [added["coverage", layer] for layer in layers]
        by_layer["coverage"] = [float(share[:-1].max() / share[-1]) for share in shares]
        widest = _argmax_without_nan(by_layer["coverage"])
        if widest is not None:
            whole["coverage_dimension"] = int(shares[widest][:-1].argmax())
        peak = _argmax_without_nan(by_layer["dominance"][1:])
        if peak is not None:
            whole["dimension"] = int(added["energy", peak].argmax())
        return _finite_reading(by_layer, whole, n_layers=n_layers)

    def _store_by_key(self, name: str, values: Tensor, *, where: Tensor, layer: int) -> None:
        """Store the sum and count of each key's ``values``, over the sequences and heads in ``where``."""
        where = where & ~values.isnan()
        total = torch.where(where, values, 0.0).sum(dim=(0, 1))
        self.added[name, layer] = torch.stack(
            [total, where.sum(dim=(0, 1)).to(total.dtype)]
        ).float()


def _count_queries_by_key(
    row_positions: Tensor,
    *,
    real: Bool[Tensor, "batch row"],
    valid: Bool[Tensor, "batch position"],
    reach: int | None,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count the sampled queries that see each key; of key 0 all queries are counted.

    Returns:
        Queries that see each key, those of them after it, its sink score under uniform attention, and the keys with
        enough queries after them; each is "batch key".
    """
    n_keys = valid.shape[1]
    rows, keys = row_positions[:, None], torch.arange(n_keys, device=real.device)
    reached = rows < keys + (n_keys if reach is None else reach)
    seen = real.float() @ (reached & (rows >= keys)).float()
    later = real.float() @ (reached & (rows > keys)).float()
    shares = 1 / (row_positions + 1).clamp(min=1, max=reach).float()
    uniform = (real.float() * shares) @ (reached & (rows >= keys)).float() / seen
    whole = 1 / (keys + 1).clamp(min=1, max=reach).float()
    uniform[:, 0] = attention.sink_score(
        whole.expand(len(valid), 1, n_keys), valid=valid, key=0, min_queries=1, reach=reach
    )[:, 0]
    queries = torch.where(keys == 0, valid.sum(1, keepdim=True), real.sum(1, keepdim=True))
    fewest = (queries / 4).clamp(min=COUNTED_QUERIES, max=None if reach is None else reach - 1)
    after = torch.where(keys == 0, valid.sum(1, keepdim=True) - 1.0, later)
    can_tell = reach is None or reach >= attention.fewest_tokens(threshold=threshold)
    return seen, later, uniform, (after >= fewest) & can_tell


def _reduce_over_processes(tensors: Totals, *, op: Any, device: torch.device) -> Totals:
    names = sorted(tensors)
    flat = torch.cat([tensors[name].flatten() for name in names]).to(device)
    torch.distributed.all_reduce(flat, op=op)
    parts = flat.cpu().split([tensors[name].numel() for name in names])
    return {name: part.view(tensors[name].shape) for name, part in zip(names, parts, strict=True)}


def _means(sums: Totals, name: str, *, layers: Sequence[int]) -> list[float]:
    return [float(torch.div(*sums.get((name, layer), _NOTHING))) for layer in layers]


def _argmax_without_nan(values: Sequence[float]) -> int | None:
    known = [index for index, value in enumerate(values) if not math.isnan(value)]
    return max(known, key=lambda index: values[index]) if known else None


def _finite_reading(
    by_layer: Mapping[str, Sequence[float]], whole: Mapping[str, float], *, n_layers: int
) -> dict[tuple[str, int | None], float]:
    """Return the finite numbers as a reading; lists of ``by_layer`` may begin with layer -1.

    The number of the whole model, if it is not in ``whole``, is the mean or the largest of the layers.
    """
    reading: dict[tuple[str, int | None], float] = {}
    for name, key in KEYS.items():
        if math.isfinite(whole.get(name, math.nan)):
            reading[name, None] = whole[name]
        values = by_layer.get(name, ())
        known = [value for value in values[-n_layers:] if math.isfinite(value)]
        if known and key.whole == "max":
            known = [value for value in values if math.isfinite(value)]
        if known:
            reading[name, None] = (
                max(known) if key.whole == "max" else math.fsum(known) / len(known)
            )
        for index, value in enumerate(values):
            if math.isfinite(value):
                reading[name, index - (len(values) - n_layers)] = value
    return reading
