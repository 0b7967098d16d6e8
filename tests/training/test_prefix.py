import copy
import itertools
import json
import math

import caches
import pytest
import torch
from rounding import assert_close, assert_rows_close
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from sink_lens import wrap
from sink_lens.errors import InputError, ModelError
from sink_lens.training.prefix import (
    PrefixConfig,
    PrefixModel,
    bridge_hooks,
    get_prefix_model,
    prefix_output,
)
from tests.tiny_families import HYBRID_FAMILIES, MORE_FAMILIES, TINY_FAMILIES, tiny

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2")
TOKENS = torch.randint(3, 300, (2, 13), generator=torch.Generator().manual_seed(7))
PHI = {
    "elu": lambda x: x if x > 0 else math.exp(x) - 1,
    "elu_plus_one": lambda x: x + 1 if x > 0 else math.exp(x),
}


def filled(family, *, scale=0.3, dtype=None, **fields):
    """A tiny model with a module of random numbers outside its heads."""
    base = tiny(family)
    model = get_prefix_model(base if dtype is None else base.to(dtype), **fields)
    draw = torch.Generator().manual_seed(3)
    for memory in model.memories.values():
        for matrix in memory.parameters():
            matrix.data.copy_(
                torch.randn(matrix.shape, generator=draw, dtype=torch.float64) * scale
            )
    return model


