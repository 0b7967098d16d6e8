"""Activation patching: put activations of one run into another, part by part, and measure the effect on a metric.

There are two runs, clean and corrupted, on sequences of the same lengths. *Denoising* puts clean values into the
corrupted run; if the metric recovers, these values were sufficient. *Noising* puts corrupted values into the clean
run; if the metric is lost, the clean values were necessary. Columns and numbers are the same as in
``transformer_lens.patching`` wherever both support a patch; ``PatchResult.to_transformer_lens`` gives its result.

The patches are cells of ``engine``: a patch at layer L and position p takes the stream before the layer, and the keys
and values before the position, from the baseline run, and ends after the last tensor that the metric reads. If both
runs have bit-identical values in a cell, nothing is run and the effect is 0.

Reference: Meng et al., arXiv 2202.05262 (causal tracing); Heimersheim and Nanda, arXiv 2404.15255.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..edits.effect_table import effect_table
from ..edits.part import Part
from ..engine.function_identity import function_hash
from ..engine.measured import metric_config
from ..engine.plan import Plan
from ..errors import InputError
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..records import RunWriter
from ..records.shards import Shard, check_shard, compute_run
from ..signatures import takes
from .config import EVERY, PatchConfig
from .first_order import first_order_effects
from .pairs import PromptPair, Sequences
from .parts import check_put_edit, configs_by_site, draw_random_parts, indices_by_axis, part_identity
from .results import PatchResult, fields_of_patches, join_sites, part_table, write_result
from .run_folder import BlocksInMemory, Kept, KeptBlocks, MeasuredPatch, open_run
from .run_pair import RunPair, merge_patch_config, prepare_runs


@takes(PatchConfig, leave_out=("approximate", "check"))
def patch(
    model: ModelLike,
    clean: Sequences | None = None,
    corrupted: Sequences | None = None,
    *,
    config: PatchConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> PatchResult:
    """Put one run's activations into the other, part by part, and measure what each patch does to the metric.

    Cost: three passes, some more to compare a few patches with forwards of the bridge, and for each cell whose values
    differ the layers and positions from its own on. Several cells share a forward pass if they fit into memory.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        clean: text, texts, token ids or a token batch; the configuration's texts if None.
        corrupted: the same number of sequences of the same lengths.
        config: what is patched; the default one if None.
        out: the run folder; nothing is written if None. The same call on a folder that holds a part of it computes the
            rest. All shards need the same one.
        shard: ``3/8`` is the third of eight; ``slurm`` is the task of the array job that this process is.
        overwrite: replace the run that the folder holds.
        progress: show a bar.
        **fields: fields of ``PatchConfig``, such as ``site="z"``; they win over those of ``config``. ``site="every"``
            patches ``resid_pre`` and what layers add to it (``attn_out``, ``mlp_out``, a mixer's), in one frame with
            the column ``site``; each has a run folder in ``out``.

    Three fields are more than texts. ``metric`` is a name, one of ``sink_lens.edits.metrics``, or a function of the
    ``logits`` or of an ``Outcome``. ``put`` is a name, such as ``source`` (the other run's values), ``mean_ordinary``
    or ``scale`` (with ``factor=2.0``), or any edit, as a function of the site and the arguments that choose a part,
    such as ``edits.zero``. ``edits`` are made in both runs and beside every patch, so that an edited model is patched.

    With ``screen``, the effects of all cells are approximated first (``attribution_patch``), and only those with the
    largest are patched; the frame then has the column ``approximation``, as a check of it.

    With ``shard`` each of several processes or machines computes a part of the cells, all in one folder. A shard that
    was killed goes on where it was, one that is done does nothing, and the one that ends last makes the tables; the
    result of the others is not ``finished``.

    Raises:
        InputError: sequences of different lengths; a field, sweep, choice, metric or shard that is not possible.
        SiteError: a site that the family lacks, or whose edits have no effect on this bridge.
        RunError: the folder is in use, or holds another run or another division into shards.
    """
    check_shard(shard, out=out, overwrite=overwrite)
    lens, how = as_lens(model), {"shard": shard, "overwrite": overwrite, "progress": progress}
    asked = merge_patch_config(config, lens=lens, fields=fields)
    if asked.site == EVERY:
        found, configs = {}, configs_by_site(lens, asked)
        for site, own in configs.items():  # all are checked before the first patch
            longest = 1 + max(own.positions or (0,))  # the lengths are checked with the tokens
            indices_by_axis(lens, site, by=own.by, n_positions=longest, **own.chosen_indices)
        for site, own in configs.items():
            request = _make_request(lens, clean, corrupted, config=own)
            found[site] = _patch_site(request, None if out is None else Path(out) / site, reopen=True, **how)
        return join_sites(found)
    return _patch_site(_make_request(lens, clean, corrupted, config=asked), out, reopen=shard is not None, **how)


def _patch_site(
    request: "_Request", out: str | Path | None, *, shard: str | None, overwrite: bool, progress: bool, reopen: bool
) -> PatchResult:
    """Measure the patches of one site (of a ``shard``, if given), and write the run folder ``out``, if given.

    ``overwrite`` replaces the run that the folder holds; ``reopen`` continues it.
    """
    code, runs = request.hash_functions(), request.runs
    about: dict[str, Any] = {"pair": request.pair, "config": request.config, "metric": runs.metric, "code": code}
    opens = partial(open_run, lens=runs.lens, **about)
    if out is None:
        held = BlocksInMemory()
        try:
            result = request.make_result(held, progress=progress)
        except BaseException as error:  # Ctrl-C too
            held.write_after(error, opens, name=runs.lens.name, baseline=runs.baseline, source=runs.source)
            raise
        return replace(result, opens=opens)
    plans: list[Plan | None] = []

    def plan_patches(writer: RunWriter) -> dict[str, int]:
        """Plan the patches; return the name of each block -> its number of patches."""
        kept = KeptBlocks(writer, only=())
        request.measure_patches(kept, progress=False)
        kept.compare_baseline(baseline=runs.baseline, source=runs.source)
        plans.append(kept.plan)
        return kept.sizes

    def check_parts(folder: Path, parts: Collection[str]) -> None:
        assert plans[0] is not None  # there are blocks
        request.runs.check_blocks(
            folder, list(parts), of=request.parts_by_name(), make=request.runs.edit_maker(request.config), plan=plans[0]
        )

    def measure_parts(writer: RunWriter, parts: Collection[str]) -> None:
        request.measure_patches(KeptBlocks(writer, planned=plans[0], only=parts), progress=progress)

    found = compute_run(
        Path(out),
        shard=shard,
        overwrite=overwrite,
        open_run=partial(opens, reopen=reopen),
        begin=plan_patches,
        check=check_parts,
        compute=measure_parts,
        finish=partial(request.finish_run, progress=progress and shard is None),
    )
    if found is not None:
        return found
    nothing = replace(request, grid=[], controls=[], approximations=None)  # other shards are still running
    waits = Shard.parse(str(shard)).done_sentence(Path(out))
    return replace(nothing.make_result(None, progress=False), folder=Path(out), waits=waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A checked call of ``patch`` for one site: runs, parts of the site, controls, configuration."""

    runs: RunPair
    grid: list[Part]
    pair: PromptPair
    config: PatchConfig
    controls: list[list[Part]]
    approximations: list[float] | None

    def hash_functions(self) -> dict[str, Any]:
        """Return name -> hash of the functions given as metric, put and edits: a stopped run needs the same ones."""
        asked = self.config
        found: dict[str, Any] = (
            {} if asked.metric is None or isinstance(asked.metric, str) else {"metric": metric_config(asked.metric)}
        )
        found |= {"put": function_hash(asked.put)} if callable(asked.put) else {}
        return found | ({"edits": [function_hash(one) for one in asked.edits]} if asked.edits else {})

    def parts_by_name(self) -> dict[str, Part]:
        """Return part identity -> part, for patches and controls."""
        return {part_identity(part): part for some in (self.grid, *self.controls) for part in some}

    def measure_patches(self, kept: Kept | None, *, progress: bool) -> dict[str, MeasuredPatch]:
        """Return part identity -> metric, for patches and controls; ``kept`` has the patches that are in the folder."""
        make = self.runs.edit_maker(self.config)
        return self.runs.measure_all(
            self.parts_by_name(), make=make, kept=kept, batch_size=self.config.batch_size, progress=progress
        )

    def make_result(self, kept: Kept | None, *, progress: bool) -> PatchResult:
        """Measure the patches that the folder (``kept``) lacks, and return the result with its table of effects."""
        runs, found = self.runs, self.measure_patches(kept, progress=progress)
        measured = [found[part_identity(part)] for part in self.grid]
        values = torch.stack([one.values for one in measured]) if measured else runs.baseline.repeat(0, 1)
        before = runs.baseline.double().numpy()
        drawn = [[found[part_identity(part)].values.double().numpy() for part in some] for some in self.controls]
        effects = effect_table(
            values.double().numpy(),
            before,
            controls=[np.array(some).reshape(-1, len(before)) for some in drawn],
            generator=np.random.default_rng(self.config.seed),
        )
        apart = (runs.source.double() - runs.baseline.double()).expand(values.shape)
        spans = apart.masked_fill(values.isnan(), torch.nan).nanmean(1).numpy()
        n = effects.pop("n")
        normalised = effects["effect"] / np.where(spans == 0, np.nan, spans)
        effects = effects.assign(normalised_effect=normalised, changed=[one.changed for one in measured], n=n)
        if self.approximations is not None:
            effects["approximation"] = self.approximations
        every = torch.cat([runs.baseline[None], runs.source[None], values]).double()
        return PatchResult(
            rows=part_table(self.grid, self.config.by).join(effects),
            values=values.double(),
            baselines=every[:2],
            **fields_of_patches(runs, self.pair, self.config),
        )

    def finish_run(self, writer: RunWriter, *, progress: bool) -> PatchResult:
        """Measure the patches that the folder lacks, write the run's tables into it, and return the result."""
        result = self.make_result(KeptBlocks(writer), progress=progress)
        write_result(writer, result)
        return replace(result, folder=writer.folder)


def _make_request(
    lens: LensModel, clean: Sequences | None, corrupted: Sequences | None, *, config: PatchConfig
) -> _Request:
    """Check the configuration, run both prompts, choose the parts to patch, and draw random parts as controls."""
    if config.approximate:
        raise InputError("approximate was given to patch, which makes real patches; call attribution_patch")
    config.check_together()
    if not callable(config.put):
        check_put_edit(config)
    if config.edits and config.screen:
        raise InputError("screen approximates patches of the unedited model; leave out screen, or edits")
    if config.screen and config.put != "source":
        raise InputError("screen approximates patches from the other run; leave out screen, or put")
    runs, grid, pair = prepare_runs(lens, clean, corrupted, config=config)
    approximations = None
    if config.screen:  # the largest effects to first order, in the order of the grid
        effects, _ = first_order_effects(runs, grid, steps=config.steps)
        largest = effects.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[: config.screen]
        best = sorted(largest.tolist())
        grid, approximations = [grid[number] for number in best], effects[best].tolist()
    at: dict[str, Any] = {"sizes": runs.sizes, "shortest": int(runs.run.lengths.min())}
    at |= {"draws": config.controls, "seed": config.seed}
    controls = [draw_random_parts(part, **at) for part in grid]
    return _Request(runs=runs, grid=grid, pair=pair, config=config, controls=controls, approximations=approximations)
