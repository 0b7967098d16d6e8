"""The class computes what its configuration says, by hand and against other ways to the same numbers."""

import caches
import pytest
import torch
from rounding import assert_gradients_close, assert_moved, assert_rows_close
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, StaticCache, Trainer, TrainingArguments

from sink_lens.errors import InputError
from sink_lens.models.headnorm import HeadNormConfig, HeadNormForCausalLM, convert, undecayed
from sink_lens.models.headnorm.modeling import HeadOutput, fused_sink_attention, unfused_attention
from sink_lens.models.headnorm.norm import HeadNorm, first_token_std, head_norm
from tests.tiny_families import tiny


@torch.no_grad()
def logits(model, ids, kernel="eager", **more):
    before = model.config._attn_implementation
    model.set_attn_implementation(kernel)
    try:
        return model(ids, use_cache=False, **more).logits
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def patterns(model, ids):
    model.set_attn_implementation("eager")
    return torch.stack(model(ids, output_attentions=True).attentions)


def captured(model, ids, name, layer=0):
    """The inputs of a submodule of a layer's attention."""
    seen = []
    module = model.model.layers[layer].self_attn.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    logits(model, ids)
    handle.remove()
    return seen[0]


# --- by hand ---


def test_the_norm_of_a_head_by_hand():
    """The root mean square of (3, 4) is sqrt(12.5)."""
    found = head_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    assert found.tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])
    assert head_norm(torch.zeros(3), torch.ones(3), eps=1e-6).tolist() == [0, 0, 0]
    # eps is added to the mean square: of (1, 1) and eps 3 the root is 2
    assert head_norm(torch.ones(2), torch.ones(2), eps=3.0).tolist() == [0.5, 0.5]
    large = torch.full((4,), 1000.0, dtype=torch.float16)  # its square is no number of the type
    assert head_norm(large, torch.ones(4, dtype=torch.float16), eps=0.0).tolist() == [1, 1, 1, 1]


def plain_norm(z, gamma, *, eps):
    wide = z.float()
    return gamma * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(z.dtype)


@pytest.mark.parametrize("shape", [(5,), (3, 5)], ids=["shared", "per head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_gradients_are_autograds(shape, dtype):
    """Gradients of first and second order, and row by row under ``vmap``."""
    generator = torch.Generator().manual_seed(0)
    z, weights = (torch.randn(2, 4, 3, 5, generator=generator).to(dtype) for _ in range(2))
    gamma = torch.randn(shape, generator=generator).to(dtype)
    found = []
    for norm in (head_norm, plain_norm):
        inputs = z.clone().requires_grad_(), gamma.clone().requires_grad_()
        out = norm(*inputs, eps=0.1)
        first = torch.autograd.grad((out * weights).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), inputs)
        found.append([out, *first, *second])
    within = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.25}
    )
    for ours, autograds in zip(*found, strict=True):
        torch.testing.assert_close(ours, autograds, **within)
    by_row = torch.func.vmap(
        torch.func.grad(lambda one: (head_norm(one, gamma, eps=0.1) * weights[0]).sum())
    )(z)
    torch.testing.assert_close(by_row[0], found[0][1][0], **within)


def test_the_norm_comes_before_the_gate_and_heads_have_their_own():
    """Heads (3, 4) and (0, 5) of root mean square sqrt(12.5): gains 1 and 2, gates 1/2 and 3/4."""
    z_raw = torch.tensor([[[[3.0, 4.0], [0.0, 5.0]]]])
    gate = torch.tensor([[[0.0, 3.0]]]).log1p()  # sigmoid(log 1) = 1/2, sigmoid(log 4) = 4/5
    gate[0, 0, 1] = torch.tensor(3.0).log()  # sigmoid(log 3) = 3/4
    norm = HeadNorm(2, 2, eps=0.0)
    norm.set_gain(torch.tensor([1.0, 2.0]))
    found = HeadOutput()(z_raw, norm, gate)
    root = 12.5**0.5
    assert found[0, 0].tolist() == pytest.approx([1.5 / root, 2 / root, 0, 0.75 * 2 * 5 / root])
    elementwise = torch.tensor([[[0.0, 100.0, 0.0, -100.0]]])
    assert HeadOutput()(z_raw, None, elementwise)[0, 0].tolist() == pytest.approx([1.5, 4, 0, 0])
    assert HeadOutput()(z_raw, None, None)[0, 0].tolist() == [3, 4, 0, 5]


