"""A claim of a paper: what it predicts, by which rule it is judged, and what came. The frame of ``analyses/``.

One folder a claim, in the folder of its paper; each can be deleted:

- ``claim.md``: question, prediction, what would refute it, written before the run; a TOML block holds the rule by
  which each number is judged; at its end stands what came.
- ``run.py``: ``measure(work) -> Measured``, on public names only.
- ``expected.csv``: its numbers in tiny mode. ``result.csv`` and ``figure.png``: those of the real run.
"""

import argparse
import dataclasses
import functools
import hashlib
import inspect
import io
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from analyses.texts import documents
from analyses.verdicts import judge, keep, read_claim, shown
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import trace
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import TokenBatch, from_text, random_tokens
from sink_lens.errors import InputError, SinkLensError
from sink_lens.models.lens import LensModel
from sink_lens.models.load import load, weights_hash, wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.records import RUN_FILE, RunWriter, create_run, package_versions, read_run
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.stats import Interval
from sink_lens.stats import interval as bootstrap
from sink_lens.training.config import read_train_config
from sink_lens.training.train import train

TEXTS = ("moby-dick", "brown", "state-of-the-union", "shakespeare-milton", "king-james-bible")
"""Where a result is compared over texts: a novel, ten genres, speeches, verse, scripture; all but one are fetched."""

