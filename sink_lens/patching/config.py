"""Configuration of ``patch``, a frozen record, and what its prompts must fulfil; torch is not imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..configuration import check_at_least, check_field_types, refuse_unread_fields
from ..data.described import BosCondition
from ..edits.named_edits import KINDS
from ..edits.named_metrics import MetricSpec, metric_spec, refuse_unread_metric_fields
from ..errors import InputError
from ..schema import DEFAULT_MODEL
from .pair_file import AnswersAs, Prompt, read_pairs

MetricName = Literal["sink_mass", "logit_difference", "loss", "kl", "norm", "dominance"]
Direction = Literal["denoising", "noising"]
"""Clean values into the corrupted run (denoising), or the reverse (noising)."""
if TYPE_CHECKING:
    Put = str
else:
    _kinds = (
        name
        for name, kind in KINDS.items()
        if kind.site is None and {"factor", "seed"}.issuperset(kind.takes)
    )
    Put = Literal[("source", *_kinds)]
"""The other run's values, or a kind of edit that can edit any part."""
TRANSFORMER_LENS_AXES = {
    "pos": "position",
    "head_index": "head",
    "src_pos": "key",
    "dest_pos": "position",
}
"""Axis as ``transformer_lens.patching`` calls it -> as it is called here; both are taken."""
EVERY = "every"
"""The stream, and what each layer adds to it, as ``get_act_patch_block_every``."""
OF_REAL_PATCHES = ("screen", "factor", "controls", "batch_size")
"""Options that an approximation does not read."""
_RANGES: dict[str, Any] = {"written": "ranges"}
_METRIC = "{} | sink_lens.edits.evaluation:Metric | Callable[..., Any]"
_EDITS = "Iterable[sink_lens.edits.constructors:Edit] | Edit"
_ANSWERS: dict[str, Any] = {"objects": True, "python": "int | str | Sequence[Any] | None"}


def refuse_equal_tokens(differ: bool) -> None:
    """Refuse prompts that ``differ`` in no token: a patch between them changes nothing."""
    if not differ:
        raise InputError(
            "the clean and the corrupted prompts have the same tokens, so that every patch puts in what is there; need "
            "prompts that differ in a token at least"
        )