def test_the_scale_by_position_by_hand():
    """At positions 0, 3 and 8 the roots of 1, 4 and 9; the scale comes before the gate, here 1/2."""
    z_raw = torch.ones(1, 3, 1, 2)
    positions = torch.tensor([[0, 3, 8]])
    assert HeadOutput()(z_raw, None, None, positions)[0, :, 0].tolist() == [1, 2, 3]
    assert HeadOutput()(z_raw, None, torch.zeros(1, 3, 1), positions)[0, :, 0].tolist() == [
        0.5,
        1,
        1.5,
    ]
    half = HeadOutput()(z_raw.half(), None, None, positions)
    assert half.dtype == torch.float16


def test_sigmoid_weights_by_hand():
    """Scores 0 and log 3 have weights 1/2 and 3/4; the first query sees the first key alone."""
    query = torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]])
    key = torch.tensor([[[[0.0, 1.0], [torch.tensor(3.0).log().item() * 2, 0.0]]]])
    value = torch.tensor([[[[8.0, 0.0], [0.0, 4.0]]]])
    out, pattern = unfused_attention(nn.Identity(), query, key, value, None, scaling=0.5)
    assert pattern[0, 0].tolist() == [pytest.approx([0.5, 0.0]), pytest.approx([0.5, 0.75])]
    assert out[0, :, 0].tolist() == [pytest.approx([4.0, 0.0]), pytest.approx([4.0, 3.0])]


def test_a_sink_logit_by_hand():
    """Two keys of score 0 beside a sink of logit log 2 have a quarter each."""
    query, key = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)
    value = torch.tensor([[[[4.0, 0, 0], [0, 4.0, 0]]]])
    sink = torch.tensor([2.0]).log()
    out, _ = fused_sink_attention(nn.Identity(), query, key, value, None, scaling=0.5, s_aux=sink)
    assert out[0, 1, 0].tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert out[0, 0, 0].tolist() == pytest.approx([4 / 3, 0.0, 0.0])


def test_a_key_bias_by_hand():
    """Two keys of score 0 beside logits log 2 and log 8 of the two queries: 1/3 of a key, then 1/10 each of two."""
    query, key = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)
    value = torch.tensor([[[[3.0, 0, 0], [0, 10.0, 0]]]])
    beside = torch.tensor([[[2.0, 8.0]]]).log()
    causal = torch.zeros(2, 2).masked_fill(~torch.ones(2, 2, dtype=torch.bool).tril(), -1e9)[
        None, None
    ]
    for attend, mask in (
        (fused_sink_attention, None),
        (fused_sink_attention, causal),
        (unfused_attention, causal),
    ):
        out, _ = attend(nn.Identity(), query, key, value, mask, scaling=0.5, s_aux=beside)
        assert out[0, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.0])
        assert out[0, 1, 0].tolist() == pytest.approx([0.3, 1.0, 0.0])


# --- the pattern ---


