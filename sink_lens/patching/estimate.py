"""Count the passes of ``patch`` from the headers of the model's files and the tokenizer's file.

Which cells differ between the runs only the model can tell; before the first token that differs none does, and after
it all are counted.
"""

from pathlib import Path

from ..engine.cost import BACKWARD
from ..errors import InputError
from ..models.bundled import header_of
from ..models.header import Header, sizes_of
from ..models.prompt_tokens import most_tokens, prompt_tokens
from ..models.sites import SITES
from .config import PatchConfig, check_differ
from .named_metric import spec_of
from .parts import cells, check_put, drawn_parts, identity_of, indices_of

_BESIDE = 14
"""Whole passes beside the patches: the site and the metric in both runs, and some patches on both paths."""


def passes_of_patches(config: PatchConfig, header: Header, *, path: Path) -> tuple[float, int] | None:
    """Whole passes over the sequences of a run, and the tokens of one pass; None without the tokenizer's file.

    Raises:
        InputError: what ``patch`` would refuse before it measures, as far as it is known.
    """
    both = prompt_tokens(path, [*config.clean, *config.corrupted], bos=config.bos)
    if both is None:
        return None
    clean, corrupted = both[: len(config.clean)], both[len(config.clean) :]
    config.check_together()
    check_put(config)
    first, n_positions = _first_difference(clean, corrupted), max(map(len, clean))
    if config.put == "source":
        check_differ(clean != corrupted)
    chosen = {name: getattr(config, name) for name in ("layers", "positions", "heads", "keys", "units")}
    grid = cells(header, config.site, by=config.by, n_positions=n_positions, **chosen)
    site = SITES[config.site]
    passes: float = _BESIDE
    if config.approximate or config.screen:
        passes += BACKWARD * config.steps
        grid = grid[: config.check if config.approximate else config.screen]
    sizes = sizes_of(header, site.axes, n_positions=n_positions)
    draws = {"draws": 0 if config.approximate else config.controls, "seed": config.seed}
    drawn = [drawn_parts(part, sizes=sizes, shortest=min(map(len, clean)), **draws) for part in grid]
    every = {identity_of(part): part for parts in (grid, *drawn) for part in parts}
    if config.put == "source" and site.by_token:
        every = {name: part for name, part in every.items() if max(part.positions or (0,)) >= first}
    read = spec_of(config).last(header)
    last = header.n_layers if read is None else read + 1
    for part in every.values():
        layers = max(0, last - min(part.layers or (0,))) if site.per_layer else 0
        weights = layers / header.n_layers * header.n_body + (read is None) * header.n_vocab
        passes += weights / (header.n_body + header.n_vocab)
    return passes, sum(map(len, clean))


def check_before(config: PatchConfig) -> None:
    """Refuse, before the weights are read, what ``patch`` would refuse once they are, as far as it is known.

    Raises:
        InputError: which field, and what is needed.
        SiteError: the family lacks the site.
    """
    config.check_together()
    if config.put == "source" and config.clean:
        check_differ(config.clean != config.corrupted)
    header = header_of(config.model)
    if header is not None:
        chosen = {name: getattr(config, name) for name in ("layers", "positions", "heads", "keys", "units")}
        longest = most_tokens([*config.clean, *config.corrupted])
        indices_of(header, config.site, by=config.by, n_positions=longest, **chosen)
        spec_of(config).last(header)
    if config.site in SITES:
        check_put(config)


def _first_difference(clean: list[list[int]], corrupted: list[list[int]]) -> int:
    """The first position at which a clean sequence and its corrupted one differ; their length if none does.

    Raises:
        InputError: they are not one for one, or of different lengths.
    """
    if len(clean) != len(corrupted):
        raise InputError(
            f"there are {len(clean)} clean and {len(corrupted)} corrupted sequences; need one of each per pair"
        )
    found = [max(map(len, clean))]
    for index, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        if len(one) != len(other):
            raise InputError(
                f"sequence {index} has {len(one)} clean and {len(other)} corrupted tokens; need the same number, so "
                "that each value has a position to go to. Replace words by words with as many tokens"
            )
        found += [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b][:1]
    return min(found)