def check_pair_lengths(
    clean: Sequence[int], corrupted: Sequence[int], told: Callable[[int], str] = lambda index: ""
) -> None:
    """Refuse sequences that differ in number or length; ``told`` describes a pair, by its index, in the error."""
    if len(clean) != len(corrupted):
        raise InputError(
            f"there are {len(clean)} clean and {len(corrupted)} corrupted sequences; need one of each per pair"
        )
    for index, (one, other) in enumerate(zip(clean, corrupted, strict=True)):
        if one != other:
            raise InputError(
                f"sequence {index} has {one} clean and {other} corrupted tokens{told(index)}; need the same number, so "
                "that each value has a position to go to. Replace words by words with as many tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchConfig:
    """The options of ``patch``: what is patched, at which places, and the metric that is read."""

    model: str = field(default=DEFAULT_MODEL, metadata={"positional": True})
    """The default model's name, a folder written by save_pretrained, a .gguf file or a hub name."""
    clean: tuple[str, ...] = ()
    """A clean text; repeat for several."""
    corrupted: tuple[str, ...] = ()
    """The clean text with something changed, in as many tokens; one for each clean text."""
    pairs_file: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Pairs of prompts with their answers, instead of texts: JSON lines, or a .csv, with clean, corrupted, correct,
    incorrect. Several answers of one kind are a list, or in a .csv a|b; the mean of their logits counts.
    correct_idx and incorrect_idx are token ids."""
    answers_as: AnswersAs | None = None
    """With a file of pairs whose answers are digits in a .csv, or in columns of both kinds: read them as text, or as
    token ids."""
    site: str = field(default="resid_pre", metadata={"metavar": "SITE"})
    """The site that is patched, see sink_lens.SITES; every is resid_pre, attn_out and mlp_out, a run folder each."""
    metric: MetricName | None = field(default=None, metadata={"objects": True, "python": _METRIC})
    """Metric to report; loss is computed on the patched run's own tokens. Answers or a file of pairs alone mean
    logit_difference."""
    by: tuple[str, ...] = field(
        default=("layer", "position"), metadata={"written": "commas", "metavar": "NAMES"}
    )
    """Axes of the sweep: some of layer, position, head, key, unit. Other axes are patched whole."""
    direction: Direction = "denoising"
    """denoising puts clean values into the corrupted run, noising corrupted values into the clean run."""
    layers: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Layers, such as 0-11 or 3,5. Default: all."""
    positions: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Positions, from 0 (queries, in scores and pattern); from -1, its last token, back from each prompt's end.
    Default: all."""
    heads: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Heads; key-value heads in k and v. Default: all."""
    keys: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Keys of scores and pattern. Default: all."""
    units: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Neurons or dimensions. Default: all."""
    sink_position: int = 0
    """Position at which sink_mass, norm and dominance are read."""
    metric_layers: tuple[int, ...] | None = field(default=None, metadata=_RANGES)
    """Layers in which sink_mass is read (default: all), or the one layer in which norm or dominance is read."""
    correct: str | None = field(default=None, metadata=_ANSWERS)
    """For logit_difference: the right token; in Python also its id, or a list with one or several for each pair."""
    incorrect: str | None = field(default=None, metadata=_ANSWERS)
    """For logit_difference: the wrong token, likewise."""
    bos: BosCondition = "auto"
    """First token of each text: as the tokenizer puts it (auto), BOS (with), or no BOS (without)."""
    put: Put = field(
        default="source", metadata={"objects": True, "python": "{} | Callable[..., Any]"}
    )
    """What a patch puts into its part: the other run's values (source), or an edit of the patched run, as in sweep."""
    edits: tuple[Any, ...] = field(
        default=(), metadata={"file_only": True, "objects": True, "python": _EDITS}
    )
    """Edits of ``sink_lens.edits`` that are made in both runs and beside every patch."""
    factor: float | None = None
    """With --put scale: the factor. With --put set: the number that values are set to."""
    controls: int = 5
    """Random parts of the same size (units, heads, positions) as controls of each patch, fewer if there are not as many
    others; 0 for none."""
    batch_size: int | None = None
    """Sequences per forward pass. Default: by length."""
    approximate: bool = False
    """Approximate the patches by gradients (attribution patching), and check a sample against real patches."""
    steps: int = 1
    """Number of points between the embeddings of the two runs over which the gradient is averaged; 1 takes the baseline
    alone."""
    screen: int = 0
    """Patch only this many cells, those with the largest first-order effects; 0 patches all."""
    check: int = 30
    """With --approximate: number of real patches in the check."""
    seed: int = 0
    """Seed of the controls, of the intervals, and of the sample of --approximate."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16 or float64. Default: float32."""

    def __post_init__(self) -> None:
        check_field_types(self)
        object.__setattr__(
            self, "edits", (self.edits,) if hasattr(self.edits, "site") else tuple(self.edits)
        )
        object.__setattr__(
            self, "by", tuple(TRANSFORMER_LENS_AXES.get(name, name) for name in self.by)
        )
        if self.metric is None and any(
            one is not None for one in (self.correct, self.incorrect, self.pairs_file)
        ):
            object.__setattr__(self, "metric", "logit_difference")
        if self.pairs_file is not None and (
            self.clean or self.corrupted or self.correct or self.incorrect
        ):
            raise InputError(
                "a pairs_file was given beside prompts or answers, which it has itself; need one of both"
            )
        check_at_least(self, 1, "steps", "check", "batch_size")
        check_at_least(self, 0, "screen", "controls")

    @property
    def chosen_indices(self) -> dict[str, Any]:
        """Axis (layers, positions, heads, keys, units) -> its chosen indices; None means all."""
        return {
            name: getattr(self, name) for name in ("layers", "positions", "heads", "keys", "units")
        }

    @property
    def put_name(self) -> str:
        """The name of what is put in; of a function its own."""
        put = self.put
        return getattr(put, "__qualname__", type(put).__name__) if callable(put) else put

    def metric_spec(self) -> MetricSpec:
        """Return the metric's name and options as a ``MetricSpec``; with a file of pairs the answers are left out."""
        assert isinstance(self.metric, str)
        refuse_unread_metric_fields(self, self.metric)
        if self.pairs_file is not None and self.metric == "logit_difference":
            return MetricSpec(name=self.metric, options={"correct": 0, "incorrect": 0})
        return metric_spec(self, self.metric)

    @property
    def prompts(self) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        """The clean and the corrupted prompts, those of the file of pairs if one was given."""
        if self.pairs_file is None:
            return self.clean, self.corrupted
        pairs = read_pairs(self.pairs_file, answers_as=self.answers_as)
        return [one.clean for one in pairs], [one.corrupted for one in pairs]

    def refuse_no_metric(self) -> None:
        """Raise InputError if there is neither a metric nor answers, which mean a logit difference."""
        if self.metric is None:
            raise InputError(
                "no metric was given; need correct=... and incorrect=..., whose logits are "
                "compared, a pairs_file with them, or a metric, such as sink_mass"
            )

    def check_together(self) -> None:
        """Raise InputError for options that do not fit together, such as ``steps`` without ``approximate``."""
        self.refuse_no_metric()
        if self.pairs_file is None:
            refuse_unread_fields(self, "answers_as", reader="pairs_file")
        if self.approximate and self.site == EVERY:
            raise InputError(
                f"approximate and site {EVERY} were given; an approximation is of one site"
            )
        if self.approximate:
            refuse_unread_fields(self, *OF_REAL_PATCHES, reader="real patches, without approximate")
        else:
            refuse_unread_fields(self, "check", reader="approximate")
            if not self.screen:
                refuse_unread_fields(self, "steps", reader="approximate and screen")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchView:
    """The options of the command that change only what it prints."""

    top: int = 10
    """Rows of the table that is shown."""


def check_prompts(config: PatchConfig) -> None:
    if config.pairs_file is None and (not config.clean or not config.corrupted):
        raise InputError(
            "patching needs two texts with the same number of tokens; give clean=... and corrupted=..., or "
            "pairs_file=..."
        )
