"""A trace of Gemma 4, whose layers multiply the stream, add an input of their own, and attend to keys of another."""

import copy
from dataclasses import replace

import pytest
import torch
from lenses import speaking

from sink_lens.chain import screen
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.measure import scout
from sink_lens.chain.setting import make_setting
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.running import prepare_passes
from sink_lens.models.tiny import BOS_ID, VOCAB_SIZE, tiny_tokenizer
from sink_lens.records import read_run
from tests.zoo.with_sink import fire, mark
from tests.zoo.writing import D_HEAD, D_MLP, HUGE, SLOWEST, draft, lock

KINDS = [
    "full_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "full_attention",
]
SCALES = (0.8, 0.6, 0.9, 0.7, 0.5)
CONFIG = TraceConfig(model="tiny", quick=True, random_init=False)
SHOWN = {"norm", "outlier_value", "value", "change", "contribution", "s1", "s2"}
"""Columns of tables that are in the unit of a stream."""


@torch.no_grad()
def write_model(*, by_input=False, read=(1, 2, 3, 4)):
    """A model in which BOS makes a dimension in layer 0, by a neuron or the layer's input, and the kind of the part.

    Later layers `read` it, 3 and 4 by the keys of 1 and 2.
    """
    fields = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB_SIZE}
    made = draft(family="gemma4", seed=1, layer_types=KINDS, num_kv_shared_layers=2, **fields)
    mark(made, [BOS_ID])
    inner = made.model.model
    quiet = [made.shared, made.trigger, made.outlier, made.second, made.gathered, made.ballast]
    for block, by in zip(inner.layers, SCALES, strict=True):
        block.post_per_layer_input_norm.weight.mul_(0.05)
        block.post_per_layer_input_norm.weight[quiet] = 0.0
        block.layer_scalar.fill_(by)
    if by_input:
        first = inner.layers[0]
        inner.embed_tokens_per_layer.weight[:, 0] = 0.0
        inner.embed_tokens_per_layer.weight[BOS_ID, 0] = 30.0
        inner.per_layer_model_projection.weight[0] = 0.0
        first.per_layer_input_gate.weight[0] = 0.0
        first.per_layer_input_gate.weight[0, made.shared] = 1.0
        first.per_layer_projection.weight[made.outlier] = 0.0
        first.per_layer_projection.weight[made.outlier, 0] = 50.0
        first.post_per_layer_input_norm.weight[made.outlier] = made.sign * HUGE / 96**0.5
        maker = ("layer input", 0, 0)
    else:
        maker = ("neuron", 0, made.pick(D_MLP))
        fire(
            made,
            layer=0,
            index=maker[2],
            reads=made.trigger,
            writes={made.outlier: made.sign * HUGE},
            token=BOS_ID,
        )
    lock(made, layers=(1, 2), reads={made.outlier: made.sign})
    for layer in range(1, 5):
        attention = inner.layers[layer].self_attn
        attention.q_proj.weight[SLOWEST::D_HEAD] = 0.0
        if layer in read:
            attention.q_proj.weight[SLOWEST::D_HEAD, made.shared] = 1.0
            attention.q_norm.weight[SLOWEST] = 2.0
    return made.model, maker


@torch.no_grad()
def folded(model):
    """The same model, whose layers multiply by 1: what they add is divided by what was multiplied before."""
    model, before = copy.deepcopy(model), 1.0
    for block in model.model.layers:
        after = (
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            "post_per_layer_input_norm",
        )
        for name in after:
            getattr(block, name).weight.div_(before)
        block.per_layer_input_gate.weight.mul_(before)
        before *= float(block.layer_scalar)
        block.layer_scalar.fill_(1.0)
    return model


def drawn():
    found = torch.randint(3, VOCAB_SIZE, (8, 32), generator=torch.Generator().manual_seed(1))
    found[:, 0] = BOS_ID
    return from_tensor(found)


def named(model):
    return replace(wrap(model, tokenizer=tiny_tokenizer()), name="tiny")


