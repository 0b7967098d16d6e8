"""Latent attention: keys and values are made from one latent, and a head's keys are wider than its values."""

from dataclasses import replace

import pytest
import torch
from lenses import lens_of, tokens

from sink_lens import patching
from sink_lens.activations.record import Reading, capture, stream
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import trace
from sink_lens.circuits.graph import Graph
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.edits.constructors import scale
from sink_lens.edits.quantisation import linear_layer_paths
from sink_lens.engine.forward import run_with
from sink_lens.engine.generation import generate
from sink_lens.errors import ModelError
from sink_lens.models.families import family_of
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.models.weights import attention_constants, attention_weights, keys_at_position
from sink_lens.schema import QUESTIONS
from sink_lens.sweeps.grid import EditGrid, Grid
from sink_lens.sweeps.sweep import sweep
from sink_lens.training.prefix import get_prefix_model
from tests.tiny_families import LATENT_FAMILIES, tiny
from tests.zoo import ZOO, build

EVERY = pytest.mark.parametrize("family", LATENT_FAMILIES)


def assert_weights_are_those_of_the_sites(lens):
    found = capture(lens, tokens(), sites=["attn_in", "q", "k", "v", "z", "attn_out"])
    for layer in range(lens.n_layers):
        weights, read = attention_weights(lens, layer=layer), found["attn_in", layer]
        torch.testing.assert_close(
            weights.keys(read)[:, 0], found["k", layer][:, 0], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(weights.values(read), found["v", layer], atol=1e-5, rtol=1e-5)
        for position in (0, 7):
            keys = keys_at_position(lens, read[:, position], layer=layer, position=position)
            torch.testing.assert_close(keys, found["k", layer][:, position], atol=1e-5, rtol=1e-5)
        made = torch.einsum("bphe,hed->bpd", found["z", layer], weights.w_o) + weights.b_o
        torch.testing.assert_close(made, found["attn_out", layer], atol=1e-5, rtol=1e-5)
        of_parts = [
            weights.keys(read, dimensions=one) for one in (range(5), range(5, lens.d_model))
        ]
        torch.testing.assert_close(sum(of_parts), weights.keys(read), atol=1e-5, rtol=1e-5)
        sets = torch.tensor([[0, 4], [3, 5]])
        apart = torch.stack([weights.keys(read, dimensions=one) for one in sets])
        torch.testing.assert_close(weights.keys(read, dimensions=sets), apart, atol=1e-6, rtol=1e-5)
        if (
            lens.family.q_latent is None
        ):  # as they are but for the rotation, which is none at position 0
            query = torch.einsum("bd,hed->bhe", read[:, 0], weights.w_q)
            torch.testing.assert_close(query, found["q", layer][:, 0], atol=1e-5, rtol=1e-5)


@EVERY
def test_the_weights_are_those_of_the_sites(family):
    assert_weights_are_those_of_the_sites(lens_of(family))


def test_autocast_changes_no_weight_and_nothing_that_is_made_with_them():
    lens = lens_of("deepseek_v3")
    x = capture(lens, tokens(), sites=["attn_in"])["attn_in", 1][:, 5]

    def read():
        weights = attention_weights(lens, layer=1)
        made = [weights.keys(x), weights.values(x), attention_constants(lens, layer=1).k]
        made.append(keys_at_position(lens, x, layer=1, position=5))
        return [weights.w_q, weights.w_k, weights.w_v, *made]

    expected = read()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = read()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "fields", [{"q_lora_rank": None}, {"rope_interleave": False}, {"v_head_dim": 22}], ids=str
)
def test_variants_of_one_class_are_read_as_they_are(fields):
    lens = wrap(tiny("deepseek_v3", **fields))
    assert_weights_are_those_of_the_sites(lens)
    reading = Reading(name="mass", sites=("mass",), function=lambda view: view["mass"])
    found = [
        stream(lens, tokens(), [reading], keys=range(24), kernel=kernel)
        for kernel in ("fused", "eager")
    ]
    pattern = capture(lens, tokens(), sites=["pattern"])
    for one in found:
        torch.testing.assert_close(one["mass", 1], pattern["pattern", 1], atol=1e-5, rtol=1e-4)


