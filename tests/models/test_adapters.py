"""A model with adapters is measured as a merged copy, whose logits are those of the user's own model."""

import copy
import logging

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

from sink_lens import TokenBatch, load, run_with, wrap
from sink_lens.errors import ModelError
from sink_lens.models import adapters
from sink_lens.models.load import weights_hash
from sink_lens.models.weights import mlp_weights
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore::UserWarning",
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",  # of peft, about its own keys for experts
)
REPRESENTATIVES = ("llama", "gpt2", "gpt_neox", "phi3")
FAMILIES = [
    one if one in REPRESENTATIVES else pytest.param(one, marks=pytest.mark.exhaustive)
    for one in (*TINY_FAMILIES, *MORE_FAMILIES)
    if one != "phimoe"  # peft itself fails on its router, whose output is a tuple
]


def batch():
    return TokenBatch.from_tensor(
        torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    )


def with_adapter(family, **fields):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = LoraConfig(
            **{"r": 2, "target_modules": "all-linear", "init_lora_weights": False} | fields
        )
        return get_peft_model(tiny(family), settings).eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=batch().tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_copy_gives_the_logits_of_the_users_model(family):
    model = with_adapter(family)
    wanted, before = logits(model), copy.deepcopy(model.state_dict())
    assert not torch.allclose(wanted, logits(tiny(family)), rtol=1e-2, atol=1e-2)
    for one in (model, model.get_base_model()):
        found = run_with(wrap(one), batch(), logits=True).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model), wanted)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_base_model_that_holds_adapters_says_so_and_a_model_asked_for_with_them_does_not(caplog):
    base = tiny("llama")
    with torch.random.fork_rng():
        tuned = get_peft_model(
            base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        ).eval()
    holds = lambda: any("get_peft_model" in note for note in wrap(base).notes)  # noqa: E731
    assert holds()
    assert any("get_peft_model" in one.getMessage() for one in caplog.records)
    assert not any("get_peft_model" in note for note in wrap(tuned).notes)
    with tuned.disable_adapter():
        assert not holds()
        assert any("disabled" in note for note in wrap(tuned).notes)


ADAPTERS = {
    "of rank-stabilised scale": LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], use_rslora=True
    ),
    "with magnitudes": LoraConfig(r=2, target_modules=["q_proj"], use_dora=True),
    "of the unembedding": LoraConfig(r=2, target_modules=["lm_head"]),
    "of the embedding": LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"]),
    "with a whole module": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "with tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "of scales": IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_adapter_of_weights_is_merged(kind, tied):
    model = get_peft_model(
        tiny("llama", tie_word_embeddings=tied), copy.deepcopy(ADAPTERS[kind])
    ).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.requires_grad and "original" not in name:
                one.add_(
                    torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
                )
    lens = wrap(model)
    torch.testing.assert_close(
        run_with(lens, batch(), logits=True).logits, logits(model), rtol=1e-4, atol=1e-4
    )
    assert weights_hash(lens) != weights_hash(wrap(tiny("llama", tie_word_embeddings=tied)))


def test_a_model_with_several_disabled_or_merged_adapters_is_what_it_computes():
    model = with_adapter("llama")
    with torch.random.fork_rng():
        model.add_adapter(
            "second", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
        )
    for change in (
        lambda: None,
        lambda: model.set_adapter("second"),
        lambda: model.base_model.set_adapter(["default", "second"]),
        lambda: model.merge_adapter(["second"]),
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
    ):
        change()
        found = run_with(wrap(model), batch(), logits=True).logits
        torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)


def test_weights_that_are_read_are_those_that_the_model_multiplies_by():
    model = with_adapter("llama")
    lens = wrap(model)
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    wanted = layer.get_base_layer().weight + layer.get_delta_weight("default")
    torch.testing.assert_close(mlp_weights(lens, layer=1).w_down, wanted.detach())


CHANGES = {
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "unloaded": lambda model: model.unload(),
    "merged": lambda model: model.merge_and_unload(),
    "other weights": lambda model: model.load_state_dict(
        {k: v + 1 for k, v in model.state_dict().items()}
    ),
    "a second": lambda model: (
        model.add_adapter("b", LoraConfig(target_modules=["q_proj"])),
        model.set_adapter("b"),
    ),
}
"""Beside those of ``changed_models``, which trains, scales and merges an adapter."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_was_merged_is_refused(change):
    model = with_adapter("llama")
    lens = wrap(model)
    run_with(lens, batch())
    CHANGES[change](model)
    with pytest.raises(
        ModelError, match=r"the model was changed after it was wrapped: .*[Ww]rap it again"
    ):
        run_with(lens, batch())


def test_what_no_adapter_is_on_stays_the_users_own():
    model = with_adapter("llama", target_modules=["q_proj"])
    lens = wrap(model)
    model.get_base_model().model.norm.weight.data.mul_(1.5)
    torch.testing.assert_close(
        run_with(lens, batch(), logits=True).logits, logits(model), rtol=1e-4, atol=1e-4
    )


def test_its_memory_is_said_first_and_in_the_notes(caplog, monkeypatch):
    model = with_adapter("llama", target_modules=["q_proj"])
    with caplog.at_level(logging.WARNING):
        lens = wrap(model, name="tuned")
    assert (
        "the 3 adapted layers of tuned are measured as a merged copy, which takes 28 kB more memory"
        in caplog.text
    )
    assert lens.notes == ("measured as a copy of the model with its adapters merged (LORA)",)
    monkeypatch.setattr(
        adapters.psutil, "virtual_memory", lambda: type("Free", (), {"available": 10})
    )
    with pytest.raises(
        ModelError, match=r"\d+ (B|kB|bytes) of memory are free; need a merged model"
    ):
        wrap(model)


def test_an_adapter_of_prompts_and_a_copy_with_other_logits_are_refused(monkeypatch):
    model = get_peft_model(
        tiny("llama"), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(
        ModelError, match=r"PREFIX_TUNING.* nothing to merge; need an adapter of weights"
    ):
        wrap(model)
    model = with_adapter("llama")
    monkeypatch.setattr(adapters, "_merged_layer", adapters._base_layer)
    with pytest.raises(
        ModelError, match=r"with its adapters merged gives other logits, by .*need at most 1e-05"
    ):
        wrap(model)


def test_a_folder_with_an_adapter_names_its_base_and_merge_and_unload(tmp_path):
    model = with_adapter("llama")
    model.peft_config["default"].base_model_name_or_path = "owner/base"
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"an adapter \(LORA\) of owner/base, .*merge_and_unload\(\)"
    ):
        load(tmp_path)