def traced(model, folder, *, report=False):
    return trace(
        named(model), config=CONFIG, tokens=drawn(), out=folder, progress=False, report=report
    )


def test_a_tiny_model_is_traced(tmp_path):
    settings = {
        "tokens": "random",
        "sequences": 2,
        "length": 16,
        "interventions": False,
        "random_init": False,
    }
    config = TraceConfig(model="tiny", threshold=0.2, **settings)
    found = trace(
        speaking("gemma4"), config=config, out=tmp_path / "run", progress=False, report=False
    )
    assert read_run(tmp_path / "run").status == "finished"
    heads = found.tables["heads"]
    assert heads["value_norm_ratio"].isna().groupby(heads["layer"]).all().tolist() == [
        False,
        False,
        True,
        True,
    ]
    assert heads["sink_mass"].notna().all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("by_input", [False, True])
def test_what_is_said_of_a_model_is_said_of_the_same_one_whose_layers_multiply_by_1(
    by_input, tmp_path
):
    model, maker = write_model(by_input=by_input)
    own = traced(model, tmp_path / "own", report=True)
    makers = own.tables["makers"].query("is_maker")
    assert [*makers[["kind", "layer", "unit"]].itertuples(index=False, name=None)] == [maker]
    verdicts = own.links.drop_duplicates("link").set_index("link")["verdict"]
    assert verdicts[["dimension_key", "key_sink"]].tolist() == ["holds", "holds"]
    paths = (
        own.tables["paths"].query("target == 'key' and through == ''").set_index("source")["share"]
    )
    assert (
        paths["layer inputs" if by_input else "super neurons"] > 0.5,
        paths["everything"] > 0.5,
    ) == (True, True)
    same = traced(folded(model), tmp_path / "folded")
    assert own.headline == same.headline
    for name, table in own.tables.items():
        other = same.tables[name]
        assert table.shape == other.shape, name
        for column in table.select_dtypes("number").columns.difference([*SHOWN]):
            found, expected = (
                torch.tensor(one[column].to_numpy("float64", na_value=float("nan")))
                for one in (table, other)
            )
            torch.testing.assert_close(
                found, expected, rtol=2e-3, atol=2e-3, equal_nan=True, msg=f"{name} {column}"
            )


@pytest.mark.exhaustive
def test_a_part_that_keys_handed_on_to_later_layers_alone_show_is_found():
    model, maker = write_model(read=(3,))
    lens, tokens = named(model), drawn()
    setting = make_setting(lens, tokens, location=scout(lens, tokens, config=CONFIG), config=CONFIG)
    assert setting.sink_layers == (3,)
    first = screen.screen_parts(setting, target="sink").nlargest(1, "integrated").iloc[0]
    assert (first["kind"], first["layer"], first["unit"], first["integrated"]) == (*maker, 1.0)

    run = screen._LayerRuns(setting)
    baseline = setting.baseline_tensors("resid_pre", layers=[1])[1]
    ordinary = setting.mean_ordinary(baseline)[:, 0]

    def mass(x):
        with prepare_passes(lens), torch.no_grad():
            layout = run._layout((0,), alone=True)
            return float(
                run._run_layer(1, layout=layout, visits={}, stream=x[None], target="sink")[0][0]
            )

    whole = float(setting.baseline.mass_at(0, layers=[3]).sum())
    assert mass(baseline[:, 0]) == pytest.approx(whole, rel=1e-5)
    near = ordinary + 1e-3 * (baseline[:, 0] - ordinary)
    way = 1e-3 * torch.randn(near.shape, generator=torch.Generator().manual_seed(0))
    options = {"weights": torch.ones(1), "after": torch.zeros_like(near), "target": "sink"}
    slope = float((run.gradients(1, at_sink=near[None], **options)["direct"] * way).sum())
    assert slope == pytest.approx((mass(near + way) - mass(near - way)) / 2, rel=0.02)