def test_softmax_off_by_one_has_a_one_in_its_denominator_that_is_not_learned(new_model, tokens):
    plain = new_model("softmax")
    model = convert(plain, attention="off_by_one")  # the same weights
    assert not model.model.layers[0].self_attn.sinks.requires_grad
    pattern, softmax = (
        patterns(model, tokens)[0],
        patterns(plain, tokens)[0],
    )  # of layer 0, whose scores are the same
    # exp(s_i) / (1 + Z) = softmax_i * Z / (1 + Z): a row is the softmax's, times what it sums to.
    torch.testing.assert_close(pattern, softmax * pattern.sum(-1, keepdim=True))
    # The first query sees its own key alone: exp(s) / (1 + exp(s)), the sigmoid of its score.
    first = patterns(convert(plain, attention="sigmoid"), tokens)[0][..., 0, 0]
    torch.testing.assert_close(pattern[..., 0, 0], first)


def test_a_single_scale_norm_scales_all_dimensions_alike(new_model):
    model = new_model("single_scale")
    norm = model.model.layers[0].input_layernorm
    assert norm.weight.shape == (1,)
    h = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    expected = norm.weight * h / h.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(norm(h), expected, rtol=1e-4, atol=1e-5)
    assert [one.shape for name, one in model.named_parameters() if "norm" in name] == [(1,)] * (
        2 * 2 + 1
    )


def test_a_gate_closes_and_opens_the_head(new_model, tokens):
    model = new_model("elementwise")
    z_raw, z = captured(model, tokens, "head_out"), captured(model, tokens, "o_proj")
    hidden = captured(model, tokens, "q_proj")
    gate = model.model.layers[0].self_attn.head_gate(hidden).sigmoid().detach()
    torch.testing.assert_close(z, z_raw.flatten(-2) * gate)
    assert z_raw.shape == (2, 21, 4, 12)


# --- the first weights ---


def test_the_scale_by_position_refuses_to_guess_the_positions():
    attention = tiny("headnorm", value_norm="position").model.layers[0].self_attn
    with pytest.raises(
        InputError,
        match="value_norm 'position' was given no position_ids; need each token's position",
    ):
        attention(
            torch.zeros(1, 2, 48), position_embeddings=(torch.ones(1, 2, 12), torch.zeros(1, 2, 12))
        )


def test_gamma_begins_at_the_size_of_the_first_tokens_output():
    """W_V has n(0, s): a value of an input of d_model standard normal numbers has deviation s sqrt(d_model)."""
    torch.manual_seed(0)
    config = HeadNormConfig(
        hidden_size=256, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=10, value_norm="per_head", value_norm_init="first_token", initializer_range=0.1,
    )  # fmt: skip
    model = HeadNormForCausalLM(config)
    for layer in model.model.layers:
        gamma = layer.self_attn.value_norm.gain
        assert gamma.mean().item() == pytest.approx(0.1 * 16, rel=0.03)
        assert (gamma == gamma[:, :1]).all()
        assert torch.equal(gamma[0], gamma[1])  # of one kv head
        assert not torch.equal(gamma[0], gamma[2])
        with torch.no_grad():
            layer.self_attn.v_proj.weight[:64] *= 3
            layer.self_attn.initialise_gain()
        assert gamma[0, 0].item() == pytest.approx(0.3 * 16, rel=0.03)


def test_the_dummy_pass_of_the_authors_is_one_draw_with_a_biased_deviation():
    fields = {
        "hidden_size": 48,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = HeadNormConfig(
        **fields, vocab_size=10, value_norm="per_head", value_norm_init="dummy_pass"
    )
    attention = HeadNormForCausalLM(config).model.layers[0].self_attn
    torch.manual_seed(5)
    attention.initialise_gain()
    torch.manual_seed(5)
    value = (torch.randn(1, 48) @ attention.v_proj.weight.T).view(
        4, 12
    )  # the first token's output is its value
    wanted = (value - value.mean(1, keepdim=True)).square().mean(1).sqrt()  # over 12, not 11
    torch.testing.assert_close(attention.value_norm.gain, wanted[:, None].expand(4, 12))
    torch.manual_seed(5)
    unbiased = first_token_std(attention.v_proj.weight, None, d_head=12, draws=64, biased=False)
    assert not torch.allclose(unbiased, wanted, rtol=1e-3)


SMALL = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 24,
}  # fmt: skip


