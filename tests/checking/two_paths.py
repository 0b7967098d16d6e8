"""The numbers that two code paths give for one thing: each pair to be within rounding, and what its edits moved.

A pair is the number of one path, that of another, and what it would be without the edit. The second path is independent
of the engine: the raw Hugging Face model edited by hand, or one whole forward of the bridge per cell.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from cell_fixtures import numbers
from lenses import lens_of
from raw_models import raw_logits
from rounding import gap

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import edit, scale, zero
from sink_lens.edits.metrics import Metric, evaluate, logit_difference, loss, norm, sink_mass
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.models.tiny import VOCAB_SIZE
from sink_lens.patching.patch import patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One number, or tensor of rows, by two paths."""

    name: str
    found: torch.Tensor
    expected: torch.Tensor
    unedited: torch.Tensor
    """The number that a dropped edit gives, by the second path."""
    least: float = 1e-9
    """A row's norm is taken to be at least so large: 1 for numbers, such as a loss or a mass, which are a row each."""

    @property
    def gap(self) -> float:
        return gap(self.found, self.expected, least=self.least)

    @property
    def moved(self) -> float:
        return gap(self.expected, self.unedited, least=self.least)


def turned(x, at=None):
    """Another direction and size, and another mean: no norm behind the site undoes it."""
    return x.flip(-1) + 0.5 * x


EDITS = {
    "z": (
        edit("z", turned, layers=[1], positions=[4, 5]),
        ("z", 1, lambda x: x[:, 4:6].copy_(turned(x[:, 4:6]))),
    ),
    "a head of z": (zero("z", layers=[2], heads=[1]), ("z", 2, lambda x: x[:, :, 1].zero_())),
    "keys": (scale("k", -8.0, layers=[0], positions=[2]), ("k", 0, lambda x: x[:, 2].mul_(-8))),
    "pattern": (
        zero("pattern", layers=[2], heads=[1], keys=[0, 1]),
        ("pattern", 2, lambda x: x[:, 1, :, :2].zero_()),
    ),
    "MLP": (
        edit("mlp_out", turned, layers=[1], positions=[3]),
        ("mlp_out", 1, lambda x: x[:, 3].copy_(turned(x[:, 3]))),
    ),
    "stream": (
        edit("resid_pre", turned, layers=[2]),
        ("resid_pre", 2, lambda x: x.copy_(turned(x))),
    ),
}
METRICS = (sink_mass(0), sink_mass(6), norm(6, layer=2), loss(), logit_difference(5, 6))
CELLS = [
    edit("z", turned, layers=[1], positions=[6]),
    zero("z", layers=[1], heads=[2]),
    zero("z", layers=[1], heads=[0]),
    edit("mlp_out", turned, layers=[0], positions=[3, 8]),
    scale("k", -8.0, layers=[1], positions=[5]),
    edit("mlp_out", turned, layers=[2], positions=[6]),
    *(edit("resid_post", turned, layers=[layer], positions=[6]) for layer in range(3)),
]


def drawn(n: int, length: int, *, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (n, length), generator=torch.Generator().manual_seed(seed))


def bridge_and_raw_model(family: str) -> Iterator[Pair]:
    """Logits under each edit, all positions."""
    lens, ids = lens_of(family), drawn(2, 12, seed=1)
    plain = raw_logits(family, ids)
    yield Pair(
        name="no edit",
        found=run_with(lens, ids, logits=True).logits,
        expected=plain,
        unedited=0 * plain,
    )
    for name, (one, change) in EDITS.items():
        found = run_with(lens, ids, one, logits=True).logits
        yield Pair(
            name=name, found=found, expected=raw_logits(family, ids, [change]), unedited=plain
        )


def sweep_and_single_runs(family: str) -> Iterator[Pair]:
    """The numbers of cells that begin late and share forwards, and those of one run of the bridge per cell."""
    lens, tokens = (
        lens_of(family),
        from_tensor(drawn(3, 10, seed=2), lengths=torch.tensor([10, 9, 10])),
    )
    cells = [cell_of_edits(one) for one in CELLS]
    engine = Engine(lens, tokens, cells, METRICS, plan=Plan(path="blocks", prompts=3, pack=3))
    found = numbers(engine)
    options = {"positions": (0, 6), "sites": ("resid_post",), "logits": True, "quiet": True}
    unedited = run_with(lens, tokens, (), **options)
    for cell, one in enumerate(CELLS):
        run = run_with(lens, tokens, one, **options)
        columns = [
            (found[cell, one.name], evaluate(one, run), evaluate(one, unedited)) for one in METRICS
        ]
        own, expected, before = (
            torch.stack(tuple(some)).double()[..., None] for some in zip(*columns, strict=True)
        )
        yield Pair(name=one.label, found=own, expected=expected, unedited=before, least=1.0)


def patched_and_clean(family: str) -> Iterator[Pair]:
    """The whole stream patched from the clean run, and the clean run."""
    lens, seen = lens_of(family), []
    clean, corrupted = drawn(2, 9, seed=3), drawn(2, 9, seed=4)

    def keep(run):
        seen.append(run.logits)
        return run.logits[:, -1, 7]

    metric = Metric(name="kept", function=keep, layers=(), logits=True)
    patch(
        lens,
        clean,
        corrupted,
        site="resid_pre",
        by=("layer",),
        layers=[0, 2],
        metric=metric,
        progress=False,
    )
    expected, before = (run_with(lens, ids, logits=True).logits for ids in (clean, corrupted))
    for layer, found in zip((0, 2), seen[-2:], strict=True):
        yield Pair(name=f"stream {layer}", found=found, expected=expected, unedited=before)


PATHS = (bridge_and_raw_model, sweep_and_single_runs, patched_and_clean)
