"""Configuration of ``circuit``: a frozen record; torch is not imported."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..configuration import check_at_least, check_at_most, check_field_types, refuse_unread_fields
from ..data.described import BosCondition
from ..errors import InputError
from ..patching.pair_file import parse_span_positions
from ..schema import DEFAULT_MODEL
from ..text import parse_ranges
from .methods import METHODS, Method, check_method

Ablation = Literal["resample", "mean_ordinary", "mean_aligned", "mean_all", "zero"]
Choice = Literal["top", "greedy", "threshold"]
ReadyTask = Literal["ioi", "greater-than", "agreement", "capitals", "induction"]
"""Tasks with pairs of prompts that are ready."""
METRICS = ("logit_difference", "sink_mass", "loss", "kl")
"""Metrics of logits, the loss or attention, by name; in the stream a circuit has no node."""
SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""MIB's shares of all edges."""
EDGES, MOST_DRAWN = 200, 60
"""Edges of a circuit whose size nothing says, and of a picture."""
CARRIES, AT_MOST = 0.8, 1.2
"""Faithfulness between which a circuit carries the metric."""
TOLERANCE = 0.01
MOST_PAIRS = 10_000
REST = "rest"
"""Name of the span of the positions that no other has."""
OF_A_RUN = (
    "task",
    "pairs_file",
    "answers_as",
    "pairs",
    "length",
    "metric",
    "metric_layers",
    "circuit",
    "check",
    "check_pairs",
    "core",
    "sizes",
    "nodes",
    "random",
    "against",
    "save",
)
"""Fields that only a run reads."""
OF_A_CHOICE = ("method", "steps", "most_steps", "tolerance", "edges", "choice", "threshold")
"""Fields that say how edges are scored and chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitConfig:
    """The options of ``circuit``: task, metric, how edges are scored and chosen, how the circuit is judged."""

    model: str = field(default=DEFAULT_MODEL, metadata={"positional": True})
    """The default model's name, a folder written by save_pretrained, a .gguf file or a hub name."""
    task: Literal[ReadyTask, "text", "file"] = "ioi"
    """What the model does: a task with pairs of prompts, text (prose, no corrupted prompts), or a file of pairs."""
    pairs_file: str | None = field(default=None, metadata={"metavar": "FILE"})
    """With the task file: JSON lines, or a .csv, with clean, corrupted, correct, incorrect. Several answers of one kind
    are a list, or in a .csv a|b; the mean of their logits counts. correct_idx and incorrect_idx are token ids."""
    answers_as: Literal["text", "ids"] | None = None
    """With a file of pairs whose answers are digits in a .csv, or in columns of both kinds: read them as text, or as
    token ids."""
    pairs: int = 128
    """Number of pairs; with the task text, number of sequences."""
    length: int = 64
    """With the task text: tokens per sequence."""
    metric: str | None = field(default=None, metadata={"metavar": "NAME", "imports": True})
    """The number that the circuit explains: logit_difference, sink_mass, loss, kl (from the clean run), or
    MODULE:FUNCTION, yours: a function of the logits, a metric, or with @circuits.MetricOfTask a function of the task.
    Default: logit_difference; sink_mass with the task text."""
    sink_position: int = 0
    """Position of the sink: where sink_mass is read, and whose share of scores and faithfulness the run says."""
    metric_layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """Layers in which sink_mass is read. Default: all."""
    method: Method = "eap-ig"
    """How edges are scored: by gradients, or each by a real patch (exact; small models). eap-ig, eap-ig-left, eap,
    eap-corrupted and gim miss edges that real patches find: all of them where parts cancel before a threshold (a run
    names the nodes), and against zero, gim fewest; eap and eap-corrupted also where attention or neurons are saturated.
    gim takes one gradient, with rules for norms and softmax: far better than eap-ig against zero, as good on wired
    mechanisms otherwise, a little worse for indirect objects in the default model."""
    ablation: Ablation | None = None
    """The value that takes the place of what an edge carries. Default: resample; mean_ordinary with the task text."""
    freeze: Literal["sink"] | None = None
    """Keep the path through the sink's position at its clean values (sink), so that no edge there carries anything."""
    steps: int = 5
    """Initial number of points of integrated gradients; it is doubled for a pair until the pair's sum is complete."""
    most_steps: int = 160
    """Maximum number of points of integrated gradients."""
    tolerance: float = TOLERANCE
    """A pair's sum is complete if its error is at most this share of the mean difference of the metric."""
    edges: int | None = None
    """Number of edges of the circuit. Default: the smallest size of the curve from which on every larger circuit keeps
    at least 80% of the metric, by the lower end of its interval, and at most 120%; 200 if there is none."""
    circuit: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Judge this circuit instead of choosing one: EAP-IG's .json or .pt, a run folder, a .parquet of every edge, or a
    .csv of edges or nodes."""
    choice: Choice = "top"
    """How edges are chosen: the largest scores (top), a connected set grown from the output (greedy), or all scores
    above a threshold (threshold)."""
    threshold: float = 0.0
    """With --choice threshold: the smallest score that is chosen."""
    neurons: tuple[str, ...] = field(default=(), metadata={"metavar": "LAYER:N,N"})
    """Neurons that form a node of their own, as LAYER:NEURONS, such as 2:15,870; repeat for more layers."""
    spans: tuple[str, ...] = field(
        default=(), metadata={"metavar": "NAME=N-N", "written": "pairs", "option": "span"}
    )
    """A span of positions that has edges of its own, such as sink=0, or the name of a column of the pairs file that has
    each pair's; negative positions count from the last token, and positions in no span are one more, rest. Default:
    edges are summed over all positions."""
    sizes: tuple[float, ...] = field(default=SIZES, metadata={"written": "commas"})
    """Sizes of the circuits on the curve, as shares of all edges."""
    nodes: bool = True
    """Also judge circuits of whole nodes."""
    random: int = 3
    """Random circuits of the same size and depth beside each size, and beside the circuit as many with a random tenth
    of its edges swapped for random ones between its own nodes."""
    check: int = 20
    """Number of edges whose score is compared with a real patch; every node is really patched too. 0 for neither."""
    check_pairs: int = 8
    """Number of pairs in the comparison of --check."""
    core: bool = False
    """Score the edges with other ablations too, and say which are in every circuit (takes its own time)."""
    against: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Compare two circuits, the argument and FILE, each a file or a run, and stop."""
    save: tuple[str, ...] = field(default=(), metadata={"metavar": "FILE"})
    """Also write the circuit as FILE: .json (EAP-IG), .graph.json (Neuronpedia), .html, .svg, .png, .pdf, .parquet,
    or a folder (MIB); repeat for several."""
    bos: BosCondition = "auto"
    """First token of each prompt: as the tokenizer puts it (auto), BOS (with), or no BOS (without); induction has BOS
    under auto wherever there is one."""
    batch_size: int | None = None
    """Pairs in a pass. Default: as many as fit into its memory, 32 at most."""
    seed: int = 0
    """Seed of the pairs, halves, bootstraps and random circuits."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16 or float64. Default: float32."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_at_least(self, 1, "steps", "most_steps", "edges", "check_pairs", "batch_size")
        check_at_least(self, 2, "pairs", "length")
        check_at_least(self, 0, "random", "check", "threshold", "sink_position")
        check_at_most(self, MOST_PAIRS, "pairs")
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance is {self.tolerance}; need a share between 0 and 1")
        if not self.sizes or min(self.sizes) <= 0 or max(self.sizes) > 1:
            raise InputError(
                f"sizes are {list(self.sizes)}; need shares of all edges, above 0 and at most 1"
            )

    def check_together(self) -> None:
        """Raise InputError for fields that do not fit together, such as ``threshold`` and the choice "top"."""
        if self.metric is not None and self.metric not in METRICS and ":" not in self.metric:
            raise InputError(
                f"metric is {self.metric!r}; need one of {', '.join(METRICS)}, or your own MODULE:FUNCTION"
            )
        if (self.pairs_file is not None) != (self.task == "file"):
            raise InputError("the task file and a pairs_file belong together; give both or neither")
        if self.task != "file":
            refuse_unread_fields(self, "answers_as", reader="task file")
        if self.circuit is not None and (self.edges is not None or self.choice != "top"):
            raise InputError(
                "a circuit was given, and edges or choice would choose another; need one of them"
            )
        self._check_choice()
        if not (self.check or self.core):
            refuse_unread_fields(self, "check_pairs", reader="check and core")
        if self.task != "text":
            refuse_unread_fields(self, "length", reader="task text")
        if self.metric_name != "sink_mass":
            refuse_unread_fields(self, "metric_layers", reader="metric sink_mass")
        for name, at in self.column_by_span.items():
            if self.task != "file":
                raise InputError(
                    f"the span {name} has the positions {at!r}, which may be a column of a file of pairs, and the task "
                    f"is {self.task}; need positions such as {name}=-2,-1 or {name}=4-6, or the task file"
                )
        for path in self.save:
            check_save_path(path)
        if self.task == "text" and self.metric_name == "logit_difference":
            raise InputError(
                "text has no right and wrong answer; need metric sink_mass or loss, or another task"
            )
        if self.task == "text" and self.used_ablation == "resample":
            raise InputError(
                "text has no corrupted prompts; need ablation mean_ordinary, mean_aligned, mean_all or zero"
            )

    @property
    def metric_name(self) -> str:
        """Name of the metric: ``metric``, or the default of the task."""
        return self.metric or ("sink_mass" if self.task == "text" else "logit_difference")

    @property
    def used_ablation(self) -> Ablation:
        """Name of the ablation: ``ablation``, or the default of the task."""
        return self.ablation or ("mean_ordinary" if self.task == "text" else "resample")

    def check_for_find(self) -> None:
        """Raise InputError for a method that cannot be used, or fields that only ``circuits.run`` reads."""
        refuse_unread_fields(self, *OF_A_RUN, reader="circuits.run")
        if self.freeze is None:
            refuse_unread_fields(self, "sink_position", reader="freeze")
        self._check_choice()

    def _check_choice(self) -> None:
        if self.choice != "threshold":
            refuse_unread_fields(self, "threshold", reader="choice threshold")
        else:
            refuse_unread_fields(self, "edges", reader="the choices top and greedy")
            if not self.threshold:
                raise InputError(
                    "choice threshold takes every edge whose score is at least 0; need a threshold above 0"
                )
        check_method(self.method, self.used_ablation)
        if not METHODS[self.method].integrates:
            refuse_unread_fields(self, "steps", reader="the methods eap-ig and eap-ig-left")
        if not METHODS[self.method].doubles:
            refuse_unread_fields(self, "most_steps", "tolerance", reader="the method eap-ig")
        elif self.steps > self.most_steps:
            raise InputError(
                f"steps is {self.steps} and most_steps {self.most_steps}; need at most as many at first as in the end"
            )

    @property
    def n_curve_circuits(self) -> int:
        """Number of circuits that the curve evaluates: those of each size, of whole nodes, and random ones."""
        return len(self.sizes) * (1 + self.nodes) + self.random * sum(one < 1 for one in self.sizes)

    @property
    def neurons_by_layer(self) -> dict[int, tuple[int, ...]]:
        """Layer -> the neurons that form a node of their own, from the texts in ``neurons``."""
        found: dict[int, tuple[int, ...]] = {}
        for one in self.neurons:
            layer, colon, numbers = one.partition(":")
            if not colon or not layer.strip().isdigit():
                raise InputError(f"neurons {one!r}; need LAYER:N,N, such as 2:15,870")
            some = [*found.get(int(layer), ()), *parse_ranges(numbers, name="neurons")]
            found[int(layer)] = tuple(dict.fromkeys(some))
        return found

    @property
    def positions_by_span(self) -> dict[str, tuple[int, ...] | str]:
        """Name of each span -> its positions, or the column of the pairs file that has its positions."""
        found: dict[str, tuple[int, ...] | str] = {}
        for one in self.spans:
            name, equals, numbers = one.partition("=")
            name = name.strip()
            if not equals or not name:
                raise InputError(f"span {one!r}; need NAME=POSITIONS, such as sink=0")
            if name in found:
                raise InputError(
                    f"span {name} was given twice; need its positions once, as NAME=0,4-6"
                )
            is_column = any(one.isalpha() for one in numbers)
            found[name] = numbers.strip() if is_column else parse_span_positions(numbers)
        return found

    @property
    def column_by_span(self) -> dict[str, str]:
        """Name of each span that is given by a column of the pairs file -> that column."""
        return {name: at for name, at in self.positions_by_span.items() if isinstance(at, str)}


ENDINGS = (".json", ".graph.json", ".svg", ".png", ".pdf", ".html", ".parquet")


def check_save_path(path: str | Path) -> None:
    """Raise InputError if the path's ending is not that of a format for circuits; no ending means a folder."""
    path = Path(path)
    if path.suffix and not path.name.lower().endswith(ENDINGS):
        raise InputError(
            f"{path} has an ending that is not known; need one of {', '.join(ENDINGS)}, or a folder"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitView:
    """The options of the command that change only what it prints."""

    top: int = 12
    """Rows of the table that is shown."""