_TINY_TRAINING: dict[str, Any] = {
    "data": "bundled",
    "n_layers": 2,
    "d_model": 48,
    "d_mlp": 64,
    "n_heads": 4,
    "vocab_size": 300,
    "length": 64,
    "batch": 4,
    "accumulation": 1,
    "steps": 4,
    "warmup": 1,
    "eval_sequences": 8,
    "watch": True,
    "device": "cpu",
}
"""What is trained in tiny mode, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What an analysis gives back."""

    numbers: Mapping[str, Interval]
    """Number -> estimate and interval. ``tau @ brown`` is judged by the rule of ``tau``."""
    figure: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an analysis is given: a model, tokens, a place for what is slow, and a seed for all that is random."""

    tiny: bool
    """Whether the model is a planted one of 5 layers, and everything is to be small."""
    retrain: bool
    """Whether to train again what is otherwise read from committed tables."""
    folder: Path
    """The claim's own folder, to read committed tables from."""
    out: Path
    """The run folder."""
    progress: bool
    one_text: bool = False
    """Whether ``texts`` gives the bundled text alone."""
    seed: int = 0
    _lens: Callable[[], LensModel]
    _weights: Callable[[], str]
    _writer: RunWriter

    @property
    def lens(self) -> LensModel:
        """The model that is studied."""
        return self._lens()

    @property
    def shared(self) -> Path:
        """A folder for runs that several analyses of one set use, or that outlive this one."""
        return self.out.parent / "shared"

    def size(self, real: Any, tiny: Any) -> Any:
        """The first in a real run, the second in a tiny one."""
        return tiny if self.tiny else real

    def rng(self) -> np.random.Generator:
        """A fresh generator for bootstraps."""
        return np.random.default_rng(self.seed)

    def generator(self) -> torch.Generator:
        """A fresh generator for draws."""
        return torch.Generator().manual_seed(self.seed)

    def interval(self, values: Any, **options: Any) -> Interval:
        """The bootstrap interval over the first axis (``sink_lens.stats.interval``)."""
        return bootstrap(values, generator=self.rng(), **options)

    def ratio(self, above: Any, below: Any, *, least: float = 0.0) -> Interval:
        """The mean of one over the mean of another, unit by unit, with its interval; nan where the lower is too small.

        Args:
            above: one number a unit.
            below: one number a unit.
            least: the mean below that a ratio is to have at least, in magnitude.
        """
        rows = np.stack([np.asarray(above, dtype=float), np.asarray(below, dtype=float)], axis=1)
        if abs(rows[:, 1].mean()) <= least:
            return Interval(estimate=np.nan, low=np.nan, high=np.nan, n=len(rows))
        return self.interval(rows, statistic=lambda drawn: drawn[:, 0].mean() / drawn[:, 1].mean())

    def share_of_pairs(self, pairs: pd.DataFrame, found: Any) -> Interval:
        """The share of pairs of models with something, and its interval over models.

        A model that is drawn twice makes no pair with itself.

        Args:
            pairs: a and b, numbers of models from 0 on.
            found: true or false for each pair.
        """
        size = int(pairs[["a", "b"]].to_numpy().max()) + 1
        table = np.full((size, size), np.nan)
        table[pairs["a"], pairs["b"]] = table[pairs["b"], pairs["a"]] = found

        def share(drawn: np.ndarray) -> np.ndarray:
            models = drawn.astype(int)
            chosen = table[np.ix_(models, models)]
            return np.nanmean(
                table if np.isnan(chosen).all() else chosen
            )  # one model, drawn every time, has no pair

        return self.interval(np.arange(size), statistic=share)

    def text(
        self, name: str = "moby-dick", *, sequences: int, length: int, bos: str = "auto"
    ) -> TokenBatch:
        """Sequences of one of ``TEXTS``, spread over its first megabyte."""
        text = bundled_text() if name == "moby-dick" else _beginning(name)
        assert self.lens.tokenizer is not None  # load gave one, and the tiny model has one
        return from_text(
            text, self.lens.tokenizer, sequences=sequences, length=length, bos=bos, name=name
        )

    def texts(self, *, sequences: int, length: int, bos: str = "auto") -> dict[str, TokenBatch]:
        """Sequences of each of ``TEXTS``; only of the bundled one in tiny mode, or where one is asked for."""
        names = TEXTS[:1] if self.one_text else self.size(TEXTS, TEXTS[:1])
        return {
            name: self.text(name, sequences=sequences, length=length, bos=bos) for name in names
        }

    def random(self, *, sequences: int, length: int, bos: str = "auto") -> TokenBatch:
        """Sequences of uniformly random tokens."""
        size = min(self.lens.d_vocab, len(self.lens.tokenizer or range(self.lens.d_vocab)))
        options: dict[str, Any] = {"generator": self.generator(), "vocab_size": size, "bos": bos}
        return random_tokens(self.lens.tokenizer, sequences=sequences, length=length, **options)

    def once(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """A table, unless an interrupted run has left it."""
        return self._writer.read_or_make(name, make)

    def base(self) -> Mapping[str, pd.DataFrame]:
        """The tables of the trace that most analyses look up growth steps and super neurons in: 32 sequences of 64."""
        return self.trace(self.text(sequences=self.size(32, 8), length=64))

    def steps(self) -> list[Any]:
        """The growth steps of ``base``, each with first_layer, last_layer and outlier_dimension.

        Raises:
            InputError: the model has none.
        """
        found = list(self.base()["growth_steps"].itertuples(index=False))
        if not found:
            raise InputError(
                f"no growth step in {self.lens.name}; need one: the first token's norm explodes nowhere"
            )
        return found

    def supers(self, neurons: pd.DataFrame) -> pd.DataFrame:
        """The super neurons of position 0 in a trace's table ``neurons``.

        Raises:
            InputError: there are none.
        """
        found = neurons.query("is_super and sink_position == 0")
        if found.empty:
            raise InputError(f"no super neuron of position 0 in {self.lens.name}; need one")
        return found

    def trained(self, arm: str, *, seed: int, **fields: Any) -> Path:
        """The folder of a training by the claim's ``train.toml``, shared with the other analyses of the same run.

        Args:
            arm: what the run is called.
            seed: of the weights.
            **fields: fields of ``TrainConfig``.
        """
        folder = self.shared / f"{'tiny-' * self.tiny}{arm}-{seed}"
        config = read_train_config(
            self.folder / "train.toml",
            seed=seed,
            **(fields | (_TINY_TRAINING if self.tiny else {})),
        )
        train(config=config, out=folder, progress=self.progress)
        return folder

    def trace(self, tokens: TokenBatch, **fields: Any) -> Mapping[str, pd.DataFrame]:
        """The tables of a trace, without interventions or a random-init baseline unless asked for.

        They are shared with the other analyses of the same run.

        Args:
            tokens: the sequences.
            **fields: fields of ``TraceConfig``.
        """
        asked_for: dict[str, Any] = {"interventions": False, "random_init": False} | fields
        config = TraceConfig(model=self.lens.name, **asked_for)
        asked = repr((self._weights(), tokens.hash, tokens.bos_condition, config))
        folder = self.shared / f"trace-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        if not (folder / RUN_FILE).exists() or read_run(folder).status != "finished":
            trace(self.lens, config=config, tokens=tokens, out=folder, progress=self.progress)
        return read_run(folder).tables


def certain(value: Any) -> Interval:
    """A number without a spread, such as one that is computed from weights alone."""
    return Interval(estimate=float(value), low=float(value), high=float(value), n=1)


def run_claim(
    folder: Path,
    *,
    out: Path,
    model: str = DEFAULT_MODEL,
    tiny: bool = False,
    retrain: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    one_text: bool = False,
) -> pd.DataFrame:
    """Run one analysis, or read it where it is finished; its result, which ``out`` then holds with the figure.

    Args:
        folder: the claim's folder.
        out: the run folder; traces that several analyses use lie beside it, in ``shared``.
        model: what ``load`` takes as a name.
        tiny: the planted model instead.
        retrain: train again what is otherwise read from committed tables.
        overwrite: run again what is finished.
        progress: show bars.
        one_text: the bundled text alone where several are compared.

    Raises:
        InputError, ModelError, RunError: what was found and needed.
    """
    claim = read_claim(folder)
    lens = functools.cache(_tiny_lens if tiny else functools.partial(loaded, model))
    weights = functools.cache(lambda: weights_hash(lens()))
    made_from: dict[str, Any] = {"model": claim.model}
    if claim.model is None:
        made_from = {"model": lens().name, "weights_sha256": weights(), "notes": list(lens().notes)}
    made_from |= {"versions": package_versions(), "seeds": {"all": 0}}
    asked: dict[str, Any] = {"claim": claim.name, "tiny": tiny, "retrain": retrain}
    if one_text:
        asked["one_text"] = True
    config = asked | {
        "code_sha256": _hash(folder / "run.py"),
        "weights_sha256": made_from.get("weights_sha256"),
    }
    if (out / RUN_FILE).exists() and not overwrite:
        before = read_run(out)
        if before.status == "finished" and before.config == config and not before.missing:
            return judge(claim, before.tables["numbers"], model=made_from["model"])
        overwrite = before.status == "finished" or before.config != config
    expects = ("numbers", "figure")
    with create_run(
        out, kind="claim", config=config, provenance=made_from, expects=expects, overwrite=overwrite
    ) as writer:
        given: dict[str, Any] = {
            "tiny": tiny,
            "retrain": retrain,
            "folder": folder,
            "out": out,
            "progress": progress,
        }
        work = Work(**given, one_text=one_text, _lens=lens, _weights=weights, _writer=writer)
        measured: Measured = runpy.run_path(str(folder / "run.py"))["measure"](work)
        rows = [
            {"number": name} | dataclasses.asdict(one) for name, one in measured.numbers.items()
        ]
        writer.write_csv("numbers", pd.DataFrame(rows).rename(columns={"estimate": "value"}))
        image = io.BytesIO()
        measured.figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
        writer.write_bytes("figure.png", image.getvalue())
    return judge(claim, pd.read_csv(out / "numbers.csv"), model=made_from["model"])


def main(measure: Callable[[Work], Measured]) -> None:
    """The command line of one ``run.py``."""
    from rich.console import Console
    from rich.table import Table

    folder = Path(inspect.getfile(measure)).resolve().parent
    claim = read_claim(folder)
    parser = argparse.ArgumentParser(description=f"{claim.title} ({claim.paper})")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a folder, .gguf file or hub name; %(default)s if not given",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a planted model of 5 layers instead, in seconds"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="the run folder; runs/analyses/NAME if not given"
    )
    parser.add_argument(
        "--retrain", action="store_true", help="train again what is read from committed tables"
    )
    parser.add_argument("--overwrite", action="store_true", help="run again what is finished")
    parser.add_argument(
        "--keep", action="store_true", help="put the result and the figure into the claim's folder"
    )
    asked = parser.parse_args()
    out = asked.out or Path("runs/analyses") / (f"tiny-{claim.name}" if asked.tiny else claim.name)
    console = Console()
    try:
        options = {
            "model": asked.model,
            "tiny": asked.tiny,
            "retrain": asked.retrain,
            "overwrite": asked.overwrite,
        }
        result = run_claim(folder, out=out, **options)
    except SinkLensError as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted: the same command goes on")
        sys.exit(130)
    if asked.keep and not asked.tiny:
        keep(claim, result, out=out)
    table = Table(
        "number",
        "ours (95%)",
        "theirs",
        "verdict",
        "prediction",
        title=f"{claim.title}, {result['model'].iloc[0]}",
    )
    for row in result.to_dict("records"):
        table.add_row(row["number"], shown(row), row["theirs"], row["verdict"], row["prediction"])
    console.print(table)
    console.print(f"{out}: numbers.csv, figure.png")


@functools.cache
def _tiny_lens() -> LensModel:
    return dataclasses.replace(
        wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True)), name="planted, 5 layers"
    )


@functools.cache
def loaded(name: str) -> LensModel:
    """The model of a name, loaded once in this process."""
    return load(name)


@functools.cache
def _beginning(name: str, *, characters: int = 1_000_000) -> str:
    """The first megabyte of a fetched text."""
    parts, size = [], 0
    for document in documents([name]):
        parts.append(document)
        size += len(document)
        if size >= characters:
            break
    return "\n\n".join(parts)[:characters]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
