"""Plan the forward passes of a sweep: how many cells share one pass, given the free memory."""

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.lens import LensModel
from .needs import Needs

Mode = Literal["exact", "fast"]
MODES = ("exact", "fast")
Path = Literal["plain", "bridge"]

CELLS_A_BLOCK = 32
"""A block is what is computed, written and lost at once; a larger pack makes a larger block."""
_CPU_TOKENS = 512
"""A CPU is as fast as it gets with this many tokens a forward, and more of them only take memory."""
_GPU_TOKENS = 65536
_MOST_LANES = 8
"""Forwards at once on a CPU; where it has more cores, each forward has several."""
_MEMORY_FRAC = 0.25
"""Share of the free memory that forward passes may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a sweep's forward passes; the run keeps it, so that a resumed sweep uses the same plan."""

    mode: Mode
    path: Path
    """The module that runs the cells which both modules can run."""
    prompts: int
    """Number of sequences in a batch of prompts."""
    pack: int
    """Number of cells in a forward pass."""
    lanes: int = 1
    """Forwards side by side on the cores of a CPU, see ``lanes``."""


def check_mode(mode: object) -> None:
    """Refuse an unknown mode.

    Raises:
        InputError: the mode is unknown.
    """
    if mode not in MODES:
        raise InputError(f"mode is {mode!r}; need one of {', '.join(MODES)}")


def plan_of(lens: LensModel, tokens: TokenBatch, needs: Needs, *, mode: Mode, n_cells: int) -> Plan:
    """Choose the sequences and cells per pass, and the passes at once, that the device has room for and uses well."""
    room, on_cpu = _tokens_that_fit(lens, tokens, needs), lens.device.type == "cpu"
    budget = max(1, min(room, _CPU_TOKENS if on_cpu else _GPU_TOKENS))
    prompts = min(tokens.n_sequences, max(1, budget // tokens.n_positions))
    pack = max(1, min(n_cells, budget // (prompts * tokens.n_positions)))
    if mode == "exact" and lens.family.down is None:
        pack = 1  # an expert multiplies all its tokens at once: how many there are moves the last bit
    lanes = min(torch.get_num_threads(), _MOST_LANES) if on_cpu else 1
    lanes = max(1, min(lanes, -(-n_cells // pack), room // (prompts * pack * tokens.n_positions)))
    return Plan(mode=mode, path="plain", prompts=prompts, pack=pack, lanes=lanes)


def bytes_a_token(lens: LensModel, n_positions: int, needs: Needs) -> int:
    """Memory of a forward for each token, roughly: streams, projections, the MLP, the pattern, the logits."""
    width = 10 * lens.d_model + 4 * (lens.d_mlp or 4 * lens.d_model) + 6 * lens.n_heads * lens.d_head
    width += 4 * lens.n_heads * n_positions
    if needs.whole:
        width += 3 * lens.d_vocab
    return width * torch.finfo(lens.dtype).bits // 8


def _tokens_that_fit(lens: LensModel, tokens: TokenBatch, needs: Needs) -> int:
    if lens.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(lens.device)
    else:
        free = psutil.virtual_memory().available
    return int(_MEMORY_FRAC * free) // bytes_a_token(lens, tokens.n_positions, needs)
