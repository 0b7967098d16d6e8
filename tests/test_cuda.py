"""On a GPU the numbers of the CPU: every family's readings, edits, sweeps, patches, traces and trainings."""

import contextlib
import copy
import os
import warnings

import numpy as np
import pytest
import torch

from sink_lens import (
    TokenBatch,
    TraceConfig,
    capture,
    edits,
    generate,
    run_with,
    sink_mask,
    sweep,
    trace,
    wrap,
)
from sink_lens.circuits.logit_attribution import direct_logit_attribution
from sink_lens.edits import metrics
from sink_lens.edits.quantisation import look_up_format, round_to_format
from sink_lens.engine.engine import Engine
from sink_lens.engine.needs import Needs
from sink_lens.engine.plan import Plan
from sink_lens.models.sites import sites_of
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.patching.patch import patch
from sink_lens.schema import QUANTISED_FORMATS
from sink_lens.sweeps import EditGrid, Grid, MetricSpec
from sink_lens.sweeps.cells import grid_cells
from sink_lens.training.config import TrainConfig
from sink_lens.training.monitor import SinkMonitor
from sink_lens.training.train import train
from tests.tiny_families import TINY_FAMILIES, tiny
from tests.zoo import build

DEVICE = os.environ.get("SINK_LENS_TEST_DEVICE", "cuda")
"""Where the copies run; ``cpu`` rehearses the tests where there is no GPU."""

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"
    ),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning:torch.*"
    ),  # of the compiler, by torch's own files
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # by the compiler
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a `functools.lru_cache`"
    ),  # in the checks of shapes
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def ids(n=3, length=14, *, seed=1):
    return torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(seed))


