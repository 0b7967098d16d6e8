"""Direct logit attribution equals TransformerLens's where that is right, formulas by hand, and the logit in sum."""

import dataclasses
import math
import warnings

import pytest
import torch
from lenses import lens_of, speaking
from transformer_lens.tools.analysis import direct_logit_attribution as reference

from sink_lens import direct_logit_attribution, edits, run_with
from sink_lens.circuits import logit_attribution
from sink_lens.errors import InputError, ModelError, SiteError
from sink_lens.models.load import wrap
from sink_lens.models.sites import sites_of
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

FAMILIES = (*TINY_FAMILIES, *MORE_FAMILIES)
RIGHT, WRONG = 5, 7
NOT_THEIRS = {
    "olmo2",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "nemotron",
    "bitnet",
    "flex_olmo",
    "vaultgemma",
}
NOT_THEIRS |= {"granite", "granitemoe", "falcon", "nanochat"} | {
    one for one in FAMILIES if "headnorm" in one
}
"""Families that TransformerLens refuses, or whose parts do not sum to the model's logits in its attribution."""


def tokens(n=3, length=12):
    return torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in NOT_THEIRS])
def test_each_part_and_head_is_transformer_lens_s_on_a_folded_copy(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = wrap(tiny(family)).bridge
        bridge.enable_compatibility_mode(fold_value_biases=False)
        answers = {
            "answer_tokens": torch.full((3,), RIGHT),
            "incorrect_tokens": torch.full((3,), WRONG),
        }
        theirs, by_head = (
            reference(bridge, tokens(), **answers, unit=unit) for unit in ("component", "head")
        )
    first = [number for number, label in enumerate(theirs.labels) if "embed" in label]
    embedded, rest = (
        theirs.attribution[first].sum(0, keepdim=True),
        theirs.attribution[len(first) :],
    )
    own = direct_logit_attribution(lens_of(family), tokens(), RIGHT, WRONG).values[
        :-1
    ]  # their bias is no part
    torch.testing.assert_close(own, torch.cat([embedded, rest]).double(), rtol=0.0, atol=1e-5)
    if family not in (
        "gemma2",
        "gemma3",
    ):  # there TransformerLens takes heads before the norm behind the attention
        found = direct_logit_attribution(lens_of(family), tokens(), RIGHT, WRONG, by="head")
        heads = found.values[(found.frame["part"] == "head").tolist()]
        torch.testing.assert_close(
            heads, by_head.attribution[: len(heads)].double(), rtol=0.0, atol=1e-5
        )


def by_hand(lens, written, *, at):
    """The difference of logits that a vector adds, with the model's own norm and head and the norm's divisor held."""
    norm, head = (
        lens.plain.get_submodule(lens.family.final_norm),
        lens.plain.get_output_embeddings(),
    )
    last = run_with(lens, tokens(), sites=("resid_post",)).tensors["resid_post", lens.n_layers - 1][
        :, at
    ]
    centred = lens.family.centred_norm
    divided, kept = (x - x.mean(-1, keepdim=True) if centred else x for x in (last, written))
    with torch.no_grad():
        through = (
            norm(last) - norm(torch.zeros_like(last))
        ) / divided  # of each dimension: its gain over the divisor
        directions = head.weight[RIGHT] - head.weight[WRONG]
        scale = (
            1 / lens.config.logits_scaling if lens.config.model_type.startswith("granite") else 1.0
        )
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
    of_layers = direct_logit_attribution(lens, tokens(), RIGHT)
    frame, split = found.frame, {"head": "attention", "neuron": "mlp"}.get(by)
    for row, label in enumerate(of_layers.frame.itertuples()):
        if label.part == split:  # heads and the bias sum to their attention, neurons to their MLP
            own = (frame["layer"] == label.layer) & frame["part"].isin([by, split])
            torch.testing.assert_close(
                found.values[own.fillna(False).tolist()].sum(0),
                of_layers.values[row],
                rtol=0.0,
                atol=1e-5,
            )


def test_under_edits_the_parts_sum_to_the_edited_logit_and_what_no_part_wrote_has_its_row():
    lens, vector = lens_of("gpt2"), torch.linspace(-1, 1, 48)
    made = [
        edits.add("resid_post", vector, layers=[1]),
        edits.zero("attn_out", layers=[2]),
        edits.scale("z", 2.0),
    ]
    logits = run_with(lens, tokens(), made, logits=True).logits[:, -1, RIGHT].double()
    for by in ("layer", "head", "neuron"):
        found = direct_logit_attribution(lens, tokens(), RIGHT, by=by, edits=made)
        torch.testing.assert_close(found.values.sum(0), logits, rtol=0.0, atol=1e-5)
        rows = found.frame["part"] == "edit"
        assert found.frame.loc[rows, "layer"].tolist() == ([1, 2] if by == "head" else [1])
        last = (
            run_with(lens, tokens(), made, sites=("resid_post",))
            .tensors["resid_post", 2][:, -1]
            .double()
        )
        norm, head = lens.plain.transformer.ln_f, lens.plain.lm_head.weight.double()
        through = norm.weight.double() * head[RIGHT]
        centred = last - last.mean(-1, keepdim=True)
        divisor = (centred.square().mean(-1) + norm.eps).sqrt()
        by_formula = (vector.double() - vector.double().mean()) @ through / divisor
        torch.testing.assert_close(
            found.values[rows.tolist()][0], by_formula.detach(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("plant", ["gain", "norm behind"])
def test_a_planted_fault_of_the_attribution_is_an_error(plant, monkeypatch):
    """The sum of the parts is compared with the logits of the model's own norm and head."""
    lens = lens_of("gemma2" if plant == "norm behind" else "gpt2")
    if plant == "gain":
        norm = logit_attribution.final_norm(lens)
        faulty = dataclasses.replace(norm, gain=torch.ones_like(norm.gain))
        monkeypatch.setattr(logit_attribution, "final_norm", lambda lens: faulty)
    else:
        monkeypatch.setattr(
            logit_attribution, "post_norm_factor", lambda total, after: torch.ones(1, 1, 1)
        )
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
    ids = [
        lens.tokenizer(one, add_special_tokens=False)["input_ids"] for one in (" a", " the", "s")
    ]
    same = direct_logit_attribution(lens, prompts, [ids[0][0], ids[1][0]], ids[2][0])
    torch.testing.assert_close(texts.values, same.values)
    assert texts.what == "logit of [' a', ' the'] minus that of 's'"
    assert "the sum of 8 contributions" in texts._repr_html_()


def test_what_cannot_be_attributed_is_refused():
    lens = lens_of()
    with pytest.raises(
        InputError, match="an edit of 'final' was given, which no part of the model writes"
    ):
        direct_logit_attribution(lens, tokens(), RIGHT, edits=edits.zero("final"))
    with pytest.raises(
        InputError, match="there are 2 answers for 3 prompts; need one, or one for each"
    ):
        direct_logit_attribution(lens, tokens(), [RIGHT, WRONG])
    with pytest.raises(
        InputError, match="position 12 is outside a sequence of 12 tokens; need -12 to 11"
    ):
        direct_logit_attribution(lens, tokens(), RIGHT, position=12)
    with pytest.raises(
        InputError, match=r"the answers are the ids \[300, 300, 300\]; need 0 to 299"
    ):
        direct_logit_attribution(lens, tokens(), 300)
    with pytest.raises(InputError, match="by of direct_logit_attribution is 'component'"):
        direct_logit_attribution(lens, tokens(), RIGHT, by="component")
