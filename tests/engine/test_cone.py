"""Nothing outside a cell's cone is computed, and the numbers are those of one forward of the bridge under hooks."""

import functools
from dataclasses import replace

import pytest
import torch
from cell_fixtures import numbers
from lenses import ALL_FAMILIES, lens_of
from rounding import MOVED, assert_close
from spying import spied

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import Edit, edit, freeze, scale, set_value, zero
from sink_lens.edits.isolation import isolate
from sink_lens.edits.metrics import (
    Metric,
    dominance,
    evaluate,
    logit_difference,
    loss,
    norm,
    sink_mass,
)
from sink_lens.engine.cells import cell_of_edits, touched_places
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.engine.trust import make_accurate_engine
from sink_lens.models.sites import SITES, sites_of
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES

LENGTHS = (20, 17, 20)
METRICS = (
    sink_mass(0),
    sink_mass(11),
    replace(sink_mass(2, layers=[2]), name="late"),
    dominance(2, layer=1),
    dominance(12, layer=2),
    norm(12, layer=2, site="z"),
    loss(),
    Metric(
        name="logits",
        function=lambda run: (run.logits[..., 5] * run.valid).sum(1),
        logits=True,
        layers=(),
    ),
)
METRICS = tuple(replace(one, name=f"{place} {one.name}") for place, one in enumerate(METRICS))
IN_HYBRIDS = tuple(
    replace(norm(12, layer=3, site="z"), name=one.name)
    if one.sites
    else replace(sink_mass(2, layers=[3]), name=one.name)
    if "late" in one.name
    else one
    for one in METRICS
)
"""The same, where attention is in layers 1 and 3."""
SCORED = (logit_difference(5, 6), replace(logit_difference(7, 8, position=1), name="early logits"))


@functools.cache
def tokens_of():
    ids = torch.randint(
        3, VOCAB_SIZE, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3)
    )
    return from_tensor(ids, lengths=torch.tensor(LENGTHS))


def kinds_of(site: str, layer: int, position: int, *, n_kv_heads: int) -> list[Edit]:
    """Edits of each kind at one layer and from one position on."""
    layers = {"layers": [layer]} if SITES[site].per_layer else {}
    part, axes = {"positions": [position]}, SITES[site].axes.split()
    if "head" in axes or "kv_head" in axes:
        part["heads"] = [1 if "head" in axes else min(1, n_kv_heads - 1)]
    if site == "scores":  # what is masked stays masked
        return [scale(site, 0.1, **part, **layers), isolate([position], **layers)]
    found = [zero(site, **part | {"positions": [position, 18]}, **layers)]
    if site == "pattern":
        return [*found, zero(site, **part, keys=range(position - 1), **layers)]
    found.append(
        edit(site, lambda x, at: x.flip(-1) + 0.5 * x, **part, **layers)
    )  # a norm undoes x 0.5
    found.append(set_value(site, 0.25, **part, **layers))
    found.append(
        edit(
            site,
            lambda x, at: x + x.flip(-1) * (x.mean((1, -1), keepdim=True) + at.positions[0]),
            **part,
            **layers,
        )
    )
    if site == "resid_pre":
        given = torch.randn(len(LENGTHS), 1, 48, generator=torch.Generator().manual_seed(4))
        found.append(freeze(site, {layer: given}, positions=[position], layers=[layer]))
    return found


@functools.cache
def cases_of(family: str) -> tuple[tuple[Edit, ...], ...]:
    """Edits of every site and kind, at early and late layers and positions; and several at once."""
    found = []
    for place, site in enumerate(sites_of(lens_of(family).family)):
        # of the families that came later one layer a site, which takes a third of the time
        layers = (
            ((0, 9), (2, 3), (1, 13))
            if family in TINY_FAMILIES
            else (((0, 9), (2, 3), (1, 13))[place % 3],)
        )
        for layer, position in layers:
            if SITES[site].per_layer:
                own = lens_of(family).layers_with(site)
                layer = next((one for one in own if one >= layer), own[-1])
            kinds = kinds_of(site, layer, position, n_kv_heads=lens_of(family).n_kv_heads)
            found.append((kinds[(place + layer) % len(kinds)],))
    of_attention = lens_of(family).attention_layers
    found.append(
        (
            scale("k", 2.0, layers=of_attention[:1], positions=[7]),
            zero("mlp_out", layers=[1], positions=[6]),
        )
    )
    found.append((zero("z", layers=[1], positions=[12]), scale("final", 0.5, positions=[8])))
    found.append((zero("v", layers=lens_of(family).layers_with("v")[-1:]),))
    return tuple(found)


@functools.cache
def oracle(family: str):
    lens = lens_of(family)
    options = {"positions": (0, 11, 2, 12), "sites": ("z",), "logits": True, "quiet": True}
    return [
        run_with(lens, tokens_of(), edits, batch_size=3, **options) for edits in cases_of(family)
    ]


def metrics_of(family: str) -> tuple[Metric, ...]:
    return METRICS if 2 in lens_of(family).attention_layers else IN_HYBRIDS


