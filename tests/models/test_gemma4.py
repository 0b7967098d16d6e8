"""Gemma 4: heads differ by layer; layers attend to keys of another, scale the stream, add an input of their own."""

import math
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch
from lenses import lens_of, speaking, tokens
from rounding import assert_rows_close

from sink_lens import patching
from sink_lens.activations.record import capture
from sink_lens.chain.locate import GrowthStep
from sink_lens.circuits.graph import Graph
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.amplification import amplify, centring_means
from sink_lens.edits.constructors import edit, freeze, scale
from sink_lens.engine import partial_pass
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.generation import generate
from sink_lens.engine.plan import Plan
from sink_lens.errors import InputError, ModelError, SiteError
from sink_lens.models.load import load, wrap
from sink_lens.models.sites import sites_of
from sink_lens.models.weights import attention_weights, norm_weights
from sink_lens.studies.card import card
from sink_lens.studies.observed import ObservedModel
from sink_lens.sweeps.grid import EditGrid, Grid
from sink_lens.sweeps.sweep import sweep
from sink_lens.training.monitor import SinkMonitor
from sink_lens.training.prefix import get_prefix_model
from tests.tiny_families import tiny

STORED = partial_pass._baseline_keys_and_values


def test_a_layer_is_amplified_around_the_values_of_the_layer_that_it_attends_to():
    lens = lens_of("gemma4")
    every, some = (centring_means(lens, n_tokens=64, layers=layers) for layers in (None, [2]))
    assert every.values.keys() == every.aggregated.keys() == {0, 1, 2, 3}
    for layer, source in ((2, 0), (3, 1)):
        assert torch.equal(every.values[layer], every.values[source])
    torch.testing.assert_close(some.values[2], every.values[2])
    z, edited = (
        run_with(lens, tokens(), edits, sites=("z_raw",), layers=[2]).tensors["z_raw", 2][:, 5]
        for edits in ((), amplify(2.0, positions=[5], layers=[2], means=some))
    )
    assert_rows_close(edited, 2 * z - some.values[2])


def furthest(lens, sites, *, layers=(1, 2, 3), positions=(0, 7, 8, 15)):
    """The largest deviation of a cell from its pass of the bridge, in units of the metric's size."""
    read = (metrics.loss(), metrics.sink_mass(2, layers=[3]), metrics.norm(18, layer=3))
    edits = [
        edit(site, lambda x, at: x.flip(-1) + 0.5 * x, layers=[layer], positions=[position])
        for site, layer, position in product(sites, layers, positions)
        if layer in lens.layers_with(site)
    ]
    plan = Plan(path="blocks", prompts=3, pack=4)
    engine = Engine(lens, from_tensor(tokens(3)), list(map(cell_of_edits, edits)), read, plan=plan)
    frame = pd.concat([engine.run(block) for block in engine.blocks])
    assert frame["error"].isna().all(), frame["error"].dropna().tolist()
    off = 0.0
    for place, one in enumerate(edits):
        outcome = run_with(
            lens, tokens(3), one, positions=(2, 18), sites=("resid_post",), quiet=True
        )
        for metric in read:
            rows = frame[(frame["cell"] == place) & (frame["metric"] == metric.name)]
            found, slow = (
                torch.tensor(rows["value"].to_numpy()),
                metrics.evaluate(metric, outcome).double(),
            )
            off = max(off, float(((found - slow).abs() / slow.abs().clamp(min=1)).max()))
    return off


def test_a_pass_that_begins_behind_the_layer_that_makes_the_keys_has_those_of_the_baseline_run(
    monkeypatch,
):
    sites = ("resid_pre", "attn_out", "per_layer_out")
    assert furthest(lens_of("gemma4"), sites, positions=(7,)) <= 1e-5

    def of_another_sequence(lens, asked):
        return {
            kind: tuple(one.flip(2) for one in pair) for kind, pair in STORED(lens, asked).items()
        }

    monkeypatch.setattr(partial_pass, "_baseline_keys_and_values", of_another_sequence)
    assert furthest(lens_of("gemma4"), sites, positions=(7,)) >= 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"num_kv_shared_layers": 0},
    ],
    ids=str,
)
def test_cells_of_every_site_are_those_of_the_bridge(fields):
    lens = wrap(tiny("gemma4", **fields)) if fields else lens_of("gemma4")
    assert ("per_layer_out" in sites_of(lens.family)) == (
        "hidden_size_per_layer_input" not in fields
    )
    sites = [name for name in sites_of(lens.family) if name not in ("scores", "pattern", "final")]
    assert furthest(lens, sites, layers=range(4), positions=(0, 7, 15)) <= 1e-5


