"""Direct logit attribution equals TransformerLens's where that is right, formulas by hand, and the logit in sum."""

import dataclasses
import math
import warnings

import pytest
import torch
from lenses import lens_of, speaking

import sink_lens
from analyses.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny
from sink_lens import direct_logit_attribution, edits, run_with
from sink_lens.circuits import logit_attribution
from sink_lens.errors import InputError, ModelError, SiteError
from sink_lens.models.load import wrap
from sink_lens.models.sites import sites_of

FAMILIES = (*TINY_FAMILIES, *MORE_FAMILIES)
RIGHT, WRONG = 5, 7
REFUSED = {"olmo2", "olmo3", "exaone4", "glm", "glm4", "nemotron", "bitnet", "flex_olmo", "vaultgemma"}
REFUSED |= {one for one in FAMILIES if "headnorm" in one}
"""Families that TransformerLens refuses: its compatibility mode does not fold their last norm, or is not for them."""
ELSEWHERE = {"granite": 0.1, "granitemoe": 0.1, "falcon": 0.1, "nanochat": 0.09}
"""Family whose attribution by TransformerLens does not sum to the model's logits -> by how much it is off at least."""
NORM_BEHIND = {"gemma2", "gemma3"}
"""Families whose heads TransformerLens takes before the norm behind the attention."""


def tokens(n=3, length=12):
    return torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))


def theirs(family, unit):
    """TransformerLens's attribution, on a folded copy."""
    from transformer_lens.tools.analysis import direct_logit_attribution as attribution

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = wrap(tiny(family)).bridge
        bridge.enable_compatibility_mode(fold_value_biases=False)
        one, other = torch.full((3,), RIGHT), torch.full((3,), WRONG)
        return attribution(bridge, tokens(), answer_tokens=one, incorrect_tokens=other, unit=unit)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_is_transformer_lens_s_on_a_folded_copy(family):
    if family in REFUSED:
        with pytest.raises((ValueError, RuntimeError), match=r"an identity final norm|not support compatibility mode"):
            theirs(family, "component")
        return
    found = direct_logit_attribution(lens_of(family), tokens(), RIGHT, WRONG)
    expected = theirs(family, "component")
    first = [number for number, label in enumerate(expected.labels) if "embed" in label]
    embedded, rest = expected.attribution[first].sum(0, keepdim=True), expected.attribution[len(first) :]
    parts = torch.cat([embedded, rest]).double()
    own = found.values[:-1]  # their bias is no part
    assert own.shape == parts.shape
    if family in ELSEWHERE:
        assert (own - parts).abs().max() > ELSEWHERE[family]
    else:
        torch.testing.assert_close(own, parts, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in REFUSED | ELSEWHERE.keys()])
def test_each_head_is_transformer_lens_s_on_a_folded_copy(family):
    found = direct_logit_attribution(lens_of(family), tokens(), RIGHT, WRONG, by="head")
    heads = found.values[(found.frame["part"] == "head").tolist()]
    expected = theirs(family, "head").attribution[: len(heads)].double()
    if family in NORM_BEHIND:
        assert (heads - expected).abs().max() > 0.1
    else:
        torch.testing.assert_close(heads, expected, rtol=0.0, atol=1e-5)


