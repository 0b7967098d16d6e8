"""``capture`` and ``stream`` against each other and against Hugging Face alone; what they keep and refuse."""

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from lenses import lens_of as lens
from lenses import stock_opt, tokens
from spying import spied

from sink_lens.activations.record import Reading, bytes_to_capture, capture, stream
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, KernelError, SiteError
from sink_lens.models.load import wrap
from sink_lens.models.sites import SITES, sites_of
from sink_lens.models.tiny import tiny_tokenizer
from tests.tiny_families import TINY_FAMILIES, tiny

LENGTH = 24
RAW = {  # layers, then within a layer: attention and MLP as they add to the stream, W_O, down-projection
    "llama": ("model.layers", "self_attn", "mlp", "self_attn.o_proj", "mlp.down_proj"),
    "gemma2": (
        "model.layers", "post_attention_layernorm", "post_feedforward_layernorm", "self_attn.o_proj", "mlp.down_proj",
    ),
    "gpt2": ("transformer.h", "attn", "mlp", "attn.c_proj", "mlp.c_proj"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp", "attention.dense", "mlp.dense_4h_to_h"),
    "opt": ("model.decoder.layers", "self_attn", "fc2", "self_attn.out_proj", "fc2"),
    "gpt_oss": ("model.layers", "self_attn", "mlp", "self_attn.o_proj", None),
}  # fmt: skip
RAW |= dict.fromkeys(("mistral", "qwen2", "qwen3", "phi3"), RAW["llama"])
RAW |= dict.fromkeys(
    ("headnorm", "headnorm_sigmoid", "headnorm_gate", "headnorm_sink"), RAW["llama"]
)
RAW |= dict.fromkeys(("gemma3", "olmo2"), RAW["gemma2"])


@functools.cache
def captured(family, path):
    model = lens(family)
    return capture(model, tokens(), sites=sites_of(model.family), path=path)


@functools.cache
@torch.no_grad()
def raw(family):
    """Read every site of a tiny model with plain torch hooks, under eager attention: (site, layer) -> tensor."""
    model = tiny(family, attn_implementation="eager")
    path, attn, mlp, w_o, down = RAW[family]
    found = {}

    def listen(module, site, layer, *, before=False, heads=None):
        def hook(module, args, result=None):
            result = args if before else result
            tensor = result[0] if isinstance(result, tuple) else result
            found[site, layer] = tensor.unflatten(-1, heads) if heads else tensor

        module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)

    for layer, block in enumerate(model.get_submodule(path)):
        listen(block.get_submodule(attn), "attn_out", layer)
        listen(block.get_submodule(mlp), "mlp_out", layer)
        listen(block.get_submodule(w_o), "z", layer, before=True, heads=(4, -1))
        if down:
            listen(block.get_submodule(down), "neurons", layer, before=True)
    ids = tokens()
    out = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    for layer in range(3):
        found["resid_pre", layer] = out.hidden_states[layer]
        found["pattern", layer] = out.attentions[layer]
        if layer:
            found["resid_post", layer - 1] = out.hidden_states[layer]
    found["final", 0] = out.hidden_states[3]
    # OPT flattens batch and position around its MLP
    return {
        key: x if len(x) == len(ids) else x.unflatten(0, (len(ids), -1)) for key, x in found.items()
    }


def reading(name, *sites, of=lambda view: None):
    return Reading(name=name, sites=sites, function=of)


def keep(*names, layers=None):
    return [
        Reading(
            name=name, sites=(name,), function=lambda view, name=name: view[name], layers=layers
        )
        for name in names
    ]


def close(found, expected):
    """Within 1e-5 of the norm of the row."""
    return bool(((found - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1) + 1e-12).all())


def streamed_sites(family):
    return [name for name in sites_of(lens(family).family) if not SITES[name].observed]


