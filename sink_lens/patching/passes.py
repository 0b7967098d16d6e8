"""Count the passes of ``patch``, and refuse what the headers tell before the weights are read; without torch.

Before the first token that differs between the runs no cell can differ; after it all are counted.
"""

from ..estimate import PassCount, PassCounts, Sizes, forward_activation_bytes, max_n_tokens
from ..models.bundled import find_header
from ..models.header import axis_sizes
from ..models.sites import SITES
from .config import EVERY, PatchConfig, check_pair_lengths, refuse_equal_tokens
from .parts import (
    check_put_edit,
    configs_by_site,
    counts_back,
    draw_random_parts,
    indices_by_axis,
    part_identity,
    parts_to_patch,
)

_BESIDE = 14
"""Whole passes beside the patches: the site and the metric in both runs, and some patches on both paths."""


def count_patch_passes(config: PatchConfig, sizes: Sizes) -> PassCounts | None:
    """Estimate the passes and memory of ``patch``; None if the tokenizer's file is missing."""
    config.check_together()
    header, prompts = sizes.header, config.prompts
    texts = [one for side in prompts for one in side if isinstance(one, str)]
    if (read := sizes.prompt_ids(texts, bos=config.bos) if texts else []) is None:
        return None
    ids = iter(read)
    clean, corrupted = (
        [next(ids) if isinstance(one, str) else list(one) for one in side] for side in prompts
    )
    check_put_edit(config)
    check_pair_lengths([*map(len, clean)], [*map(len, corrupted)])
    n_positions, shortest = max(map(len, clean)), min(map(len, clean))
    differing = (
        place
        for one, other in zip(clean, corrupted, strict=True)
        for place, (a, b) in enumerate(zip(one, other, strict=True))
        if a != b
    )
    first = min(differing, default=n_positions)
    if config.put == "source":
        refuse_equal_tokens(clean != corrupted)
    made, backwards = 0.0, 0
    read = config.metric_spec().last_layer(header)
    last = header.n_layers if read is None else read + 1
    for name, own in configs_by_site(header, config).items():
        grid = parts_to_patch(
            header,
            name,
            by=config.by,
            n_positions=n_positions,
            shortest=shortest,
            **own.chosen_indices,
        )
        site = SITES[name]
        made += _BESIDE
        if config.approximate or config.screen:
            backwards += config.steps
            grid = grid[: config.check if config.approximate else config.screen]
        axes = axis_sizes(header, site.axes, n_positions=n_positions)
        drawn = [
            draw_random_parts(
                part,
                sizes=axes,
                shortest=shortest,
                draws=0 if config.approximate else config.controls,
                seed=config.seed,
            )
            for part in grid
        ]
        skips = config.put == "source" and site.by_token
        for part in {part_identity(one): one for parts in (grid, *drawn) for one in parts}.values():
            if skips and not counts_back(part) and max(part.positions or (0,)) < first:
                continue
            layers = max(0, last - min(part.layers or (0,))) if site.per_layer else 0
            weights = layers / header.n_layers * header.n_body + (read is None) * header.n_vocab
            made += weights / (header.n_body + header.n_vocab)
    whole = PassCount(forwards=made, backwards=backwards, tokens=sum(map(len, clean)))
    return PassCounts(
        parts=(whole,),
        sequences=len(clean),
        positions=n_positions,
        bytes=forward_activation_bytes(header, tokens=whole.total_tokens),
    )


def check_before_loading(config: PatchConfig) -> None:
    """Refuse a site and places that the model lacks, by the headers of its files."""
    config.check_together()
    clean, corrupted = config.prompts
    if config.put == "source" and clean:
        refuse_equal_tokens(clean != corrupted)
    header = find_header(config.model)
    if header is not None:
        longest = max(
            max_n_tokens([one]) if isinstance(one, str) else len(one)
            for one in (*clean, *corrupted)
        )
        for site, own in configs_by_site(header, config).items():
            sizes = {"n_positions": longest, "shortest": longest}
            indices_by_axis(header, site, by=config.by, **sizes, **own.chosen_indices)
        config.metric_spec().last_layer(header)
    if config.site in (EVERY, *SITES):
        check_put_edit(config)