def of_seed(seed=3, **fields):
    torch.manual_seed(seed)
    return HeadNormForCausalLM(HeadNormConfig(**SMALL | fields))


def sizes_by_hand(model, length, sequences=200):
    """Root mean square of what enters W_O in a model without a norm, by layer and head, on tokens of the test's own."""
    tokens = torch.randint(
        SMALL["vocab_size"], (sequences, length), generator=torch.Generator().manual_seed(9)
    )
    before = (
        "head_out" if model.config.attention.startswith("gate") else "o_proj"
    )  # a gate comes after the norm
    into = [captured(model, tokens, before, layer) for layer in range(SMALL["num_hidden_layers"])]
    return torch.stack(
        [one.reshape(sequences, length, 4, 12).square().mean((0, 1, 3)).sqrt() for one in into]
    )


@pytest.mark.parametrize(
    "more", [{}, {"attention": "sigmoid"}, {"attention": "gate_headwise"}], ids=str
)
def test_matched_gains_begin_at_the_size_of_z_without_the_norm(more):
    """Gains of models of one seed, with grouped heads; a shared gain is the mean over the heads."""
    per_head = of_seed(value_norm="per_head", value_norm_init="matched", **more)
    shared = of_seed(value_norm="shared", value_norm_init="matched", **more)
    plain = of_seed(**more)
    weights = dict(per_head.named_parameters())
    assert all(torch.equal(weights[name], one) for name, one in plain.named_parameters())
    wanted = sizes_by_hand(plain, 24)
    for layer, sizes in enumerate(wanted):
        gain = per_head.model.layers[layer].self_attn.value_norm.gain
        assert (gain == gain[:, :1]).all()
        torch.testing.assert_close(gain[:, 0], sizes, rtol=0.1, atol=0)
        alike = shared.model.layers[layer].self_attn.value_norm.gain
        torch.testing.assert_close(alike, gain[:, 0].mean().expand(12))
    if not more:
        w_v = per_head.model.layers[0].self_attn.v_proj.weight
        ratio = first_token_std(w_v, None, d_head=12, draws=64, biased=False) / wanted[0].view(
            2, 2
        ).mean(1)
        assert (ratio > 1.5).all()  # the first token's is larger than the mean over 24


def test_matched_gains_depend_on_the_length_and_leave_the_random_state_alone(tmp_path):
    short = of_seed(value_norm="shared", value_norm_init="matched", value_norm_length=4)
    state = torch.get_rng_state()
    short.initialise_gains()
    assert torch.equal(torch.get_rng_state(), state)
    plain = sizes_by_hand(of_seed(), 4).mean(1)
    torch.testing.assert_close(torch.tensor(short.mean_gains()), plain, rtol=0.1, atol=0)
    assert min(short.mean_gains()) > 1.3 * max(
        of_seed(value_norm="shared", value_norm_init="matched").mean_gains()
    )
    with torch.no_grad():
        short.model.layers[1].self_attn.value_norm.gain.fill_(7.0)
    short.save_pretrained(tmp_path)
    found = HeadNormForCausalLM.from_pretrained(tmp_path)
    assert found.mean_gains() == short.mean_gains()
    assert found.config.value_norm_length == 4
    for own in (None, *found.model.layers):
        assert (
            own is None or own.self_attn.value_norm is not None
        )  # the measurement has put them back


def test_matched_gains_of_a_folder_without_them_are_measured_on_its_weights(tmp_path):
    model = of_seed()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(5)
    model.save_pretrained(tmp_path)
    loaded = HeadNormForCausalLM.from_pretrained(
        tmp_path, value_norm="per_head", value_norm_init="matched"
    )
    converted = convert(model, value_norm="per_head", value_norm_init="matched")
    for found in (loaded, converted):
        gains = torch.stack([layer.self_attn.value_norm.gain[:, 0] for layer in found.model.layers])
        torch.testing.assert_close(gains, sizes_by_hand(model, 24), rtol=0.1, atol=0)


