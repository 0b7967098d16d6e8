"""Estimate what a run costs before it begins: a kind of run says its passes; time, memory and words are made here.

On the CPU everything comes from the headers of the model's files and from the speed of one product of matrices, so that
no weights are loaded. On a GPU, or if the headers do not say it all, the model is loaded and a pass is timed.
"""

import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .data.described import BosCondition
from .errors import InputError
from .models.bundled import find_local_model, read_header, read_tokenizer
from .models.header import Header
from .models.memory import free_bytes, peak_bytes, weight_bytes
from .text import about_duration_text, duration_text, plural, size_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from .models.lens import LensModel

LIBRARIES = 650_000_000
"""Bytes that the imported libraries take."""
BACKWARD = 3
"""Passes that a forward and a backward count as."""
OF_A_MATRIX = "the speed of a product of matrices: expect a factor of 2"
_BY_HEADER = f"the model's size and {OF_A_MATRIX}"
_TOKENS_A_FORWARD = 1024
_COPIES = 3
"""Copies of what a layer computes that a forward pass holds at a time."""
_COPIES_OF_LOGITS = 1.3
"""The greatest of each row is one more number."""
_PRODUCTS = 4
_OF_A_PARAMETER, _OF_A_TOKEN = 2_000, 10_000_000
"""Operations that take as long as a parameter's or a token's share in the conversion of a GGUF file: files of 0.13B,
0.27B and 1.5B parameters with 49,152 to 262,144 tokens, in Q4_1, Q4_K_M and Q8_0, are within a third."""
_AROUND = "loading, tables and the page"
_OF_A_RUN, _OF_LOADING = 2e12, 2_000
"""Operations that take as long as imports, tables and page, and as loading a parameter or drawing it: a trace of 0.3B
random parameters took 18 and 10 s of a core with 150e9 operations a second, a circuit of 0.13B took 8 and 2 s."""
_ROWS_OF_READING = 64
"""Rows whose products take as long as reading the weights: 896 x 4,864 took 3.0 times as long a row for 32 rows as for
512 of a square product, 2.0 for 64 and 1.3 for 256."""
_GPU_FILES = ("nvidia", "nvhost", "nvgpu", "nvmap", "dxg", "kfd")
"""How the names of the files begin that Linux has for GPUs of NVIDIA (Jetson and Windows' subsystem too) and AMD."""
_OVERHEAD = 400.0
"""The time of a pass over that of its products of matrices alone is 1 and this over the width of the stream: 1.5 to 2.0
in forward passes of SmolLM2-135M (576), 1.4 at 0.5B (896), 1.1 at 1.5B (1,536)."""
_TIMED_TOKENS, _TIMED_SEQUENCES = 2048, 8
"""Most tokens of the forward pass that is timed, and on a CPU most sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCount:
    """Passes that one part of a run needs, with their number of tokens."""

    name: str = ""
    """A run of one part needs no name."""
    forwards: float = 1.0
    backwards: float = 0.0
    """Forward passes that a backward pass follows."""
    tokens: int
    """Tokens of one pass."""
    slowness: float = 1.0
    """Time of a pass, relative to a plain one: a pass that measures takes longer."""
    rows: int | None = None
    """Tokens of a forward pass, if they are few: each takes longer then."""
    only_if: str = ""
    """What must be so for these passes to be made, such as "the model has a sink"."""

    @property
    def n_forwards(self) -> float:
        """A backward pass counts as three, its forward pass included."""
        return self.forwards + BACKWARD * self.backwards

    @property
    def total_tokens(self) -> int:
        return round(self.n_forwards * self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCounts:
    """The passes of a run through its model, from which its cost is estimated."""

    parts: tuple[PassCount, ...]
    sequences: int
    positions: int
    """Tokens of the longest sequence."""
    bytes: int
    """Peak memory beside libraries and the model, in bytes."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other rows of the answer: name -> text."""
    bound: str = "about"
    """The word before the number of passes."""
    apart: str = ""
    """What the time leaves out."""
    memory: str = ""
    """Stands behind the row on memory."""
    refusal: str = ""
    """What to do if memory is short and the run would be refused."""
    unit: str = "sequence"
    each: str = ""
    """What one of the passes is called, if its time is said too."""
    twin: int = 0
    """Bytes, among ``bytes``, of the weights of a second model of the same size."""
    others: tuple[str, ...] = ()
    """Other models that are read in the same passes."""
    unembeds: bool = True
    """Logits are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model that are known before it is run."""

    header: Header
    files: Path | None = None
    """Its folder or GGUF file."""
    lens: "LensModel | None" = None
    """If it had to be loaded."""

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """Return the model's tokenizer; None if it has none, or no file of it."""
        if self.lens is not None:
            return self.lens.tokenizer
        return None if self.files is None else read_tokenizer(self.files)

    def prompt_ids(self, prompts: Sequence[str], *, bos: BosCondition) -> list[list[int]] | None:
        if (tokenizer := self.tokenizer()) is None:
            return None
        from .data.token_ids import prompt_ids

        return prompt_ids(prompts, tokenizer, bos=bos)


