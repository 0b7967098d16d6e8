"""A circuit as a kind of run."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from ..configuration import make_config, refuse_unread_fields
from ..data.tokens import TokenBatch
from ..edits.metrics import Metric
from ..edits.named_metrics import import_metric, metric_spec
from ..engine.forward import baseline_logits
from ..engine.measured import metric_config
from ..errors import InputError, RunError
from ..models.inputs import describe_provenance, load_model
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..patching.pair_file import read_pairs
from ..records import Result, RunWriter, create_run, place_of_run, read_run
from ..records.recomputed import MOST, keep_or_compare, sample_parts
from ..records.shards import check_shard, compute_run, process_name
from ..signatures import takes
from ..stats import mean_interval
from .attention import explain_attention
from .choice import swap_tenth
from .circuit import Circuit, choose_by_scores, choose_size, take_edges
from .config import Ablation, CircuitConfig
from .core import core_table
from .curve import curve_areas, judge_circuits
from .files import SavedCircuit, read
from .graph import Graph
from .methods import METHODS
from .runs import Runs, run_pairs
from .scoring import (
    check_score_files,
    divide_pairs,
    left_sum_completeness,
    score_edges,
    scores_file_name,
)
from .sink import sink_fields
from .summary import summary_row
from .tasks import MetricOfTask, Task, make_task

FILES = (
    "pairs",
    "nodes",
    "edges",
    "circuit",
    "completeness",
    "curve",
    "areas",
    "prompt",
    "attention",
    "summary",
)
"""What a finished run holds; with a check ``check`` and, of scores by gradients, ``check_nodes``; with core ``core``.
``attention`` says where the circuit's heads look in the first ``prompt``."""
_BASELINE = "baseline.json"
"""The metric of the clean and the replaced run of each pair."""
_NODE_PAIRS = 4
_CORE: tuple[Ablation, ...] = ("resample", "mean_ordinary", "mean_aligned", "mean_all")
"""Ablations that the core is taken over; the first only with corrupted prompts. Zero is none of them: a norm does not
see how long the stream is, so that to first order the embedding's edges into layer 0 are worth nothing against zero."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CircuitRun(Result):
    """The result of ``circuits.run``: the circuit and its tables."""

    main = "circuit"
    found: Circuit | None = None
    """The circuit; None if other shards are still to be computed."""

    @property
    def circuit(self) -> Circuit:
        """The circuit that was found; RunError if other shards are still to be computed."""
        if self.found is None:
            raise RunError(
                f"{self.headline}; need all shards: the one that ends last chooses the circuit"
            )
        return self.found

    def notebook_parts(self) -> tuple[object, ...]:
        """Return the parts that a notebook shows: the circuit and its largest edges."""
        return self.circuit.draw(most=40), self.frame.head(12)


@takes(CircuitConfig)
def run(
    model: ModelLike,
    *,
    config: CircuitConfig | None = None,
    out: str | Path | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    report: bool = True,
    progress: bool = True,
    **fields: Any,
) -> CircuitRun:
    """Find the circuit of a task, and measure how faithful it is.

    With ``shard`` each of several processes or machines scores some of the pairs, all in one folder. A shard that was
    killed goes on where it was, one that is done does nothing, and the one that ends last chooses the circuit and does
    all that needs it: the curve, real patches, and where heads look. The result of the others is not ``finished``.

    Args:
        model: what ``load`` takes, or a ``LensModel``.
        config: the configuration; the default one if None.
        out: the run folder; nothing is written if None. An unfinished run of the same question is continued. All
            shards need the same one.
        shard: ``3/8`` is the third of eight; ``slurm`` is the task of the array job that this process is.
        overwrite: replace the run that the folder holds.
        report: draw the page in ``out`` at the end.
        progress: show progress bars.
        **fields: fields of ``CircuitConfig``, such as ``task="ioi"``; they win over those of the configuration.

    Raises:
        InputError: fields that cannot be used together; a task that the model does not do; a metric that does not
            tell the clean from the replaced runs; a shard that does not exist.
        ModelError: a mixture of experts, a hybrid, or a model that can only be measured.
        RunError: the folder is in use, or holds another run or another division into shards.
    """
    check_shard(shard, out=out, overwrite=overwrite)
    asked = _make_request(model, config=config, fields=fields)
    with place_of_run(out, name=asked.lens.name) as place:
        found = compute_run(
            place.folder,
            shard=shard,
            overwrite=overwrite,
            open_run=partial(asked.open_run, reopen=shard is not None),
            begin=asked.begin,
            check=asked.check_scores,
            compute=partial(asked.score_pair_groups, progress=progress),
            finish=partial(_finish_run, asked, progress=progress),
        )
        if found is None:
            return CircuitRun.unfinished(place.folder, shard=str(shard))
        circuit, sentences = found
        held, names = read_run(place.folder).tables, (*FILES, "check", "check_nodes", "core")
        result = CircuitRun(
            folder=place.named,
            place=place,
            found=circuit,
            tables={name: held[name] for name in names if name in held},
            headline="\n".join(sentences),
        )
        if report and out is not None:
            result.report()
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """All that determines a run."""

    lens: LensModel
    task: Task
    config: CircuitConfig
    metric: Metric | Callable[..., Any]
    given: SavedCircuit | None

    def open_run(
        self, folder: Path, *, part: Mapping[str, Any] | None = None, **how: Any
    ) -> RunWriter:
        provenance = describe_provenance(self.lens, self.task.clean, kernel="eager") | {
            "corrupted_sha256": None if self.config.task == "text" else self.task.corrupted.hash,
            "answers_sha256": self.task.sha256,
            "seeds": {"pairs": self.config.seed},
        }
        if self.given is not None:
            provenance["circuit_sha256"] = self.given.sha256
        if part:
            provenance["holder"] = process_name()
        config = asdict(self.config)
        for name in ("save", "against", "batch_size"):  # no part of the question
            del config[name]
        if ":" in self.config.metric_name:
            config["code"] = metric_config(self.metric)["code"]
        return create_run(
            folder,
            kind="circuit",
            config=config | dict(part or {}),
            provenance=provenance,
            expects=() if part else FILES,
            recomputes=True,
            **how,
        )

    @property
    def sets_of_scores(self) -> Mapping[str, tuple[Ablation, dict[str, range]]]:
        """Set of scores -> its ablation, and its files with their pairs: the run's own first, then the core's."""
        own = self.config.used_ablation
        ablations: dict[str, Ablation] = {"scores": own}
        if self.config.core:
            able = _CORE[1:] if self.config.task == "text" else _CORE
            ablations |= {f"scores-{one}": one for one in able if one != own}
        groups = divide_pairs(self.task.clean.n_sequences)
        return {
            name: (one, {scores_file_name(name, rows): rows for rows in groups})
            for name, one in ablations.items()
        }

    def begin(self, writer: RunWriter) -> dict[str, int]:
        if writer.has(_BASELINE):
            self.make_runs(self.config.used_ablation, writer)
        sets = self.sets_of_scores.values()
        return {file: len(rows) for _, files in sets for file, rows in files.items()}

    def check_scores(self, folder: Path, names: Collection[str]) -> None:
        chosen = sample_parts(list(names), most=MOST)
        for ablation, files in self.sets_of_scores.values():
            if held := {file: rows for file, rows in files.items() if file in chosen}:
                check_score_files(self.make_runs(ablation), self.config, folder, held)

    def make_runs(self, ablation: Ablation, writer: RunWriter | None = None) -> Runs:
        """Run the task's pairs, clean and with all edges replaced under this ablation.

        ``writer`` keeps the metric of the run's own ablation in its folder, or compares it with what is there.
        """
        task, config = self.task, replace(self.config, ablation=ablation)
        found = run_pairs(
            self.lens,
            task.clean,
            None if config.task == "text" else task.corrupted,
            metric=self.metric,
            config=config,
            spans=task.spans,
        )
        if ablation != self.config.used_ablation:
            return found
        gap = mean_interval(found.gap.numpy(), generator=np.random.default_rng([config.seed, 6]))
        if found.corrupts_all and not gap.excludes_zero:
            raise InputError(
                f"{found.metric.name} differs by {gap.estimate:.3g} [{gap.low:.3g}, {gap.high:.3g}] between clean and "
                f"corrupted prompts of {gap.n} pairs, which covers 0: there is nothing to divide faithfulness by. "
                "Need pairs whose corrupted prompt changes the metric, or more pairs"
            )
        if writer is not None:
            values = {
                "clean": found.clean_values.tolist(),
                "corrupted": found.corrupted_values.tolist(),
            }
            keep_or_compare(writer, _BASELINE, values)
        return found

    def score_pair_groups(
        self, writer: RunWriter, names: Collection[str], *, progress: bool
    ) -> None:
        for name, (ablation, files) in self.sets_of_scores.items():
            if not files.keys().isdisjoint(names):
                score_edges(
                    self.make_runs(ablation, writer),
                    self.config,
                    writer=writer,
                    name=name,
                    only=names,
                    progress=progress,
                )


def _make_request(
    model: ModelLike, *, config: CircuitConfig | None, fields: Mapping[str, Any]
) -> _Request:
    named = {"model": str(model)} if isinstance(model, str | Path) else {}
    asked = make_config(CircuitConfig, config, {**fields, **named}, where="circuit")
    asked.check_together()
    refuse_unread_fields(asked, "against", reader="circuits.compare and the command")
    if asked.pairs_file is not None:  # what is no pair is refused before the weights are read
        read_pairs(asked.pairs_file, spans=asked.column_by_span, answers_as=asked.answers_as)
    lens = load_model(cast("Any", asked)) if named else as_lens(model)
    asked = replace(asked, model=lens.name)
    Graph.of(lens, neurons=asked.neurons_by_layer)  # refuses a model before anything is written
    given = None if asked.circuit is None else read(asked.circuit, model=lens)
    task = make_task(lens, asked)
    if task.clean.n_sequences < 2:
        raise InputError("a single pair cannot both choose and judge edges; need at least 2 pairs")
    return _Request(
        lens=lens, task=task, config=asked, metric=_make_metric(lens, task, asked), given=given
    )


def _make_metric(lens: LensModel, task: Task, config: CircuitConfig) -> Metric | Callable[..., Any]:
    name = config.metric_name
    if name == "logit_difference":
        return task.metric
    if ":" not in name:
        return metric_spec(config, name).make_metric(
            lens, partial(baseline_logits, lens, task.clean)
        )
    found = import_metric(name)
    return found.function(task) if isinstance(found, MetricOfTask) else found


def _finish_run(
    asked: _Request, writer: RunWriter, *, progress: bool
) -> tuple[Circuit, tuple[str, ...]]:
    from .sentences import circuit_sentences

    task, config, given = asked.task, asked.config, asked.given
    runs = asked.make_runs(config.used_ablation, writer)
    scores = score_edges(runs, config, writer=writer, name="scores", progress=progress)
    half = choose_by_scores(runs, scores, config, templates=task.templates, halved=True)
    writer.write_table("pairs", _pair_table(task, runs))
    curve, gap = _judge_sizes(asked, half, writer, progress=progress)
    areas = curve_areas(curve.loc[curve["by"].isin(["edges", "nodes", "random"])])
    writer.write_table("areas", areas)
    circuit = _choose_circuit(half, curve, config=config, given=given)
    writer.write_table("nodes", circuit.nodes)
    writer.read_or_make("edges", lambda: circuit.every_edge)
    writer.write_table("circuit", circuit.edges)
    writer.write_table("completeness", scores.completeness_by_pair)
    check, nodes = _patch_really(config, circuit, writer, progress=progress)
    if not writer.has("sink.json"):
        writer.write_text("sink.json", json.dumps(sink_fields(circuit, config)))
    core = None
    if config.core:
        core = writer.read_or_make("core", lambda: _find_core(asked, circuit, writer, progress))
    prompt = runs.first_prompt_tokens
    writer.write_table("prompt", pd.DataFrame({"position": range(len(prompt)), "text": prompt}))
    if not writer.has("attention"):
        frame, patterns = explain_attention(circuit)
        if patterns:
            writer.write_tensors("attention_patterns", patterns)
        writer.write_table("attention", frame)
    row = summary_row(
        circuit,
        seen=given is not None and given.found_on == task.clean.hash,
        curve=curve,
        gap=gap,
        areas=areas,
        sink=_read_json(writer, "sink.json"),
        check=check,
        nodes=nodes,
        core=core,
        judge=half.faithfulness_judge,
    )
    row["left_sum"], row["left_pairs"] = left_sum_completeness(runs, config=config)
    summary = pd.DataFrame([row])
    writer.write_csv("summary", summary)
    for path in config.save:
        circuit.save(path)
    sentences = [task.sentence] if config.task != "text" else []
    return circuit, (*sentences, *circuit_sentences(summary, sizes=config.sizes))


def _read_json(writer: RunWriter, name: str) -> dict[str, Any]:
    return json.loads((writer.folder / name).read_text("utf-8"))


def _judge_sizes(
    asked: _Request, half: Circuit, writer: RunWriter, *, progress: bool
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return the curve of faithfulness by size, with the circuit's rows, and the gap that it is divided by."""
    config = asked.config

    def compute_curve_table() -> pd.DataFrame:
        found = half.evaluate(
            config.sizes, random=config.random, nodes=config.nodes, progress=progress
        )
        chosen = _choose_circuit(half, found.frame, config=config, given=asked.given)
        own = _circuit_curve_rows(chosen, half, random=config.random)
        gap = chosen.faithfulness_judge.gap if chosen.given else found.gap
        writer.write_text("judged.json", json.dumps({"gap": asdict(gap)}))
        return pd.concat([found.frame, own], ignore_index=True)

    curve = writer.read_or_make("curve", compute_curve_table)
    return curve, _read_json(writer, "judged.json")["gap"]