def test_the_first_weights_have_the_sizes_of_the_paper_and_follow_the_seed():
    fields = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    norm = {"value_norm": "shared", "value_norm_init": "first_token"}
    config = HeadNormConfig(**fields, **norm, vocab_size=500, attention="gate_headwise")
    torch.manual_seed(3)
    first = HeadNormForCausalLM(config)
    torch.manual_seed(3)
    again = HeadNormForCausalLM(config)
    for (name, one), two in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
        wanted = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        if one.ndim > 1:
            assert one.std().item() == pytest.approx(wanted, rel=0.15), name
    assert first.model.layers[0].self_attn.value_norm.gain.mean().item() == pytest.approx(
        0.02 * 8, rel=0.1
    )
    config = HeadNormConfig(
        **fields, attention="sink_logit", value_norm="per_head", value_norm_init="ones"
    )
    attention = HeadNormForCausalLM(config).model.layers[1].self_attn
    assert (attention.sinks == 0).all()
    assert (attention.value_norm.gain == 1).all()


def test_gains_sink_logits_and_biases_are_not_decayed():
    model = tiny(
        "headnorm",
        value_norm="per_head",
        attention="sink_logit",
        attention_bias=True,
        num_hidden_layers=1,
    )
    inside = ["value_norm.gain", "sinks", *(f"{part}_proj.bias" for part in "qkvo")]
    norms = [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.norm",
    ]
    assert undecayed(model) == {f"model.layers.0.self_attn.{name}" for name in inside} | {
        f"{n}.weight" for n in norms
    }
    decayed = {name for name, _ in model.named_parameters()} - undecayed(model)
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"} < decayed


def test_an_unshared_gain_is_decayed_where_the_released_code_is_asked_for():
    gain = "model.layers.0.self_attn.value_norm.gain"
    per_head, shared = (
        tiny("headnorm", value_norm=norm, num_hidden_layers=1) for norm in ("per_head", "shared")
    )
    assert gain in undecayed(shared, unshared_gain=False)
    assert gain not in undecayed(per_head, unshared_gain=False)


@pytest.mark.parametrize("norm", ["shared", "per_head"])
def test_the_plain_trainer_of_transformers_decays_no_gain(norm, tmp_path):
    model = tiny("headnorm", value_norm=norm, qk_norm=True, attention_bias=True)
    trainer = Trainer(
        model, TrainingArguments(str(tmp_path), weight_decay=0.1, use_cpu=True, report_to="none")
    )
    decayed, spared = trainer.create_optimizer().param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    wanted = {id(one) for name, one in model.named_parameters() if name in undecayed(model)}
    assert {id(one) for one in spared["params"]} == wanted


# --- one model in several ways ---


def test_eager_equals_sdpa_under_every_mask(variant, model_of, tokens):
    model = model_of(variant)
    lengths = torch.tensor([[21], [13]])
    for real in (None, torch.arange(21) < lengths, torch.arange(21) >= 21 - lengths):
        mask = None if real is None else real.long()
        fused, eager = (
            logits(model, tokens, kernel, attention_mask=mask)[real] for kernel in ("sdpa", "eager")
        )
        assert (fused - eager).abs().max() <= 2e-6 * eager.abs().max()