CountPasses = Callable[[Any, Sizes], PassCounts | None]
"""From a kind's configuration and the model's sizes to its passes; None if it takes the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The estimated cost of a run."""

    model: str
    device: str
    passes: PassCounts
    seconds_per_token: float
    bytes_weights: int
    """With those of a second model of the same size."""
    bytes_peak: int
    source: str
    """What the time comes from."""
    hints: str = ""
    """What is said about the weights' type."""
    before: str = ""
    """The conversion of GGUF files, which comes before the first pass."""
    seconds_around: float = 0.0
    """Loading, tables and the page; 0 if they are not estimated."""

    def seconds_of(self, part: PassCount) -> float:
        few = 1.0 if part.rows is None else 1 + _ROWS_OF_READING / part.rows
        return part.n_forwards * part.tokens * part.slowness * few * self.seconds_per_token

    @property
    def seconds(self) -> float:
        return sum(map(self.seconds_of, self.passes.parts))


def estimate_cost(config: Any, passes: CountPasses) -> Cost:
    """Estimate the cost of a run; ``passes`` counts its passes from a model's sizes.

    Errors are those of the run itself before it measures.
    """
    if not getattr(config, "device_map", None) and not _runs_on_gpu(config.device):
        sizes = _read_sizes(config.model)
        asked = sizes and passes(config, sizes)
        models = [sizes, *map(_read_sizes, asked.others)] if asked else []
        if asked and None not in models:
            return _estimate_from_sizes(config, asked, [one for one in models if one])
    return _estimate_by_timing(config, passes)


def _read_sizes(name: str) -> Sizes | None:
    files = find_local_model(name)
    header = files and read_header(files)
    return Sizes(header=header, files=files) if header else None


def _estimate_from_sizes(config: Any, asked: PassCounts, models: Sequence[Sizes]) -> Cost:
    found = [one.header for one in models]
    weights = sum(header.weight_bytes(config.dtype) for header in found)
    stored = sum(
        file.stat().st_size
        for one in models
        if one.files
        for file in one.files.glob("*.safetensors")
    )
    is_wider = weights > 1.5 * stored > 0
    times = [
        seconds_per_token(
            header.n_body + asked.unembeds * header.n_vocab,
            slowness=1 + _OVERHEAD / max(1, header.d_model),
        )
        for header in found
    ]
    path, n_weights = models[0].files, sum(header.n_body + header.n_vocab for header in found)
    own = f"; the weights take {size_text(stored)} in the checkpoint's own type (dtype='auto')"
    converted = dict.fromkeys(filter(None, map(_gguf_conversion_sentence, models)))
    around = _OF_A_RUN + _OF_LOADING * (1 + bool(asked.twin)) * n_weights
    return Cost(
        model=path.name if path and path.suffix == ".gguf" else config.model,
        device="the CPU",
        passes=asked,
        seconds_per_token=sum(times) / len(times),
        bytes_weights=weights + asked.twin,
        bytes_peak=LIBRARIES + weights + asked.bytes,
        source=_BY_HEADER,
        hints=own if is_wider else "",
        before="; ".join(converted),
        seconds_around=around / measure_operations_per_second(),
    )