def by_hand(lens, written, *, at):
    """The difference of logits that a vector adds, with the model's own norm and head and the norm's divisor held."""
    norm, head = lens.plain.get_submodule(lens.family.final_norm), lens.plain.get_output_embeddings()
    last = run_with(lens, tokens(), sites=("resid_post",)).tensors["resid_post", lens.n_layers - 1][:, at]
    centred = lens.family.centred_norm
    divided, kept = (x - x.mean(-1, keepdim=True) if centred else x for x in (last, written))
    with torch.no_grad():
        through = (norm(last) - norm(torch.zeros_like(last))) / divided  # of each dimension: its gain over the divisor
        directions = head.weight[RIGHT] - head.weight[WRONG]
        scale = 1 / lens.config.logits_scaling if lens.config.model_type.startswith("granite") else 1.0
        scale *= lens.config.logit_scale if lens.config.model_type.startswith("cohere") else 1.0
        return (kept * through) @ directions * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_each_part_is_the_formula_by_hand(family):
    """With the model's own modules in the place of the weights that are read, in every family."""
    lens = lens_of(family)
    read = run_with(lens, tokens(), sites=("resid_pre", "attn_out", "mlp_out")).tensors
    places = [("resid_pre", 0)]
    places += [(site, layer) for layer in range(lens.n_layers) for site in ("attn_out", "mlp_out")]
    expected = torch.stack([by_hand(lens, read[place][:, 4], at=4) for place in places]).double()
    found = direct_logit_attribution(lens, tokens(), RIGHT, WRONG, position=4)
    torch.testing.assert_close(found.values[:-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_sum_to_the_logit_of_the_model(family, by, monkeypatch):
    lens = lens_of(family)
    monkeypatch.setattr(logit_attribution, "_TOKENS_A_FORWARD", 24)  # two sequences, and then one
    if by == "neuron" and "neurons" not in sites_of(lens.family):
        with pytest.raises(SiteError, match="has no site 'neurons'"):
            direct_logit_attribution(lens, tokens(), RIGHT, by=by)
        return
    found = direct_logit_attribution(lens, tokens(), RIGHT, by=by)
    summed, cap = found.values.sum(0), getattr(lens.config, "final_logit_softcapping", None)
    summed = summed if cap is None else cap * (summed / cap).tanh()
    logits = run_with(lens, tokens(), logits=True).logits[:, -1, RIGHT].double()
    torch.testing.assert_close(summed, logits, rtol=0.0, atol=1e-5)
    of_layers = direct_logit_attribution(lens, tokens(), RIGHT).values
    frame, split = found.frame, {"head": "attention", "neuron": "mlp"}.get(by)
    for row, label in enumerate(direct_logit_attribution(lens, tokens(), RIGHT).frame.itertuples()):
        if label.part == split:  # heads and the bias sum to their attention, neurons to their MLP
            own = (frame["layer"] == label.layer) & frame["part"].isin([by, split])
            torch.testing.assert_close(
                found.values[own.fillna(False).tolist()].sum(0), of_layers[row], rtol=0.0, atol=1e-5
            )


def test_under_edits_the_parts_sum_to_the_edited_logit_and_what_no_part_wrote_has_its_row():
    lens, vector = lens_of("gpt2"), torch.linspace(-1, 1, 48)
    made = [edits.add("resid_post", vector, layers=[1]), edits.zero("attn_out", layers=[2]), edits.scale("z", 2.0)]
    logits = run_with(lens, tokens(), made, logits=True).logits[:, -1, RIGHT].double()
    for by in ("layer", "head", "neuron"):
        found = direct_logit_attribution(lens, tokens(), RIGHT, by=by, edits=made)
        torch.testing.assert_close(found.values.sum(0), logits, rtol=0.0, atol=1e-5)
        rows = found.frame["part"] == "edit"
        assert found.frame.loc[rows, "layer"].tolist() == ([1, 2] if by == "head" else [1])
        last = run_with(lens, tokens(), made, sites=("resid_post",)).tensors["resid_post", 2][:, -1].double()
        norm, head = lens.plain.transformer.ln_f, lens.plain.lm_head.weight.double()
        through = norm.weight.double() * head[RIGHT]
        centred = last - last.mean(-1, keepdim=True)
        divisor = (centred.square().mean(-1) + norm.eps).sqrt()
        by_formula = (vector.double() - vector.double().mean()) @ through / divisor
        torch.testing.assert_close(found.values[rows.tolist()][0], by_formula.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plant", ["sign", "gain", "bias of the norm", "norm behind", "wrong token"])
def test_a_planted_fault_of_the_attribution_is_an_error(plant, monkeypatch):
    """The sum of the parts is compared with the logits of the model's own norm and head."""
    lens = lens_of("gemma2" if plant == "norm behind" else "gpt2")
    norm = logit_attribution.final_norm(lens)
    planted = {"gain": {"gain": torch.ones_like(norm.gain)}, "bias of the norm": {"bias": torch.zeros_like(norm.bias)}}
    if plant in planted:
        faulty = dataclasses.replace(norm, **planted[plant])
        monkeypatch.setattr(logit_attribution, "final_norm", lambda lens: faulty)
    elif plant == "norm behind":
        monkeypatch.setattr(logit_attribution, "post_norm_factor", lambda total, after: torch.ones(1, 1, 1))
    else:
        right = logit_attribution.unembedding_vectors
        sign, other = (-1, 0) if plant == "sign" else (1, 1)

        def faulty_rows(lens, ids):
            vectors, constants = right(lens, ids + other)
            return sign * vectors, constants

        monkeypatch.setattr(logit_attribution, "unembedding_vectors", faulty_rows)
    with pytest.raises(ModelError, match="sum to logits that are off by"):
        direct_logit_attribution(lens, tokens(), RIGHT, by="head")


def test_the_interval_is_over_sequences():
    found = direct_logit_attribution(lens_of(), tokens(n=5), RIGHT, WRONG)
    row = found.values[2].numpy()  # t with 4 degrees of freedom: 2.776
    wide = 2.776445 * row.std(ddof=1) / math.sqrt(5)
    assert found.frame.loc[2, ["contribution", "ci_low", "ci_high", "n"]].tolist() == pytest.approx(
        [row.mean(), row.mean() - wide, row.mean() + wide, 5]
    )


def test_answers_are_texts_behind_each_prompt_or_ids():
    lens = speaking()
    prompts = ["the cat and the", "the dog"]
    texts = direct_logit_attribution(lens, prompts, [" a", " the"], "s")
    ids = [lens.tokenizer(one, add_special_tokens=False)["input_ids"] for one in (" a", " the", "s")]
    same = direct_logit_attribution(lens, prompts, [ids[0][0], ids[1][0]], ids[2][0])
    torch.testing.assert_close(texts.values, same.values)
    assert texts.what == "logit of [' a', ' the'] minus that of 's'"
    assert "the sum of 8 contributions" in texts._repr_html_()


def test_what_cannot_be_attributed_is_refused():
    lens = lens_of()
    with pytest.raises(InputError, match="an edit of 'final' was given, which no part of the model writes"):
        direct_logit_attribution(lens, tokens(), RIGHT, edits=edits.zero("final"))
    with pytest.raises(InputError, match="there are 2 answers for 3 prompts; need one, or one for each"):
        direct_logit_attribution(lens, tokens(), [RIGHT, WRONG])
    with pytest.raises(InputError, match="position 12 is outside a sequence of 12 tokens; need -12 to 11"):
        direct_logit_attribution(lens, tokens(), RIGHT, position=12)
    with pytest.raises(InputError, match=r"the answers are the ids \[300, 300, 300\]; need 0 to 299"):
        direct_logit_attribution(lens, tokens(), 300)
    with pytest.raises(InputError, match="by of direct_logit_attribution is 'component'"):
        sink_lens.direct_logit_attribution(lens, tokens(), RIGHT, by="component")