@EVERY
def test_a_cached_generation_is_that_of_whole_passes(family):
    edit, ids = scale("kv_latent", 1.5, layers=[0]), [5, 9, 17, 40, 8]
    found = generate(lens_of(family), ids, edit, max_new_tokens=4)
    for _ in range(4):
        ids.append(
            int(
                run_with(lens_of(family), torch.tensor([ids]), edit, logits=True)
                .logits[0, -1]
                .argmax()
            )
        )
    assert list(found.ids) == ids[5:]


@EVERY
def test_sweeps_and_patches_go_over_heads_and_latents(family, tmp_path):
    lens, clean = lens_of(family), tokens()
    grid = Grid.of(EditGrid(kind="zero", site="z", heads="each", layers=[1]))
    found = sweep(
        lens,
        grid,
        tokens=from_tensor(clean),
        metrics=metrics.loss(),
        out=tmp_path / "run",
        progress=False,
    )
    assert found.tables["cells"]["error"].isna().all()
    for site in ("kv_latent", "k"):
        options = {"site": site, "metric": metrics.loss()}
        patched = patching.patch(lens, clean, clean.flip(0), by="layer", progress=False, **options)
        assert {*patched.frame["layer"]} == {0, 1, 2}
        first = patching.attribution_patch(lens, clean, clean.flip(0), **options)
        assert first.frame["effect"].abs().max() > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ZOO["latent_key"].families)
def test_every_answer_about_a_sink_whose_key_is_made_from_a_latent_is_its_truth(family, tmp_path):
    zoo = build("latent_key", seed=1, family=family)
    drawn = zoo.draw(8, length=32, generator=torch.Generator().manual_seed(1))
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=zoo.name)
    config = TraceConfig(model=zoo.name, quick=True, random_init=False)
    found = trace(
        lens,
        config=config,
        tokens=from_tensor(drawn),
        out=tmp_path / "run",
        progress=False,
        report=False,
    )
    said = found.links.drop_duplicates("link").set_index("link")
    for link, truth in zoo.truth.links.items():
        for question in QUESTIONS:
            assert said.loc[link, question] in (getattr(truth, question), "undecided"), (
                link,
                question,
            )
        assert said.loc[link, "verdict"] == ("holds" if truth.carries == "yes" else "fails"), link
    makers = found.tables["makers"].query("is_maker")
    assert [*makers[["kind", "layer", "unit"]].itertuples(index=False, name=None)] == [
        (one.kind, one.layer, one.index) for one in zoo.truth.makers
    ]


def test_what_reads_a_latent_is_rounded_with_the_other_weights():
    read = [
        linear_layer_paths(lens_of("deepseek_v3"), site)
        for site in ("attn_in", "q_latent", "kv_latent")
    ]
    names = [("q_a_proj", "kv_a_proj_with_mqa"), ("q_b_proj",), ("kv_b_proj",)]
    assert read == [tuple(f"self_attn.{name}" for name in some) for some in names]


def test_what_latent_attention_does_not_have_is_refused_with_the_reason():
    with pytest.raises(ModelError, match="its latents have biases"):
        wrap(tiny("youtu", attention_bias=True))
    with pytest.raises(
        ModelError, match="left out: its attention reads compressed keys and values in a way"
    ):
        family_of("LongcatFlashForCausalLM")
    with pytest.raises(
        ModelError, match=r"latent attention\), so that what a head reads is no sum"
    ):
        Graph.of(lens_of("youtu"))
    with pytest.raises(ModelError, match=r"latent attention\), where no module"):
        get_prefix_model(tiny("youtu"))
    with pytest.raises(
        ModelError, match="found a bridge of a model whose heads have widths of their own, Youtu"
    ):
        wrap(lens_of("youtu").bridge)