def _patch_really(
    config: CircuitConfig, circuit: Circuit, writer: RunWriter, *, progress: bool
) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
    if not config.check:
        return None, None
    pairs, nodes = config.check_pairs, None
    check = writer.read_or_make(
        "check", lambda: circuit.check(edges=config.check, pairs=pairs, progress=progress).frame
    )
    if not METHODS[config.method].patches:
        few = min(pairs, _NODE_PAIRS)
        nodes = writer.read_or_make(
            "check_nodes", lambda: circuit.check_nodes(pairs=few, progress=progress)
        )
    return check, nodes


def _find_core(
    asked: _Request, circuit: Circuit, writer: RunWriter, progress: bool
) -> pd.DataFrame:
    others: dict[str, Circuit] = {}
    for name, (ablation, _) in list(asked.sets_of_scores.items())[1:]:
        runs = asked.make_runs(ablation)
        scores = score_edges(runs, asked.config, writer=writer, name=name, progress=progress)
        others[ablation] = replace(circuit, runs=runs, scores=scores).with_size(circuit.size)
    return core_table(circuit, others, pairs=asked.config.check_pairs, progress=progress)


def _pair_table(task: Task, runs: Runs) -> pd.DataFrame:
    rows, tokenizer = range(runs.n_pairs), runs.lens.tokenizer

    def prompt_text(batch: TokenBatch, row: int) -> str:
        ids = batch.tokens[row, : int(batch.lengths[row])].tolist()
        return " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))

    def answer_text(ids: tuple[tuple[int, ...], ...], row: int) -> str:
        return "|".join(map(runs.token_text, ids[row] if ids else ()))

    return pd.DataFrame(
        {
            "pair": list(rows),
            "template": list(task.templates),
            "clean": [prompt_text(task.clean, row) for row in rows],
            "corrupted": [
                "" if runs.corrupted is None else prompt_text(task.corrupted, row) for row in rows
            ],
            "correct": [answer_text(task.correct, row) for row in rows],
            "incorrect": [answer_text(task.incorrect, row) for row in rows],
            "clean_value": runs.clean_values.numpy(),
            "corrupted_value": runs.corrupted_values.numpy(),
        }
    )


