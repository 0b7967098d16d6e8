"""``isolate`` and ``amplify``: commands that make a sweep's grid from a few options; the run is that of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..data.described import TOKENS_TABLE, BosCondition, TokenKind
from ..edits.named_metrics import MetricSpec
from ..errors import InputError
from ..schema import CENTRES, DEFAULT_MODEL, FACTORS, Centre
from .config import SweepConfig
from .grid import EditGrid, Grid
from .kinds import SWEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolateOptions:
    """Options of ``sink-lens isolate``."""

    model: str = field(default=DEFAULT_MODEL, metadata={"positional": True})
    """The default model's name, a folder written by save_pretrained, a .gguf file or a hub name."""
    target_positions: tuple[int, ...] = field(default=(), metadata={"option": "target_position"})
    """A position to edit; repeat for several, one at a time. Default: a third of the length."""
    sink_position: int = 0
    """Position of the model's own sink, whose attention is measured too."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """Layers to edit together, such as 0-11 or 3,5. Default: all."""
    controls: int = 5
    """Random controls: the same edit of other positions; 0 for none."""
    tokens: TokenKind = field(default="text", metadata={"table": TOKENS_TABLE})
    """Text, uniformly random ids, or one id repeated."""
    text: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Text file (UTF-8) to cut the sequences from. Default: bundled prose."""
    prompts: tuple[str, ...] = field(default=(), metadata={"option": "prompt"})
    """A prompt, one sequence; repeat for several. Instead of text."""
    bos: BosCondition = "auto"
    """First token of each sequence: as the tokenizer puts it (auto), BOS (with), or no BOS (without)."""
    sequences: int = 8
    """Number of sequences."""
    length: int = field(default=64, metadata={"metavar": "T"})
    """Tokens per sequence, BOS included."""
    device: str | None = field(default=None, metadata={"metavar": "NAME"})
    """cpu, cuda, cuda:1, mps. Default: the first GPU, else the CPU."""
    dtype: str | None = field(default=None, metadata={"metavar": "NAME"})
    """float32, bfloat16, float16 or float64. Default: float32."""
    seed: int = 0
    """Seed of every generator: tokens, draws of the controls, bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmplifyOptions(IsolateOptions):
    """Options of ``sink-lens amplify``."""

    layers: tuple[int, ...] | None = field(default=(0, 1), metadata={"written": "ranges"})
    """Layers to edit together, such as 0-11 or 3,5: those before the token would grow. Default: 0 and 1."""
    factors: tuple[float, ...] = field(
        default=FACTORS, metadata={"written": "commas", "metavar": "F,F"}
    )
    """Factors, such as 1,2,5,30; those below 1 attenuate."""
    centres: tuple[Centre, ...] = field(default=CENTRES, metadata={"option": "centre"})
    """The mean from which the edit moves the aggregated values; none multiplies the values themselves, as a control
    that changes the norm alone. Repeat for several."""


def isolation_sweep(settings: Mapping[str, Any], where: str) -> SweepConfig:
    """Make the sweep in which each target position sees only itself."""
    return _sweep(IsolateOptions(**settings), kind="isolate")


def amplification_sweep(settings: Mapping[str, Any], where: str) -> SweepConfig:
    asked = AmplifyOptions(**settings)
    return _sweep(asked, kind="amplify", factors=asked.factors, centres=asked.centres)


def _sweep(asked: IsolateOptions, *, kind: str, **options: Any) -> SweepConfig:
    if asked.prompts and not asked.target_positions:
        raise InputError("prompts were given and no position to edit; need target_positions=...")
    targets = asked.target_positions or (asked.length // 3,)
    layers = "all" if asked.layers is None else [list(asked.layers)]
    edits = EditGrid(kind=kind, positions=list(targets), layers=layers, **options)
    read = dict.fromkeys((*targets, asked.sink_position))
    masses = [MetricSpec(name="sink_mass", options={"sink_position": one}) for one in read]
    names = IsolateOptions.__dataclass_fields__.keys() & SweepConfig.__dataclass_fields__.keys()
    return SweepConfig(
        grid=Grid(edits=(edits,), controls=asked.controls, seed=asked.seed),
        metrics=(*masses, MetricSpec(name="loss")),
        **{name: getattr(asked, name) for name in names},
    )


_ISOLATE = replace(
    SWEEP,
    name="isolate",
    help="Isolate tokens by the attention mask: does a sink form there? A sweep whose grid is made for you.",
    config="sink_lens.sweeps.presets:IsolateOptions",
    read="sink_lens.sweeps.presets:isolation_sweep",
    example="",
    examples="""\
sink-lens isolate  [dim]a third of the length, in all layers of the default model[/dim]

sink-lens isolate gpt2 --target-position 9 --target-position 20 --layers 0-5

sink-lens isolate --prompt "Call me Ishmael. Some years ago, never mind how long" --target-position 5
""",
)
PRESETS = (
    _ISOLATE,
    replace(
        _ISOLATE,
        name="amplify",
        help="Amplify the variance of a token's aggregated values: does a sink form there? A sweep made for you.",
        config="sink_lens.sweeps.presets:AmplifyOptions",
        read="sink_lens.sweeps.presets:amplification_sweep",
        examples="""\
sink-lens amplify  [dim]a third of the length, in layers 0 and 1 of the default model[/dim]

sink-lens amplify gpt2 --target-position 10 --factors 1,2,5,10 --centre values --centre none

sink-lens amplify --target-position 10 --layers 0 --factors 0,0.5  [dim]attenuate[/dim]
""",
    ),
)
"""Commands that are no kinds of run."""