def assert_every_cell_moves(family: str) -> None:
    """Every cell moves some number by a hundred times what rounding is allowed."""
    options = {"positions": (0, 11, 2, 12), "sites": ("z",), "logits": True}
    unedited = run_with(lens_of(family), tokens_of(), batch_size=3, **options)
    before = [evaluate(metric, unedited) for metric in metrics_of(family)]
    for cell, outcome in enumerate(oracle(family)):
        after = [evaluate(metric, outcome) for metric in metrics_of(family)]
        moves = [
            ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(0).max()
            for a, b in zip(after, before, strict=True)
        ]
        assert max(moves) >= MOVED, (cell, cases_of(family)[cell], float(max(moves)))


SETS = {
    "all": METRICS,
    "scored": SCORED,
    "late": METRICS[2:3],
    "early": (sink_mass(11, layers=[0, 1]),),
}
PACKS = Plan(path="blocks", prompts=3, pack=4)
WAYS = {
    "bridge": replace(PACKS, path="bridge"),
    "lanes": replace(PACKS, pack=2, lanes=3, cut=False),
}
CASES = [
    pytest.param(
        family,
        metrics,
        PACKS,
        id=f"{family}-{name}",
        marks=pytest.mark.every_family if name == "all" and family in TINY_FAMILIES else (),
    )
    for family in ALL_FAMILIES
    for name, metrics in SETS.items()
    if name == "all"
    or (family in TINY_FAMILIES and (name not in ("late", "early") or family == "gemma3"))
]
CASES += [
    pytest.param(family, METRICS, WAYS[way], id=f"{family}-{way}")
    for way, families in {
        "bridge": ("llama", "gpt_neox"),
        "lanes": ("llama", "qwen3", "headnorm_gate"),
    }.items()
    for family in families
]


@pytest.mark.parametrize(("family", "metrics", "plan"), CASES)
def test_the_cone_gives_what_one_forward_of_the_bridge_gives(family, metrics, plan):
    lens = lens_of(family)
    if metrics == METRICS:
        assert_every_cell_moves(family)
        metrics = metrics_of(family)
    engine = Engine(
        lens, tokens_of(), [cell_of_edits(edits) for edits in cases_of(family)], metrics, plan=plan
    )
    found = numbers(engine)
    assert {cell for cell, _ in found} == set(range(len(cases_of(family))))
    for cell, outcome in enumerate(oracle(family)):
        for metric in metrics:
            assert_close(found[cell, metric.name], evaluate(metric, outcome).double())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_where_the_check_keeps_a_plan_every_cell_agrees_with_the_bridge(family):
    """The check compares some cells, and these are all."""
    cells = [cell_of_edits(edits) for edits in cases_of(family)]
    kept = make_accurate_engine(lens_of(family), tokens_of(), cells, METRICS, plan=PACKS).plan
    assert kept == PACKS
    assert kept.deviation < 1e-5 * 50  # of the largest norm


def rows_run(engine: Engine) -> list[tuple[str, int]]:
    """Every projection that runs for the cells of an engine: its name and its rows."""
    ran: list[tuple[str, int]] = []
    for block in engine.blocks:
        engine.run(block)  # what is known of the clean run is computed once
    modules = {
        name: module
        for layer, block in enumerate(engine.lens.bridge.blocks)
        for name, module in ((f"q {layer}", block.attn.q), (f"down {layer}", block.mlp.out))
    }
    with spied(modules, lambda name, out: ran.append((name, out.shape[-2]))):
        for block in engine.blocks:
            engine.run(block)
    return ran


def test_nothing_outside_the_cone_is_computed():
    lens = lens_of("llama")
    cells = [cell_of_edits(scale("resid_pre", 0.5, layers=[1], positions=[at])) for at in (4, 15)]
    both = Engine(lens, tokens_of(), cells, [logit_difference(5, 6)], plan=PACKS)
    # 16 and 5 positions of three sequences, from layer 1 on
    assert rows_run(both) == [(name, 63) for name in ("q 1", "down 1", "q 2", "down 2")]
    early = Engine(lens, tokens_of(), cells, [sink_mass(0, layers=[1])], plan=PACKS)
    assert rows_run(early) == [("q 1", 63)]
    whole = Engine(
        lens, tokens_of(), cells, [logit_difference(5, 6)], plan=replace(PACKS, cut=False)
    )
    assert rows_run(whole)[0] == ("q 1", 120)
    none = Engine(lens, tokens_of(), cells, [sink_mass(0, layers=[0])], plan=PACKS)
    assert rows_run(none) == []


def test_the_first_position_is_the_lowest_that_an_edit_touches_and_0_where_one_reads():
    reading = edit("z", lambda x, at: x + at.read.mean(), reads="v", layers=[1], positions=[7])
    late, early = (
        scale("z", 2.0, layers=[1], positions=[9, 6]),
        scale("v", 2.0, layers=[2], positions=[8]),
    )
    assert touched_places([late, early]) == ((("z", (1,)), ("v", (2,))), 6)
    assert touched_places([late, reading]) == ((("z", (1,)), ("z", (1,)), ("v", (1,))), 0)
    assert touched_places([zero("z")])[1] == 0
