"""Everything that takes a model takes what ``load`` takes; names that no file system takes are one line."""

import functools
from pathlib import Path

import pandas as pd
import pytest
import torch
from lenses import lens_of
from rounding import assert_rows_close

import sink_lens as sl
from sink_lens import TokenBatch, TraceConfig, read_run
from sink_lens.edits.constructors import scalar
from sink_lens.edits.metrics import sink_mass
from sink_lens.errors import InputError, SinkLensError
from sink_lens.identity import FingerprintConfig
from sink_lens.models.load import wrap
from sink_lens.sweeps import EditGrid, Grid
from tests.tiny_families import tiny

CONFIG = TraceConfig(
    model="tiny", tokens="random", sequences=2, length=24, interventions=False, random_init=False
)
GRID = Grid(edits=(EditGrid(kind="zero", site="z", layers=(0,), heads=(0,)),))
FIRST = sl.Reading(name="first", sites=("z",), function=lambda view: view["z"][:, 0])
SHORT = FingerprintConfig(sequences=50, length=4, coordinates=28)


def batch(seed=0, length=24):
    return TokenBatch.from_tensor(
        torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(seed))
    )


def _folder(path):
    tiny("llama").save_pretrained(path / "saved")
    return path / "saved"


KINDS = {
    "Hugging Face model": lambda path: tiny("llama"),
    "bridge": lambda path: wrap(tiny("llama")).bridge,
    "name": lambda path: str(_folder(path)),
    "path": _folder,
}
Z = {"site": "z", "metric": sink_mass(0), "layers": [0]}
QUIET = {"progress": False}
TAKERS = {
    "trace": lambda m, out: (
        sl.trace(m, config=CONFIG, tokens=batch(), out=out, report=False, **QUIET).links
    ),
    "sweep": lambda m, out: sl.sweep(m, GRID, tokens=batch(), out=out, **QUIET).frame,
    "capture": lambda m, out: sl.capture(m, batch(), sites=["z"])["z", 0],
    "stream": lambda m, out: sl.stream(m, batch(), [FIRST]).values["first"][1],
    "run_with": lambda m, out: sl.run_with(m, batch(), logits=True).logits,
    "patch": lambda m, out: sl.patching.patch(m, batch(), batch(1), **Z, **QUIET).frame,
    "attribution_patch": lambda m, out: (
        sl.patching.attribution_patch(m, batch(), batch(1), **Z).frame
    ),
    "path_patch": lambda m, out: (
        sl.patching.path_patch(
            m,
            batch(),
            batch(1),
            sender=("z", 0, 1),
            receiver=("resid_post", 2),
            metric=sink_mass(0),
        ).frame
    ),
    "scalar": lambda m, out: (
        sl.run_with(
            lens_of(), batch(), scalar(m, layer=1, neurons=[3], dimensions=[4]), logits=True
        ).logits
    ),
    "generate": lambda m, out: sl.generate(m, [5, 6], max_new_tokens=2).ids,
    "preference": lambda m, out: sl.identity.preference(m, sequences=64, length=12).frame,
    "contraction": lambda m, out: sl.identity.contraction(m, sequences=64, length=12).frame,
    "centring_means": lambda m, out: next(
        iter(sl.edits.centring_means(m, n_tokens=128).tensors().values())
    ),
}
CASES = [("Hugging Face model", taker) for taker in TAKERS]
CASES += [
    (kind, taker)
    for kind in ("bridge", "name", "path")
    for taker in ("trace", "capture", "patch", "sweep")
]


@pytest.fixture(scope="module")
def of_lens(tmp_path_factory):
    """``of_lens(taker)``: what it gives for a ``LensModel``, computed once."""
    return functools.cache(
        lambda taker: TAKERS[taker](lens_of(), tmp_path_factory.mktemp("runs") / taker)
    )


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
    found = sl.identity.fingerprint(models, config=SHORT, out=tmp_path / "run", progress=False)
    assert len(found.frame) == 1


def test_the_run_of_a_hugging_face_model_is_named_after_it(tmp_path):
    sl.trace(
        tiny("llama"),
        config=CONFIG,
        tokens=batch(),
        out=tmp_path / "run",
        report=False,
        progress=False,
    )
    assert read_run(tmp_path / "run").provenance["model"] == "LlamaForCausalLM"


@pytest.mark.parametrize("thing", [7, None, {"model": 1}])
def test_what_is_no_model_is_refused_in_one_line(thing):
    with pytest.raises(SinkLensError, match=r"need a .*PreTrainedModel") as caught:
        sl.load(thing)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    too_long = "a" * 5000
    for call in (
        lambda: sl.load(too_long),
        lambda: sl.load(Path(too_long)),
        lambda: sl.trace(too_long),
        lambda: sl.read_run(tmp_path / too_long),
        lambda: sl.sweep(
            tiny("llama"), GRID, tokens=batch(), out=tmp_path / too_long, progress=False
        ),
    ):
        with pytest.raises(SinkLensError, match="too long") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert issubclass(InputError, SinkLensError)
