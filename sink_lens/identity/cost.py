"""``--dry-run`` of ``preference``, ``contraction`` and ``fingerprint``."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby

import pandas as pd

from ..estimate import time_call
from ..models.memory import used_bytes
from ..report.page import PageTable, page_table
from ..text import duration_text, plural, short_count
from .config import FingerprintConfig, SurveyConfig
from .fingerprint import models_to_compare
from .models_to_measure import RandomSequences
from .preference import last_logits, sequences_that_fit
from .surveys import models_to_survey

_FLOPS = 2e11
"""The most that a dry run times."""


def dry_run_output(config: SurveyConfig | FingerprintConfig) -> Iterator[str | PageTable]:
    """Yield an estimate of size, tokens, time and memory for each variant.

    One forward pass over a few sequences of each variant's first model is timed. Memory is that of this process after
    the pass.

    Raises:
        SinkLensError: what measuring the first model of a variant would raise.
    """
    is_survey = isinstance(config, SurveyConfig)
    found = models_to_survey(config) if is_survey else models_to_compare((), config)
    draws = RandomSequences(sequences=config.sequences, length=config.length, seed=config.seed)
    rows = []
    for variant, of_variant in groupby(found, key=lambda one: one.variant):
        models = list(of_variant)
        begun = time.perf_counter()
        lens = models[0].open(device=config.device, dtype=config.dtype)
        opened = time.perf_counter() - begun
        draws.check_readable_by(lens)
        n_parameters = lens.plain.num_parameters()
        affordable = max(1, int(_FLOPS / (2 * n_parameters * draws.length)))
        size = min(sequences_that_fit(lens, length=draws.length), affordable)
        part = next(iter(draws.chunk(lens, 0).batches(size)))
        seconds = time_call(partial(last_logits, lens, part), device=lens.device, warm_up=1)
        rows.append(
            {
                "variant": variant,
                "models": len(models),
                "parameters": n_parameters,
                "tokens": len(models) * draws.sequences * draws.length,
                "seconds": len(models) * (opened + seconds / part.n_sequences * draws.sequences),
                "memory": used_bytes(),
            }
        )
    frame = pd.DataFrame(rows)
    shown = frame.assign(
        parameters=frame["parameters"].map(short_count),
        tokens=frame["tokens"].map(short_count),
        seconds=frame["seconds"].map(duration_text),
        memory=frame["memory"].map(lambda held: f"{held / 1e9:.2f} GB"),
    )
    names = {"variant": "models", "models": "how many", "seconds": "time"}
    heads = {name: names.get(name, name) for name in shown}
    yield replace(page_table(shown, heads, most=len(shown)), frame=frame)
    in_all = f"in all {duration_text(sum(frame['seconds'].tolist()))} for opening models and for their passes"
    if not is_survey:
        in_all += (
            f", and about a second per pair ({plural(len(found) * (len(found) - 1) // 2, 'pair')})"
        )
    yield f"{in_all}; the memory does not grow with the sequences"