def test_keys_belong_to_the_layer_that_makes_them():
    lens = lens_of("gemma4")
    assert [lens.layers_with(site) for site in ("k", "v", "z")] == [(0, 1), (0, 1), (0, 1, 2, 3)]
    with pytest.raises(SiteError, match=r"have 'k'; need one of 0-1"):
        capture(lens, tokens(), sites=["k"], layers=[2])
    with pytest.raises(
        SiteError, match="layer 3 of Gemma4ForCausalLM attends to the keys and values of layer 1"
    ):
        attention_weights(lens, layer=3)
    runs = [
        run_with(lens, tokens(), some, sites=["pattern"])
        for some in ((), scale("k", 3.0, layers=[1]))
    ]
    changed = [
        not torch.equal(*(run.tensors["pattern", layer] for run in runs)) for layer in range(4)
    ]
    assert changed == [False, True, True, True]
    alone = [
        run_with(lens, tokens(), scale("k", 3.0, layers=[1], positions=[5]), sites=["pattern"]),
        runs[0],
    ]
    assert not torch.equal(*(run.tensors["pattern", 3][..., 5] for run in alone))


def test_weights_give_the_keys_and_values_before_their_norms():
    lens = lens_of("gemma4")
    found = capture(lens, tokens(), sites=["attn_in", "q", "k", "v"], layers=[0, 1])
    for layer in (0, 1):
        weights, read = attention_weights(lens, layer=layer), found["attn_in", layer]
        query = torch.einsum("bpd,hed->bphe", read, weights.w_q)
        for made, site, norm in ((query, "q", "q_norm"), (weights.keys(read), "k", "k_norm")):
            of = norm_weights(lens, layer=layer, which=norm)
            torch.testing.assert_close(
                made / of.divisor(made)[..., None] * of.gain, found[site, layer]
            )
        value = weights.values(read)
        scale_of = (value.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(value / scale_of, found["v", layer])


@pytest.mark.exhaustive
def test_it_is_loaded_generated_from_swept_and_patched(tmp_path):
    model = tiny("gemma4")
    model.save_pretrained(tmp_path / "model")
    lens = load(tmp_path / "model")
    with torch.no_grad():
        assert_rows_close(*(one(tokens(), use_cache=False).logits for one in (lens.plain, model)))
    doubled, ids = scale("v", 2.0, layers=[1]), [5, 9, 17, 40, 8]
    written = generate(lens, ids, doubled, max_new_tokens=4)
    for _ in range(4):
        ids.append(
            int(run_with(lens, torch.tensor([ids]), doubled, logits=True).logits[0, -1].argmax())
        )
    assert list(written.ids) == ids[5:]
    grid = Grid.of(EditGrid(kind="zero", site="z", heads="each"))
    run = sweep(
        lens,
        grid,
        tokens=from_tensor(tokens()),
        metrics=metrics.loss(),
        out=tmp_path / "run",
        progress=False,
    )
    assert run.tables["cells"]["error"].isna().all()
    assert len(run.tables["cells"]) == 16
    options = {"metric": metrics.loss(), "progress": False}
    clean, corrupted = tokens(), tokens().flip(0)
    kept = run_with(lens, corrupted, sites=["k", "per_layer_out"]).tensors
    for site in ("k", "per_layer_out"):
        patched = patching.patch(lens, clean, corrupted, site=site, by="layer", **options)
        assert {*patched.frame["layer"]} == {*lens.layers_with(site)}
        for layer in lens.layers_with(site):  # all of its heads, as many as there are
            put = freeze(site, {layer: kept[site, layer]}, layers=[layer])
            value = patched.frame.query("layer == @layer")["value"].mean()
            assert value == pytest.approx(float(run_with(lens, clean, put).loss.mean()), rel=1e-5)


def test_what_differs_by_layer_is_asked_by_layer():
    lens, each = lens_of("gemma4"), EditGrid(kind="zero", site="neurons", units="each")
    with pytest.raises(
        InputError, match="layers differ in the number of units of 'neurons'; need them named"
    ):
        each.n_edits(lens, n_positions=24)
    with pytest.raises(InputError, match="layers differ in the number of heads of 'k'"):
        patching.patch(lens, tokens(), tokens().flip(0), site="k", by="head", metric=metrics.loss())
    with pytest.raises(InputError, match="need 0 to 79"):
        run_with(lens, tokens(), scale("neurons", 2.0, units=[100]))
    assert (
        run_with(lens, tokens(), scale("neurons", 2.0, units=[100], layers=[2]))
        .loss.isfinite()
        .all()
    )


def test_parts_times_the_later_layers_numbers_sum_to_the_stream():
    lens = lens_of("gemma4")
    found = capture(
        lens, tokens(), sites=["resid_pre", "attn_out", "mlp_out", "per_layer_out", "resid_post"]
    )
    scales = [lens.scale(layer) for layer in range(4)]
    assert len({1.0, *scales}) == 5
    for last in range(4):
        whole = math.prod(scales[: last + 1]) * found["resid_pre", 0]
        for layer in range(last + 1):
            added = sum(found[site, layer] for site in lens.added_sites(layer))
            whole = whole + math.prod(scales[layer : last + 1]) * added
        assert_rows_close(whole, found["resid_post", last])


def test_the_writers_of_a_card_share_what_a_layer_adds():
    lens = speaking("gemma4")
    seen = ObservedModel(lens, from_tensor(tokens()))
    step = GrowthStep(first_layer=0, last_layer=3, ratio_before=1.0, ratio_after=2.0, dimension=5)
    seen.__dict__["location"] = replace(seen.location, steps=(step,), outliers={3: (5,)})
    assert [row["layer"] for row in seen.outlier_writers] == [0, 1, 2, 3]
    for row in seen.outlier_writers:
        assert sum(row[site] for site in ("attn_out", "mlp_out", "per_layer_out")) == pytest.approx(
            1.0, abs=1e-4
        )


@pytest.mark.exhaustive
def test_a_pair_of_cards_is_written(tmp_path):
    lens = speaking("gemma4")
    made = card(
        lens,
        replace(lens, name="other"),
        sequences=2,
        length=16,
        out=tmp_path / "pair",
        progress=False,
    )
    assert made.headline
    assert made.report().exists()


def test_what_it_does_not_have_is_refused_with_the_reason():
    lens = lens_of("gemma4")
    with pytest.raises(
        ModelError, match="multiply the whole stream, and add to it an input of their own"
    ):
        Graph.of(lens)
    with pytest.raises(ModelError, match="heads of another width in some layers"):
        get_prefix_model(tiny("gemma4"))
    with pytest.raises(ModelError, match="attend to keys that another one hands on"):
        SinkMonitor(tiny("gemma4"))
    with pytest.raises(
        ModelError, match="found a bridge of a model whose heads have widths of their own, Gemma4"
    ):
        wrap(lens.bridge)
    with pytest.raises(ModelError, match="see those behind them; need a causal model"):
        wrap(tiny("gemma4", use_bidirectional_attention="all"))


def test_experts_beside_the_mlp_are_measured_without_neurons():
    fields = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    lens = wrap(tiny("gemma4", **fields))
    assert {"gate", "up", "neurons"}.isdisjoint(sites_of(lens.family))
    found = [
        capture(lens, tokens(), sites=["attn_out", "mlp_out"], path=path)
        for path in ("plain", "bridge")
    ]
    for place in found[0]:
        torch.testing.assert_close(found[0][place], found[1][place], atol=1e-5, rtol=1e-4)
    assert furthest(lens, ("mlp_out",), positions=(7,)) <= 1e-5
