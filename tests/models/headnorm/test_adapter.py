"""TransformerLens on the class: the same numbers and gradients, edits that take effect, and found by its name."""

import copy
from importlib.metadata import entry_points

import pytest
import torch
from rounding import assert_close, assert_gradients_close, assert_rows_close
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from sink_lens.activations.record import Reading, capture, stream
from sink_lens.data.tokens import TokenBatch
from sink_lens.edits.constructors import scale, zero
from sink_lens.edits.metrics import evaluate, loss, norm, sink_mass
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.errors import InputError, KernelError, ModelError
from sink_lens.models.headnorm.adapter import HEAD_NORM, HeadNormAdapter, register_head_norm_adapter
from sink_lens.models.load import load, wrap
from tests.tiny_families import tiny


def test_the_bridge_has_the_logits_and_the_gradients_of_the_plain_model(variant, new_model, tokens):
    plain = new_model(variant, attn_implementation="eager")
    lens = wrap(plain)
    assert isinstance(lens.bridge.adapter, HeadNormAdapter)
    assert lens.uneditable == frozenset()
    wanted = plain(tokens, use_cache=False).logits
    wanted.square().mean().backward()
    trained = {
        name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad
    }
    expected = {name: parameter.grad.clone() for name, parameter in trained.items()}
    plain.zero_grad()
    found = lens.bridge(tokens, use_cache=False)
    assert_rows_close(found.detach(), wanted.detach())
    found.square().mean().backward()
    for name, parameter in trained.items():
        assert_gradients_close(parameter.grad, expected[name], name)


def test_the_scores_hook_has_masked_scores_and_the_pattern_hook_the_weights(
    variant, lens_of, tokens
):
    lens = lens_of(variant)
    scores = capture(lens, tokens, sites=["scores"], path="bridge")["scores", 0]
    pattern = capture(lens, tokens, sites=["pattern"], path="bridge")["pattern", 0]
    attention = lens.plain.config.attention
    seen = torch.ones(21, 21, dtype=torch.bool).tril()
    assert (scores[..., ~seen] < -1e30).all()
    if attention == "sigmoid":
        expected = scores.sigmoid()
    elif attention in ("sink_logit", "off_by_one"):
        sinks = lens.layer(0).self_attn.sinks.detach()[:, None, None]
        expected = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp())
    elif attention == "key_bias":
        query = capture(lens, tokens, sites=["q"], path="bridge")["q", 0]
        bias = lens.layer(0).self_attn.key_bias.detach()
        logit = torch.einsum("bphe,he->bhp", query, bias) / bias.shape[1] ** 0.5
        expected = scores.exp() / (scores.exp().sum(-1, keepdim=True) + logit.exp()[..., None])
    else:
        expected = scores.softmax(-1)
    torch.testing.assert_close(pattern, expected)
    assert (pattern[..., ~seen] == 0).all()


def test_what_is_observed_on_the_plain_path_is_the_bridges(variant, lens_of, tokens):
    lens = lens_of(variant)
    names = ("mass", "scores", "pattern", "rows", "z_raw", "z")
    readings = [
        Reading(name=name, sites=(name,), function=lambda view, name=name: view[name])
        for name in names
    ]
    rows = torch.tensor([0, 7, 20])
    found = stream(lens, tokens, readings, keys=(0, 4), rows=rows)
    sigmoid = lens.plain.config.attention == "sigmoid"
    assert found.kernel == ("eager" if sigmoid else "fused")
    bridge = capture(lens, tokens, sites=["scores", "pattern", "z_raw", "z"], path="bridge")
    for layer in range(2):
        pattern = bridge["pattern", layer]
        shares = (
            pattern / pattern.sum(-1, keepdim=True) if sigmoid else pattern
        )  # sigmoid rows sum to anything
        torch.testing.assert_close(found["mass", layer], shares[..., [0, 4]], atol=1e-5, rtol=0)
        torch.testing.assert_close(found["rows", layer], pattern[:, :, rows], atol=1e-5, rtol=0)
        torch.testing.assert_close(found["pattern", layer], pattern, atol=1e-5, rtol=0)
        for name in ("z_raw", "z"):
            torch.testing.assert_close(
                found[name, layer], bridge[name, layer], atol=1e-5, rtol=1e-5
            )
    if sigmoid:
        with pytest.raises(
            KernelError, match=r"takes the sigmoid of its attention scores.*kernel='eager'"
        ):
            stream(lens, tokens, readings, rows=rows, kernel="fused")


