"""The chain in hybrids: a link is asked in the layers that have what it is about, and a gap is a gap on every page."""

from dataclasses import replace

import pytest
import torch

from sink_lens.chain.config import TraceConfig
from sink_lens.chain.locate import GrowthStep, Location, feeding_layers
from sink_lens.chain.page.circuit import chain_circuit
from sink_lens.chain.setting import find_segments
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.records import read_run
from sink_lens.schema import QUESTIONS
from tests.tiny_families import HYBRID_FAMILIES, tiny
from tests.zoo import build

KINDS = [
    ("in_mixer_layer", "lfm2", 0),
    pytest.param("in_mixer_layer", "jamba", 5, marks=pytest.mark.exhaustive),
    pytest.param("mixer_spike", "lfm2", 5, marks=pytest.mark.exhaustive),
    pytest.param("mixer_spike", "jamba", 0, marks=pytest.mark.exhaustive),
    pytest.param("state_sink", "jamba", 0, marks=pytest.mark.exhaustive),
    pytest.param("state_sink", "bamba", 0, marks=pytest.mark.exhaustive),
]


def traced(zoo, folder, *, report=True, **fields):
    tokens = from_tensor(zoo.draw(8, length=32, generator=torch.Generator().manual_seed(zoo.seed)))
    lens = replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=zoo.name)
    config = TraceConfig(model=zoo.name, quick=True, **{"random_init": False} | fields)
    return trace(
        lens, config=config, tokens=tokens, out=folder / "run", progress=False, report=report
    )


@pytest.mark.parametrize(("name", "family", "seed"), KINDS)
def test_every_answer_about_a_hybrid_is_its_truth(name, family, seed, tmp_path):
    zoo = build(name, seed=seed, family=family)
    found = traced(zoo, tmp_path)
    said = found.links.drop_duplicates("link").set_index("link")
    for link, truth in zoo.truth.links.items():
        for question in QUESTIONS:
            asked = getattr(truth, question)
            if asked == "not asked" and zoo.truth.sink == "none" and question != "present":
                asked = "not applicable"
            assert said.loc[link, question] in (asked, "undecided"), (link, question)
    makers = found.tables["makers"].query("is_maker")
    assert [*makers[["kind", "layer", "unit"]].itertuples(index=False, name=None)] == [
        (one.kind, one.layer, one.index) for one in zoo.truth.makers
    ]
    _reads_right(found, zoo)


def _reads_right(found, zoo):
    """Terminal, tables and page of a trace; layers without attention have no row of it and no 0."""
    heads, layers = found.tables["heads"], found.tables["layers"].set_index("layer")
    assert {*heads["layer"]} == {1, 3, 5}
    assert heads["sink_score"].notna().all()
    assert layers["sink_score"].notna().to_dict() == {layer: bool(layer % 2) for layer in range(6)}
    assert layers["norm_ratio"].notna().all()
    positions = found.tables["positions"]
    for site, having in {"z": {1, 3, 5}, "mixer_out": {0, 2, 4}, "resid_post": {*range(6)}}.items():
        assert {*positions.loc[positions["site"] == site, "layer"]} == having
    page = (found.folder / "report.html").read_text("utf-8")
    without = "before any layer with attention, so there is nothing to ask"
    assert (without in page) == (not zoo.truth.feeding)
    assert ">nan<" not in page
    if zoo.truth.sink == "none":
        assert "What mixers keep of a token, in layers 0,2,4, has no key and was not asked" in page
    else:
        assert {"mixers"} <= {*found.tables["paths"]["source"]}
        assert {*found.tables["effects"]["read_layers"]} <= {"1,3,5", "3,5"}
    chain_circuit(read_run(found.folder))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_an_untrained_hybrid_is_traced_to_its_end(family, tmp_path):
    """The position that is strongest by chance is taken for a sink, so that interventions are made."""
    lens = wrap(tiny(family), tokenizer=tiny_tokenizer())
    fields = {"tokens": "random", "sequences": 6, "length": 64, "controls": 5, "quick": True}
    config = TraceConfig(model=family, min_sink_rate=1e-3, threshold=0.08, **fields)
    found = trace(lens, config=config, out=tmp_path / "run", progress=False)
    assert {*found.tables["heads"]["layer"]} == {*lens.attention_layers}
    assert len(found.tables["effects"])
    assert (found.folder / "report.html").exists()
    shown = found.tables["effects"].query("edit == 'isolation'")["layers"].tolist()
    assert shown == [] or shown == [
        ",".join(map(str, lens.attention_layers)) if family != "falcon_h1" else "0-2"
    ]


def test_what_feeds_the_growth_and_what_reads_it_are_layers_with_attention():
    assert feeding_layers((2,), attention=(1, 3, 5)) == (1,)
    assert feeding_layers((0,), attention=(1, 3, 5)) == ()
    assert feeding_layers((), attention=(3, 7, 11)) == (3,)
    step = GrowthStep(first_layer=0, last_layer=0, ratio_before=1.0, ratio_after=9.0, dimension=0)
    last = replace(step, first_layer=5, last_layer=5)
    at = Location(sink_positions=(0,), sink_found=True, steps=(step, last), outliers={})
    (found,) = find_segments(
        at, n_layers=6, attention=(1, 3, 5)
    )  # nothing reads what layer 5 makes
    assert (found.layers, found.every) == ((1, 3), (1, 2, 3, 4))
    (found,) = find_segments(replace(at, steps=()), n_layers=8, attention=(0, 1))
    assert found.layers == (1,)
