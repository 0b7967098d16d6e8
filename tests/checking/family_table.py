"""The table of families and sites in ``docs/families.md``, made by reading and editing every site of every family.

``python tests/checking/family_table.py`` writes it; ``tests/models/test_more_families.py`` compares it.
"""

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
import torch
from lenses import ALL_FAMILIES, lens_of

from sink_lens.activations.record import capture
from sink_lens.errors import SiteError
from sink_lens.models.lens import LensModel
from sink_lens.models.sites import SITES, bridge_hook_name, site_of, sites_of
from sink_lens.models.tiny import VOCAB_SIZE

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- made by tests/checking/family_table.py -->", "<!-- end of what was made -->"
BOTH, READ = "●", "○"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    blocked = other < -1e30
    one, other = one.masked_fill(blocked, 0), other.masked_fill(blocked, 0)
    return bool((one - other).norm() <= 1e-5 * other.norm())


@torch.no_grad()
def _cell(
    lens: LensModel, site: str, *, captured: list[dict], tokens: torch.Tensor, clean: torch.Tensor
) -> str:
    """What is found when the site is read on both paths and noise is added to it."""
    layer = _layer(lens, site)
    plain, bridge = (found[site, layer] for found in captured)
    if not _same(plain, bridge):
        raise AssertionError(f"{site} of {lens.family.architecture} is not the same on both paths")
    hook = bridge_hook_name(SITES[site], family=lens.family, layer=layer)
    edited = lens.bridge.run_with_hooks(
        tokens, fwd_hooks=[(hook, lambda x, hook: x + 0.1 * x.std())], use_cache=False
    )
    if site in lens.uneditable or torch.equal(edited, clean):
        return READ
    return BOTH


def _layer(lens: LensModel, site: str) -> int:
    return (
        0
        if not SITES[site].per_layer
        else 1
        if 1 in lens.layers_with(site)
        else lens.layers_with(site)[0]
    )


def _captured(lens: LensModel, tokens: torch.Tensor, *, path: Literal["plain", "bridge"]) -> dict:
    """Each site in one layer that has it."""
    found = {}
    places = {site: _layer(lens, site) for site in sites_of(lens.family)}
    for layer in set(places.values()):
        own = [site for site in places if places[site] == layer]
        found |= capture(lens, tokens, sites=own, layers=[layer], path=path).tensors
    return found


def _reason(lens: LensModel, site: str) -> str:
    with pytest.raises(SiteError) as refused:
        site_of(site, family=lens.family)
    found = re.search(r": it (.*?); need one of", str(refused.value))
    assert found, refused.value
    return found[1]


@torch.no_grad()
def read_cells(families: Iterable[str] = ALL_FAMILIES) -> dict[str, list[str]]:
    """Read and edit each site of each architecture; return the cell of each, or the reason why it is refused."""
    tokens = torch.randint(3, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))
    rows: dict[str, list[str]] = {}
    for family in families:
        lens = lens_of(family)
        if lens.family.architecture in rows:  # variants of our own class have the same sites
            continue
        own = sites_of(lens.family)
        captured = [_captured(lens, tokens, path=path) for path in ("plain", "bridge")]
        clean = lens.bridge(tokens, use_cache=False)
        rows[lens.family.architecture] = [
            _cell(lens, site, captured=captured, tokens=tokens, clean=clean)
            if site in own
            else _reason(lens, site)
            for site in SITES
        ]
    return rows


def make_table() -> str:
    """The sites of every family, a table of the other sites with a row for families that are alike, and the reasons."""
    reasons: dict[str, str] = {}
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for architecture, cells in read_cells().items():
        short = (
            c if c in (BOTH, READ) else reasons.setdefault(c, "abcdefgh"[len(reasons)])
            for c in cells
        )
        by_cells.setdefault(tuple(short), []).append(f"`{architecture}`")
    common = [site for site, *cells in zip(SITES, *by_cells, strict=True) if set(cells) == {BOTH}]
    others = [place for place, site in enumerate(SITES) if site not in common]
    names = [f"`{site}`" for site in SITES]
    everywhere = textwrap.fill(
        f"{BOTH} in every family: {', '.join(f'`{site}`' for site in common)}.", width=120
    )
    head = [
        "| | " + " | ".join(names[place] for place in others) + " |",
        "| --- " * (len(others) + 1) + "|",
    ]
    rows = [
        f"| {', '.join(families)} | " + " | ".join(cells[place] for place in others) + " |"
        for cells, families in by_cells.items()
    ]
    below = [f"- {letter}: refused, since it {reason}" for reason, letter in reasons.items()]
    return "\n".join([BEGIN, everywhere, "", *head, *rows, "", *below, END])


def written() -> str:
    """The table as the page has it."""
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) : text.index(END) + len(END)]


def read() -> dict[str, list[str]]:
    """What the page says of each architecture, as ``read_cells`` gives it."""
    everywhere, table, below, *_ = written().split("\n\n")
    reasons = dict(re.findall(r"^- (\w): refused, since it (.*)$", below, flags=re.M))
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    of: dict[str, list[str]] = {}
    for architectures, *cells in rows:
        own = dict(zip(re.findall(r"`(\w+)`", " ".join(head)), cells, strict=True))
        own |= dict.fromkeys(re.findall(r"`(\w+)`", everywhere), BOTH)
        said = [reasons.get(own[site], own[site]) for site in SITES]
        of |= dict.fromkeys(re.findall(r"`(\w+)`", architectures), said)
    return of


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(written(), make_table()), encoding="utf-8")
