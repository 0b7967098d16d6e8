"""The neurons of routed experts, against the experts of transformers and against edits written out here."""

import pytest
import torch
from lenses import lens_of, tokens
from mlps import EXPERTS
from rounding import assert_moved, assert_rows_close
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from sink_lens.activations.record import capture
from sink_lens.edits.constructors import edit, scalar, scale, zero
from sink_lens.engine.forward import run_with
from sink_lens.models.experts import expert_down_projection
from sink_lens.models.load import wrap
from sink_lens.models.weights import mlp_weights
from tests.tiny_families import tiny

LAYER = 1


def experts_of(model):
    layer = model.model.layers[LAYER]
    return (layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp).experts


@torch.no_grad()
def logits(model):
    return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("family", EXPERTS)
def test_the_experts_give_what_those_of_transformers_give(family):
    assert_rows_close(logits(lens_of(family).plain), logits(tiny(family)))


@pytest.mark.parametrize("family", EXPERTS)
def test_every_token_uses_its_two_experts_and_no_other(family):
    lens = lens_of(family)
    assert lens.d_expert is not None
    neurons = capture(lens, tokens(), sites=["neurons"])["neurons", LAYER].unflatten(
        -1, (-1, lens.d_expert)
    )
    assert ((neurons != 0).any(-1).sum(-1) == 2).all()
    columns = expert_down_projection(experts_of(lens.plain), 3)
    own = mlp_weights(lens, layer=LAYER).w_down[:, 3 * lens.d_expert : 4 * lens.d_expert]
    assert torch.equal(columns, own)


@pytest.mark.parametrize("family", EXPERTS)
def test_edits_of_an_expert_are_those_of_its_weights_in_the_raw_model(family):
    """One neuron doubled, all neurons of an expert switched off, and some entries of the down-projections."""
    lens = lens_of(family)
    neuron, entry, expert = (
        2 * lens.d_expert + 7,
        lens.d_expert + 3,
        range(2 * lens.d_expert, 3 * lens.d_expert),
    )
    for one, columns, factor in (
        (scale("neurons", 2.0, layers=[LAYER], units=[neuron]), (2, 7), 2),
        (zero("neurons", layers=[LAYER], units=expert), 2, 0),
        (
            scalar(lens, layer=LAYER, neurons=[neuron, entry], dimensions=[4, 11]),
            ([2, 2, 1, 1], [7, 7, 3, 3], [4, 11, 4, 11]),
            0,
        ),
    ):
        model = tiny(family)
        experts = experts_of(model)
        down = experts.down_proj.data if family == "gpt_oss" else experts.down_proj.data.mT
        down[columns] *= factor
        if family == "gpt_oss" and columns == 2:
            experts.down_proj_bias.data[2] = 0
        found = run_with(lens, tokens(), one, loss=False, logits=True, layers=[0]).logits
        assert_rows_close(found, logits(model))
        assert_moved(found, logits(tiny(family)))


def test_an_edit_may_use_an_expert_that_a_token_was_not_sent_to():
    lens = lens_of("mixtral")
    clean = capture(lens, tokens(), sites=["mlp_out", "neurons"])
    unit = 3 * lens.d_expert + 5
    idle = clean["neurons", LAYER][..., 3 * lens.d_expert : 4 * lens.d_expert].abs().sum(-1) == 0
    assert idle.any()
    added = edit("neurons", lambda x, at: x + 2.0, layers=[LAYER], units=[unit])
    found = run_with(lens, tokens(), added, sites=["mlp_out"], loss=False, layers=[LAYER]).tensors[
        "mlp_out", LAYER
    ]
    expected = clean["mlp_out", LAYER] + 2.0 * mlp_weights(lens, layer=LAYER).w_down[:, unit]
    assert_rows_close(found, expected)


def test_a_saved_model_has_the_classes_of_transformers_and_its_weights(tmp_path):
    model = tiny("mixtral")
    names = set(model.state_dict())
    lens = wrap(model)
    assert set(lens.plain.state_dict()) == names
    lens.plain.save_pretrained(tmp_path)
    again = type(tiny("mixtral")).from_pretrained(tmp_path)
    assert type(again.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert_rows_close(logits(again), logits(tiny("mixtral")))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_a_stock_bridge_shows_the_neurons_of_its_experts(family):
    model = tiny(family)
    lens = wrap(build_bridge_from_module(model, type(model).__name__, hf_config=model.config))
    on_bridge, plain = (
        capture(lens, tokens(), sites=["neurons"], path=path) for path in ("bridge", "plain")
    )
    torch.testing.assert_close(
        on_bridge["neurons", LAYER], plain["neurons", LAYER], atol=1e-4, rtol=1e-4
    )


MIXED = (
    "qwen2_moe",
    "glm4_moe",
    "ernie4_5_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "lfm2_moe",
    "jamba",
    "deepseek_v3",
)


@pytest.mark.parametrize(
    "family",
    [
        one if one == "qwen2_moe" else pytest.param(one, marks=pytest.mark.exhaustive)
        for one in MIXED
    ],
)
@torch.no_grad()
def test_neurons_of_routed_shared_and_dense_parts_are_units_of_one_axis(family):
    lens, model = wrap(tiny(family)), tiny(family)
    captured = [
        capture(lens, tokens(), sites=["neurons", "down_out"], path=path)
        for path in ("auto", "plain")
    ]
    widths = set()
    for layer in range(lens.n_layers):
        columns = mlp_weights(lens, layer=layer).w_down
        for found in captured:
            torch.testing.assert_close(
                found["neurons", layer] @ columns.T, found["down_out", layer], atol=1e-4, rtol=1e-4
            )
        block = model.get_submodule(lens.family.layers)[layer].get_submodule(lens.family.mlp)
        parts = _columns_of_raw(block, lens.family)
        widths.add(len(parts))
        assert lens.d_mlp >= len(parts)
        assert not columns[:, len(parts) :].any()
        assert not captured[0]["neurons", layer][..., len(parts) :].any()
        units = sorted(
            {0, len(parts) - 1, int(captured[0]["neurons", layer].abs().amax((0, 1)).argmax())}
        )
        without = run_with(
            lens, tokens(), zero("neurons", layers=[layer], units=units), logits=True, quiet=True
        ).logits
        kept = [parts[unit].clone() for unit in units]
        for unit in units:
            parts[unit].zero_()
        expected = logits(model)
        for unit, before in zip(units, kept, strict=True):
            parts[unit].copy_(before)
        torch.testing.assert_close(without, expected, atol=1e-4, rtol=1e-4)
    assert max(widths) == lens.d_mlp


def _columns_of_raw(block, family):
    """The columns of the raw model's down-projections, as views, in the order of the units."""
    columns = []
    experts = getattr(block, "experts", None)
    if experts is not None:
        columns += [
            weight[:, one] for weight in experts.down_proj for one in range(weight.shape[1])
        ]
    dense = block if experts is None else getattr(block, family.shared or "", None)
    if dense is not None:
        weight = getattr(dense, family.dense[2]).weight
        columns += [weight[:, one] for one in range(weight.shape[1])]
    return columns
