"""``run``: a circuit as a kind of run. Pairs, scores, the circuit, its curve and error bars go into one run folder.

Scores are written pass by pass, and each table when it is made: a run that was killed goes on from there.
"""

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from ..configuration import make_config
from ..data.corpora import bundled_text
from ..data.tokens import TokenBatch, from_text
from ..edits.metrics import Metric
from ..edits.named_metrics import import_function, spec_of
from ..engine.forward import predictions
from ..engine.measured import metric_config
from ..errors import InputError, RunError
from ..models.inputs import describe_provenance, load_model
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..records import Result, RunWriter, create_run, default_folder, display, read_run, refuse_unhashed_code
from ..records.shards import check_shard, compute_run, process_name
from ..stats import interval
from .attention import attention_of
from .checks import CONFIRMED, check_from_table
from .circuit import Circuit, circuit_by_scores
from .config import Ablation, CircuitConfig, asked_by
from .core import core_of
from .curve import size_fields, steady_share
from .files import SavedCircuit, read
from .graph import Graph
from .methods import METHODS
from .pairs import read_pairs
from .runs import Runs, runs_of
from .scores import score
from .scoring import part_name, parts_of, score_edges
from .sink import sink_fields
from .tasks import Task, task_of

FILES = ("pairs", "nodes", "edges", "circuit", "completeness", "curve", "areas", "prompt", "attention", "summary")
"""What a finished run holds; with a check ``check`` and, of scores by gradients, ``check_nodes``; with core ``core``.
``attention`` says where the circuit's heads look in the first ``prompt``."""
_LEFT_PAIRS, _NODE_PAIRS = 8, 4
_CORE: tuple[Ablation, ...] = ("resample", "mean_ordinary", "mean_aligned", "mean_all")
"""Ablations that the core is taken over; the first only with corrupted prompts. Zero is none of them: a norm does not
see how long the stream is, so that to first order the embedding's edges into layer 0 are worth nothing against zero."""


@dataclass(frozen=True, kw_only=True)
class CircuitRun(Result):
    """A run; everything in it also lies in its run folder."""

    main = "circuit"
    found: Circuit | None = None
    """The circuit; None if other shards are still to be computed."""

    @property
    def circuit(self) -> Circuit:
        """The circuit.

        Raises:
            RunError: other shards are still to be computed.
        """
        if self.found is None:
            raise RunError(f"{self.headline}; need all shards: the one that ends last chooses the circuit")
        return self.found

    def shown(self) -> tuple[object, ...]:
        """The circuit and its largest edges."""
        return self.circuit.draw(most=40), self.frame.head(12)


