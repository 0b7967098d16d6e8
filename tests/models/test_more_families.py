"""The families that came later: what the tests of every family do not reach, and the variants that are refused."""

import pytest
import torch
from family_table import make_table, read, read_cells, written
from jaxtyping import TypeCheckError
from lenses import ALL_FAMILIES, speaking, tokens
from rounding import assert_rows_close
from tiers import REPRESENTATIVES
from transformers import LlamaConfig

from sink_lens import answers, capture, run_with
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import trace
from sink_lens.errors import ModelError
from sink_lens.models.families import FAMILIES, family_of_model, setting_of
from sink_lens.models.interfaced import give_attention_interface
from sink_lens.models.load import wrap
from sink_lens.models.private_apis import set_attention
from sink_lens.models.weights import norm_weights
from sink_lens.records import read_run
from tests.tiny_families import LATENT_FAMILIES, MORE_FAMILIES, config_of, tiny

OWN_ATTENTION = ("falcon", "gptj", "gpt_neo", "bloom")


@torch.no_grad()
def logits(model):
    return model(tokens(), use_cache=False).logits


def test_there_are_at_least_24_families():
    assert {type(tiny(name)).__name__ for name in ALL_FAMILIES} == set(FAMILIES)
    assert len(FAMILIES) >= 24


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_an_attention_that_takes_the_interface_gives_the_numbers_of_its_own_class(family):
    model, other = tiny(family), tiny(family)
    give_attention_interface(other)
    assert any(type(one).__module__.startswith("sink_lens") for one in other.modules())
    assert {name for name, _ in other.named_parameters()} == {
        name for name, _ in model.named_parameters()
    }
    assert_rows_close(logits(other), logits(model))
    set_attention(other, "sink_lens_cells")
    with pytest.raises((AssertionError, KeyError, TypeCheckError)):  # it is called
        logits(other)


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_a_change_of_the_weights_reaches_the_bridge(family):
    lens = wrap(tiny(family))
    before = lens.bridge(tokens(), use_cache=False)
    fused = lens.layer(1).get_submodule(lens.family.attention).get_submodule(lens.family.q)
    with torch.no_grad():
        fused.weight.mul_(1.5)
        found, expected = lens.bridge(tokens(), use_cache=False), logits(lens.plain)
    assert not torch.equal(found, before)
    assert_rows_close(found, expected)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("stablelm", {"qk_layernorm": True}, "a gain of its own for each head"),
        ("cohere", {"use_qk_norm": True}, "a gain of its own for each head"),
        ("phi", {"qk_layernorm": True}, "need a model without it"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "add to the normed stream"),
        ("opt", {"do_layer_norm_before": False}, "norms behind its sublayers"),
        ("opt", {"word_embed_proj_dim": 24}, "another width"),
        ("olmo", {"clip_qkv": 8.0}, "clips its queries"),
        ("olmoe", {"clip_qkv": 8.0}, "clips its queries"),
        ("falcon", {"alibi": True}, "need a Falcon with rotary positions"),
        ("falcon", {"new_decoder_architecture": True}, "laid out in groups"),
        ("falcon", {"multi_query": False}, "need multi_query and parallel_attn"),
        ("gpt_bigcode", {"multi_query": False}, "need one with multi_query"),
        ("falcon", {"parallel_attn": False}, "need multi_query and parallel_attn"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "some of its layers have no experts"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "some of its layers have no experts"),
    ],
)
def test_a_variant_that_is_not_known_is_refused_with_the_reason(family, fields, reason):
    with pytest.raises(ModelError, match=reason):
        wrap(tiny(family, **fields))


def test_both_sublayers_of_a_parallel_stablelm_read_one_norm():
    lens = wrap(tiny("stablelm", use_parallel_residual=True))
    attention, mlp = (
        norm_weights(lens, layer=0, which=which) for which in ("attn_norm", "mlp_norm")
    )
    assert torch.equal(attention.gain, mlp.gain)


def test_granites_multiplier_is_read_from_the_configuration():
    row = family_of_model(
        "GraniteForCausalLM", config=config_of("granite", residual_multiplier=0.22)
    )
    assert row.attn_multiplier == row.mlp_multiplier == 0.22


def test_a_setting_that_a_configuration_of_ones_own_takes_is_read():
    class Taken(LlamaConfig):
        def __init__(self, sliding_window=4, **others):
            super().__init__(**others)
            self.sliding_window = sliding_window

    class Stated(LlamaConfig):
        sliding_window = 4

    assert [setting_of(kind(), "sliding_window") for kind in (Taken, Stated)] == [4, 4]


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("llama", {"sliding_window": 4}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("llama", {"final_logit_softcapping": 1.0}),
        ("llama", {"residual_multiplier": 0.5}),
    ],
)
def test_a_field_of_the_configuration_that_no_model_of_its_class_reads_changes_no_number(
    family, field
):
    ids, found = tokens(1), []
    for more in ({}, field):
        model = tiny(family)
        vars(model.config).update(more)
        lens = wrap(model)
        mass = run_with(lens, ids, loss=False).mass
        table = answers(lens, ids, top=3)
        plain = capture(lens, ids, sites=["attn_out"], layers=[1], path="plain")
        found.append((mass, torch.tensor(table["logit"].tolist()), plain["attn_out", 1]))
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("family", [*MORE_FAMILIES, *LATENT_FAMILIES])
def test_a_trace_runs_to_its_end(family, tmp_path):
    settings = {
        "sequences": 2,
        "length": 16,
        "interventions": False,
        "random_init": False,
        "threshold": 0.1,
    }
    config = TraceConfig(model="tiny", tokens="random", **settings)
    result = trace(
        speaking(family), config=config, out=tmp_path / "run", progress=False, report=False
    )
    assert read_run(tmp_path / "run").status == "finished"
    assert len(result.tables["heads"]) == 3 * 4 * len(result.location.sink_positions)
    if family in LATENT_FAMILIES:
        assert result.tables["heads"]["qk_alignment"].isna().all()


# --- the table of families and sites in the documentation is what the models do


MEND = "run python tests/checking/family_table.py"


def test_the_table_of_the_documentation_says_what_is_found_of_a_family_for_each_mechanism():
    said = read()
    for architecture, cells in read_cells(REPRESENTATIVES).items():
        assert said[architecture] == cells, (architecture, MEND)


@pytest.mark.exhaustive
def test_the_table_of_the_documentation_is_what_is_found():
    assert make_table() == written(), MEND
