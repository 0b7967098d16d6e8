"""``fingerprint``: many models on the same random inputs, each with each, by a test of one initialisation."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..configuration import make_config
from ..errors import InputError
from ..estimate import wall_seconds
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..progress import tqdm
from ..records import Finding, check_free, create_run, default_folder, versions
from .config import TWO, FingerprintConfig
from .features import Facts, Inputs, cached_features, facts_of, features, kept_features, shared_inputs
from .models_to_measure import ModelToMeasure, models_to_measure
from .nulls import NULLS
from .seedprint import ModelPair, Simulated, compare_states
from .untrained_models import read_untrained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..report.page import PageTable

__all__ = ["Fingerprint", "FingerprintConfig", "cost", "fingerprint"]


@dataclass(frozen=True, kw_only=True)
class Fingerprint(Finding):
    """Result of comparing the fingerprints of some models; its tables are models, pairs and nulls.

    ``models`` has one row per model (model, seed, step, d_model, ids, dtype, weights_sha256, cached); ``pairs`` one per
    pair (a, b, verdict, why, shared, expected, tau_bar, across, too_narrow, scale_tau, scale_log10_p, shares_scale, and
    z and log10_p of each null); ``nulls`` one per pair and null (mean, sd, z, log10_p_paper, log10_p_code, p_draws).
    """

    main = "pairs"
    config: FingerprintConfig
    folder: Path | None = None
    """Folder of the run, if it was written."""

    def shown(self) -> tuple[object, ...]:
        """Return the figure of the models, which a notebook shows below the headline."""
        return (self.figure(),)

    def matrix(self, value: str = "tau_bar") -> pd.DataFrame:
        """A column of the pairs as a table of models by models; nan on the diagonal."""
        names, pairs = self.tables["models"]["model"].tolist(), self.frame
        table = pd.DataFrame(np.nan, index=names, columns=names)
        for a, b, one in zip(pairs["a"], pairs["b"], pairs[value].to_numpy(float), strict=True):
            table.loc[a, b] = table.loc[b, a] = one
        return table

    def figure(self) -> "Figure":
        """The models against each other."""
        from .pages.fingerprint import draw

        return draw(self.frame, self.tables["nulls"], names=self.tables["models"]["model"].tolist())


def fingerprint(
    models: Sequence[ModelLike | ModelToMeasure] = (),
    *,
    config: FingerprintConfig | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Fingerprint:
    """Tell which models come from one initialisation, by SeedPrint on every pair.

    Each model is opened twice, and let go before the next: to find inputs that all can take, and then, unless its
    states are in the cache, to read them.

    Args:
        models: names, folders (of ``sink-lens train``: its first and last checkpoint), open models, or what
            ``models_to_measure`` gives; besides those that the configuration names.
        config: how they are compared.
        out: folder of the run; None writes nothing.
        overwrite: replace what it holds.
        progress: show bars.
        **fields: fields of ``FingerprintConfig``, as ``sequences=500``; they win over ``config``.

    Raises:
        InputError: fewer than two models, one twice, tokenizers that differ, too few inputs.
        ModelError: a model that cannot be opened, or whose states are not finite.
        RunError: the folder is in use, or holds another run.

    Reference: arXiv 2509.26404.
    """
    check_free(out, overwrite=overwrite)
    config = make_config(FingerprintConfig, config, fields, where="fingerprint")
    device, dtype, cache = config.device, config.dtype, config.cache
    found = _models_to_compare(models, config)
    opened = {one.name: _open_later(one, device=device, dtype=dtype) for one in found}
    bar: dict[str, Any] = {"disable": not progress, "leave": False}
    known = {name: facts_of(open_it()) for name, open_it in tqdm(opened.items(), desc="models", unit="model", **bar)}
    inputs = _choose_inputs(known, config)
    states, was_cached = {}, {}
    for name, open_it in opened.items():
        kept = cached_features(known[name], inputs) if cache else None
        was_cached[name] = kept is not None
        if kept is None and cache:
            kept = kept_features(open_it(), inputs, of=known[name], progress=progress)
        states[name] = features(open_it(), inputs, progress=progress) if kept is None else kept
    simulated = Simulated(config, n=config.sequences)
    compared = []
    names = list(combinations(states, 2))
    for index, (a, b) in enumerate(tqdm(names, desc="pairs", unit="pair", **bar)):
        generator = np.random.default_rng([config.seed, index])
        compared.append(
            compare_states((a, states[a]), (b, states[b]), config=config, simulated=simulated, generator=generator)
        )
    made = _make_result(compared, found, known=known, was_cached=was_cached, config=config)
    return made if out is None else _write_run(made, inputs, out=Path(out), overwrite=overwrite)


def cost(models: Sequence[ModelLike | ModelToMeasure] = (), *, config: FingerprintConfig) -> pd.DataFrame:
    """Estimate the cost of ``fingerprint`` by model: d_model, inputs, tokens, cached, seconds, and MB of its states.

    A forward pass over a few inputs is timed on each model that would read them; nothing is written.

    Raises:
        InputError, ModelError: what ``fingerprint`` would raise before it reads anything.
    """
    found = _models_to_compare(models, config)
    opened = {one.name: _open_later(one, device=config.device, dtype=config.dtype) for one in found}
    known = {name: facts_of(open_it()) for name, open_it in opened.items()}
    inputs = _choose_inputs(known, config)
    rows = []
    for name, open_it in opened.items():
        is_cached = config.cache and cached_features(known[name], inputs) is not None
        row = {"model": name, "d_model": known[name].width, "inputs": inputs.sequences}
        row |= {"tokens": inputs.sequences * inputs.length, "cached": is_cached}
        row["seconds"] = 0.0 if is_cached else _time_inputs(open_it(), inputs)
        rows.append(row | {"megabytes": 4e-6 * inputs.sequences * known[name].width})
    return pd.DataFrame(rows)


def _models_to_compare(
    models: Sequence[ModelLike | ModelToMeasure], config: FingerprintConfig
) -> list[ModelToMeasure | LensModel]:
    """The models, each once; a training gives its first and its last checkpoint, unless all are asked for."""
    found: list[ModelToMeasure | LensModel] = []
    texts = [*config.models, *(str(one) for one in models if isinstance(one, (str, os.PathLike)))]
    named = models_to_measure(texts) if texts else []
    for one in named:
        steps = [other.step for other in named if other.variant == one.variant and other.step is not None]
        if config.every_checkpoint or one.step is None or one.step in (min(steps), max(steps)):
            found.append(one)
    found += [
        one if isinstance(one, ModelToMeasure) else as_lens(one)
        for one in models
        if not isinstance(one, (str, os.PathLike))
    ]
    if config.untrained:
        found += models_to_measure(configs=[read_untrained(text) for text in config.untrained], seeds=config.seeds)
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{', '.join(twice)} is there twice; need each model once: a model is its own relative")
    if len(found) < 2:
        given = f"1 model was given ({names[0]})" if names else "no model was given"
        raise InputError(f"{given}; {TWO}")
    return found


def _open_later(one: ModelToMeasure | LensModel, *, device: str | None, dtype: str | None) -> Callable[[], LensModel]:
    """Return a function that opens a model, or returns the one that is open already."""
    return (lambda: one) if isinstance(one, LensModel) else lambda: one.open(device=device, dtype=dtype)


def _choose_inputs(known: dict[str, Facts], config: FingerprintConfig) -> Inputs:
    """The inputs that all models share."""
    for one in known.values():
        config.n_coordinates(one.width)
    return shared_inputs(
        known,
        kind=config.inputs,
        sequences=config.sequences,
        length=config.length,
        seed=config.seed,
        any_tokenizer=config.any_tokenizer,
    )


def _time_inputs(lens: LensModel, inputs: Inputs) -> float:
    """Seconds that a model's forward pass takes for one input, measured on a few inputs."""
    few = replace(inputs, sequences=min(inputs.sequences, max(2, 256 // inputs.length)))
    once = wall_seconds(lambda: features(lens, few), device=lens.device, warm_up=1)
    return once / few.sequences * inputs.sequences


def _make_result(
    compared: Sequence[ModelPair],
    found: Sequence[ModelToMeasure | LensModel],
    *,
    known: dict[str, Facts],
    was_cached: dict[str, bool],
    config: FingerprintConfig,
) -> Fingerprint:
    """Make the result from the compared pairs, with tables of models, pairs and nulls."""
    models = pd.DataFrame(
        [
            {
                "model": one.name,
                "seed": one.seed if isinstance(one, ModelToMeasure) else None,
                "step": one.step if isinstance(one, ModelToMeasure) else None,
                "d_model": known[one.name].width,
                "ids": len(known[one.name].ids),
                "dtype": known[one.name].dtype,
                "weights_sha256": known[one.name].weights,
                "cached": was_cached[one.name],
            }
            for one in found
        ]
    )
    long = pd.DataFrame([row for pair in compared for row in pair.null_rows()], columns=_NULL_COLUMNS)
    pairs = pd.DataFrame([pair.row() | _null_columns(pair) for pair in compared])
    from .pages.fingerprint import sentences

    return Fingerprint(
        config=config,
        tables={"models": models, "pairs": pairs, "nulls": long},
        headline="\n".join(sentences(pairs, inputs=config.inputs, decides=config.decides)),
        notes=tuple(_make_notes(pairs, known=known, config=config)),
    )


_NULL_COLUMNS = ["a", "b", "null", "mean", "sd", "z", "log10_p_paper", "log10_p_code", "p_draws"]


def _null_columns(pair: ModelPair) -> dict[str, float]:
    """Columns with z and p of the pair's tau_bar under each null."""
    rows = {row["null"]: row for row in pair.null_rows()}
    return {
        f"{column}_{name}": rows[name][source] if name in rows else math.nan  # type: ignore[misc]
        for name in NULLS
        for column, source in (("z", "z"), ("log10_p", "log10_p_paper"))
    }


def _make_notes(pairs: pd.DataFrame, *, known: dict[str, Facts], config: FingerprintConfig) -> list[str]:
    """Notes on the pairs that got no answer or a doubtful one."""
    said = []
    if config.inputs != "tokens":
        said.append(
            "the inputs are random embeddings: the stream carries their coordinates to the end, and narrow "
            "unrelated models then look related (tau_bar .556 between families in arXiv 2509.26404's setting): "
            "under the relabelled null, p stays above .01 in a share of 0.30 of unrelated untrained pairs of "
            "width 192, and of 0.83 at width 768; among trained pairs, in none of 0.3M parameters and in 45 of 48 "
            "of 3.4M. Use tokens to decide"
        )
    if config.any_tokenizer and len({one.tokenizer for one in known.values()} - {None}) > 1:
        said.append("the tokenizers differ: the same ids are other texts in each model")
    scaled = pairs.loc[pairs["shares_scale"].eq(True)]
    for row in scaled.head(3).to_dict("records"):
        said.append(
            f"{row['a']} and {row['b']} share a factor of each input that scales all coordinates alike (tau of the "
            f"sizes {row['scale_tau']:.2f}): the analytical null is {row['too_narrow']:.1f} times too narrow, and its "
            "p, which is the published one, means nothing here"
        )
    if len(scaled) > 3:
        said.append(f"so do {len(scaled) - 3} further pairs")
    if config.decides in NULLS[:3]:
        said.append(f"decided by the {config.decides} null, which assumes that coordinates and inputs are independent")
    same = [name for name, one in known.items() if [o.weights for o in known.values()].count(one.weights) > 1]
    if same:
        said.append(f"{', '.join(same)}: some of these have the very same weights")
    return said


def _write_run(found: Fingerprint, inputs: Inputs, *, out: Path, overwrite: bool) -> Fingerprint:
    """Write a finished comparison into its run folder."""
    provenance: dict[str, Any] = {
        "models": found.tables["models"]["model"].tolist(),
        "weights_sha256": found.tables["models"]["weights_sha256"].tolist(),
        "tokens_sha256": inputs.digest,
        "token_source": f"random {inputs.kind}",
        "bos_condition": "without",
        "dtype": sorted(set(found.tables["models"]["dtype"])),
        "versions": versions(),
    }
    record = {"config": asdict(found.config), "provenance": provenance, "overwrite": overwrite}
    with create_run(out, kind="fingerprint", expects=("models", "pairs", "nulls", "findings"), **record) as writer:
        writer.write_csv("models", found.tables["models"])
        writer.write_table("pairs", found.frame)
        writer.write_table("nulls", found.tables["nulls"])
        said = [*found.sentences, *(f"note: {note}" for note in found.notes)]
        writer.write_text("findings.txt", "\n".join(said) + "\n")
    return replace(found, folder=out)


# --- the command


def run(config: FingerprintConfig, *, out: str | Path | None, overwrite: bool, progress: bool) -> Fingerprint:
    """Run the comparison that a configuration asks for, in a run folder."""
    folder = default_folder("fingerprint") if out is None else out
    try:
        return fingerprint(config=config, out=folder, overwrite=overwrite, progress=progress)
    except KeyboardInterrupt as error:
        if config.cache:
            error.add_note("the states of finished models are cached: the same command goes on")
        raise


def answer(found: Fingerprint) -> dict[str, Any]:
    """The content of ``--json``."""
    return {"sentences": found.sentences, "notes": found.notes, "pairs": found.frame}


def cost_in_words(config: FingerprintConfig) -> "Iterator[str | PageTable]":
    """Yield the text of ``--dry-run``: the whole, and a row per model."""
    from ..report.page import PageTable

    frame = cost(config=config)
    n, seconds = len(frame), sum(frame["seconds"].tolist())
    yield (f"{n} models, {n * (n - 1) // 2} pairs; about {seconds:,.0f} s to read the inputs, about a second per pair")
    lines = []
    for row in frame.to_dict("records"):
        time = "cached" if row["cached"] else f"{row['seconds']:,.1f}"
        whole = (f"{row[name]:,}" for name in ("inputs", "tokens"))
        lines.append((row["model"], str(row["d_model"]), *whole, time, f"{row['megabytes']:,.1f} MB"))
    heads = ("model", "width", "inputs", "tokens", "seconds", "states")
    yield PageTable(heads=heads, numeric=(False, *(True for _ in heads[1:])), rows=lines, frame=frame)