@pytest.mark.parametrize("family", TINY_FAMILIES)
@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_capture_equals_hugging_face_alone(family, path):
    found = captured(family, path)
    assert found.path == path
    assert len(raw(family)) == 3 * (
        6 if family == "gpt_oss" else 7
    )  # no resid_post at the last layer, but final
    for key, expected in raw(family).items():
        assert close(found[key], expected), key


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_stream_equals_capture_in_batches_of_one_as_all_at_once(family):
    names = streamed_sites(family)
    together = stream(lens(family), tokens(5), keep(*names), batch_size=5)
    one_by_one = stream(lens(family), tokens(5), keep(*names), batch_size=1)
    kept = capture(lens(family), tokens(5), sites=names, path="plain")
    for name, layer in kept:
        for found in (together, one_by_one):
            assert close(found[name, 3 if name == "final" else layer], kept[name, layer]), (
                name,
                layer,
            )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_prompt_in_a_padded_batch_is_as_alone(family):
    lengths = torch.tensor([LENGTH, 11, 5])
    ids = tokens(3)
    padded = from_tensor(
        ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0), lengths=lengths
    )
    names = streamed_sites(family)
    together = stream(lens(family), padded, keep(*names))
    for path in ("plain", "bridge"):
        kept = capture(lens(family), padded, sites=names, path=path)
        for index, length in enumerate(lengths.tolist()):
            alone = capture(lens(family), ids[index : index + 1, :length], sites=names, path=path)
            for name, layer in alone:
                at = 3 if name == "final" else layer
                assert close(kept[name, layer][index, :length], alone[name, layer][0]), (
                    name,
                    layer,
                    path,
                )
                assert close(together[name, at][index, :length], alone[name, layer][0]), (
                    name,
                    layer,
                )


def test_a_bridge_with_a_tokenizer_leaves_token_tensors_as_they_are():
    """TransformerLens puts BOS before strings and masks padding of lists; of tensors it must do neither."""
    with_tokenizer = wrap(tiny("llama"), tokenizer=tiny_tokenizer())
    ids = tokens().index_fill(1, torch.tensor([0, 1, LENGTH - 1]), 0)  # pad tokens at both ends
    with pytest.warns(UserWarning, match="rows 0-1 begin .* the padding id 0"):
        found = capture(with_tokenizer, ids, sites=["resid_post"], path="bridge")
    plain = capture(lens("llama"), ids, sites=["resid_post"], path="plain")
    assert close(found["resid_post", 2], plain["resid_post", 2])


def test_a_reading_sees_its_layer_and_which_tokens_are_real():
    views, total = [], []

    def look(view):
        views.append(view)
        return view["z"].mean((1, 2, 3))

    ids, lengths, rows = tokens(), torch.tensor([LENGTH, 9]), torch.tensor([2, 4])
    batch = from_tensor(ids, lengths=lengths)
    sums = reading("sums", "resid_post", of=lambda view: total.append(view["resid_post"].sum()))
    found = stream(
        lens("llama"), batch, [reading("look", "z", "attn_out", of=look), sums], rows=rows
    )
    assert (found.values["sums"], len(total)) == ({}, 3)
    assert [view.layer for view in views] == [0, 1, 2]
    assert all(torch.equal(view.tokens, ids) and torch.equal(view.rows, rows) for view in views)
    assert all(view.valid.sum(1).tolist() == [LENGTH, 9] for view in views)
    assert found.stacked("look").shape == (3, 2)
    assert torch.equal(found.stacked("look")[1], found["look", 1])


def test_a_reading_that_changes_the_run_and_a_tensor_that_was_not_captured_are_refused():
    changes = reading("changes", "attn_out", of=lambda view: view["attn_out"].mul_(0).sum((1, 2)))
    with pytest.raises(
        InputError, match="the reading 'changes', layer 0 changed a tensor of the run in place"
    ):
        stream(lens("llama"), tokens(), [changes])
    with pytest.raises(
        InputError, match=r"\('z', -1\) was not captured; need one of 'z', 2. Layers are counted"
    ):
        capture(lens("llama"), tokens(), sites=["z"], layers=[-1])["z", -1]


