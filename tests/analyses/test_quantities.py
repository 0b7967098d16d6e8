"""Every quantity against an independent computation on the raw Hugging Face model, or against a planted truth."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
from lenses import speaking

from analyses.our_own.published_facts.quantities import AbsentError, UnmeasuredError, attention_under
from analyses.our_own.published_facts.quantities import measure_quantity as measure
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_text
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.studies import card as make_card
from sink_lens.studies.card import card_contents
from sink_lens.studies.observed import ObservedModel
from tests.tiny_families import tiny

N, T = 4, 24
TRUTH = planted()
D, LAYER, NEURON = TRUTH.outlier_dimension, TRUTH.layer, TRUTH.neuron


@functools.cache
def seen(kind="planted"):
    """The planted model on text with BOS, a random llama on text without it, or qwen2, whose queries have a bias."""
    if kind == "planted":
        lens = wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True))
    else:
        lens = speaking("llama" if kind == "random" else kind)
    bos = "without" if kind == "random" else "with"
    return ObservedModel(lens, from_text(bundled_text(), lens.tokenizer, sequences=N, length=T, bos=bos))


@functools.cache
def raw():
    """Attention [layer, batch, head, query, key], states [layer + 1, batch, position, d] and losses [batch, target]."""
    model, tokens = seen().lens.plain, seen().tokens.tokens
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    states = []
    hooks = [layer.register_forward_hook(lambda m, a, out: states.append(out)) for layer in model.model.layers]
    with torch.no_grad():
        out = model(tokens, output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    return torch.stack(out.attentions), torch.stack([out.hidden_states[0], *states]), losses_of(out.logits, tokens)


def losses_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def attention():
    return raw()[0]


def states():
    return raw()[1][1:]


def mass():
    return attention()[..., 1:, 0].mean(-1)


def ratio_to_median():
    x = states().abs()
    return x.amax(-1) / x.median(-1).values


def loss_with(change):
    """Mean loss of each sequence where every layer's output is changed in place by layer."""
    model, tokens = seen().lens.plain, seen().tokens.tokens
    hooks = [layer.register_forward_hook(functools.partial(change, at)) for at, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return losses_of(logits, tokens).mean()


def set_outlier(to):
    def change(at, module, args, out):
        if at >= LAYER:
            out[:, 0, D] = 0.0 if to is None else out[:, 0, D].mean()

    return loss_with(change)


def dropped_entry():
    weight = seen().lens.plain.model.layers[LAYER].mlp.down_proj.weight
    before = weight[D, NEURON].item()
    with torch.no_grad():
        weight[D, NEURON] = 0.0
        loss = loss_with(lambda *_: None)
        weight[D, NEURON] = before
    return torch.exp(loss - raw()[2].mean())


def without_bos():
    tokens = seen().tokens.tokens[:, 1:]
    with torch.no_grad():
        logits = seen().lens.plain(tokens).logits
    return torch.exp(losses_of(logits, tokens).mean() - raw()[2][:, 1:].mean())


def attn_in():
    layer = seen().lens.plain.model.layers[LAYER + 1]
    return layer.input_layernorm(raw()[1][LAYER + 1][:, 0]).detach().abs()


def rounding_noise():
    x = states()[LAYER]
    scale = x.abs().amax((1, 2), keepdim=True) / 127
    noise = x - (x / scale).round() * scale
    return 10 * torch.log10(x.double().square().sum() / noise.double().square().sum())


def ratio_of_norms():
    norms = states().norm(dim=-1)
    return (norms[..., 0] / norms[..., 8:].quantile(0.5, dim=-1)).mean(1).max()


AT = {"layer": LAYER + 1, "dimension": D}
NUMBERS = {
    "sink_rate": lambda: (attention()[..., 0].mean(-1) > 0.3).float().mean(),  # the own query included
    "bos_attention": lambda: attention()[1:, :, :, T // 2 :, 0].mean(),
    "first_token_share": lambda: mass().mean(),
    "sink_onset_layer": lambda: (mass().mean((1, 2)) > 0.3).nonzero()[0],
    "null_mass": lambda: torch.tensor(0.0),
    "dimension_value": lambda: states()[..., 0, D].abs().mean(1).max(),
    "norm_ratio": ratio_of_norms,
    "dominance_after_norm": lambda: (
        attn_in()[:, D].mean() / torch.cat([attn_in()[:, :D], attn_in()[:, D + 1 :]], 1).mean()
    ),
    "value_after_norm": lambda: attn_in()[:, D].mean(),
    "max_activation": lambda: states().abs().max(),
    "max_activation_layer": lambda: states().abs().flatten(1).amax(1).argmax(),
    "massive_layer": lambda: ((states().abs() > 50).any(-1) & (ratio_to_median() >= 20)).flatten(1).any(1).nonzero()[0],
    "massive_ratio": lambda: ratio_to_median().amax((0, 2)).mean(),
    "kurtosis": lambda: np.mean(scipy.stats.kurtosis(states().double().numpy(), axis=-1)),
    "perplexity": lambda: raw()[2].mean().exp(),
    "loss": lambda: raw()[2].mean(),
    "perplexity_zeroed": lambda: set_outlier(None).exp(),
    "perplexity_mean_aligned": lambda: set_outlier("mean").exp(),
    "super_weight_factor": dropped_entry,
    "no_bos_factor": without_bos,
    "sqnr": rounding_noise,
}
"""Quantity -> its value on the planted model, by another way."""
TERMS = {
    "bos_attention": {"layers": [1, 4]},
    "dimension_value": {"dimension": D},
    "dominance_after_norm": AT,
    "value_after_norm": AT,
    "massive_layer": {"absolute": 50, "relative": 20},
    "super_weight_factor": {"entries": [[LAYER, D, NEURON]]},
    "sqnr": {"format": "int8_tensor", "layer": LAYER, "site": "resid_post"},
}
INDICES = {
    "sink_positions": (0,), "outlier_dimensions": (D,), "outlier_layers": (LAYER, 4),
    "super_weights": ((LAYER, D, NEURON),), "writing_neurons": ((LAYER, NEURON),), "residual_sinks": (),
}  # fmt: skip
"""Quantity -> the planted truth."""


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_what_the_raw_model_gives(name):
    found, wanted = measure(name, seen(), TERMS.get(name)), float(NUMBERS[name]())
    assert found.number == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert math.isnan(found.low) or found.low <= found.number + 1e-9 <= found.high + 2e-9


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_the_planted_ones(name):
    assert measure(name, seen()).indices == INDICES[name]


READ = {
    "sink_rate": "sink_rate", "first_token_share": "first_token_attention", "null_mass": "attention_to_no_key",
    "loss": "loss", "norm_ratio": "first_token_norm_ratio", "kurtosis": "kurtosis",
}  # fmt: skip
"""Quantity -> its row in a comparison of two cards; a card has the first four."""


def test_a_card_of_one_or_two_models_and_a_fact_say_one_number(tmp_path):
    card, number = card_contents(seen()), {name: measure(name, seen()).number for name in READ}
    study = make_card(seen().lens, seen().lens, tokens=seen().tokens, out=tmp_path / "diff", progress=False)
    changes = study.tables["changes"].set_index("quantity")["first"]
    said = [card["sink"][name]["value"] for name in ("rate", "attention", "to_no_key")]
    said.append(card["loss"]["clean"]["value"])
    assert said == pytest.approx([number[name] for name in list(READ)[:4]], rel=1e-3)  # a card has four digits
    assert {name: changes[row] for name, row in READ.items()} == pytest.approx(number, rel=1e-6)


def test_the_largest_dimensions_begin_with_the_planted_one():
    assert measure("largest_dimensions", seen(), {"count": 1}).indices == (D,)
    assert D in measure("largest_dimensions", seen()).indices


def test_the_planted_sink_needs_its_key_column_and_its_neuron():
    assert measure("attention_without_key_columns", seen()).number < 0.3
    assert measure("attention_without_mlp", seen()).number < 0.3
    assert [row["mlp_out"] for row in seen().outlier_writers] == pytest.approx([1], abs=1e-3)
    everything = measure("attention_without_key_columns", seen(), {"dimensions": [(D + 1) % 48]}).number
    assert everything > 0.8  # another column is not what the sink comes from


def test_no_query_bias_is_a_query_without_its_bias():
    one = seen("qwen2")
    found = measure("attention_without_query_bias", one, {"layers": [0, 2]}).number
    before, model = attention_under(one, [], layers=[0, 1, 2]), tiny("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.zero_()
    changed = ObservedModel(wrap(model, tokenizer=one.lens.tokenizer), one.tokens)
    after = attention_under(changed, [], layers=[0, 1, 2])
    assert found == pytest.approx(float((after / before).mean()), rel=1e-4)
    with pytest.raises(UnmeasuredError, match="no bias"):
        measure("attention_without_query_bias", seen())


def test_the_largest_activation_of_a_site_is_read_there():
    assert measure("site_max_activation", seen(), {"site": "mlp_out"}).number == pytest.approx(108.5, abs=0.5)
    with pytest.raises(UnmeasuredError, match="the site nowhere cannot be read"):
        measure("site_max_activation", seen(), {"site": "nowhere"})


def test_tau_of_w_o_is_defined_without_bos_only():
    assert abs(measure("w_o_tau", seen("random")).number) < 0.2  # random weights prefer nothing
    with pytest.raises(UnmeasuredError, match="the same in every sequence"):
        measure("w_o_tau", seen())


def test_what_a_model_lacks_is_said():
    with pytest.raises(InputError, match="there is no quantity 'sinks'"):
        measure("sinks", seen())
    with pytest.raises(InputError, match="needs dimension"):
        measure("dimension_value", seen())
    with pytest.raises(AbsentError, match="no dimension 48; it has 0 to 47"):
        measure("dimension_value", seen(), {"dimension": 48})
    with pytest.raises(AbsentError, match="no outlier dimension"):
        measure("outlier_layers", seen("random"))
