"""What is checked before a model is handed out finds what it is there to find."""

import copy
import json

import pytest
import torch
import transformers
from lenses import tokens
from rounding import assert_rows_close
from torch import nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers.models.llama.modeling_llama import LlamaAttention

from sink_lens.errors import ModelError
from sink_lens.models import checks
from sink_lens.models.families import FAMILIES
from sink_lens.models.load import load, wrap
from tests.tiny_families import tiny


class ONormForCausalLM(transformers.LlamaForCausalLM):
    """A subclass under a name of its own."""


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """A subclass under the name of its parent."""


class HeadNorm(nn.Module):
    """W_O behind a norm of each head's values: what the stock adapter of Llama leaves out."""

    def __init__(self, w_o):
        super().__init__()
        self.w_o = w_o

    def forward(self, z):
        heads = z.unflatten(-1, (4, -1))
        return self.w_o(nn.functional.rms_norm(heads, heads.shape[-1:]).flatten(-2))


@pytest.mark.parametrize(
    ("model_class", "text"),
    [
        (ONormForCausalLM, r"the architecture 'ONormForCausalLM' is not known"),
        (
            LlamaForCausalLM,
            r"\.LlamaForCausalLM has the name of a class of transformers but is a different class",
        ),
    ],
)
def test_a_subclass_does_not_get_its_parents_adapter_nor_a_bridge_of_it(model_class, text):
    model = tiny("llama")
    model.__class__ = model_class
    for made in (
        model,
        build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config),
    ):
        with pytest.raises(ModelError, match=text):
            wrap(made)


def test_an_attention_that_was_replaced_inside_the_model_is_found_by_its_logits():
    """A subclass of the attention in a model of the right class: the adapter skips what it adds."""

    class Doubling(LlamaAttention):
        def forward(self, *args, **options):
            output, weights = super().forward(*args, **options)
            return 2 * output, weights

    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = Doubling
    with pytest.raises(
        ModelError, match=r"logits differ .* the adapter skips a part of this model"
    ):
        wrap(model)


def test_a_module_in_place_of_a_projection_is_used_by_both_paths():
    model = tiny("llama")
    model.model.layers[1].self_attn.o_proj = HeadNorm(model.model.layers[1].self_attn.o_proj)
    with torch.no_grad():
        lens = wrap(model)
        assert_rows_close(
            lens.bridge(tokens(), use_cache=False), lens.plain(tokens(), use_cache=False).logits
        )


def test_the_model_is_on_its_own_kernel_again_after_the_check():
    plain = tiny("llama")
    inner = copy.deepcopy(plain)
    bridge = build_bridge_from_module(inner, "LlamaForCausalLM", hf_config=inner.config)
    plain.model.norm.weight.data.mul_(2)
    with pytest.raises(
        ModelError, match=r"differ from the plain model's by 5.0e-01 of their norm on 64 tokens"
    ):
        checks.check_bridge_logits(bridge, plain=plain, family=FAMILIES["LlamaForCausalLM"])
    assert plain.config._attn_implementation == "sdpa"


def test_logits_that_are_no_numbers_and_a_type_in_which_a_pass_fails_are_refused():
    plain = tiny("llama")
    plain.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(
        ModelError, match=r"logits in torch.float32 are not finite on 8 tokens; need a type"
    ):
        wrap(plain)
    with pytest.raises(
        ModelError, match=r"a forward pass in torch.float64 .*fails \(.*\); .*Use float32"
    ):
        wrap(tiny("gpt_oss").double())


@pytest.mark.parametrize(
    "key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"]
)
def test_a_kernel_of_the_hub_is_neither_fetched_nor_run(key, tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # transformers would fetch a kernel where flash_attn is not installed
    (tmp_path / "config.json").write_text(json.dumps(config | {key: "flash_attention_2"}))
    assert load(tmp_path, device="cpu").plain.config._attn_implementation == "sdpa"
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("opened")
    )
    for value in ("somebody/kernel", "kernels-community/flash-attn2"):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(
            ModelError, match="which is code that would be fetched from the hub and run"
        ):
            load(tmp_path, device="cpu")


def test_a_fault_of_the_configuration_is_told_as_such(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in (
        {"hidden_size": "a"},
        {"num_attention_heads": 0},
        {"hidden_act": "nosuch"},
        {"vocab_size": -3},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=r"config\.json describes no model"):
            load(tmp_path, device="cpu")


def test_a_padding_id_outside_the_vocabulary_is_named(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changed = config | {"bos_token_id": 777, "pad_token_id": 900}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ModelError, match=r"pad_token_id is 900.* 300 tokens"):
        load(tmp_path, device="cpu")


def test_two_embeddings_that_the_configuration_ties_are_noted(tmp_path):
    model = tiny("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    assert not any("tie_word_embeddings" in note for note in load(tmp_path, device="cpu").notes)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    changed = load(tmp_path, device="cpu")
    assert any("tie_word_embeddings" in note for note in changed.notes)
    assert torch.equal(changed.plain.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("path", ["", "self_attn", "mlp.up_proj"])
def test_a_module_of_two_layers_is_refused(path):
    model = tiny("llama")
    layers = model.model.layers
    layers.set_submodule(f"2.{path}".rstrip("."), layers.get_submodule(f"1.{path}".rstrip(".")))
    with pytest.raises(
        ModelError, match=rf"layers 1 and 2 of .* share a module \({path or 'the whole layer'}"
    ):
        wrap(model)


def test_layers_that_share_tensors_are_wrapped():
    model = tiny("llama")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    assert wrap(model).n_layers == 3


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_attention_can_be_edited_in_a_model_whose_values_are_all_zero(family):
    model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "v_proj" in name:
                parameter.zero_()
            elif "query_key_value" in name:  # query, key and value of each head in turn
                parameter.unflatten(0, (model.config.num_attention_heads, 3, -1))[:, 2] = 0.0
    assert wrap(model).uneditable == frozenset()


def test_the_epsilon_of_a_norm_is_the_models_own_whatever_its_configuration_calls_it():
    bridge = wrap(tiny("starcoder2", norm_epsilon=1e-2)).bridge  # which compares the logits
    assert {one.config.eps for one in (bridge.blocks[0].ln1, bridge.ln_final)} == {1e-2}