def test_a_frame_has_one_row_a_number():
    norm = reading(
        "norm", "z", of=lambda view: view["z"].norm(dim=-1)[:, :4]
    )  # [batch, 4 positions, 4 heads]
    found = stream(lens("llama"), tokens(), [norm])
    frame = found.frame("norm", axes=("position", "head"))
    assert list(frame.columns) == ["layer", "sequence", "position", "head", "value"]
    assert len(frame) == 3 * 2 * 4 * 4
    row = frame[
        (frame.layer == 1) & (frame.sequence == 1) & (frame.position == 3) & (frame["head"] == 2)
    ]
    assert row["value"].item() == found["norm", 1][1, 3, 2].item()
    with pytest.raises(
        InputError,
        match=r"'norm' has 2 axes after the sequence and 1 names were given: \['position'",
    ):
        found.frame("norm", axes=("position",))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_layers_after_the_last_one_needed_do_not_run(family):
    model, ran = lens(family), []
    modules = {**dict(enumerate(model.bridge.blocks)), "lm_head": model.bridge.unembed}
    with spied(modules, lambda name, output: ran.append(name)):
        found = stream(model, tokens(), keep("resid_post", "mass", layers=frozenset({1})))
        assert list(found.values["resid_post"]) == list(found.values["mass"]) == [1]
        assert ran == [0, 1]
        ran.clear()
        capture(model, tokens(), sites=["resid_pre"], layers=[0])
        assert ran == [0]
        ran.clear()
        capture(model, tokens(), sites=["final"], layers=[])
        assert ran == [0, 1, 2]
    assert close(found["resid_post", 1], captured(family, "plain")["resid_post", 1])


def test_nothing_of_a_pass_is_kept(request):
    gc.disable()  # nothing waits for a collection
    request.addfinalizer(gc.enable)
    seen: list[weakref.ref] = []

    def first_token(view):
        seen.extend(weakref.ref(tensor) for tensor in view.tensors.values())
        alive = [reference() for reference in seen[: -2 * len(view.tensors)]]
        assert all(
            tensor is None for tensor in alive
        )  # of the layer before the one before: gone already
        return view["resid_post"][:, 0]

    first = reading("first", "attn_in", "z", "resid_post", of=first_token)
    found = stream(lens("llama"), tokens(6), [first], batch_size=2)
    assert len(seen) == 3 * 3 * 3
    assert all(reference() is None for reference in seen)
    # What is kept of a view is the view's numbers, not the storage that it looks into.
    assert all(
        tensor.untyped_storage().nbytes() == 6 * 48 * 4 for tensor in found.values["first"].values()
    )


def test_captured_tensors_share_no_storage():
    found = capture(lens("llama"), tokens(), sites=["resid_pre", "resid_post", "z", "z_raw"])
    assert found.path == "bridge"  # where there is one
    storages = [tensor.untyped_storage().data_ptr() for tensor in found.tensors.values()]
    assert len(set(storages)) == len(storages)
    before = found["resid_pre", 1].clone()
    found["resid_post", 0].zero_()  # the same tensor in the model
    assert torch.equal(found["resid_pre", 1], before)


@pytest.mark.parametrize("path", ["plain", "bridge"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((one, torch.float32) for one in TINY_FAMILIES),
        *((one, torch.bfloat16) for one in ("olmo2", "gpt2")),
    ],
)
def test_the_estimate_is_the_bytes_that_are_kept(family, dtype, path):
    model = lens(family) if dtype == torch.float32 else wrap(tiny(family).to(dtype))
    batch, sites = from_tensor(tokens()), sites_of(model.family)
    for options in ({"layers": [0, 2]}, {"layers": [1], "positions": [0, 5, 23, 4]}):
        found = capture(model, batch, sites=sites, path=path, **options)
        for name in sites:
            nbytes = sum(found[key].untyped_storage().nbytes() for key in found if key[0] == name)
            assert bytes_to_capture(model, batch, sites=[name], **options) == nbytes > 0, name
        assert {tensor.dtype for tensor in found.tensors.values()} == {dtype}


