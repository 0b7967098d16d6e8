"""Plan the forward passes of many cells: how many share one pass, given the free memory and their cones."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path as FilePath
from typing import Literal, get_args

import psutil
import torch

from ..data.tokens import TokenBatch
from ..models.lens import LensModel
from ..records.reading import damaged_file_error
from .needs import Needs

Path = Literal["blocks", "bridge"]

CELLS_A_BLOCK = 32
"""A block is computed and written as a whole; smaller cones and larger packs allow more."""
_CPU_TOKENS = 512
"""More tokens per forward make a CPU no faster."""
_GPU_TOKENS = 65536
_MOST_LANES = 8
"""With more cores than this, each forward on a CPU has several."""
_MEMORY_FRAC = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run keeps its plan, so that a resumed run uses the same."""

    path: Path
    """``blocks``: the bridge's blocks with Hugging Face's attention, for cells that can run so; ``bridge``: its own."""
    prompts: int
    """Sequences in a forward."""
    pack: int
    """Cells in a forward over all positions."""
    cut: bool = True
    """Positions before the first edited one are skipped; a forward then takes more cells."""
    lanes: int = 1
    """Forwards side by side, see ``threads``."""
    n_compared: int | None = field(default=None, compare=False)
    """Cells that were compared with the bridge, besides the baseline; None before that."""
    deviation: float = field(default=math.nan, compare=False)
    """The worst of the compared numbers' distances from the bridge's; nan before that."""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def choose_plan(lens: LensModel, tokens: TokenBatch, needs: Needs, *, n_cells: int) -> Plan:
    """Choose how many sequences and cells share a forward pass, and how many passes run at once."""
    on_cpu, on_gpu = lens.device.type == "cpu", lens.device.type == "cuda"
    free = torch.cuda.mem_get_info(lens.device)[0] if on_gpu else psutil.virtual_memory().available
    room = int(_MEMORY_FRAC * free) // bytes_per_token(lens, tokens.n_positions, needs)
    budget = max(1, min(room, _CPU_TOKENS if on_cpu else _GPU_TOKENS))
    prompts = tokens.n_sequences
    if not needs.together:
        prompts = min(prompts, max(1, budget // tokens.n_positions))
    pack = max(1, min(n_cells, budget // (prompts * tokens.n_positions)))
    lanes = min(torch.get_num_threads(), _MOST_LANES) if on_cpu else 1
    lanes = max(1, min(lanes, -(-n_cells // pack), room // (prompts * pack * tokens.n_positions)))
    if lens.own_attention is not None:  # it may read the lengths, or other tokens' queries
        return Plan(path="bridge", prompts=prompts, pack=1, cut=False)
    return Plan(path="blocks", prompts=prompts, pack=pack, lanes=lanes)


def choose_even_plan(lens: LensModel, tokens: TokenBatch, needs: Needs) -> Plan:
    """Choose a plan for few cells: the sequences are spread evenly over the forwards that run at once."""
    plan = choose_plan(lens, tokens, needs, n_cells=_MOST_LANES * tokens.n_sequences)
    if needs.together:
        return plan
    budget = plan.prompts * plan.pack * tokens.n_positions
    batches = plan.lanes * max(1, round(tokens.tokens.numel() / (plan.lanes * budget)))
    prompts = -(-tokens.n_sequences // batches)
    pack = max(1, budget // (prompts * tokens.n_positions)) if plan.cut else 1
    return replace(plan, prompts=prompts, pack=pack)


def bytes_per_token(lens: LensModel, n_positions: int, needs: Needs) -> int:
    """Estimate the bytes per token of a forward over ``n_positions``."""
    width = 10 * lens.d_model + 4 * lens.d_mlp + 6 * lens.n_heads * lens.d_head
    width += 4 * lens.n_heads * n_positions
    if needs.whole and needs.makes_logits:
        width += 3 * lens.d_vocab
    return width * torch.finfo(lens.dtype).bits // 8


def read_plan(path: FilePath) -> Plan:
    """Read the plan that a run began with; refuse a damaged file."""
    try:
        plan = Plan(**json.loads(path.read_text(encoding="utf-8")))
        counts = (plan.prompts, plan.pack, plan.lanes)
        if plan.path not in get_args(Path) or not all(
            type(one) is int and 0 < one < 2**20 for one in counts
        ):
            raise ValueError(f"it holds {plan}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged_file_error(path, error) from error
    return plan
