"""Everything that takes a model takes what ``load`` takes; names that no file system takes are one line."""

import functools
from pathlib import Path

import pandas as pd
import pytest
import torch
from lenses import lens_of
from rounding import assert_rows_close
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import sink_lens
from analyses.tiny_families import tiny
from sink_lens import TokenBatch, TraceConfig, read_run
from sink_lens.edits.constructors import scalar
from sink_lens.edits.metrics import sink_mass
from sink_lens.errors import InputError, SinkLensError
from sink_lens.identity import FingerprintConfig
from sink_lens.models.load import wrap
from sink_lens.sweeps import EditGrid, Grid

CONFIG = TraceConfig(model="tiny", tokens="random", sequences=2, length=24, interventions=False, random_init=False)
GRID = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0,), heads=(0,)),))
FIRST = sink_lens.Reading(name="first", sites=("z",), function=lambda view: view["z"][:, 0])
SHORT = FingerprintConfig(sequences=50, length=4, coordinates=28)


def batch(seed=0, length=24):
    return TokenBatch.from_tensor(torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(seed)))


def _bridge():
    model = tiny("llama", attn_implementation="eager")
    return build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config).eval()


def _folder(path):
    tiny("llama").save_pretrained(path / "saved")
    return path / "saved"


KINDS = {
    "Hugging Face model": lambda path: tiny("llama"),
    "bridge": lambda path: _bridge(),
    "name": lambda path: str(_folder(path)),
    "path": _folder,
}
TAKERS = {
    "trace": lambda model, out: (
        sink_lens.trace(model, config=CONFIG, tokens=batch(), out=out, report=False, progress=False).links
    ),
    "isolate": lambda model, out: sink_lens.studies.isolate(model, tokens=batch(), out=out, progress=False).headline,
    "amplify": lambda model, out: (
        sink_lens.studies.amplify(
            model, tokens=batch(), layers=[0], factors=[2], centres=["none"], out=out, progress=False
        ).headline
    ),
    "sweep": lambda model, out: sink_lens.sweep(model, GRID, tokens=batch(), out=out, progress=False).frame,
    "capture": lambda model, out: sink_lens.capture(model, batch(), sites=["z"])["z", 0],
    "stream": lambda model, out: sink_lens.stream(model, batch(), [FIRST]).values["first"][1],
    "run_with": lambda model, out: sink_lens.run_with(model, batch(), logits=True).logits,
    "patch": lambda model, out: (
        sink_lens.patching.patch(
            model, batch(), batch(1), site="z", metric=sink_mass(0), layers=[0], progress=False
        ).frame
    ),
    "attribution_patch": lambda model, out: (
        sink_lens.patching.attribution_patch(model, batch(), batch(1), site="z", metric=sink_mass(0), layers=[0]).frame
    ),
    "path_patch": lambda model, out: (
        sink_lens.patching.path_patch(
            model, batch(), batch(1), sender=("z", 0, 1), receiver=("resid_post", 2), metric=sink_mass(0)
        ).frame
    ),
    "scalar": lambda model, out: (
        sink_lens.run_with(lens_of(), batch(), scalar(model, layer=1, neurons=[3], dimensions=[4])).state
    ),
    "generate": lambda model, out: sink_lens.generate(model, [5, 6], max_new_tokens=2).ids,
    "preference": lambda model, out: sink_lens.identity.preference(model, sequences=64, length=12).frame,
    "contraction": lambda model, out: sink_lens.identity.contraction(model, sequences=64, length=12).frame,
    "centring_means": lambda model, out: next(
        iter(sink_lens.edits.centring_means(model, n_tokens=128).tensors().values())
    ),
}


CASES = [("Hugging Face model", taker) for taker in TAKERS]
CASES += [(kind, taker) for kind in ("bridge", "name", "path") for taker in ("trace", "capture", "patch", "sweep")]


@pytest.fixture(scope="module")
def of_lens(tmp_path_factory):
    """``of_lens(taker)``: what it gives for a ``LensModel``, computed once."""
    return functools.cache(lambda taker: TAKERS[taker](lens_of(), tmp_path_factory.mktemp("runs") / taker))


@pytest.mark.parametrize(("kind", "taker"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_everything_takes_what_load_takes(kind, taker, of_lens, tmp_path):
    """And gives what it gives for a ``LensModel``."""
    found, expected = TAKERS[taker](KINDS[kind](tmp_path), tmp_path / "found"), of_lens(taker)
    if isinstance(found, torch.Tensor):
        assert_rows_close(found, expected)
    elif isinstance(found, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected)
    else:
        assert found == expected


def test_models_in_memory_are_fingerprinted(tmp_path):
    models = [tiny("llama"), wrap(tiny("llama", seed=1), name="other")]
    found = sink_lens.identity.fingerprint(models, config=SHORT, out=tmp_path / "run", progress=False)
    assert len(found.frame) == 1


def test_the_run_of_a_hugging_face_model_is_named_after_it(tmp_path):
    sink_lens.trace(tiny("llama"), config=CONFIG, tokens=batch(), out=tmp_path / "run", report=False, progress=False)
    assert read_run(tmp_path / "run").provenance["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize("thing", [7, None, {"model": 1}])
def test_what_is_no_model_is_refused_in_one_line(thing):
    with pytest.raises(SinkLensError, match=r"need a .*PreTrainedModel") as caught:
        sink_lens.load(thing)
    assert "\n" not in str(caught.value)


LONG = "a" * 5000


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    for call in (
        lambda: sink_lens.load(LONG),
        lambda: sink_lens.load(Path(LONG)),
        lambda: sink_lens.trace(LONG),
        lambda: sink_lens.read_run(tmp_path / LONG),
        lambda: sink_lens.sweep(tiny("llama"), GRID, tokens=batch(), out=tmp_path / LONG, progress=False),
    ):
        with pytest.raises(SinkLensError, match="too long") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert issubclass(InputError, SinkLensError)
