"""Position or token? The sink of BOS and of ordinary tokens, at position 0 and inside.

A chain that needs BOS is not a chain of the first position.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch

from ..data.token_ids import bos_id
from ..data.tokens import TokenBatch
from ..edits.isolation import isolate
from ..engine.baseline_run import BaselineRun
from ..engine.engine import outcomes_under_edits
from ..measures.attention import uniform_mass
from ..progress import progress_bar
from ..schema import column_names
from .readings import OTHERS_FROM, evenly_spaced
from .setting import Setting, mean_mass

_TIMES = 4.0
_LEAST = 0.1
_SHARE = 0.25


class _Case(NamedTuple):
    """One token at one position, whose sink is measured."""

    position: int
    token: str
    isolated: bool
    tokens: TokenBatch


def placement_table(setting: Setting, *, progress: bool = False) -> pd.DataFrame:
    """Measure the sink of each token at each position: one row per (position, token, isolated).

    The rest of a sink of BOS is no sink of the token that replaces BOS, so a sink must also exceed uniform attention by
    a quarter of what the model's sink does. Cost: three passes at most, two more for a sink that is not at position 0,
    and two from the isolated position on.
    """
    by_tokens = itertools.groupby(_make_cases(setting), key=lambda case: id(case.tokens))
    groups, rows = [list(cases) for _, cases in by_tokens], []
    for cases in progress_bar(groups, label="position or token", progress=progress):
        rows += _run_cases(setting, cases)
    return pd.DataFrame(rows, columns=column_names("trace", "placement"))


def binding_kind(table: pd.DataFrame) -> str:
    """Tell whether the sink follows the position or the token; isolated rows do not count.

    *positional*: an ordinary token at position 0 is a sink, and BOS at a later position is none; *positional, not BOS*
    if BOS at position 0 is none either. *token*: the other way round. *position or token*: both are sinks. *position
    and token*: neither is, but BOS at position 0 is. In a model without BOS only *positional* and *no sink* can be
    told. The kinds with *own* are of a sink at another position; an empty table is *undecided*.
    """

    def is_sink(token: str, *, first: bool | None = None) -> bool:
        """True if this token makes a sink at position 0, inside, or (None) anywhere."""
        chosen = table[(table["token"] == token) & ~table["isolated"].astype(bool)]
        if first is not None:
            chosen = chosen[(chosen["position"] == 0) == first]
        return bool(chosen["is_sink"].any())

    if table.empty:
        return "undecided"
    if bool((table["token"] == "other").any()):
        by_position, by_token = is_sink("other"), is_sink("own")
        alone, neither, own = "own position", "own position and token", "own "
    else:
        by_position, by_token = is_sink("ordinary", first=True), is_sink("bos", first=False)
        told = bool(((table["position"] == 0) & (table["token"] == "bos")).any())
        with_bos = is_sink("bos", first=True)
        alone = "positional, not BOS" if told and not with_bos else "positional"
        neither, own = "position and token" if with_bos else "no sink", ""
    if by_position:
        return f"{own}position or token" if by_token else alone
    return f"{own}token" if by_token else neither


def _make_cases(setting: Setting) -> list[_Case]:
    """Cases with BOS are made only if there is one; ordinary cases have BOS cut from the sequences.

    A sink that is not at position 0 has two more: another token there, and its own token at the target position.
    """
    tokens, at, target = setting.tokens, setting.sink_position, setting.target_position
    bos = None if setting.lens.tokenizer is None else bos_id(setting.lens.tokenizer)
    begins = tokens.bos or (bos is not None and bool((tokens.tokens[:, 0] == bos).any()))
    ids = tokens.tokens[:, 1:] if begins else tokens.tokens
    if ids.shape[1] < target + 2:
        return []
    plain = _batch_with_ids(tokens, ids)
    cases = [
        _Case(0, "ordinary", False, plain),
        _Case(target, "ordinary", False, plain),
        _Case(target, "ordinary", True, plain),
    ]
    if bos is not None:
        first, inner = ids.clone(), ids.clone()
        first[:, 0], inner[:, target] = bos, bos
        inside = _batch_with_ids(tokens, inner)
        cases += [
            _Case(0, "bos", False, _batch_with_ids(tokens, first)),
            _Case(target, "bos", False, inside),
            _Case(target, "bos", True, inside),
        ]
    if at > 0 and max(at, target) + 1 < tokens.n_positions:
        other, moved = tokens.tokens.clone(), tokens.tokens.clone()
        other[:, at], moved[:, target] = tokens.tokens[:, target].roll(1, 0), tokens.tokens[:, at]
        cases += [
            _Case(at, "other", False, replace(tokens, tokens=other)),
            _Case(target, "own", False, replace(tokens, tokens=moved)),
        ]
    return cases


def _batch_with_ids(tokens: TokenBatch, ids: torch.Tensor) -> TokenBatch:
    lengths = torch.full((len(ids),), ids.shape[1])
    return replace(
        tokens, tokens=ids, lengths=lengths, labelled=None, bos=False, bos_condition="without"
    )


def _run_cases(setting: Setting, cases: Sequence[_Case]) -> list[dict[str, object]]:
    tokens, length = cases[0].tokens, cases[0].tokens.n_positions
    cut = setting.tokens.n_positions - length  # BOS
    sinks = {place - cut for place in setting.location.sink_positions}
    inner = [
        place for place in range(min(OTHERS_FROM, length - 2), length - 1) if place not in sinks
    ]
    read = [
        (case.position, *evenly_spaced([p for p in inner if p != case.position], 5))
        for case in cases
    ]
    keys = tuple(sorted({position for some in read for position in some}))
    needs = replace(setting.baseline_run.needs, keys=keys)
    baseline_run = BaselineRun(setting.lens, tokens, plan=setting.baseline_run.plan, needs=needs)
    edits = [[isolate([case.position])] if case.isolated else [] for case in cases]
    found = outcomes_under_edits(baseline_run, edits, needs=replace(needs, sites=()))
    own = mean_mass(setting.baseline, setting.sink_position, setting.sink_layers)
    uniform = _uniform_sink_mass(setting, setting.tokens, setting.sink_position)
    least = _SHARE * max(0.0, own - uniform)
    layers, rows = setting.sink_layers, []
    for case, (run, _), (_, *others) in zip(cases, found, read, strict=True):
        assert run.loss is not None  # it was asked for
        mass = mean_mass(run, case.position, layers)
        beside = [run.mass_at(other, layers=layers) for other in others]
        ordinary = float(torch.stack(beside).nanmean())
        over = mass - _uniform_sink_mass(setting, tokens, case.position)
        norms = torch.stack([run.state_at(p).norm(dim=-1) for p in (case.position, *others)], -1)
        ratio = norms[..., 0] / norms[..., 1:].median(dim=-1).values
        rows.append(
            {
                "position": case.position,
                "token": case.token,
                "isolated": case.isolated,
                "sink_mass": mass,
                "ordinary_mass": ordinary,
                "norm_ratio": float(ratio.mean(1).max()) if others else math.nan,
                "loss_nats": float(run.loss.nanmean()),
                "is_sink": mass > _LEAST and mass > _TIMES * ordinary and over >= least,
                "n": tokens.n_sequences,
            }
        )
    return rows


def _uniform_sink_mass(setting: Setting, tokens: TokenBatch, position: int) -> float:
    masses = [
        uniform_mass(tokens.valid, key=position, reach=setting.lens.reach(layer))
        for layer in setting.sink_layers
    ]
    return float(torch.stack(masses).nanmean())
