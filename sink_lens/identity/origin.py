"""From seed to sink: what training chose for position 0 in runs that differ only in the seed, and who foretold it.

For every checkpoint: the outlier dimension of position 0 and its super neurons, or what stands in for them
(``becoming``). For the last one: where its dimension and its neurons stood at the initialisation of the same run, by
each statistic of ``initial``, against random choices, over seeds, corrected for all statistics that were tried
(``foretelling``). There is no published measurement to compare with, and nothing is assumed of the answer.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..data.tokens import TokenBatch
from ..records import RunWriter, create_run, display, versions
from ..training.evaluation import evaluation_tokens, run_tokenizer
from ..training.variants import DATA, seeds_of
from .along import End, OriginConfig, measured
from .foretelling import Candidates, Foretold, foretold, holm
from .initial import DIMENSION_STATISTICS, NEURON_STATISTICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TABLES", "Origin", "OriginConfig", "seed_to_sink"]

TABLES = ("course", "writers", "ranks", "tests")
"""What a run of kind "origin" has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the sinks of some runs came from."""

    course: pd.DataFrame = field(repr=False)
    """A checkpoint a row: seed, step, tokens, dimension, layer, dominance_ratio, is_outlier, are_super, sink_rate,
    final_rank (the rank of the last checkpoint's dimension in the state of position 0 after its layer)."""
    writers: pd.DataFrame = field(repr=False)
    """A neuron of a checkpoint a row: seed, step, layer, neuron, share, is_super."""
    ranks: pd.DataFrame = field(repr=False)
    """A statistic of the initialisation and what the last checkpoint of a seed has a row: of (dimension or neuron),
    statistic, seed, layer, index, rank, n."""
    tests: pd.DataFrame = field(repr=False)
    """A statistic a row: of, statistic, meaning, place, p, p_holm, lowest, n_seeds."""
    notes: tuple[str, ...]
    """What a reader must know of it."""
    folder: Path | None = None
    """Of the run, where it was written."""

    def _repr_html_(self) -> str:
        return display.html(self.sentences, self.figure(), notes=self.notes, folder=self.folder)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result in words."""
        return display.sentences("origin", self.course, self.writers, self.ranks, self.tests)

    @property
    def headline(self) -> str:
        """The sentences, one a line."""
        return "\n".join(self.sentences)

    def figure(self) -> "Figure":
        """The places at the initialisation, and the final dimension's rank along training."""
        return display.figure("origin", course=self.course, ranks=self.ranks, tests=self.tests)


def seed_to_sink(
    runs: Sequence[str | os.PathLike[str]],
    *,
    config: OriginConfig | None = None,
    tokens: TokenBatch | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> Origin:
    """Which dimension and which neurons training runs chose for position 0, and whether the initialisation foretold it.

    The initialisation is checkpoint 0 of the same run; where it is not there, the model is built again from its seed.
    With ``out`` every checkpoint is kept when it is measured, and the same call goes on where it was stopped.

    Args:
        runs: folders of finished training runs that differ in the seed only.
        config: how they are measured.
        tokens: sequences to use instead of the runs' evaluation data.
        out: folder of the result; None writes nothing.
        overwrite: replace what it holds.
        device: where the models go; a GPU if there is one.
        progress: show a bar.

    Raises:
        InputError, RunError: runs that may not be put together, and why; a folder that holds another run.
    """
    config = OriginConfig() if config is None else config
    by_seed, notes = seeds_of(runs)
    first = next(iter(by_seed.values()))
    tokenizer = run_tokenizer(first)
    batch = tokens
    if batch is None:
        batch = evaluation_tokens(first, tokenizer, sequences=config.sequences, length=config.length)
    record: dict[str, Any] = {
        "kind": "origin",
        "config": asdict(config) | {"runs": {str(seed): str(run.folder) for seed, run in by_seed.items()}},
        "provenance": {name: first.provenance.get(name) for name in DATA}
        | {"tokens_sha256": batch.hash, "token_source": batch.source, "device": device, "versions": versions()},
        "expects": (*TABLES, "findings", "origin"),
        "overwrite": overwrite,
    }
    with contextlib.nullcontext() if out is None else create_run(out, **record) as writer:
        course, writers, ends = measured(
            by_seed, batch, config=config, tokenizer=tokenizer, writer=writer, device=device, progress=progress
        )
        ranks, tests = _tested(ends, generator=np.random.default_rng(config.seed), config=config)
        notes += tuple(end.note for end in ends.values() if end.note)
        found = Origin(
            course=course,
            writers=writers,
            ranks=ranks,
            tests=tests,
            notes=notes,
            folder=None if out is None else Path(out),
        )
        if writer is not None:
            _write(found, writer)
    return found


def _tested(
    ends: dict[int, End], *, generator: np.random.Generator, config: OriginConfig
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ranks of what each seed chose, and the test of each statistic over seeds."""
    ranks: list[dict[str, Any]] = []
    asked: dict[tuple[str, str], list[list[Candidates]]] = {}
    for seed, end in ends.items():
        for name, values in end.dimensions.items():
            one = Candidates(values=values, chosen=(end.last.dimension,))
            asked.setdefault(("dimension", name), []).append([one])
            ranks += _ranked(one, of="dimension", statistic=name, seed=seed, layer=end.last.layer)
        for name, by_layer in end.neurons.items():
            chosen = {layer: tuple(w.neuron for w in end.last.writers if w.layer == layer) for layer in by_layer}
            groups = {layer: Candidates(values=values, chosen=chosen[layer]) for layer, values in by_layer.items()}
            asked.setdefault(("neuron", name), []).append(list(groups.values()))
            for layer, one in groups.items():
                ranks += _ranked(one, of="neuron", statistic=name, seed=seed, layer=layer)
    at = 0.05 / max(1, len(asked))  # what Holm asks of the smallest
    found: dict[tuple[str, str], Foretold] = {
        key: foretold(groups, generator=generator, permutations=config.permutations, at=at)
        for key, groups in asked.items()
    }
    meaning = DIMENSION_STATISTICS | NEURON_STATISTICS
    tests = pd.DataFrame(
        [{"of": of, "statistic": name, "meaning": meaning[name]} | asdict(one) for (of, name), one in found.items()]
    )
    return pd.DataFrame(ranks), tests.assign(p_holm=holm(tests["p"].tolist()))


def _ranked(one: Candidates, **where: Any) -> list[dict[str, Any]]:
    return [{**where, "index": index, "rank": one.ranks[index], "n": len(one.values)} for index in one.chosen]


def _write(found: Origin, writer: RunWriter) -> None:
    for name in TABLES:
        writer.write_table(name, getattr(found, name))
    figure = found.figure()
    writer.write_text("findings.txt", "\n".join([*found.sentences, *(f"note: {one}" for one in found.notes)]) + "\n")
    writer.write_bytes("origin.png", display.image(figure, "png"))
    writer.write_bytes("origin.svg", display.image(figure, "svg"))
