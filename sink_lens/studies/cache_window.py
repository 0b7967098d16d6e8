"""``streaming``: how many first tokens must a cache keep, so that the loss stays low beyond its size?

A cache of some tokens evicts the oldest one that is not kept. Each query then sees the kept tokens and the newest
others, which a mask in every layer gives exactly (``edits.eviction``). With ``positions="stay"`` nothing else changes.
With ``positions="reindexed"`` a token's position is its place in the cache (StreamingLLM, arXiv 2309.17453): relative
to a query, a kept token moves closer by the number of tokens evicted between them. With rotary positions that is the
query turned back by as many positions before it meets the kept key. Both equal a real cache, generating token by token.

All caches have the same size: one that keeps more first tokens has fewer of the newest.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from ..activations.attention import ChangeRows, Put, Scores, Watch, observed
from ..activations.forward import check_tokens
from ..activations.sink_mask import sink_mask
from ..data.tokens import TokenBatch, from_tensor
from ..edits.eviction import evictions, first_tokens, ranks, seen_keys
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.running import running
from ..models.unembedding import next_token_losses
from ..records import check_free
from ..schema import WORTH_KEEPING_NATS
from ..stats import paired_difference
from ..text import costs, number, percent, plural
from ..text import interval as bounds
from .config import StreamingConfig
from .decision import is_cost, loss_row, parts
from .quantisation import random_tokens
from .study import Study, inputs, write_study

_TOKENS_A_FORWARD = 1024
_CHECKED_SHIFT, _CHECKED_TOKENS = 5, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A cache that evicts the oldest token that is not kept."""

    size: int
    """Cache size in tokens, including the current query."""
    kept: Bool[Tensor, "batch position"]
    """True at tokens that are never evicted, one row for each sequence."""
    reindexed: bool = False
    """Whether a token's position is its place in the cache."""