def test_more_bytes_than_allowed_are_refused_before_anything_runs(monkeypatch):
    batch, sites = from_tensor(tokens()), ["resid_post", "pattern"]
    # 2 sequences x 3 layers x 24 positions x (48 dimensions + 4 heads x 24 keys) x 4 bytes
    needed = 2 * 3 * 24 * (48 + 4 * 24) * 4
    free = SimpleNamespace(available=needed / 0.8 + 1)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    assert len(capture(lens("llama"), batch, sites=sites)) == 6
    free.available = (needed - 1) / 0.8
    with pytest.raises(
        InputError, match=rf"would keep {needed:,} bytes and {needed - 1:,} are allowed.*use stream"
    ):
        capture(lens("llama"), batch, sites=sites)


@pytest.mark.parametrize("path", ["plain", "bridge"])
def test_layers_and_positions_are_those_that_were_asked_for(path):
    everything = captured("llama", path)
    sites = ["k", "neurons", "scores", "resid_post", "final", "k"]
    found = capture(
        lens("llama"), tokens(), sites=sites, layers=[2, 0, 2], positions=[7, 0], path=path
    )
    assert set(found) == {(site, layer) for site in sites[:4] for layer in (0, 2)} | {("final", 0)}
    assert found.positions == (7, 0)
    for key in found:
        whole = everything[key]
        assert torch.equal(
            found[key], whole[:, :, [7, 0]] if key[0] == "scores" else whole[:, [7, 0]]
        )
    assert torch.equal(found["final"], found["final", 0])


def test_a_hook_of_the_users_before_a_module_is_behind_the_site_on_both_paths():
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
    found = [
        capture(wrap(model), tokens(), sites=["z", "attn_out"], path=path)
        for path in ("plain", "bridge")
    ]
    for site in ("z", "attn_out"):
        torch.testing.assert_close(found[0][site, 1], found[1][site, 1])


def test_hooks_that_stand_on_the_bridge_act_or_are_refused():
    model, ids = lens("llama"), tokens()
    edited = run_with(model, ids, zero("attn_out", layers=[1]), sites=("resid_post",)).tensors
    with model.bridge.hooks(
        fwd_hooks=[("blocks.1.hook_attn_out", lambda x, hook: torch.zeros_like(x))]
    ):
        found = stream(model, ids, keep("resid_post", "mass"))
        kept = capture(model, ids, sites=["resid_post"])
    for layer in range(3):
        assert close(found["resid_post", layer], edited["resid_post", layer])
        assert close(kept["resid_post", layer], edited["resid_post", layer])
    with (
        model.bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: x)]),
        pytest.raises(
            KernelError,
            match=r"a hook stands at blocks.1.attn.hook_pattern, and this pass makes no scores",
        ),
    ):
        stream(model, ids, keep("resid_post"))


def test_a_bridge_that_delegates_its_attention_is_not_read_for_scores():
    """The stock adapter of OPT computes in Hugging Face; its hook of the scores carries the pattern."""
    stock = stock_opt()
    assert stock.uneditable == {"scores", "pattern"}
    found = capture(stock, tokens(), sites=["scores", "pattern"])
    assert found.path == "plain"
    expected = captured("opt", "bridge")
    seen = expected["scores", 1] > -1e30
    torch.testing.assert_close(found["scores", 1][seen], expected["scores", 1][seen])
    torch.testing.assert_close(found["pattern", 1], expected["pattern", 1])
    with pytest.raises(SiteError, match=r"shows no 'scores' as.*path='plain'"):
        capture(stock, tokens(), sites=["resid_post", "scores"], path="bridge")


