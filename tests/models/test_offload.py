"""Models that are partly on disk: the plain path gives the numbers of the whole model, and the rest is refused."""

import warnings

import pandas as pd
import pytest
import torch
from lenses import tokens
from rounding import CLOSE, assert_rows_close

from sink_lens.activations.record import capture
from sink_lens.activations.sink_mask import sink_mask
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.trace import trace
from sink_lens.edits.constructors import zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, ModelError
from sink_lens.models.load import load, random_init, weights_hash, wrap
from sink_lens.models.offload import bytes_on_disk
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.models.weights import attention_weights, mlp_weights, norm_weights
from sink_lens.studies import card
from tests.tiny_families import tiny

FAMILIES = ("llama", "mixtral", "bloom")


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """The whole model, and the same with at most a third of its weights in memory."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny(request.param)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    size = sum(one.numel() * 4 for one in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(folder, device="cpu"), load(
            folder, device_map="auto", max_memory=f"{size // 3000}KB"
        )


def test_most_of_it_is_on_disk_and_it_says_so(both):
    whole, part = both
    size = sum(one.numel() * 4 for one in whole.plain.parameters())
    assert bytes_on_disk(part.plain) > size / 2
    assert part.offloaded
    assert not whole.offloaded
    assert "GB of the weights of" in part.notes[0]
    assert (part.device, part.dtype, part.d_mlp) == (whole.device, whole.dtype, whole.d_mlp)


def test_what_is_measured_is_the_same_and_weights_are_read_one_by_one(both):
    whole, part = both
    names = ["resid_pre", "q", "z", "attn_out", "neurons", "mlp_out", "final"]
    found, expected = (capture(lens, tokens(), sites=names, path="plain") for lens in (part, whole))
    for key in expected:
        assert_rows_close(found[key], expected[key], key)
    assert torch.equal(sink_mask(part, tokens()), sink_mask(whole, tokens()))
    assert weights_hash(part) == weights_hash(whole)
    for layer in range(3):
        assert torch.equal(
            attention_weights(part, layer=layer).w_k, attention_weights(whole, layer=layer).w_k
        )
        assert torch.equal(
            mlp_weights(part, layer=layer).w_down, mlp_weights(whole, layer=layer).w_down
        )
        assert torch.equal(
            *(norm_weights(lens, layer=layer, which="mlp_norm").gain for lens in both)
        )
    assert bytes_on_disk(part.plain) > 0  # nothing was left in memory


def test_interventions_are_refused_with_the_reason(both):
    whole, part = both
    text = (
        r"of the weights of .* are on disk, and interventions need them in memory; need about .* GB"
    )
    with pytest.raises(ModelError, match=text):
        run_with(part, tokens(), zero("z", layers=[0]))
    found, expected = (capture(one, tokens(), sites=["scores"]).tensors for one in (part, whole))
    for place, scores in expected.items():  # a reading is none
        torch.testing.assert_close(found[place], scores, rtol=CLOSE, atol=CLOSE)
    with pytest.raises(ModelError, match="neither do those of its random-init baseline"):
        random_init(part, seed=0)


@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_a_trace_measures_without_interventions_and_gives_the_same_tables(both, tmp_path):
    whole, part = both
    config = TraceConfig(model="tiny", tokens="random", sequences=3, length=20, threshold=0.1)
    with pytest.raises(
        InputError, match="neither does its random-init baseline; trace without the baseline"
    ):
        trace(part, config=config, out=tmp_path / "no", progress=False, report=False)
    options = {"random_init": False, "progress": False, "report": False}
    expected = trace(whole, config=config, out=tmp_path / "whole", interventions=False, **options)
    with pytest.warns(UserWarning, match="no intervention is made: .* are on disk"):
        found = trace(part, config=config, out=tmp_path / "part", **options)
    for name, table in expected.tables.items():
        pd.testing.assert_frame_equal(found.tables[name], table, rtol=CLOSE, atol=CLOSE, obj=name)


@pytest.fixture(scope="module")
def with_outliers(tmp_path_factory):
    """A model with an outlier dimension: whole, and with most of its weights on disk."""
    folder = tmp_path_factory.mktemp("planted")
    planted().model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    return load(folder, device="cpu"), load(folder, device_map="auto", max_memory="60KB")


SIZE = {"sequences": 4, "length": 24, "progress": False}


def test_a_card_is_that_of_the_whole_model_without_its_ablations(with_outliers):
    expected, found = (card(lens, **SIZE).decision for lens in with_outliers)
    assert list(found["loss"]) == ["clean"]
    assert "was not tested" in found["sentence"]
    for name in ("sink", "outlier_dimensions", "writers", "super_weights", "bos"):
        assert found[name] == expected[name], name


def test_two_models_of_which_one_is_on_disk_are_compared_by_all_weights(with_outliers):
    whole, part = with_outliers
    assert card(whole, part, **SIZE).decision["same_weights"]
    model, name = planted().model, "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    changed = card(part, wrap(model, tokenizer=whole.tokenizer), **SIZE).tables["tensors"]
    assert changed["tensor"].tolist() == [name]
    assert changed["change"].tolist() == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_memory": "1GB"}, "max_memory was given without device_map"),
        (
            {"device_map": "auto", "max_memory": "much"},
            "max_memory is 'much'; need a size, such as 8GB",
        ),
        ({"device_map": "some"}, "device_map 'some' is not known; need auto"),
        ({"dtype": "int8"}, "or auto"),
        ({"revision": "main"}, "which is not a hub name"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, options, text):
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=text):
        load(tmp_path, **options)