def streaming(
    model: ModelLike | StreamingConfig,
    *,
    config: StreamingConfig | None = None,
    tokens: TokenBatch | str | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Study:
    """Find how many first tokens a cache of fixed size must keep, and what keeping them is worth.

    Args:
        model: what ``load`` takes, a ``LensModel``, or a configuration, which names one and its tokens.
        config: the study's configuration; the default one if None.
        tokens: the sequences, instead of those of the configuration.
        out: the run folder; ``runs/MODEL-DATE-TIME`` if None.
        overwrite: replace the run that the folder holds.
        progress: show bars.
        **fields: fields of ``StreamingConfig``, such as ``window=128``; they win over those of ``config``.

    Raises:
        InputError: sequences that do not pass the window, too few of them, or new positions in a model whose positions
            are not rotary.
        RunError: the folder is in use, or holds another run.
    """
    check_free(out, overwrite=overwrite)
    config, lens, batch = inputs(StreamingConfig, model, config=config, tokens=tokens, fields=fields)
    if int(batch.lengths.min()) < config.window + 2:
        raise InputError(
            f"the shortest sequence has {int(batch.lengths.min())} tokens and the window {config.window}; need at "
            f"least {config.window + 2}, so that a loss beyond the window can be read. Use a longer --length or text, "
            "or a smaller --window"
        )
    reindexed = config.positions == "reindexed"
    rows: list[dict[str, Any]] = []
    by_position: list[pd.DataFrame] = []
    decision: dict[str, Any] = {}
    recommended, n_kept = 0, math.nan
    with tqdm(desc="runs with a cache", unit="run", disable=not progress, leave=False) as bar:
        for name, part in parts(batch).items():

            def run(kept: Tensor, *, part: TokenBatch = part) -> Tensor:
                """The loss of every token with these tokens kept."""
                bar.update()
                cache = Cache(size=config.window, kept=kept, reindexed=reindexed)
                return token_losses(lens, part, cache=cache, batch_size=config.batch_size)

            shape = {"sequences": part.n_sequences, "length": part.n_positions}
            marked = sink_mask(lens, part).cpu()
            most = int(marked.sum(1).max())
            found = {"full": token_losses(lens, part, batch_size=config.batch_size)}
            bar.update()
            found |= {str(n): run(first_tokens(n, **shape)) for n in sorted(config.keep)}
            if 0 < most < config.window:
                found["sink_mask"] = run(marked)
            means = {kept: loss_beyond_cache(losses, window=config.window) for kept, losses in found.items()}
            known = {"baseline": means["full"], "worst": means["0"], "best": means["full"], "seed": config.seed}
            counts = {"full": math.nan, "sink_mask": float(marked.sum(1).double().mean())}
            for kept, losses in means.items():
                row = {"part": name, "kept": kept, "tokens": counts.get(kept) if kept in counts else float(kept)}
                rows.append(row | {"draw": None} | loss_row(losses, **known))
            if name == "choose":
                recommended = _recommend(means, config=config)
                continue
            n_kept = counts["sink_mask"] if "sink_mask" in means else math.nan
            by_position += [_by_position(kept, losses) for kept, losses in found.items()]
            if recommended:
                generator, valid = torch.Generator().manual_seed(config.seed), part.valid.cpu()
                valid = valid & (torch.arange(part.n_positions) < config.window)
                for draw in range(config.controls):
                    first = first_tokens(recommended, **shape)
                    kept = random_tokens(first, valid=valid, generator=generator)
                    row = {"part": name, "kept": "random", "tokens": float(recommended), "draw": draw}
                    rows.append(row | loss_row(loss_beyond_cache(run(kept), window=config.window), **known))
            decision = _decision(lens, config, rows, means, recommended=recommended, marked=n_kept)
    frames = {
        "losses": pd.DataFrame(rows).astype({"draw": "Int64"}),
        "positions": pd.concat(by_position, ignore_index=True),
        "summary": pd.DataFrame([{name: decision[name] for name in _SUMMARY}]),
    }
    return write_study(
        "streaming",
        lens,
        batch,
        config,
        frames,
        kernel="eager",
        decision=decision,
        headline=decision["sentence"],
        out=out,
        overwrite=overwrite,
    )


_SUMMARY = (
    "verdict",
    "sentence",
    "recommended",
    "chosen",
    "window",
    "positions",
    "full_loss_nats",
    "none_loss_nats",
    "kept_loss_nats",
    "gain_nats",
    "gain_low",
    "gain_high",
    "closed_share",
    "closed_low",
    "closed_high",
    "cost_nats",
    "cost_low",
    "cost_high",
    "sink_mask_tokens",
    "sink_mask_loss_nats",
    "random_loss_nats",
    "controls",
    "n",
)


def token_losses(
    lens: ModelLike,
    tokens: TokenBatch | Int[Tensor, "batch position"],
    *,
    cache: Cache | None = None,
    batch_size: int | None = None,
) -> Float[Tensor, "batch position"]:
    """Loss of each token's prediction of the next one, in nats, generating with a cache; nan at a sequence's last.

    One pass of the plain model. No cache means one that holds everything.

    Args:
        lens: the model.
        tokens: the sequences; a plain tensor is taken to have no padding.
        cache: the cache.
        batch_size: sequences per forward pass; None chooses it by their length.

    Raises:
        InputError: the cache is too small for what it keeps, or has new positions and the model's are not rotary.
    """
    lens = as_lens(lens)
    batch = tokens if isinstance(tokens, TokenBatch) else from_tensor(tokens)
    check_tokens(lens, batch)
    if cache is not None and cache.kept.shape != batch.tokens.shape:
        raise InputError(
            f"the kept tokens have the shape {tuple(cache.kept.shape)} and the sequences {tuple(batch.tokens.shape)}; "
            "need the same"
        )
    frequencies = rotary_frequencies(lens) if cache is not None and cache.reindexed else ()
    if frequencies:
        _check_rotation(lens, batch, frequencies)
    size = max(1, _TOKENS_A_FORWARD // batch.n_positions) if batch_size is None else batch_size
    found = []
    for start in range(0, batch.n_sequences, size):
        chosen = slice(start, start + size)
        part, change = batch[chosen], None
        if cache is not None:
            evicting = _Evicting(lens, dataclasses.replace(cache, kept=cache.kept[chosen]), frequencies=frequencies)
            change = evicting.change
        found.append(_losses(lens, part, change=change))
    return torch.cat(found)


def _losses(lens: LensModel, part: TokenBatch, *, change: Any) -> Float[Tensor, "batch position"]:
    """The loss of every token, with attention changed."""
    ids = part.tokens.to(lens.device)
    with running(lens), observed(lens.plain, watch=_watch(change=change)), torch.no_grad():
        logits = lens.plain(input_ids=ids, use_cache=False).logits
    losses = next_token_losses(logits, ids).cpu().masked_fill(~part.valid[:, 1:].cpu(), math.nan)
    return torch.nn.functional.pad(losses, (0, 1), value=math.nan)


def _ignore(layer: int, name: str, tensor: Tensor) -> None:
    """Keep nothing of what is read."""


def _watch(*, change: Any = None, names: Sequence[str] = (), put: Put = _ignore) -> Watch:
    """Return what to read and change in the attention of a pass."""
    wanted = frozenset(names)
    return Watch(kernel="eager", names=lambda _: wanted, keys=(), rows=None, put=put, change=change)


def loss_beyond_cache(losses: Float[Tensor, "batch position"], *, window: int) -> Float[Tensor, " batch"]:
    """Mean loss of each sequence at the queries for which the cache has evicted something."""
    return losses[:, window:].nanmean(1)


def rotary_frequencies(lens: LensModel) -> tuple[Float[Tensor, " value"], ...]:
    """Angle by which a position turns each pair of a head's dimensions, by layer.

    Raises:
        InputError: the model has no rotary positions.
    """
    rotaries = [module for name, module in lens.plain.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    if not rotaries:
        raise InputError(
            f"{lens.family.architecture} has no rotary embedding that can be read (its positions are learned, ALiBi's "
            "or rotated in a way of its own), so a token cannot be moved in the cache; use positions that stay "
            "(--positions stay)"
        )
    kinds = getattr(lens.config, "layer_types", None) or [""] * lens.n_layers
    own: list[Any] = [
        getattr(rotaries[0], "inv_freq", None)
        if hasattr(rotaries[0], "inv_freq")
        else getattr(rotaries[0], f"{kind}_inv_freq")
        for kind in kinds
    ]
    return tuple(one.float() for one in own)


def turned_back(
    query: Float[Tensor, "batch head query d_head"],
    by: Int[Tensor, "batch query"],
    frequencies: Float[Tensor, " value"],
) -> Float[Tensor, "batch head query d_head"]:
    """Rotated queries as they are so many positions earlier."""
    n = len(frequencies)
    angle = (by[..., None].double() * frequencies.double().to(by.device))[:, None]
    cos, sin = angle.cos().to(query.device, query.dtype), angle.sin().to(query.device, query.dtype)
    first, second, rest = query[..., :n], query[..., n : 2 * n], query[..., 2 * n :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def _check_rotation(lens: LensModel, batch: TokenBatch, frequencies: Sequence[Tensor]) -> None:
    """Compare queries at later positions, turned back, with the same queries at their own positions.

    Raises:
        InputError: they differ in some layer, so the rotation of this model is another one.
    """
    length = min(_CHECKED_TOKENS, batch.n_positions)
    ids = batch.tokens[:1, :length].to(lens.device)
    found: list[dict[int, Tensor]] = []
    for shift in (0, _CHECKED_SHIFT):
        queries: dict[int, Tensor] = {}

        def put(layer: int, name: str, tensor: Tensor, *, queries: dict[int, Tensor] = queries) -> None:
            """Keep a layer's queries."""
            queries[layer] = tensor

        places = torch.arange(length, device=lens.device)[None] + shift
        watch = _watch(names=["rotated_q"], put=put)
        with running(lens), observed(lens.plain, watch=watch), torch.no_grad():
            lens.plain.base_model(input_ids=ids, position_ids=places, use_cache=False)
        found.append(queries)
    back = torch.full((1, length), _CHECKED_SHIFT)
    for layer, wanted in found[0].items():
        got = turned_back(found[1][layer].float(), back.to(lens.device), frequencies[layer])
        off = float((got - wanted.float()).norm() / wanted.float().norm())
        if not off < (1e-3 if lens.dtype in (torch.float32, torch.float64) else 5e-2):
            raise InputError(
                f"the positions of {lens.family.architecture} are not the rotation that was expected (off by "
                f"{off:.1e} in layer {layer}); use positions that stay (--positions stay)"
            )


class _Evicting:
    """A cache in one forward pass, as changes of the scores of each layer."""

    def __init__(self, lens: LensModel, cache: Cache, *, frequencies: Sequence[Tensor]) -> None:
        """Find which keys each query has lost, and where the kept ones stand."""
        self.lens, self.frequencies = lens, frequencies
        kept = cache.kept.cpu()
        self.hidden = ~seen_keys(kept, size=cache.size)[:, None]
        self.slots: list[tuple[Tensor, Tensor]] = []
        if cache.reindexed:
            gone, before = evictions(kept.shape[1], size=cache.size), ranks(kept)
            for slot in range(int(kept.sum(1).max())):
                ordered = kept.long().argsort(dim=1, descending=True, stable=True)
                place = ordered[:, slot].masked_fill(kept.sum(1) <= slot, 0)
                # tokens evicted between a kept token and each query: a sequence with fewer kept tokens moves nothing
                closer = (gone[None] - before.gather(1, place[:, None])).clamp(min=0)
                closer[kept.sum(1) <= slot] = 0
                self.slots.append((place, closer))

    def change(self, layer: int, score: Scores) -> ChangeRows:
        """The function that changes a layer's scores."""
        reach = self.lens.reach(layer)
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        turned, by = score.query, None
        for place, closer in self.slots:
            if by is None or not torch.equal(by, closer):
                turned, by = turned_back(score.query, closer.to(score.query.device), self.frequencies[layer]), closer
            index = place.to(score.key.device)[:, None, None, None]
            key = score.key.gather(2, index.expand(-1, score.key.shape[1], 1, score.key.shape[3]))
            column = score.product(turned, key)[..., 0]
            queries = torch.arange(closer.shape[1])
            far = queries - place[:, None] - closer >= (reach or len(queries) + 1)
            columns.append((place, closer > 0, column.masked_fill(far.to(column.device)[:, None], -math.inf)))

        def changed(block: Tensor, rows: Tensor) -> Tensor:
            """The scores with evicted keys masked, and kept keys at their place in the cache."""
            at = rows.cpu()
            for place, moved, column in columns:
                index = place.to(block.device)[:, None, None, None].expand(-1, *block.shape[1:3], 1)
                new = torch.where(
                    moved[:, at].to(block.device)[:, None, :, None], column[:, :, rows, None], block.gather(3, index)
                )
                block = block.scatter(3, index, new)
            return block.masked_fill(self.hidden[:, :, at].to(block.device), -math.inf)

        return changed


def _recommend(means: Mapping[str, Tensor], *, config: StreamingConfig) -> int:
    """The fewest first tokens that gain the goal's share of what any number of them gains; 0 where that is little."""
    mean = {int(kept): float(losses.mean()) for kept, losses in means.items() if kept.isdecimal()}
    best = min(mean, key=lambda n: (mean[n], n))
    if not is_cost(means["0"], means[str(best)], seed=config.seed):
        return 0
    return min(n for n, loss in mean.items() if mean[0] - loss >= config.goal * (mean[0] - mean[best]))


def _by_position(kept: str, losses: Float[Tensor, "batch position"]) -> pd.DataFrame:
    """Mean loss by position."""
    known = losses[:, :-1]
    counts = (~known.isnan()).sum(0).numpy()
    mean = known.double().nanmean(0).numpy()
    return pd.DataFrame({"kept": kept, "position": np.arange(known.shape[1]), "loss_nats": mean, "n": counts})


def _decision(
    lens: LensModel,
    config: StreamingConfig,
    rows: Sequence[Mapping[str, Any]],
    means: Mapping[str, Tensor],
    *,
    recommended: int,
    marked: float,
) -> dict[str, Any]:
    """The recommended number and what it is worth, all on the second part of the text."""
    judged = {row["kept"]: row for row in rows if row["part"] == "judge" and row["kept"] != "random"}
    random = [row["loss_nats"] for row in rows if row["kept"] == "random"]
    row = judged[str(recommended)]
    none, here = means["0"].double().numpy(), means[str(recommended)].double().numpy()
    gain = paired_difference(none, here, generator=np.random.default_rng(config.seed))
    confirmed = recommended == 0 or is_cost(means["0"], means[str(recommended)], seed=config.seed)
    found = {
        "model": lens.name,
        "verdict": "keep none" if recommended == 0 else "keep" if confirmed else "not confirmed",
        "recommended": recommended if confirmed else 0,
        "chosen": recommended,
        "window": config.window,
        "positions": config.positions,
        "full_loss_nats": judged["full"]["loss_nats"],
        "none_loss_nats": judged["0"]["loss_nats"],
        "kept_loss_nats": row["loss_nats"],
        "gain_nats": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "closed_share": row["closed_share"],
        "closed_low": row["closed_low"],
        "closed_high": row["closed_high"],
        "cost_nats": row["change_nats"],
        "cost_low": row["change_low"],
        "cost_high": row["change_high"],
        "sink_mask_tokens": marked,
        "sink_mask_loss_nats": judged["sink_mask"]["loss_nats"] if "sink_mask" in judged else math.nan,
        "random_loss_nats": float(np.mean(random)) if random else math.nan,
        "controls": len(random),
        "n": row["n"],
        "notes": list(lens.notes),
    }
    return found | {"sentence": _sentence(found, tried=sorted(config.keep))}


def _sentence(found: Mapping[str, Any], *, tried: Sequence[int]) -> str:
    """The decision in a sentence."""
    full = f"a full cache has {number(found['full_loss_nats'])}"
    where = f"beyond a cache of {found['window']} tokens, on held-out text"
    if not found["chosen"]:
        cost = costs(found["cost_nats"], found["cost_low"], found["cost_high"])
        return (
            f"Keep no first token: {where}, the loss is {number(found['none_loss_nats'])} nats without one ({full}; "
            f"evicting {cost}), and keeping up to {max(tried)} gains less than {WORTH_KEEPING_NATS} nats."
        )
    many = "the first token" if found["chosen"] == 1 else f"the first {found['chosen']} tokens"
    gain = f"{number(found['gain_nats'])} {bounds(found['gain_low'], found['gain_high'])}"
    if found["verdict"] == "not confirmed":
        return (
            f"Keep no first token: {many} helped on the text they were chosen on, but {where}, the gain is {gain} nats "
            f"({number(found['none_loss_nats'])} without, {number(found['kept_loss_nats'])} with; {full})."
        )
    text = (
        f"Keep {many}: {where}, the loss is {number(found['kept_loss_nats'])} nats instead of "
        f"{number(found['none_loss_nats'])} (a gain of {gain}); {full}"
    )
    if not math.isnan(found["closed_share"]):
        interval = bounds(found["closed_low"], found["closed_high"], shown=percent)
        text += f", so that closes {percent(found['closed_share'])} {interval} of the gap"
    if found["controls"]:
        random = plural(found["controls"], "draw")
        text += f", and random tokens instead leave {number(found['random_loss_nats'])} ({random})"
    return f"{text}."