def run(
    model: CircuitConfig | ModelLike | None = None,
    *,
    config: CircuitConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    report: bool = True,
    progress: bool = False,
    **fields: Any,
) -> CircuitRun:
    """Find the circuit of a task, judge it and write a run folder.

    With ``shard`` each of several processes or machines scores a part of the pairs, all in one folder. Parts of 32
    pairs go to shards in turns, under every ablation that the core is taken over. A shard that was killed goes on where
    it was, one that is done does nothing, and the one that ends last chooses the circuit and judges it: the curve, the
    checks with real patches and where heads look are not divided, since they need the circuit. The result of the others
    is not ``finished``.

    Args:
        model: the model, or a configuration that names it.
        config: the configuration; the default one if None.
        out: the run folder; a new one in ``runs`` if None. An unfinished run of the same question is continued. Shards
            have one, where each can read and write.
        shard: ``3/8`` is the third of eight; ``slurm`` is the task of the array job that this process is.
        overwrite: replace the run that the folder holds.
        report: draw the page.
        progress: show progress bars.
        **fields: fields of ``CircuitConfig``, such as ``task="ioi"``; they win over those of the configuration.

    Raises:
        InputError: what cannot be used; a task that the model does not do; a metric that does not tell the clean from
            the replaced runs; a shard that is none.
        ModelError: a mixture of experts, a hybrid, or a model that can only be measured.
        RunError: the folder is in use, or holds another run or another division into shards.
    """
    check_shard(shard, out=out, overwrite=overwrite)
    asked = _ask(model, config=config, fields=fields)
    if shard is not None:
        refuse_unhashed_code(asked.code())
    folder = default_folder(asked.lens.name) if out is None else Path(out)
    found = compute_run(
        folder,
        shard=shard,
        overwrite=overwrite,
        opened=partial(asked.open, reopen=shard is not None),
        begin=lambda writer: asked.parts(),
        compute=partial(asked.compute, progress=progress),
        finish=partial(asked.finish, progress=progress),
    )
    if found is None:
        return CircuitRun.unfinished(folder, shard=str(shard))
    return _finished_run(folder, *found, report=report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Everything that determines a circuit."""

    lens: LensModel
    task: Task
    config: CircuitConfig
    metric: Metric | Callable[..., Any]
    given: SavedCircuit | None
    """The circuit that is judged, where one was given."""

    def open(
        self,
        folder: Path,
        *,
        overwrite: bool = False,
        reopen: bool = False,
        patience: float = 0,
        part: Mapping[str, Any] | None = None,
    ) -> RunWriter:
        """Open the run folder of the circuit, or of a part of it."""
        provenance = describe_provenance(self.lens, self.task.clean, kernel="eager") | {
            "corrupted_sha256": None if self.config.task == "text" else self.task.corrupted.hash,
            "answers_sha256": self.task.sha256,
            "seeds": {"pairs": self.config.seed},
        }
        provenance |= {} if self.given is None else {"circuit_sha256": self.given.sha256}
        return create_run(
            folder,
            kind="circuit",
            config=asked_by(asdict(self.config)) | self.code() | dict(part or {}),
            provenance=provenance | ({"holder": process_name()} if part else {}),
            expects=() if part else FILES,
            overwrite=overwrite,
            reopen=reopen,
            patience=patience,
        )

    def code(self) -> dict[str, Any]:
        """Hash of a metric of the user's: a run does not go on with another function of this name."""
        return {"code": metric_config(self.metric)["code"]} if ":" in self.config.reads else {}

    @property
    def scored(self) -> Mapping[str, Ablation]:
        """Name of scores -> their ablation: the run's own, and those of the core."""
        others = other_ablations(self.config) if self.config.core else ()
        return {"scores": self.config.replaced_by, **{f"scores-{one}": one for one in others}}

    def parts(self) -> dict[str, int]:
        """Name of every part of the scores -> its pairs."""
        n_pairs = self.task.clean.n_sequences
        return {part_name(name, rows): len(rows) for name in self.scored for rows in parts_of(n_pairs)}

    def compute(self, writer: RunWriter, parts: Collection[str], *, progress: bool) -> None:
        """Score the pairs of some parts."""
        for name, ablation in self.scored.items():
            if any(part_name(name, rows) in parts for rows in parts_of(self.task.clean.n_sequences)):
                runs = runs_for(self, ablation)
                if name == "scores":
                    _check_gap(runs, seed=self.config.seed)
                score_edges(runs, self.config, writer=writer, name=name, progress=progress, only=parts)

    def finish(self, writer: RunWriter, *, progress: bool) -> tuple[Circuit, tuple[str, ...]]:
        """Score what the folder lacks, choose the circuit and judge it."""
        circuit, sentences = _find_and_write(self, writer=writer, progress=progress)
        for path in self.config.save:
            circuit.save(path)
        return circuit, sentences


def _ask(model: CircuitConfig | ModelLike | None, *, config: CircuitConfig | None, fields: Mapping[str, Any]) -> _Asked:
    """Resolve the arguments of ``run`` to the configuration, the model and the task if it is given."""
    if isinstance(model, CircuitConfig):
        config, model = model, None
    asked = make_config(CircuitConfig, config, fields, where="circuit")
    asked.check_together()
    if asked.pairs_file is not None:
        read_pairs(
            asked.pairs_file, spans=asked.columns_of_spans
        )  # refuses what is no pair, before the weights are read
    lens = model_for(asked) if model is None else as_lens(cast("ModelLike", model))
    asked = replace(asked, model=lens.name)
    Graph.of(lens, neurons=asked.neurons_by_layer)  # refuses what has no circuit, before anything is written
    given, task = None if asked.circuit is None else read(asked.circuit, lens=lens), task_for(lens, asked)
    return _Asked(lens=lens, task=task, config=asked, metric=metric_of(lens, task, asked), given=given)


def _finished_run(folder: Path, circuit: Circuit, sentences: tuple[str, ...], *, report: bool) -> CircuitRun:
    """The result of a finished run folder."""
    if report:
        display.draw_page(folder)
    held = read_run(folder)
    tables = {name: held.tables[name] for name in (*FILES, "check", "check_nodes", "core") if name in held.tables}
    return CircuitRun(folder=folder, found=circuit, tables=tables, headline="\n".join(sentences))


def model_for(config: CircuitConfig) -> LensModel:
    """The model that a configuration names."""
    return load_model(cast("Any", config))  # which reads no sequences


def task_for(lens: LensModel, config: CircuitConfig) -> Task:
    """The pairs of a configuration's task, or pieces of text without answers."""
    if config.task != "text":
        return task_of(lens, config=config)
    if lens.tokenizer is None:
        raise InputError(f"{lens.name} has no tokenizer; need one to read text, or a task 'file' of token ids")
    lengths: dict[str, Any] = {"sequences": config.pairs, "length": config.length, "bos": config.bos}
    tokens = from_text(bundled_text(), lens.tokenizer, name="moby_dick", **lengths)
    return Task(
        name="text",
        clean=tokens,
        corrupted=tokens,
        correct=(),
        incorrect=(),
        templates=("",) * tokens.n_sequences,
        n_tried=tokens.n_sequences,
        n_answered=tokens.n_sequences,
    )


def metric_of(lens: LensModel, task: Task, config: CircuitConfig) -> Metric | Callable[..., Any]:
    """The metric that a configuration names."""
    name = config.reads
    if name == "logit_difference":
        return task.metric
    if ":" not in name:
        return spec_of(config, name).metric(lens, partial(predictions, lens, task.clean))
    function = import_function(name)
    return function(task) if next(iter(signature(function).parameters), "") == "task" else function


def runs_for(asked: "_Asked", ablation: Ablation) -> Runs:
    """The clean and the replaced runs of a task."""
    task, config = asked.task, replace(asked.config, ablation=ablation)
    corrupted: TokenBatch | None = None if config.task == "text" else task.corrupted
    return runs_of(asked.lens, task.clean, corrupted, metric=asked.metric, config=config, spans=task.spans)


def _find_and_write(asked: _Asked, *, writer: RunWriter, progress: bool) -> tuple[Circuit, tuple[str, ...]]:
    """Score, choose and judge the circuit, and write the tables."""
    lens, task, config = asked.lens, asked.task, asked.config
    runs = runs_for(asked, config.replaced_by)
    _check_gap(runs, seed=config.seed)
    scores = score_edges(runs, config, writer=writer, name="scores", progress=progress)
    half = circuit_by_scores(runs, scores, config, templates=task.templates, halved=True)
    writer.write_table("pairs", _pair_table(lens, task, runs))

    @functools.cache
    def evaluation() -> tuple[pd.DataFrame, pd.DataFrame]:
        """The areas and the table of the curve with the circuit's rows; its gap is written first."""
        found = half.evaluate(config.sizes, random=config.random, nodes=config.nodes, progress=progress)
        chosen, _ = one_circuit(half, found.frame, config=config, given=asked.given)
        own = _judged_rows(chosen, half)
        gap = chosen.judge.gap if chosen.given else found.gap
        writer.write_text("judged.json", json.dumps({"gap": asdict(gap)}))
        return found.areas, pd.concat([found.frame, own], ignore_index=True)

    areas = writer.once("areas", lambda: evaluation()[0])
    curve = writer.once("curve", lambda: evaluation()[1])
    gap = json.loads((writer.folder / "judged.json").read_text("utf-8"))["gap"]
    circuit, rule = one_circuit(half, curve, config=config, given=asked.given)
    writer.write_table("nodes", circuit.nodes)
    writer.once("edges", lambda: circuit.every_edge)
    writer.write_table("circuit", circuit.edges)
    completeness = scores.completeness
    writer.write_table("completeness", completeness)

    def attention() -> pd.DataFrame:
        """The table ``attention``; its patterns are written first."""
        frame, patterns = attention_of(circuit)
        if patterns:
            writer.write_tensors("attention_patterns", patterns)
        return frame

    check = nodes = None
    if config.check:
        pairs = config.check_pairs
        check = writer.once("check", lambda: circuit.check(edges=config.check, pairs=pairs, progress=progress).frame)
        few = min(pairs, _NODE_PAIRS)
        if METHODS[config.method].along != "patches":
            nodes = writer.once("check_nodes", lambda: circuit.check_nodes(pairs=few, progress=progress))
    if not writer.has("sink.json"):
        writer.write_text("sink.json", json.dumps(sink_fields(circuit, config)))
    sink = json.loads((writer.folder / "sink.json").read_text("utf-8"))
    core, alone = None, None
    if config.core:
        others = partial(_circuits_of_ablations, circuit, asked, writer=writer, progress=progress)
        core = writer.once("core", lambda: core_of(circuit, others(), pairs=config.check_pairs, progress=progress))
        mask = np.isin(circuit.graph.names, core.loc[core["core"].to_numpy(bool), "edge"].to_numpy())
        alone = half.judge.judged(half.judge.values(mask[None]))
    writer.once("prompt", lambda: _prompt_table(lens, task.clean))
    writer.once("attention", attention)
    seen = asked.given is not None and asked.given.found_on == task.clean.hash
    found = _Found(circuit=circuit, rule=rule, curve=curve, areas=areas, gap=gap, completeness=completeness, seen=seen)
    found = replace(found, check=check, nodes=nodes, core=core, alone=alone, sink=sink)
    summary = _summary_table(found)
    summary["left_sum"], summary["left_pairs"] = left_sum_completeness(runs, config=config)
    writer.write_csv("summary", summary)
    from .sentences import circuit_sentences

    sentences = [task.sentence] if config.task != "text" else []
    return circuit, (*sentences, *circuit_sentences(summary, sizes=config.sizes))


def left_sum_completeness(runs: Runs, *, config: CircuitConfig) -> tuple[float, int]:
    """Completeness of EAP-IG's left sum with as many points as the midpoints began with, and on how many pairs.

    A few pairs show how far it is off; nan where the run takes no midpoints, or a zero stream.
    """
    if not METHODS[config.method].doubles or runs.ablation == "zero":
        return float("nan"), 0
    few = runs.some(range(min(_LEFT_PAIRS, runs.n_pairs)))
    return score(few, method="eap-ig-left", steps=config.steps).complete, few.n_pairs


def _check_gap(runs: Runs, *, seed: int) -> None:
    """Refuse runs whose clean and replaced metrics are not told apart.

    Raises:
        InputError: the interval of their difference covers 0.
    """
    gap = interval(runs.gap.double().numpy(), generator=np.random.default_rng([seed, 6]))
    if runs.ablation == "resample" and not (gap.low > 0 or gap.high < 0):
        raise InputError(
            f"{runs.metric.name} differs by {gap.estimate:.3g} [{gap.low:.3g}, {gap.high:.3g}] between clean and "
            "corrupted prompts, which covers 0: there is nothing that a circuit could explain. Need pairs whose "
            "corrupted prompt changes the metric"
        )


def _pair_table(lens: LensModel, task: Task, runs: Runs) -> pd.DataFrame:
    """The table ``pairs``."""

    def text(batch: TokenBatch, row: int) -> str:
        """A sequence as text; its ids without a tokenizer."""
        ids = batch.tokens[row, : int(batch.lengths[row])].tolist()
        return str(lens.tokenizer.decode(ids)) if lens.tokenizer is not None else " ".join(map(str, ids))

    def answer(ids: tuple[tuple[int, ...], ...], row: int) -> str:
        """Answers as text, several with | between them; ids without a tokenizer."""
        own = ids[row] if ids else ()
        return "|".join(str(one) if lens.tokenizer is None else str(lens.tokenizer.decode([one])) for one in own)

    rows = range(runs.n_pairs)
    return pd.DataFrame(
        {
            "pair": list(rows),
            "template": list(task.templates),
            "clean": [text(task.clean, row) for row in rows],
            "corrupted": ["" if runs.corrupted is None else text(task.corrupted, row) for row in rows],
            "correct": [answer(task.correct, row) for row in rows],
            "incorrect": [answer(task.incorrect, row) for row in rows],
            "clean_value": runs.clean_values.double().numpy(),
            "corrupted_value": runs.corrupted_values.double().numpy(),
        }
    )


def _prompt_table(lens: LensModel, batch: TokenBatch) -> pd.DataFrame:
    """The tokens of the first prompt, by position."""
    ids = batch.tokens[0, : int(batch.lengths[0])].tolist()
    texts = [str(one) if lens.tokenizer is None else str(lens.tokenizer.decode([one])) for one in ids]
    return pd.DataFrame({"position": list(range(len(ids))), "text": texts})


def other_ablations(config: CircuitConfig) -> tuple[Ablation, ...]:
    """The ablations beside the run's own that the core is taken over."""
    able = _CORE[1:] if config.task == "text" else _CORE
    return tuple(one for one in able if one != config.replaced_by)


def _circuits_of_ablations(circuit: Circuit, asked: _Asked, *, writer: RunWriter, progress: bool) -> dict[str, Circuit]:
    """Name of each other ablation that the core is taken over -> the circuit that it gives."""
    others: dict[str, Circuit] = {}
    for ablation in other_ablations(asked.config):
        runs = runs_for(asked, ablation)
        scores = score_edges(runs, asked.config, writer=writer, name=f"scores-{ablation}", progress=progress)
        others[ablation] = circuit.like(runs, scores)
    return others


def one_circuit(
    half: Circuit, curve: pd.DataFrame, *, config: CircuitConfig, given: SavedCircuit | None
) -> tuple[Circuit, str]:
    """The one circuit of a run, and the rule that chose it.

    Args:
        half: the circuit of as many edges as were asked for, chosen on the half of the pairs that judges none.
        curve: circuits of several sizes, judged on the other half.
        config: says the number of edges, or a threshold, if they are known.
        given: the circuit that is judged, where one was given.

    Returns:
        The circuit, and ``given``, ``asked``, ``threshold``, ``smallest`` (the smallest size that carries the metric,
        see ``curve``) or ``none`` (no size but all edges does).

    Raises:
        InputError: none of its edges lies on a path from the input to the metric.
    """
    share = steady_share(curve)
    if given is not None:
        mask = given.on(half.graph).chosen
        circuit, rule = replace(half, chosen=half.judge.used(mask), size=int(mask.sum()), given=True), "given"
    elif config.choice == "threshold" or config.edges is not None:
        circuit, rule = half, "threshold" if config.choice == "threshold" else "asked"
    elif share < 1:
        circuit, rule = half.smaller(max(1, round(share * half.graph.n_edges))), "smallest"
    else:
        circuit, rule = half, "none"
    if not circuit.n_edges:
        needs = {"threshold": f"a lower threshold than {config.threshold:g}", "given": "a circuit that has one"}
        need = needs.get(rule, "more edges")
        raise InputError(f"no edge was chosen that lies on a path from the input to the metric; need {need}")
    return circuit, rule


def _judged_rows(circuit: Circuit, half: Circuit) -> pd.DataFrame:
    """Rows of the curve: the circuit, its drawn part, all edges but its own, and as many of the largest scores.

    Scores choose the last, and the part that is drawn if it is not the whole circuit: only pairs that chose no edge
    judge these. All pairs judge a circuit that was given.
    """
    drawn, like = circuit.strongest(), half.smaller(circuit.size) if circuit.given else circuit
    masks = {"circuit": circuit.chosen, "picture": drawn, "without": ~circuit.chosen, "as_many": like.chosen}
    of_scores = {"as_many"} if (drawn == circuit.chosen).all() else {"as_many", "picture"}
    frames = []
    for judge, names in (
        (circuit.judge if circuit.given else half.judge, [name for name in masks if name not in of_scores]),
        (half.judge, [name for name in masks if name in of_scores]),
    ):
        some = np.stack([masks[name] for name in names])
        rows = pd.DataFrame([size_fields(judge, mask) for mask in some]).assign(by=names, n=some.sum(1), draw=0)
        rows["share"] = rows["n"] / circuit.graph.n_edges
        frames.append(pd.concat([rows, judge.judged(judge.values(some))], axis=1))
    return pd.concat(frames, ignore_index=True)


def _count_confirmed(circuit: Circuit, core: pd.DataFrame) -> int:
    """Count the core edges whose real patch does at least 1% of the difference, without those that cancel."""
    does = np.abs(core["exact"].to_numpy(float)) >= CONFIRMED * abs(circuit.difference)
    return int((does & ~core["together"].to_numpy(bool)).sum())


def _unseen_nodes(nodes: pd.DataFrame) -> str:
    """Names of the nodes that gradients do not see, the largest first."""
    ordered = nodes.sort_values("exact", key=abs, ascending=False)
    return " ".join(ordered.loc[ordered["unseen"], "node"].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Everything that the table ``summary`` is made of."""

    circuit: Circuit
    rule: str
    curve: pd.DataFrame
    areas: pd.DataFrame
    gap: Mapping[str, float]
    completeness: pd.DataFrame
    check: pd.DataFrame | None = None
    nodes: pd.DataFrame | None = None
    core: pd.DataFrame | None = None
    alone: pd.DataFrame | None = None
    sink: Mapping[str, float] = field(default_factory=dict)
    seen: bool
    """It was given, and found on these pairs."""


def _summary_table(found: _Found) -> pd.DataFrame:
    """The table ``summary``."""
    circuit, gap, check, nodes, core = found.circuit, found.gap, found.check, found.nodes, found.core
    by = found.areas.loc[found.areas["by"].eq("edges")].to_dict("records")[0]
    errors = found.completeness["error"].abs().to_numpy(float)
    share = steady_share(found.curve)
    of_edges = found.curve.loc[found.curve["by"].eq("edges")]
    most = of_edges.sort_values("faithfulness", ascending=False).to_dict("records")[0]
    own, drawn, without, like = (
        found.curve.loc[found.curve["by"].eq(name)].to_dict("records")[0]
        for name in ("circuit", "picture", "without", "as_many")
    )
    row: dict[str, Any] = {
        "metric": circuit.runs.metric.name,
        "method": circuit.scores.method,
        "ablation": circuit.runs.ablation,
        "frozen": -1 if circuit.runs.frozen is None else circuit.runs.frozen,
        "pairs": circuit.runs.n_pairs,
        "chosen_on": 0 if circuit.given else len(circuit.rows),
        "judged_on": circuit.judge.runs.n_pairs,
        "seen": found.seen,
        "rule": found.rule,
        "edges": circuit.n_edges,
        "asked_edges": circuit.size,
        "all_edges": circuit.graph.n_edges,
        **_faithfulness_fields(own, ""),
        **_faithfulness_fields(without, "without_"),
        **_faithfulness_fields(like, "as_many_"),
        "picture_edges": drawn["n"],
        **_faithfulness_fields(drawn, "picture_"),
        "clean": float(circuit.scores.clean.mean()),
        "corrupted": float(circuit.scores.corrupted.mean()),
        "gap": gap["estimate"],
        "gap_low": gap["low"],
        "gap_high": gap["high"],
        "completeness": circuit.scores.complete,
        "completeness_error_median": float(np.median(errors)),
        "completeness_error_largest": float(errors.max()),
        "steps_mean": float(found.completeness["steps"].to_numpy(float).mean()),
        "cpr": float(by["cpr"]),
        "cmd": float(by["cmd"]),
        "cpr_log": float(by["cpr_log"]),
        "cmd_log": float(by["cmd_log"]),
        "share_at_80": share if share < 1 else np.nan,
        "most_kept": most["faithfulness"],
        "most_kept_at": most["share"],
        **found.sink,
        "jaccard_halves": circuit.jaccard,
        "stable_edges": int((circuit.inclusion[circuit.chosen] >= 0.95).sum()),
        "rank_correlation": np.nan,
        "missed": np.nan,
        "outside_over": -1,
        "outside_sampled": -1,
        "outside_at_most": -1,
        "weakest": np.nan,
        "patched_nodes": -1 if nodes is None else len(nodes),
        "unseen_nodes": "" if nodes is None else _unseen_nodes(nodes),
        "core_edges": -1 if core is None else int(core["core"].to_numpy(bool).sum()),
        "confirmed_edges": -1 if core is None else _count_confirmed(circuit, core),
        "together_edges": -1 if core is None else int(core["together"].to_numpy(bool).sum()),
        "undecided_edges": -1 if core is None else int(core["undecided"].to_numpy(bool).sum()),
        "contingent_edges": -1 if core is None else int((~core[["core", "undecided"]].to_numpy(bool).any(1)).sum()),
    }
    if found.alone is not None:
        row |= _faithfulness_fields(found.alone.to_dict("records")[0], "core_")
    if check is not None:
        made = check_from_table(circuit.scores, circuit.chosen, check, n_pairs=0)
        row |= {"rank_correlation": made.rank_correlation, "missed": made.missed, "weakest": made.weakest}
        row |= {"outside_over": made.outside[0], "outside_sampled": made.outside[1], "outside_at_most": made.at_most}
    return pd.DataFrame([row])


def _faithfulness_fields(row: Mapping[Any, Any], name: str) -> dict[str, float]:
    """Faithfulness and its interval from a row of the curve, under names that begin with ``name``."""
    return {f"{name}faithfulness{end}": float(row[end[1:] or "faithfulness"]) for end in ("", "_low", "_high")}