def _estimate_by_timing(config: Any, passes: CountPasses) -> Cost:
    from torch import Generator

    from .data.tokens import random_tokens
    from .engine.forward import run_with
    from .models.inputs import load_model

    lens = load_model(config)
    if (asked := passes(config, Sizes(header=_header_of_model(lens), lens=lens))) is None:
        raise InputError(
            f"{lens.name} has no tokenizer, so no text can be read; need its files beside the weights"
        )
    models = [lens, *(load_model(replace(config, model=name)) for name in asked.others)]
    few = [part.rows for part in asked.parts if part.rows]
    wanted = min(few) if few else min(_TIMED_TOKENS, max(part.total_tokens for part in asked.parts))
    parts = tuple(replace(part, rows=None) for part in asked.parts)  # their passes are timed
    asked = replace(asked, parts=parts)
    most = _TIMED_SEQUENCES if lens.device.type == "cpu" else _TIMED_TOKENS
    batch = random_tokens(
        lens.tokenizer,
        sequences=max(1, min(wanted // asked.positions, most)),
        length=max(2, min(asked.positions, _TIMED_TOKENS)),
        generator=Generator().manual_seed(0),
        vocab_size=lens.d_vocab,
    )
    seconds = 0.0
    for one in models:
        call = partial(run_with, one, batch, layers=[0], quiet=True, progress=False)
        seconds += time_call(call, device=one.device, warm_up=1)
    weights = sum(weight_bytes(one.plain) for one in models)
    libraries = 0 if lens.device.type == "cuda" else LIBRARIES
    return Cost(
        model=lens.name,
        device=str(lens.device),
        passes=asked,
        seconds_per_token=seconds / len(models) / batch.tokens.numel(),
        bytes_weights=weights + asked.twin,
        bytes_peak=max(peak_bytes(lens.device), libraries + weights + asked.bytes),
        source="one timed pass",
    )


def _header_of_model(lens: "LensModel") -> Header:
    weights = {id(one): one for one in lens.plain.parameters()}.values()
    n_weights, n_vocab = sum(one.numel() for one in weights), lens.d_vocab * lens.d_model
    ends = sum(tuple(one.shape) == (lens.d_vocab, lens.d_model) for one in weights)
    same = (
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_model",
        "d_head",
        "d_mlp",
        "n_context",
        "d_vocab",
    )
    return Header(
        **{name: getattr(lens, name) for name in same},
        n_body=max(0, n_weights - ends * n_vocab),
        n_vocab=n_vocab,
        n_weights=n_weights,
        has_tokenizer=lens.tokenizer is not None,
        architecture=lens.family.architecture,
    )


def cost_table(cost: Cost) -> RenderableType:
    asked, first, rows = cost.passes, cost.passes.parts[0], dict(cost.passes.facts)
    title = f"{cost.model}: {plural(asked.sequences, asked.unit)} of up to {asked.positions} tokens, on {cost.device}"
    shown: list[RenderableType] = [Text(title, style="bold")]
    if len(asked.parts) > 1:
        table = Table("pass")
        for name in ("tokens", "time"):
            table.add_column(name, justify="right")
        for part in asked.parts:
            name = f"{part.name}, if {part.only_if}" if part.only_if else part.name
            table.add_row(name, f"{part.total_tokens:,}", duration_text(cost.seconds_of(part)))
        if cost.seconds_around:
            table.add_row(_AROUND, "", duration_text(cost.seconds_around))
        in_all = sum(part.total_tokens for part in asked.parts)
        table.add_row(
            "in all", f"{in_all:,}", duration_text(cost.seconds + cost.seconds_around), style="bold"
        )
        shown.append(table)
    elif asked.each:
        each = cost.seconds * BACKWARD / first.n_forwards
        rows[f"a {asked.each}"] = f"{each:.3g} s in one process"
        rows["tokens per second"] = f"{first.tokens / each:,.0f}"
    else:
        over = f"over all {plural(asked.sequences, asked.unit)}, {first.total_tokens:,} tokens"
        rows["passes"] = f"{asked.bound} {first.n_forwards:.4g} {over}"
    depending = {part.only_if: cost.seconds_of(part) for part in asked.parts if part.only_if}
    sure = about_duration_text(cost.seconds + cost.seconds_around - sum(depending.values()))
    more = "".join(
        f", and {about_duration_text(seconds)} more if {what}"
        for what, seconds in depending.items()
    )
    around = ""
    if cost.seconds_around:
        around = f", with {duration_text(cost.seconds_around)} for {_AROUND}"
    left = ", ".join(filter(None, ["" if around else _AROUND, asked.apart]))
    rows["time"] = f"{sure}{more}{around}, from {cost.source}"
    rows["time"] += f"; not included: {left}" if left else ""
    weights = f"of which {size_text(cost.bytes_weights)} are weights{asked.memory}{cost.hints}"
    rows["memory"] = f"about {size_text(cost.bytes_peak)} at its peak, with libraries, {weights}"
    if asked.refusal and cost.bytes_peak > (free := free_bytes()):
        rows["memory"] += (
            f"; {size_text(free)} are free, so that it would be refused: {asked.refusal}"
        )
    if cost.before:
        rows["before"] = cost.before
    listed = Table(box=None, show_header=False, pad_edge=False)
    for name, text in rows.items():
        listed.add_row(name, Text(text))
    return Group(*shown, listed)


def time_call(
    piece: Callable[[], object], *, device: "torch.device | str", warm_up: int = 0
) -> float:
    """Return the seconds that a call of ``piece`` takes, after ``warm_up`` calls that are not timed."""
    for _ in range(warm_up):
        piece()
    begun = _read_synchronised_clock(device)
    piece()
    return _read_synchronised_clock(device) - begun


def _read_synchronised_clock(device: "torch.device | str") -> float:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_operations_per_second() -> float:
    """Measure operations per second of the CPU in a matrix product; takes half a second."""
    rows, width = 512, 2048
    a, b = np.ones((rows, width), dtype=np.float32), np.ones((width, width), dtype=np.float32)
    # others may run beside it
    fastest = min(timeit.repeat(lambda: a @ b, number=1, repeat=_PRODUCTS + 1)[1:])
    return 2 * rows * width**2 / fastest


def seconds_per_token(n_weights: int, *, slowness: float) -> float:
    """Estimate the seconds of a forward pass on the CPU for each token.

    ``slowness`` is the time of a pass divided by the time of its matrix products alone. The estimate is too low for
    models of a few million parameters, since Python takes most of their time, and for sequences of several thousand
    tokens, since attention does.
    """
    return slowness * 2 * n_weights / measure_operations_per_second()


def max_n_tokens(texts: Sequence[str]) -> int:
    """Return a number of tokens that none of these texts exceeds with any tokenizer, with special tokens."""
    return 8 + 2 * max((len(text.encode()) for text in texts), default=0)


def forward_activation_bytes(header: Header, *, tokens: int) -> int:
    """Estimate the bytes that a forward pass needs beside the weights: one layer and the logits."""
    held = min(tokens, _TOKENS_A_FORWARD)
    logits = round(_COPIES_OF_LOGITS * 4 * held * header.d_vocab)
    return logits + layer_activation_bytes(header, tokens=held)


def layer_activation_bytes(header: Header, *, tokens: int) -> int:
    """Estimate the bytes of one layer's activations."""
    size = 2 * header.n_body * header.d_vocab
    return 4 * _COPIES * tokens * size // (header.n_layers * header.n_vocab)


def _runs_on_gpu(device: str | None) -> bool:
    """Check whether a model loaded with this setting runs on a GPU; None takes a GPU if there is one."""
    if device is not None:
        return device.partition(":")[0] != "cpu"
    if "torch" not in sys.modules and sys.platform == "linux":
        if not any(file.name.startswith(_GPU_FILES) for file in Path("/dev").iterdir()):
            return False
    import torch

    return torch.cuda.is_available()


def _gguf_conversion_sentence(sizes: Sizes) -> str:
    if sizes.files is None or sizes.files.suffix != ".gguf":
        return ""
    header = sizes.header
    operations = _OF_A_PARAMETER * (header.n_body + header.n_vocab) + _OF_A_TOKEN * header.d_vocab
    seconds = about_duration_text(operations / measure_operations_per_second())
    return f"{sizes.files.name} is converted first, once: {seconds} and {size_text(header.weight_bytes())} in the cache"