@pytest.mark.parametrize("family", ["headnorm", "headnorm_gate"])
def test_an_edit_before_the_norm_goes_through_it(family, tokens):
    """The norm takes a factor away again; after it, the factor stays."""
    lens = wrap(tiny(family))
    z_raw, z = "blocks.1.attn.head_out.hook_in", "blocks.1.attn.hook_z"

    def changed(name):
        seen = {}
        hooks = [
            (name, lambda tensor, hook: tensor * 3),
            (z, lambda tensor, hook: seen.update(z=tensor)),
        ]
        with torch.no_grad():
            lens.bridge.run_with_hooks(tokens, fwd_hooks=hooks, use_cache=False)
        return seen["z"]

    plain = capture(lens, tokens, sites=["z"], path="bridge")["z", 1]
    torch.testing.assert_close(changed(z_raw), plain, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(changed(z), plain * 3)


def test_generation_on_the_bridge_is_the_models(variant, lens_of, tokens):
    lens = lens_of(variant)
    model = lens.plain
    options = {"max_new_tokens": 4, "do_sample": False}
    own = {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(tokens, **own, **options)
    found = lens.bridge.generate(tokens, stop_at_eos=False, verbose=False, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("option", ["set_use_split_qkv_input", "set_use_attn_in"])
def test_a_gate_refuses_inputs_of_its_own_for_each_head(option, tokens):
    bridge = wrap(tiny("headnorm_gate")).bridge
    getattr(bridge, option)(True)
    with pytest.raises(InputError, match=r"split the gate's input; switch them off"):
        bridge(tokens)


# --- found by its name ---


def test_registering_again_changes_nothing_and_the_adapter_is_published():
    assert (
        register_head_norm_adapter()
        == register_head_norm_adapter()
        == HEAD_NORM
        == "HeadNormForCausalLM"
    )
    (found,) = entry_points(group="transformer_lens.architectures", name=HEAD_NORM)
    assert found.value == "sink_lens.models.headnorm.adapter:HeadNormAdapter"


def test_a_bridge_with_the_parents_adapter_is_refused():
    model = tiny("headnorm")
    memo = {id(parameter): parameter for parameter in model.parameters()}
    wrong = build_bridge_from_module(
        copy.deepcopy(model, memo), "LlamaForCausalLM", hf_config=model.config
    )
    with pytest.raises(ModelError, match=r"differ from the plain model's"):
        wrap(wrong)


def test_a_sweep_gives_what_a_run_of_each_cell_alone_gives(variant, lens_of, tokens):
    lens, batch = lens_of(variant), TokenBatch.from_tensor(tokens)
    edits = [
        zero("z", layers=[0], heads=[1]),
        scale("scores", 0.5, layers=[1]),
        zero("pattern", layers=[1], heads=[0]),
    ]
    edits += [
        scale("resid_post", 2.0, layers=[0], positions=[3]),
        zero("q", layers=[1], positions=[4, 5]),
    ]
    cells = [cell_of_edits([one]) for one in edits]
    metrics = [sink_mass(0), loss(), norm(3, layer=1)]
    engine = Engine(
        lens, batch, cells, metrics, plan=Plan(path="blocks", prompts=2, pack=3, cut=True)
    )
    for block in engine.blocks:
        for (cell, name), rows in engine.run(block).groupby(["cell", "metric"], sort=False):
            alone = run_with(
                lens, batch, [edits[cell]], positions=(0, 3), sites=("resid_post",), quiet=True
            )
            expected = evaluate(next(one for one in metrics if one.name == name), alone)
            assert rows["error"].isna().all(), rows["error"].tolist()
            assert_close(torch.tensor(rows["value"].to_numpy()), expected.double())


def test_a_folder_is_opened_and_the_facts_of_the_variant_are_told(tmp_path):
    for variant, facts in {
        "sigmoid": (True, False, "sdpa"),
        "sink_logit": (False, True, "sdpa"),
    }.items():
        tiny("headnorm", attention=variant).save_pretrained(tmp_path / variant)
        family = load(tmp_path / variant).family
        assert (family.sigmoid, family.sink_logit, family.plain_kernel) == facts
