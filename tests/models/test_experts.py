"""The neurons of routed experts, against the experts of transformers and against edits written out here."""

import pytest
import torch
from lenses import lens_of
from mlps import EXPERTS
from rounding import assert_rows_close
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from analyses.tiny_families import tiny
from sink_lens.activations.record import capture
from sink_lens.edits.constructors import edit, scalar, scale, zero
from sink_lens.engine.forward import run_with
from sink_lens.models.experts import expert_columns
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from sink_lens.models.weights import mlp_weights

LAYER = 1


def tokens():
    return torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))


def experts_of(model):
    layer = model.model.layers[LAYER]
    return (layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp).experts


def close(found, expected, tolerance=1e-5):
    return bool(((found - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all())


@torch.no_grad()
def raw(family, change=None):
    """The logits of a model of transformers' own classes; ``change`` gets (expert, rows, neurons) of one layer.

    The experts are written out here: each token's experts one after the other.
    """
    model = tiny(family)
    model.config._experts_implementation = "eager"
    if change is not None:
        experts = experts_of(model)
        transposed = family == "gpt_oss"

        def forward(x, index, weights):
            out = torch.zeros_like(x)
            for row in range(len(x)):
                for slot, expert in enumerate(index[row].tolist()):
                    w_in, w_out = experts.gate_up_proj[expert], experts.down_proj[expert]
                    if transposed:
                        w_in, w_out = w_in.T, w_out.T
                    both = w_in @ x[row]
                    if transposed:
                        both = both + experts.gate_up_proj_bias[expert]
                    neurons = change(expert, row, experts._apply_gate(both[None])[0] * weights[row, slot])
                    out[row] += w_out @ neurons
                    if transposed:
                        out[row] += experts.down_proj_bias[expert] * weights[row, slot]
            return out

        experts.forward = forward
    return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("family", EXPERTS)
def test_the_experts_give_what_those_of_transformers_give(family):
    lens = lens_of(family)
    model = tiny(family)
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits
        assert_rows_close(lens.plain(tokens(), use_cache=False).logits, expected)
    # and the one that is written out here
    assert close(raw(family, lambda expert, row, neurons: neurons), raw(family))


@pytest.mark.parametrize("family", EXPERTS)
def test_the_neurons_times_their_columns_sum_to_what_the_block_adds(family):
    lens = lens_of(family)
    found = capture(lens, tokens(), sites=["neurons", "down_out"])
    for layer in range(3):
        terms = found["neurons", layer] @ mlp_weights(lens, layer=layer).w_down.T
        assert close(terms, found["down_out", layer])


@pytest.mark.parametrize("family", EXPERTS)
def test_every_token_uses_its_two_experts_and_no_other(family):
    lens = lens_of(family)
    assert lens.d_expert is not None
    neurons = capture(lens, tokens(), sites=["neurons"])["neurons", LAYER].unflatten(-1, (-1, lens.d_expert))
    assert ((neurons != 0).any(-1).sum(-1) == 2).all()
    columns = expert_columns(experts_of(lens.plain), 3)
    own = mlp_weights(lens, layer=LAYER).w_down[:, 3 * lens.d_expert : 4 * lens.d_expert]
    assert torch.equal(columns, own)


@pytest.mark.parametrize("family", EXPERTS)
def test_an_edit_of_an_experts_neuron_is_the_same_edit_of_the_raw_model(family):
    lens = lens_of(family)
    expert, neuron = 2, 7

    def doubled(which, row, neurons):
        return neurons * (1 + (torch.arange(len(neurons)) == neuron)) if which == expert else neurons

    one = scale("neurons", 2.0, layers=[LAYER], units=[expert * lens.d_expert + neuron])
    found = run_with(lens, tokens(), one, loss=False, logits=True, layers=[0]).logits
    assert close(found, raw(family, doubled))
    assert not close(found, raw(family), tolerance=1e-4)


@pytest.mark.parametrize("family", EXPERTS)
def test_ablating_an_expert_is_leaving_it_out(family):
    lens = lens_of(family)
    whole = zero("neurons", layers=[LAYER], units=range(2 * lens.d_expert, 3 * lens.d_expert))
    found = run_with(lens, tokens(), whole, loss=False, logits=True, layers=[0]).logits
    model = tiny(family)
    with torch.no_grad():
        experts_of(model).down_proj[2] = 0
        if family == "gpt_oss":
            experts_of(model).down_proj_bias[2] = 0
        assert close(found, model(tokens(), use_cache=False).logits)


@pytest.mark.parametrize("family", EXPERTS)
def test_entries_of_a_down_projection_are_entries_of_one_experts_weights(family):
    lens = lens_of(family)
    units = [2 * lens.d_expert + 7, lens.d_expert + 3]
    one = scalar(lens, layer=LAYER, neurons=units, dimensions=[4, 11])
    found = run_with(lens, tokens(), one, loss=False, logits=True, layers=[0]).logits
    model = tiny(family)
    down = experts_of(model).down_proj
    with torch.no_grad():
        for expert, neuron in ((2, 7), (1, 3)):
            for dimension in (4, 11):
                down[(expert, neuron, dimension) if family == "gpt_oss" else (expert, dimension, neuron)] = 0
        assert close(found, model(tokens(), use_cache=False).logits)


def test_an_edit_may_use_an_expert_that_a_token_was_not_sent_to():
    lens = lens_of("mixtral")
    clean = capture(lens, tokens(), sites=["mlp_out", "neurons"])
    unit = 3 * lens.d_expert + 5
    idle = clean["neurons", LAYER][..., 3 * lens.d_expert : 4 * lens.d_expert].abs().sum(-1) == 0
    assert idle.any()
    added = edit("neurons", lambda x, at: x + 2.0, layers=[LAYER], units=[unit])
    found = run_with(lens, tokens(), added, sites=["mlp_out"], loss=False, layers=[LAYER]).tensors["mlp_out", LAYER]
    expected = clean["mlp_out", LAYER] + 2.0 * mlp_weights(lens, layer=LAYER).w_down[:, unit]
    assert close(found, expected)


def test_a_saved_model_has_the_classes_of_transformers_and_its_weights(tmp_path):
    model = tiny("mixtral")
    names = set(model.state_dict())
    lens = wrap(model)
    assert set(lens.plain.state_dict()) == names
    lens.plain.save_pretrained(tmp_path)
    again = type(tiny("mixtral")).from_pretrained(tmp_path)
    assert type(again.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    with torch.no_grad():
        assert close(again(tokens(), use_cache=False).logits, raw("mixtral"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_a_stock_bridge_shows_the_neurons_of_its_experts(family):
    model = tiny(family)
    lens = wrap(build_bridge_from_module(model, type(model).__name__, hf_config=model.config))
    on_bridge, plain = (capture(lens, tokens(), sites=["neurons"], path=path) for path in ("bridge", "plain"))
    torch.testing.assert_close(on_bridge["neurons", LAYER], plain["neurons", LAYER], atol=1e-4, rtol=1e-4)


MIXED = ("qwen2_moe", "glm4_moe", "ernie4_5_moe", "qwen3_5_moe", "qwen3_next", "lfm2_moe", "jamba", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [one if one == "qwen2_moe" else pytest.param(one, marks=pytest.mark.exhaustive) for one in MIXED]
)
@torch.no_grad()
def test_neurons_of_routed_shared_and_dense_parts_are_units_of_one_axis(family):
    lens, model = wrap(tiny(family)), tiny(family)
    ids = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    captured = [capture(lens, ids, sites=["neurons", "down_out"], path=path) for path in ("auto", "plain")]
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
        units = sorted({0, len(parts) - 1, int(captured[0]["neurons", layer].abs().amax((0, 1)).argmax())})
        without = run_with(lens, ids, zero("neurons", layers=[layer], units=units), logits=True, quiet=True).logits
        kept = [parts[unit].clone() for unit in units]
        for unit in units:
            parts[unit].zero_()
        expected = model(ids, use_cache=False).logits
        for unit, before in zip(units, kept, strict=True):
            parts[unit].copy_(before)
        torch.testing.assert_close(without, expected, atol=1e-4, rtol=1e-4)
    assert max(widths) == lens.d_mlp


def _columns_of_raw(block, family):
    """The columns of the raw model's down-projections, as views, in the order of the units."""
    columns = []
    experts = getattr(block, "experts", None)
    if experts is not None:
        columns += [weight[:, one] for weight in experts.down_proj for one in range(weight.shape[1])]
    dense = block if experts is None else getattr(block, family.shared or "", None)
    if dense is not None:
        weight = getattr(dense, family.dense[2]).weight
        columns += [weight[:, one] for one in range(weight.shape[1])]
    return columns