def _choose_circuit(
    half: Circuit, curve: pd.DataFrame, *, config: CircuitConfig, given: SavedCircuit | None
) -> Circuit:
    circuit = choose_size(half, curve)
    if given is not None:
        circuit = take_edges(half, given.map_to_graph(half.graph).chosen, rule="given")
    if not circuit.n_edges:
        need = {
            "threshold": f"a lower threshold than {config.threshold:g}",
            "given": "a circuit that has one",
        }.get(circuit.rule, "more edges")
        raise InputError(
            f"no edge was chosen that lies on a path from the input to the metric; need {need}"
        )
    return circuit


def _circuit_curve_rows(circuit: Circuit, half: Circuit, *, random: int) -> pd.DataFrame:
    """Make the curve's rows for the circuit, all other edges, swapped circuits, and as many edges of largest score.

    The edges of ``half`` were chosen on half of the pairs. All are judged on the other half; a circuit that the user
    gave, and the edges outside it, are judged on all pairs.
    """
    own, like = (circuit, half.with_size(circuit.size)) if circuit.given else (half, circuit)
    swapped = swap_tenth(
        circuit.graph,
        circuit.chosen,
        draws=random,
        generator=np.random.default_rng([circuit.seed, 11]),
    )

    circuits = {"circuit": [circuit.chosen], "without": [~circuit.chosen], "swapped": swapped}
    judged = judge_circuits(own.faithfulness_judge, circuits)
    as_many = judge_circuits(half.faithfulness_judge, {"as_many": [like.chosen]})
    return pd.concat([judged, as_many], ignore_index=True)
