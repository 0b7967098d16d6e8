"""What training runs have made of position 0, checkpoint by checkpoint, and what each began with."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..chain.config import TraceConfig
from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.load import load
from ..records import Run, RunWriter, read_run
from ..training.checkpoints import checkpoints_of, tokens_by_step, without_bars
from ..training.config import train_config
from ..training.model import model_of
from ..training.saving import read_checkpoint
from .becoming import Became, became
from .initial import dimension_statistics, neuron_statistics
from .measured_models import FEWEST, Draws

_COURSE = ("seed", "step", "tokens", "dimension", "layer", "dominance_ratio", "is_outlier", "are_super", "sink_rate")
_COURSE += ("final_rank", "d_model")
_WRITERS = ("seed", "step", "layer", "neuron", "share", "is_super")


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginConfig:
    """How runs are asked where their sink came from."""

    sequences: int = 32
    """Sequences of the runs' own evaluation data."""
    length: int = 64
    """Tokens of each."""
    random_sequences: int = 512
    """Sequences of random tokens, for the contraction direction."""
    random_length: int = 32
    """Tokens of each."""
    threshold: float = 0.3
    """Of the sink score."""
    permutations: int = 20_000
    """Random choices of the null."""
    last_only: bool = False
    """Of each run the last checkpoint only, without its course."""
    seed: int = 0
    """Of the random tokens and of the null."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: which value, and what is needed.
        """
        lowest = {
            "sequences": 1,
            "length": 10,
            "random_sequences": FEWEST,
            "random_length": 10,
            "permutations": 99,
            "seed": 0,
        }
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise InputError(f"{name} is {getattr(self, name)}; need at least {low}")
        if not 0 < self.threshold < 1:
            raise InputError(f"threshold is {self.threshold}; need a number between 0 and 1, both excluded")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What a run's last checkpoint has, and its initialisation had."""

    last: Became
    dimensions: dict[str, np.ndarray]
    neurons: dict[str, dict[int, np.ndarray]]
    note: str


def measured(
    runs: dict[int, Run],
    batch: TokenBatch,
    *,
    config: OriginConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    writer: RunWriter | None,
    device: str | None,
    progress: bool,
) -> tuple[pd.DataFrame, pd.DataFrame, dict[int, End]]:
    """The tables of all checkpoints, those that were measured before kept, and what each seed came to."""
    tables = {} if writer is None else read_run(writer.folder).tables
    course, writers = (tables[name].to_dict("records") if name in tables else [] for name in ("course", "writers"))
    have = {(row["seed"], row["step"]) for row in course}
    writers = [row for row in writers if (row["seed"], row["step"]) in have]
    aim = TraceConfig(model="", threshold=config.threshold, seed=config.seed)
    ends: dict[int, End] = {}

    def of(path: Path) -> Became:
        if (path / "checkpoint.json").exists():
            read_checkpoint(path)  # whole, byte for byte
        return became(load(str(path), tokenizer=tokenizer, device=device), batch, config=aim)

    total = sum(1 if config.last_only else len(checkpoints_of(run)) for run in runs.values())
    with without_bars(), tqdm(total=total, desc="checkpoints", disable=not progress, leave=False) as bar:
        for seed, run in runs.items():
            found, seen = checkpoints_of(run), tokens_by_step(run)
            final = max(found)
            last = of(found[final])
            ends[seed] = _initial(run, found, batch, last=last, config=config, tokenizer=tokenizer, device=device)
            for step in [final] if config.last_only else found:
                if (seed, step) not in have:
                    one = last if step == final else of(found[step])
                    course.append({"seed": seed, "step": step, "tokens": seen(step)} | _row(one, final=last))
                    writers += [
                        {"seed": seed, "step": step, **asdict(each), "is_super": one.are_super} for each in one.writers
                    ]
                    if writer is not None:
                        writer.write_table("writers", _frame(writers, _WRITERS))
                        writer.write_table("course", _frame(course, _COURSE))
                bar.update()
    return _frame(course, _COURSE), _frame(writers, _WRITERS), ends


def _initial(
    run: Run,
    found: dict[int, Path],
    batch: TokenBatch,
    *,
    last: Became,
    config: OriginConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | None,
) -> End:
    model, note = str(found.get(0, "")), ""
    if 0 not in found:
        model = model_of(train_config(run.config), tokenizer=tokenizer)
        note = f"{run.folder} has no checkpoint 0: its initialisation was built again from its seed"
    lens = load(model, tokenizer=tokenizer, device=device)
    length = min(config.random_length, lens.n_context or config.random_length)
    draws = Draws(sequences=config.random_sequences, length=length, seed=config.seed)
    layers = sorted({one.layer for one in last.writers})
    return End(
        last=last,
        dimensions=dimension_statistics(lens, batch, draws=draws, layer=last.layer),
        neurons=neuron_statistics(lens, batch, layers=layers, dimension=last.dimension) if layers else {},
        note=note,
    )


def _row(one: Became, *, final: Became) -> dict[str, Any]:
    state = one.states[final.layer].double().numpy()
    return {
        "dimension": one.dimension,
        "layer": one.layer,
        "dominance_ratio": one.dominance,
        "is_outlier": one.is_outlier,
        "are_super": one.are_super,
        "sink_rate": one.sink_rate,
        "final_rank": float(rankdata(-state)[final.dimension]),
        "d_model": len(state),
    }


def _frame(rows: list[dict[Any, Any]], columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(columns)).sort_values(["seed", "step"], kind="stable", ignore_index=True)