def both(family):
    model = tiny(family)
    return wrap(copy.deepcopy(model), tokenizer=tiny_tokenizer()), wrap(
        model.to(DEVICE), tokenizer=tiny_tokenizer()
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_site_and_edit_of_a_family(family):
    tokens, (here, there) = TokenBatch.from_tensor(ids()), both(family)
    sites = [site for site in ("resid_post", "z", "pattern", "k") if site in sites_of(here.family)]
    of_here, of_there = (capture(lens, tokens, sites=sites, layers=[1]) for lens in (here, there))
    for site in sites:
        torch.testing.assert_close(of_there[site, 1].cpu(), of_here[site, 1], **CLOSE)
    changes = [edits.isolate([5]), edits.zero("mlp_out", layers=[1], positions=[0])]
    runs = [run_with(lens, tokens, changes, positions=(5, 0)) for lens in (here, there)]
    torch.testing.assert_close(runs[1].loss.cpu(), runs[0].loss, **CLOSE)
    torch.testing.assert_close(runs[1].mass_at(0).cpu(), runs[0].mass_at(0), **CLOSE)
    assert torch.equal(sink_mask(there, tokens).cpu(), sink_mask(here, tokens))


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_sweep_and_a_patch(family, tmp_path):
    here, there = both(family)
    grid = Grid.of(
        EditGrid(site="z", layers="0-1", heads="each"),
        EditGrid(kind="mean_ordinary", site="mlp_out"),
        controls=1,
    )
    names = (MetricSpec(name="sink_mass"), MetricSpec(name="loss"))
    tokens = TokenBatch.from_tensor(ids())
    frames = [
        sweep(lens, grid, tokens=tokens, metrics=names, out=tmp_path / name, progress=False).frame
        for lens, name in ((here, "cpu"), (there, "cuda"))
    ]
    assert all(frame["error"].isna().all() for frame in frames), frames[1]["error"].unique()
    np.testing.assert_allclose(frames[1]["effect"], frames[0]["effect"], **CLOSE, equal_nan=False)
    clean, corrupted = ids(2), ids(2, seed=2)
    difference = metrics.logit_difference([5, 6], [7, 8])
    results = [
        patch(
            lens,
            clean,
            corrupted,
            site="resid_pre",
            metric=difference,
            by=("layer", "position"),
            progress=False,
        )
        for lens in (here, there)
    ]
    np.testing.assert_allclose(
        results[1].frame["value"], results[0].frame["value"], **CLOSE, equal_nan=False
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_near(dtype):
    tokens, (here, there) = TokenBatch.from_tensor(ids()), both("llama")
    lower = wrap(there.plain.to(dtype), tokenizer=tiny_tokenizer())
    losses = [run_with(lens, tokens).loss.cpu().float() for lens in (lower, here)]
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", ["llama", "olmo2"])  # olmo2 has a norm behind each sublayer
def test_a_trace_says_the_same(family, tmp_path):
    said, model = (
        [],
        planted().model if family == "llama" else build("bos_neuron", family=family).model,
    )
    for number, device in enumerate(("cpu", DEVICE)):
        lens = wrap(copy.deepcopy(model).to(device), tokenizer=tiny_tokenizer())
        config = TraceConfig(
            model="planted", random_init=False, intervention_sequences=4, controls=2
        )
        batch = TokenBatch.from_tensor(ids(10, 24))
        result = trace(
            lens, config=config, tokens=batch, out=tmp_path / f"{number}", progress=False
        )
        said.append(result.links.set_index(["link", "statistic"])[["value", "verdict"]])
    assert said[0]["verdict"].tolist() == said[1]["verdict"].tolist()
    np.testing.assert_allclose(*(one["value"].astype(float) for one in said), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("by", ["head", "neuron"])
def test_what_each_part_adds_to_a_logit(family, by):
    here, there = (
        direct_logit_attribution(lens, ids(), 5, 6, by=by).values for lens in both(family)
    )
    torch.testing.assert_close(there, here, **CLOSE)


def test_text_under_edits():
    here, there = both("llama")
    change = [edits.zero("mlp_out", positions=[0])]
    assert generate(there, "a b c", edits=change, max_new_tokens=5) == generate(
        here, "a b c", edits=change, max_new_tokens=5
    )


@pytest.mark.parametrize("name", QUANTISED_FORMATS)
def test_number_formats_round_alike(name):
    form = look_up_format(name)
    x = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(round_to_format(x.to(DEVICE), form).cpu(), round_to_format(x, form))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_monitor_reads_the_same_and_changes_nothing(attention, compiled):
    read, weights = [], []
    for device, watched in (("cpu", True), (DEVICE, True), (DEVICE, False)):
        model = tiny("llama").train().to(device)
        model.set_attn_implementation(attention)
        run = torch.compile(model) if compiled and device == DEVICE else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with SinkMonitor(run, every=1) if watched else contextlib.nullcontext() as monitor:
            for step in range(3):
                batch = ids(4, 20, seed=step).to(device)
                run(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step()
        if monitor is not None:
            read.append(monitor.frame())
        weights.append(model.get_input_embeddings().weight.detach().cpu().clone())
    assert torch.equal(weights[1], weights[2])
    np.testing.assert_allclose(
        *(one.select_dtypes("number").astype(float) for one in read), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("norm", ["none", "shared"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_toy_training_in_bf16(norm, compiled, tmp_path):
    config = TrainConfig(
        data="bundled", steps=6, batch=4, length=64, value_norm=norm, dtype="bfloat16", device=DEVICE, compile=compiled,
        d_model=64, d_mlp=128, n_heads=2, n_layers=2, vocab_size=512, warmup=1,
    )  # fmt: skip
    train(config=config, out=tmp_path / "run")
    assert (tmp_path / "run").is_dir()


@pytest.mark.skipif(DEVICE != "cuda", reason="waits are counted on the GPU alone")
@pytest.mark.parametrize(
    "metric", [metrics.sink_mass(0), metrics.logit_difference(5, 6), metrics.loss()]
)
def test_a_cell_waits_for_the_gpu_once(metric):
    _, lens = both("llama")
    tokens = TokenBatch.from_tensor(ids(2, 10))
    grid = Grid.of(EditGrid(site="mlp_out", layers="0", positions="each"), controls=0)
    cells = grid_cells(grid, lens, n_positions=10).every
    counts = {}
    for number in (4, 8):
        plan = Plan(path="blocks", prompts=2, pack=99, cut=False)
        engine = Engine(
            lens,
            tokens,
            cells[:number],
            [metric],
            plan=plan,
            needs=Needs.of_metrics([metric], lens=lens),
        )
        engine.baseline_metrics()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for block in engine.blocks:
                    engine.run(block)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts[number] = [
            f"{one.filename}:{one.lineno}" for one in said if "synchroniz" in str(one.message)
        ]
    assert len(counts[8]) - len(counts[4]) <= 4, counts[8]
