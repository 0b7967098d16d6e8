"""Edits and readings in TransformerLens alone give the numbers of the engine, and its hook functions are edits here."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from lenses import lens_of, speaking

from sink_lens.activations.record import Reading, capture, stream
from sink_lens.data.tokens import TokenBatch
from sink_lens.edits.amplification import amplify, centring_means
from sink_lens.edits.constructors import (
    EditError,
    clamp,
    edit,
    freeze,
    resample,
    scalar,
    scale,
    set_value,
    zero,
)
from sink_lens.edits.eviction import window
from sink_lens.edits.hooks import from_hook, fwd_hooks
from sink_lens.edits.isolation import isolate
from sink_lens.edits.mean_ablation import mean_all
from sink_lens.edits.metrics import Metric, loss, sink_mass
from sink_lens.edits.normalisation import head_rms_norm, natural_rms
from sink_lens.edits.quantisation import quantisation
from sink_lens.engine.forward import run_with
from sink_lens.engine.generation import generate
from sink_lens.errors import InputError, SiteError
from sink_lens.models.sites import SITES, bridge_hook_name, site_of_hook, sites_of
from sink_lens.patching.patch import patch
from sink_lens.sweeps import cell_of
from sink_lens.sweeps.sweep import sweep
from tests.tiny_families import TINY_FAMILIES

LENGTH = 12


def batch_of(n=3):
    tokens = torch.randint(3, 300, (n, LENGTH), generator=torch.Generator().manual_seed(3))
    return TokenBatch.from_tensor(tokens)


def every_constructor(lens, batch):
    values = run_with(lens, batch, sites=("z",)).tensors
    by_layer = {layer: values["z", layer][:, [2]] for layer in range(lens.n_layers)}
    generator = torch.Generator().manual_seed(0)
    some = {"layers": [1], "positions": [2, 5]}
    return {
        "zero": zero("z", heads=[1], **some),
        "set": set_value("neurons", 0.3, units=[4, 7], **some),
        "scale": scale("resid_post", 1.7, units=[3], layers=[0], positions=[0]),
        "clamp": clamp("mlp_out", low=-0.1, high=0.1, **some),
        "freeze": freeze("z", {layer: 2 * one for layer, one in by_layer.items()}, positions=[2]),
        "resample": resample("z", by_layer, generator=generator, positions=[2]),
        "mean": mean_all(lens, batch, "attn_out", layers=[1], positions=[0]),
        "scalar": scalar(lens, layer=1, neurons=[2, 3], dimensions=[5], positions=[0, 4]),
        "isolate": isolate([3], layers=[1]),
        "amplify": amplify(
            3.0, positions=[2], layers=[1], means=centring_means(lens, n_tokens=128)
        ),
        "normalise": head_rms_norm(natural_rms(lens, batch), layers=[1]),
        "quantise": quantisation("resid_post", "int4_token", layers=[1]),
        "window": window(4, keep=1),
        "own": edit(
            "attn_out", lambda x, at: x + at.read.flatten(2)[..., :48], reads="z", layers=[2]
        ),
    }


def test_the_hooks_of_each_constructor_give_in_transformerlens_what_they_give_here():
    lens, batch = lens_of("llama"), batch_of()
    made = every_constructor(lens, batch)
    clean = run_with(lens, batch, logits=True).logits
    for name, one in made.items():
        expected = run_with(lens, batch, one, logits=True).logits
        assert not torch.allclose(expected, clean, atol=1e-4), name
        for options in ({}, {"tokens": batch}):
            with torch.no_grad():
                found = lens.bridge.run_with_hooks(
                    batch.tokens, fwd_hooks=fwd_hooks(lens, one, **options)
                )
            torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5, msg=name)
    several = [made["zero"], made["scalar"], made["amplify"]]
    with torch.no_grad(), lens.bridge.hooks(fwd_hooks=fwd_hooks(lens, several)):
        found = lens.bridge(batch.tokens)
    torch.testing.assert_close(
        found, run_with(lens, batch, several, logits=True).logits, rtol=0.0, atol=1e-5
    )
    assert torch.equal(run_with(lens, batch, logits=True).logits, clean)  # no hook stays


def test_hooks_of_edits_that_do_not_fit_are_refused():
    lens = lens_of("gpt2")
    with pytest.raises(SiteError, match="GPT2LMHeadModel has no site 'gate'"):
        fwd_hooks(lens, zero("gate"))
    with pytest.raises(InputError, match="head 9 of the edit 'zero z' does not exist"):
        fwd_hooks(lens, [zero("z"), zero("z", heads=[9])])
    with pytest.raises(InputError, match="position 12 of the edit"):
        fwd_hooks(lens, zero("z", positions=[12]), tokens=batch_of())


def test_an_edit_of_a_position_is_refused_by_passes_over_the_last_token_alone():
    lens = lens_of("llama")
    prompt = torch.arange(3, 12)[None]
    written = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "return_type": "tokens"}
    here = zero("resid_post", layers=[2], positions=[0])
    with lens.bridge.hooks(fwd_hooks=fwd_hooks(lens, here)):
        whole = lens.bridge.generate(prompt, use_past_kv_cache=False, **written)
        with pytest.raises(EditError, match="need use_past_kv_cache=False"):
            lens.bridge.generate(prompt, use_past_kv_cache=True, **written)
    assert tuple(whole[0, 9:].tolist()) == generate(lens, prompt[0], here, max_new_tokens=3).ids
    with (
        lens.bridge.hooks(fwd_hooks=fwd_hooks(lens, window(3))),
        pytest.raises(EditError, match="need use_past_kv_cache=False"),
    ):
        lens.bridge.generate(prompt, use_past_kv_cache=True, **written)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_hook_of_transformerlens_is_an_edit_at_every_site(family):
    batch, lens = batch_of(2), lens_of(family)

    def times(x, hook):
        assert hook.layer() == 1
        return 0.5 * x

    for name in (
        one for one in sites_of(lens.family) if SITES[one].per_layer and not SITES[one].observed
    ):
        hook_name = bridge_hook_name(SITES[name], family=lens.family, layer=1)
        one = from_hook(hook_name, times, model=lens)
        with torch.no_grad():
            expected = lens.bridge.run_with_hooks(
                batch.tokens, fwd_hooks=[(hook_name, times)], use_cache=False
            )
        found = run_with(lens, batch, one, logits=True).logits
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5, msg=name)


def test_a_hook_that_changes_its_tensor_in_place_and_gives_none_is_an_edit():
    lens, batch = lens_of("llama"), batch_of()

    def shift(x, hook):
        x[:, 3] += 2.0

    hook = ("blocks.1.hook_resid_post", shift)
    one = from_hook(*hook)
    assert (one.site, one.layers) == ("resid_post", (1,))
    with torch.no_grad():
        expected = lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=[hook])
    torch.testing.assert_close(
        run_with(lens, batch, one, logits=True).logits, expected, rtol=0.0, atol=1e-5
    )


def test_names_of_hooks_are_found_by_their_hook_point():
    for family in TINY_FAMILIES:
        lens = lens_of(family)
        for name in sites_of(lens.family):
            hook_name = bridge_hook_name(SITES[name], family=lens.family, layer=2)
            site, layer = site_of_hook(hook_name, lens=lens)
            assert layer == (2 if SITES[name].per_layer else None)
            points = lens.bridge.hook_dict
            assert (
                points[bridge_hook_name(SITES[site], family=lens.family, layer=2)]
                is points[hook_name]
            )
    assert site_of_hook("blocks.4.attn.hook_z") == ("z", 4)
    assert site_of_hook("ln_final.hook_out") == ("final", None)
    assert site_of_hook("blocks.2.mlp.hook_pre", lens=lens_of("gpt2")) == ("up", 2)
    assert site_of_hook("blocks.2.mlp.hook_pre", lens=lens_of("llama")) == ("gate", 2)
    assert site_of_hook("blocks.2.hook_out", lens=lens_of("llama")) == (
        "resid_post",
        2,
    )  # the canonical name
    with pytest.raises(
        SiteError, match=r"'blocks.2.mlp.hook_pre' is at no site; .*or the model \(model=...\)"
    ):
        from_hook("blocks.2.mlp.hook_pre", lambda x, hook: x)
    for name in ("blocks.1.hook_resid_mid", "hook_embed", "blocks.9.hook_out", "nothing"):
        with pytest.raises(SiteError, match=f"'{name}' is at no site; need one of"):
            from_hook(name, lambda x, hook: x, model=lens_of("llama"))


def test_a_sweep_of_plain_hook_functions_gives_what_run_with_hooks_gives_for_each(tmp_path):
    lens, batch, shapes = lens_of("gemma2"), batch_of(4), set()

    def factor(number):
        def hook(x, hook):
            shapes.add(tuple(x.shape[1:]))
            return x * number

        return hook

    parts = itertools.product((0, 2), (0.0, 3.0))
    names = {str(one): (f"blocks.{one[0]}.hook_attn_out", factor(one[1])) for one in parts}
    cells = [cell_of(from_hook(*one), name=name) for name, one in names.items()]
    read = Metric(name="last", function=lambda run: run.logits[:, -1, 7], layers=(), logits=True)
    found = sweep(
        lens, cells, tokens=batch, metrics=[read], out=tmp_path / "run", progress=False
    ).frame
    assert shapes == {(LENGTH, lens.d_model)}  # one cell's sequences, never the rows of several
    for name, one in names.items():
        with torch.no_grad():
            by_hand = lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=[one])[:, -1, 7]
        assert found[found["name"] == name]["value"].item() == pytest.approx(
            float(by_hand.mean()), abs=1e-5
        )


def test_a_patch_beside_a_hook_function_is_that_of_the_edited_bridge():
    lens, (clean, corrupted) = (
        speaking("llama"),
        (batch_of(2).tokens, batch_of(2).tokens.roll(1, 0)),
    )
    one = ("blocks.1.attn.hook_z", lambda x, hook: 0.25 * x)
    asked = {
        "site": "resid_pre",
        "by": ("layer", "position"),
        "layers": [1, 2],
        "positions": [3, 11],
    }
    asked |= {"metric": loss(), "edits": from_hook(*one)}
    found = patch(lens, clean, corrupted, progress=False, **asked)
    for row in found.frame.itertuples():
        name = f"blocks.{row.layer}.hook_resid_pre"
        with torch.no_grad(), lens.bridge.hooks(fwd_hooks=[one]):
            _, cache = lens.bridge.run_with_cache(clean, names_filter=name)

            def put(x, hook, position=row.position, cache=cache, name=name):
                x = x.clone()
                x[:, position] = cache[name][:, position]
                return x

            logits = lens.bridge.run_with_hooks(corrupted, fwd_hooks=[(name, put)])
        by_hand = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), corrupted[:, 1:].flatten()
        )
        assert row.value == pytest.approx(float(by_hand), abs=1e-5)
    with pytest.raises(InputError, match="screen approximates patches of the unedited model"):
        patch(lens, clean, corrupted, screen=2, **asked)


def test_readings_as_hooks_give_what_stream_gives():
    labelled = torch.arange(12).expand(3, 12) > 1
    batch = replace(batch_of(), lengths=torch.tensor([12, 9, 5]), labelled=labelled)
    rows = torch.tensor([4, 8])

    def squares(v):  # which do not cancel
        return v["z"].square().sum((1, 2)) + v["v"].square().sum()

    readings = [
        Reading(
            name="norm",
            sites=("resid_post",),
            function=lambda v: v["resid_post"].norm(dim=-1) * (v.valid & v.labelled),
        ),
        Reading(name="mass", sites=("mass",), function=lambda v: v["mass"].mean(1)),
        Reading(name="rows", sites=("rows",), function=lambda v: v["rows"].flatten(1)),
        Reading(
            name="keys",
            sites=("key_scores",),
            function=lambda v: v["key_scores"].clamp(min=-1e4).flatten(1),
        ),
        Reading(name="both", sites=("z", "v"), function=squares, layers=frozenset({1})),
        Reading(
            name="final", sites=("final",), function=lambda v: v["final"][:, 0] + v.tokens[:, :1]
        ),
    ]
    for family in ("llama", "gpt_oss", "gpt2", "mistral", "headnorm_sigmoid"):
        lens = lens_of(family)
        whole = stream(lens, batch, readings, keys=(0, 2), rows=rows)
        for reading in readings:
            found = {}
            hooks = reading.fwd_hooks(lens, keys=(0, 2), rows=rows, tokens=batch, into=found)
            with torch.no_grad():
                lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=hooks)
            assert found.keys() == whole.values[reading.name].keys()
            for layer, tensor in found.items():
                torch.testing.assert_close(tensor, whole[reading.name, layer], rtol=1e-5, atol=1e-5)
    found = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=readings[-1].fwd_hooks(lens, into=found))
    assert [*found] == [lens.n_layers]  # the tokens are read from the run itself
    turned = Reading(name="turned", sites=("rotated_q",), function=lambda v: v["rotated_q"])
    with pytest.raises(SiteError, match="no hook point for 'rotated_q'; stream reads it"):
        turned.fwd_hooks(lens)
    with pytest.raises(InputError, match="needs 'rows' and no query position"):
        readings[2].fwd_hooks(lens)
    edited = {}
    with torch.no_grad():
        hooks = [
            *fwd_hooks(lens, zero("pattern", keys=[0])),
            *readings[1].fwd_hooks(lens, into=edited),
        ]
        lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=hooks)
    assert float(edited[1].abs().max()) == 0.0  # read after the edit
    assert float(run_with(lens, batch, zero("pattern", keys=[0])).mass_at(0).abs().max()) == 0.0


def test_patches_are_handed_on_as_transformerlens_lays_them_out():
    lens, (clean, corrupted) = speaking("gpt2"), (batch_of(2).tokens, batch_of(2).tokens.roll(1, 0))
    for site, by, names in (
        ("resid_pre", ("layer", "position"), ["layer", "pos"]),
        ("z", ("layer", "position", "head"), ["layer", "pos", "head"]),
        ("pattern", ("layer", "head", "position"), ["layer", "head_index", "dest_pos"]),
    ):
        asked = {"layers": [0, 2], "positions": [3, 5, 11], "metric": sink_mass(0)}
        result = patch(lens, clean, corrupted, site=site, by=by, progress=False, **asked)
        theirs = result.to_transformer_lens()
        assert theirs.axis_names == names == list(theirs.index_df)
        assert theirs.values.shape == (*(len(result.frame[one].unique()) for one in by), 2)
        long = theirs.to_dataframe().groupby(names)["value"].mean()
        own = result.frame.set_index(list(by))["value"]
        assert long.tolist() == pytest.approx([own[place] for place in long.index])
        effects = theirs.effect().mean(-1).flatten()
        assert effects.tolist() == pytest.approx(result.frame["effect"].tolist())
        assert theirs.normalized(result.baselines[0] + 1.0).isfinite().all()
        torch.testing.assert_close(
            theirs.normalized(result.baselines[1]).shape, theirs.values.shape
        )
    few = patch(
        lens, clean, corrupted, screen=3, progress=False, metric=loss()
    ).to_transformer_lens()
    assert few.axis_names == []
    assert few.values.shape == (3, 2)


@pytest.mark.parametrize(
    ("family", "site"), [("gpt_neox", "q"), ("mixtral", "neurons"), ("falcon_h1", "attn_out")]
)
def test_a_hook_on_the_bridge_may_change_its_tensor_in_place(family, site):
    lens, ids = lens_of(family), batch_of().tokens
    name, found = bridge_hook_name(SITES[site], family=lens.family, layer=1), []
    for hook in (lambda x, hook: torch.zeros_like(x), lambda x, hook: x.mul_(0)):
        with lens.bridge.hooks(fwd_hooks=[(name, hook)]):
            found.append(capture(lens, ids, sites=["resid_post"], layers=[1])["resid_post", 1])
    clean = capture(lens, ids, sites=["resid_post"], layers=[1])["resid_post", 1]
    assert not torch.allclose(found[0], clean, atol=1e-4)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