def test_a_padded_prompt_is_as_alone(variant, model_of, tokens):
    model = model_of(variant)
    alone = logits(model, tokens[1:, :13])
    left = torch.cat([torch.zeros(1, 8, dtype=torch.int64), tokens[1:, :13]], dim=1)
    mask = torch.ones(1, 21, dtype=torch.int64)
    positions = torch.cat([torch.zeros(8, dtype=torch.int64), torch.arange(13)])[None]
    for kernel in ("eager", "sdpa"):
        behind = logits(
            model, tokens[1:], kernel, attention_mask=mask.index_fill(1, torch.arange(13, 21), 0)
        )
        assert_rows_close(behind[:, :13], alone)
        options = {
            "attention_mask": mask.index_fill(1, torch.arange(8), 0),
            "position_ids": positions,
        }
        assert_rows_close(logits(model, left, kernel, **options)[:, 8:], alone)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_mask_of_ones_own_is_honoured(variant, model_of, tokens, kernel):
    """A window of 4, as a mask with four axes: boolean under SDPA, added under eager."""
    model = model_of(variant)
    window = torch.ones(21, 21, dtype=torch.bool).tril().triu(-3)[None, None]
    mask = (
        window
        if kernel == "sdpa"
        else torch.zeros(1, 1, 21, 21).masked_fill(~window, torch.finfo().min)
    )
    windowed = logits(model, tokens, kernel, attention_mask=mask)
    other = tokens.clone()
    other[:, 0] = 299 - other[:, 0]
    changed = logits(model, other, kernel, attention_mask=mask)
    reach = 3 * 2  # layers
    assert_rows_close(changed[:, reach + 1 :], windowed[:, reach + 1 :])
    assert_moved(changed[:, : reach + 1], windowed[:, : reach + 1])
    assert not torch.allclose(windowed[:, 10:], logits(model, tokens, kernel)[:, 10:])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_a_cache_changes_nothing(variant, new_model, tokens, kernel):
    model = new_model(variant, attn_implementation=kernel)
    whole = logits(model, tokens, kernel)
    cache, parts = None, []
    for piece in tokens.split([9, 1, 1, 10], dim=1):
        part, cache = caches.run(model, piece, cache)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    static = StaticCache(config=model.config, max_cache_len=30)
    parts = [caches.run(model, piece, static)[0] for piece in tokens.split([20, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("tied", [False, True])
def test_it_comes_back_from_a_folder(variant, tied, new_model, tokens, tmp_path):
    """Nothing is drawn in vain, and the logits are the same to the last bit."""
    model = new_model(variant, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(found) is HeadNormForCausalLM
    assert torch.equal(logits(found, tokens), logits(model, tokens))
    own = {"transformers_version", "_name_or_path", "dtype", "architectures"}
    kept, config = (
        {k: v for k, v in one.config.to_dict().items() if k not in own} for one in (found, model)
    )
    assert kept == config
    assert "auto_map" not in found.config.to_dict()
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    assert type(AutoModel.from_pretrained(tmp_path)) is type(model.model)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}


def test_gradients_reach_everything_and_checkpointing_and_the_kernel_leave_them(
    variant, new_model, tokens
):
    model = new_model(variant, attn_implementation="eager").train()
    plain = gradients(model, tokens)
    assert all(grad.abs().max() > 0 for grad in plain.values())
    # Under its new name, which the oldest transformers that is taken does not have.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for name, grad in gradients(model, tokens).items():
        assert_gradients_close(grad, plain[name], name)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    model.set_attn_implementation("sdpa")
    for name, grad in gradients(model, tokens).items():
        assert (grad - plain[name]).norm() <= 2e-5 * plain[name].norm() + 1e-7, name


def test_dropout_of_the_attention_is_for_training_only(tokens):
    for attention in ("sigmoid", "sink_logit", "softmax"):
        for kernel in ("eager", "sdpa"):
            model = tiny(
                "headnorm", attention=attention, attention_dropout=0.5, num_hidden_layers=1
            )
            torch.testing.assert_close(logits(model, tokens, kernel), logits(model, tokens))
            noisy = [logits(model.train(), tokens, kernel) for _ in range(2)]
            assert not torch.equal(*noisy)


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_a_kernel_that_knows_no_variant_is_refused(kernel, new_model):
    with pytest.raises((ValueError, ImportError)):
        new_model("sigmoid").set_attn_implementation(kernel)
