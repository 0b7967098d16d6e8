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

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..models.load import ModelLike, as_lens
from ..records.shards import check_shard
from ..schema import table_of
from ..signatures import takes
from .config import EVERY, PatchConfig
from .pairs import Sequences
from .parts import configs_by_site, indices_by_axis
from .patches import Row
from .request import PatchRequest, make_patch_request
from .results import PatchResult, join_sites
from .run_folder import leave_unfinished, open_run, patch_in_folder
from .run_pair import merge_patch_config


@takes(PatchConfig, leave_out=("approximate", "check"), table=partial(table_of, "patch", "patches"))
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

    Cost: three passes, two on the longest sequence to compare two patches with the bridge, and for each cell whose
    values differ the layers and positions from its own on. Cells share a forward pass if they fit into memory.

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
    if shard is not None:
        check_shard(shard, out=out, overwrite=overwrite)
    lens = as_lens(model)
    asked = merge_patch_config(config, lens=lens, fields=fields, texts=(clean, corrupted))
    every, configs = asked.site == EVERY, configs_by_site(lens, asked)
    for site, own in configs.items() if every else ():  # all are checked before the first patch
        longest = 1 + max(map(abs, own.positions or (0,)))  # lengths are checked with the tokens
        sizes = {"n_positions": longest, "shortest": longest}
        indices_by_axis(lens, site, by=own.by, **sizes, **own.chosen_indices)
    found = {}
    for site, own in configs.items():
        request = make_patch_request(lens, clean, corrupted, config=own)
        if out is None:
            found[site] = _patch(request, progress=progress)
        else:
            found[site] = patch_in_folder(
                request,
                Path(out, site if every else ""),
                shard=shard,
                overwrite=overwrite,
                progress=progress,
                reopen=every or shard is not None,
            )
    return join_sites(found) if every else found[asked.site]


def _patch(request: PatchRequest, *, progress: bool) -> PatchResult:
    """Measure the patches of one site. An error or Ctrl-C writes the measured ones into a folder."""
    patches, rows = request.patches(), dict[str, list[Row]]()
    opens = partial(open_run, **request.asked)
    try:
        for block, of_block in patches.measure(patches.blocks, progress=progress):
            rows[block] = of_block
    except BaseException as error:
        leave_unfinished(error, opens, patches, rows)
        raise
    return replace(
        request.result(patches, (row for some in rows.values() for row in some)), opens=opens
    )