def state(model):
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for path in (model.plain, model.bridge)
        for module in path.modules()
    )
    return (
        model.plain.config._attn_implementation,
        hooks,
        [module.training for module in model.plain.modules()],
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_model_is_left_as_it_was_also_after_an_error(family):
    model = lens(family)
    before = state(model)
    with torch.no_grad():
        logits = model.plain(tokens(), use_cache=False).logits
    stream(model, tokens(), keep("mass", "resid_post", layers=frozenset({0})))
    assert state(model) == before

    def fail(view):
        raise ZeroDivisionError

    for sites in (("mass",), ("resid_post",)):
        with pytest.raises(ZeroDivisionError):
            stream(model, tokens(), [reading("fail", *sites, of=fail)])
        assert state(model) == before
    capture(model, tokens(), sites=["pattern", "z"], path="bridge")
    assert state(model) == before
    with torch.no_grad():
        out = model.plain(tokens(), use_cache=False, output_hidden_states=True)
    assert torch.equal(out.logits, logits)
    assert len(out.hidden_states) == 4


@pytest.mark.parametrize(
    ("readings", "options", "error", "text"),
    [
        (keep("z", "z"), {}, InputError, r"readings have the same name: \['z', 'z'\]"),
        (keep("zz"), {}, SiteError, r"no site 'zz'; need one of resid_pre"),
        (keep("rows"), {}, InputError, r"needs 'rows' and no query positions were given"),
        (
            keep("rows"),
            {"rows": torch.tensor([24])},
            InputError,
            r"position 24 is outside the sequences; need 0 to 23",
        ),
        (
            keep("mass"),
            {"keys": (0, -1)},
            InputError,
            r"position -1 is outside the sequences; need 0 to 23",
        ),
        (keep("mass"), {"keys": ()}, InputError, r"needs the columns of keys and no key was given"),
        (keep("z", layers=frozenset({3})), {}, InputError, r"layer 3 does not exist; need 0 to 2"),
        (keep("z"), {"batch_size": 0}, InputError, r"batch size is 0"),
        ([reading("none")], {}, InputError, r"'none' names no site"),
        ([reading("x", "final", "z")], {}, SiteError, r"need a reading of 'final' alone"),
        (
            [reading("mean", "z", of=lambda view: view["z"].mean())],
            {},
            InputError,
            r"shape \(\) for 2 sequences; need",
        ),
        (
            [reading("turned", "z", of=lambda view: view["z"].mT[0])],
            {},
            InputError,
            r"\(24, 12, 4\) for 2 sequences",
        ),
    ],
)
def test_stream_refuses(readings, options, error, text):
    with pytest.raises(error, match=text):
        stream(lens("llama"), tokens(), readings, **options)


def test_capture_and_tokens_that_the_model_does_not_take_are_refused():
    with pytest.raises(SiteError, match=r"no site 'nothing'"):
        capture(lens("llama"), tokens(), sites=["nothing"])
    with pytest.raises(InputError, match=r"layer 3 does not exist; need 0 to 2"):
        capture(lens("llama"), tokens(), sites=["z"], layers=[0, 3])
    with pytest.raises(InputError, match=r"position 24 is outside the sequences; need 0 to 23"):
        capture(lens("llama"), tokens(), sites=["z"], positions=[0, 24])
    with pytest.raises(
        InputError, match=r"the sequences have 257 tokens; LlamaForCausalLM takes at most 256"
    ):
        capture(lens("llama"), tokens(1, 257), sites=["z"])
    with pytest.raises(InputError, match=r"token id 300 is outside the vocabulary of 300"):
        stream(lens("llama"), torch.tensor([[1, 300]]), keep("z"))


def test_a_reading_of_the_final_norm_beside_one_of_each_layer_waits_at_its_own():
    last = reading("last", "final", of=lambda view: view["final"].norm(dim=-1))
    found = stream(lens("llama"), tokens(), [*keep("z"), last])
    alone, place = stream(lens("llama"), tokens(), [last]), ("last", lens("llama").n_layers)
    assert torch.equal(found[place], alone[place])