@pytest.mark.parametrize("phi", [*PHI, "constant"])
def test_what_is_added_and_its_gradient_are_the_formula_by_nested_loops_in_float64(phi):
    """Two query heads share each key-value head: heads 0 and 1 the first M, 2 and 3 the second."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
    up = torch.randn(q.shape, generator=draw, dtype=torch.float64)  # dL/d(what is added)
    memory = torch.randn(
        2, 1 if phi == "constant" else 5, 5, generator=draw, dtype=torch.float64
    ).requires_grad_()
    found = prefix_output(q, memory, phi=phi)
    (gradient,) = torch.autograd.grad(found, memory, up)
    wanted, slopes = torch.zeros_like(q), torch.zeros_like(memory)
    for b, p, head, d in itertools.product(*map(range, q.shape)):
        for f in range(memory.shape[1]):
            feature = 1.0 if phi == "constant" else PHI[phi](q[b, p, head, f].item())
            wanted[b, p, head, d] += feature * memory[head // 2, f, d].item()
            slopes[head // 2, f, d] += feature * up[b, p, head, d].item()
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, slopes, rtol=1e-12, atol=1e-13)


def test_three_matrices_are_refused():
    one = torch.ones(2, 5, 5)
    with pytest.raises(InputError, match="3 matrices were given; need M, or keys and values"):
        prefix_output(torch.ones(2, 3, 4, 5), one, one, one)


def test_keys_and_values_are_m_of_limited_rank():
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 3, 5, generator=draw, dtype=torch.float64)
    found = prefix_output(q, keys, values)
    torch.testing.assert_close(found, prefix_output(q, keys.mT @ values), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_logits_and_gradients_are_those_of_the_formula_hooked_in_by_hand(family):
    model = filled(family, dtype=torch.float64)
    loss = cross_entropy(model(TOKENS).logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, [memory.memory for memory in model.memories.values()])

    raw, held = tiny(family).to(torch.float64), {}
    memories = [
        memory.memory.detach().clone().requires_grad_() for memory in model.memories.values()
    ]
    n_heads, d_head = 4, 16 if family in ("qwen3", "gemma2") else 12
    blocks = raw.transformer.h if family == "gpt2" else raw.model.layers
    for layer, (block, memory) in enumerate(zip(blocks, memories, strict=True)):
        attention = block.attn if family == "gpt2" else block.self_attn
        q = attention.c_attn if family == "gpt2" else attention.q_proj

        def see(module, args, output, layer=layer):
            held[layer] = output[..., : n_heads * d_head].view(2, -1, n_heads, d_head)

        def add(module, args, layer=layer, memory=memory):
            query = held[layer]
            features = torch.where(query > 0, query, query.exp() - 1)
            by_head = memory.repeat_interleave(
                n_heads // len(memory), dim=0
            )  # GQA: heads 0, 1 share the first
            return (
                args[0]
                + torch.stack([features[:, :, h] @ by_head[h] for h in range(n_heads)], 2).flatten(
                    2
                ),
            )

        q.register_forward_hook(see)
        (attention.c_proj if family == "gpt2" else attention.o_proj).register_forward_pre_hook(add)
    wanted = raw(TOKENS).logits
    by_hand = torch.autograd.grad(
        cross_entropy(wanted[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()), memories
    )
    torch.testing.assert_close(model(TOKENS).logits, wanted, rtol=1e-10, atol=1e-10)
    for found, expected in zip(gradients, by_hand, strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", [*TINY_FAMILIES, *MORE_FAMILIES])
def test_it_begins_as_no_change_and_the_bridge_with_its_hooks_is_the_model_with_it(family):
    base = tiny(family)
    before = base(TOKENS).logits
    assert torch.equal(get_prefix_model(base)(TOKENS).logits, before)
    assert torch.equal(get_prefix_model(tiny(family), rank=2)(TOKENS).logits, before)
    model = filled(family)
    after = model(TOKENS).logits.detach()
    assert (after - before).abs().max() > 0.1
    assert_close(
        wrap(tiny(family)).bridge.run_with_hooks(TOKENS, fwd_hooks=model.bridge_hooks()), after
    )


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_hybrid_gets_it_in_the_layers_that_have_attention(family):
    before, model = tiny(family)(TOKENS).logits, filled(family)
    assert list(model.memories) == ([0, 1, 2] if family == "falcon_h1" else [1, 3])
    after = model(TOKENS).logits.detach()
    assert (after - before).abs().max() > 0.05
    assert_close(
        wrap(tiny(family)).bridge.run_with_hooks(TOKENS, fwd_hooks=model.bridge_hooks()), after
    )
    assert_rows_close(model.unload()(TOKENS).logits.detach(), before.detach())


def test_a_wrapped_model_shares_the_module_or_is_refused():
    model = filled("llama")
    lens = wrap(model.get_base_model())
    for memory in model.memories.values():
        memory.memory.data.mul_(2)  # after the bridge was built
    assert_close(lens.bridge(TOKENS), model(TOKENS).logits)
    with pytest.raises(ModelError, match="bridge_hooks"):
        wrap(filled("gpt2").get_base_model())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_the_counts_and_what_is_printed_are_pefts(capsys):
    peft = pytest.importorskip("peft", reason="peft is an extra for comparison: pip install peft")
    model = get_prefix_model(tiny("qwen3"))  # 3 layers, 2 key-value heads of 16 x 16
    assert model.get_nb_trainable_parameters()[0] == 3 * 2 * 16 * 16
    model.print_trainable_parameters()
    ours = capsys.readouterr().out
    theirs = peft.get_peft_model(
        tiny("qwen3"), peft.PrefixTuningConfig(num_virtual_tokens=8, task_type="CAUSAL_LM")
    )
    theirs.print_trainable_parameters()  # d_head / 2 tokens: a key and a value of 16 numbers each
    assert ours == capsys.readouterr().out


@pytest.mark.parametrize(
    "fields", [{}, {"rank": 3}, {"phi": "constant"}, {"share": "head", "layers": (0, 2)}]
)
def test_save_and_load_are_equal_to_the_last_bit(tmp_path, fields):
    model = filled("qwen3", **fields)
    model.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PrefixModel.from_pretrained(tiny("qwen3"), tmp_path)
    assert loaded.prefix_config == model.prefix_config
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.get_nb_trainable_parameters()[0] == 0
    again = PrefixModel.from_pretrained(tiny("qwen3"), tmp_path, is_trainable=True)
    assert again.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_is_generation_without(family):
    model = filled(family)
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(TOKENS[:, :5], use_cache=True, **asked)
    assert torch.equal(cached, model.generate(TOKENS[:, :5], use_cache=False, **asked))
    whole, past, steps = model(TOKENS).logits, None, []
    for at in range(TOKENS.shape[1]):
        step, past = caches.run(model, TOKENS[:, at : at + 1], past)
        steps.append(step)
    assert_close(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_trainer_trains_it_alone_saves_it_alone_and_goes_on(family, tmp_path):
    def trainer(model, name):
        args = {
            "max_steps": 6,
            "learning_rate": 0.03,
            "per_device_train_batch_size": 2,
            "seed": 0,
            "report_to": [],
        }
        args |= {
            "gradient_accumulation_steps": 2,
            "use_cpu": True,
            "disable_tqdm": True,
            "save_steps": 3,
        }
        args = TrainingArguments(output_dir=str(tmp_path / name), logging_steps=1, **args)
        return Trainer(
            model=model,
            args=args,
            train_dataset=[{"input_ids": TOKENS[0], "labels": TOKENS[0]}] * 24,
        )

    base = tiny(family)
    weights = copy.deepcopy(base.state_dict())
    model = get_prefix_model(base)
    run = trainer(model, "whole")
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.05
    assert all(
        torch.equal(value, weights[name])
        for name, value in base.state_dict().items()
        if name in weights
    )
    checkpoint = tmp_path / "whole" / "checkpoint-6"
    loaded = PrefixModel.from_pretrained(tiny(family), checkpoint, config=model.prefix_config)
    trained = model.eval()(TOKENS).logits  # gpt2 has dropout while it is trained
    assert torch.equal(loaded(TOKENS).logits, trained)
    assert (checkpoint / "model.safetensors").stat().st_size < 40_000  # 3 matrices, and no model

    rest = trainer(get_prefix_model(tiny(family)), "rest")
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert rest.state.global_step == 6
    assert torch.equal(rest.model.eval()(TOKENS).logits, trained)


def test_gradient_checkpointing_gives_the_same_gradients():
    plain, model = filled("llama").train(), filled("llama").train()
    # Under its new name, which the oldest transformers that is taken does not have.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    assert model.get_base_model().model.layers[0].gradient_checkpointing
    for one in (plain, model):
        one(TOKENS, labels=TOKENS).loss.backward()
    for one, other in zip(plain.memories.values(), model.memories.values(), strict=True):
        assert_close(one.memory.grad, other.memory.grad)


def test_unload_gives_the_model_back_as_it_was():
    base = tiny("llama")
    base.lm_head.weight.requires_grad_(False)
    before, names = base(TOKENS).logits, list(base.state_dict())
    model = get_prefix_model(base)
    for memory in model.memories.values():
        memory.memory.data.fill_(1.0)
    assert model.unload() is base
    assert torch.equal(base(TOKENS).logits, before)
    assert list(base.state_dict()) == names
    assert not base.lm_head.weight.requires_grad
    assert all(p.requires_grad for name, p in base.named_parameters() if name != "lm_head.weight")
    get_prefix_model(base)  # and again


def test_a_model_in_half_precision_is_tuned_in_float32():
    model = filled("llama", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model(TOKENS).logits.dtype == torch.bfloat16


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path):
    model = filled("llama")
    with pytest.raises(ModelError, match="Call unload first"):
        get_prefix_model(model.get_base_model())
    for fields, said in (
        ({"rang": 2}, "did you mean rank"),
        ({"rank": 0}, "need at least 1"),
        ({"phi": "constant", "rank": 2}, "need rank None"),
        ({"layers": (3,)}, r"need some of \[0, 1, 2\]"),
    ):
        with pytest.raises(InputError, match=said):
            get_prefix_model(tiny("llama"), **fields)
    with pytest.raises(ModelError, match="found PrefixModel"):
        get_prefix_model(model)
    with pytest.raises(ModelError, match="Trainer"):
        PrefixModel.from_pretrained(tiny("llama"), tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is of a LlamaForCausalLM"):
        PrefixModel.from_pretrained(tiny("mistral"), tmp_path)
    other = tiny("llama", num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(ModelError, match="belongs to another model"):
        PrefixModel.from_pretrained(other, tmp_path)
    get_prefix_model(other)  # it was left without a module
    with pytest.raises(ModelError, match="differs from this model's in 1 matrices"):
        PrefixModel.from_pretrained(tiny("llama"), tmp_path, config=PrefixConfig(layers=(0, 1)))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved | {"peft_type": "LORA"}))
    with pytest.raises(ModelError, match="Open others with PEFT"):
        PrefixModel.from_pretrained(tiny("llama"), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="Save it again"):
        PrefixModel.from_pretrained(tiny("llama"), tmp_path)


def test_hooks_of_one_layer_take_matrices_of_ones_own():
    lens = wrap(tiny("llama"))
    keys = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    before = lens.bridge(TOKENS)
    assert torch.equal(
        lens.bridge.run_with_hooks(TOKENS, fwd_hooks=bridge_hooks(1, keys, 0 * keys)), before
    )
    assert not torch.equal(
        lens.bridge.run_with_hooks(TOKENS, fwd_hooks=bridge_hooks(1, keys, keys)), before
    )
