"""Passes and memory of a trace."""

import pandas as pd
import pytest
from live import LiveBytes

from sink_lens import estimate as estimating
from sink_lens.chain import passes as counting
from sink_lens.chain import trace as tracing
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.passes import bytes_beside_model, count_trace_passes
from sink_lens.chain.trace import trace
from sink_lens.cli.console import render_lines
from sink_lens.errors import InputError
from sink_lens.estimate import Sizes, cost_table, estimate_cost
from sink_lens.models.bundled import read_header
from sink_lens.models.load import load
from sink_lens.models.memory import store_parameters_on_disk
from sink_lens.text import duration_text


def test_tokens_are_counted_by_pass(planted_folder):
    config = TraceConfig(
        model="planted", tokens="random", sequences=10, length=16, interventions=False
    )
    found = count_trace_passes(config, Sizes(header=read_header(planted_folder)))
    # scout: 8 sequences of 16
    assert {part.name: part.total_tokens for part in found.parts} == {
        "scout": 128,
        "measure": 160,
        "the other BOS condition": 128 + 160,
        "random-init baseline": 160,
    }
    assert found.twin == read_header(planted_folder).weight_bytes()


@pytest.mark.exhaustive
def test_the_estimate_of_a_quick_trace_is_within_a_quarter_of_the_tensors_that_it_holds(
    planted_folder, tmp_path
):
    """Bytes of tensors that are alive are counted, not the memory of a process, so that every run counts the same."""
    given = {"tokens": "random", "sequences": 10, "length": 24, "quick": True, "random_init": False}
    config = TraceConfig(model=str(planted_folder), bos="with", device="cpu", **given)
    with LiveBytes() as live:
        lens = load(config.model)
        trace(lens, config=config, out=tmp_path / "run", progress=False, report=False)
    said = 4 * lens.plain.num_parameters() + bytes_beside_model(lens, config)
    assert 0.8 < said / live.peak < 1.25


def test_a_trace_that_does_not_fit_is_refused_and_its_dry_run_says_so(
    planted_folder, tmp_path, monkeypatch
):
    for module in (counting, estimating):
        monkeypatch.setattr(module, "free_bytes", lambda: 1000)
    config = TraceConfig(model=str(planted_folder), tokens="random", length=16, device="cpu")
    text = "\n".join(render_lines(cost_table(estimate_cost(config, count_trace_passes)), width=999))
    assert (
        "one model after the other; 1 kB are free, so that it would be refused: need fewer sequences"
        in text
    )
    with pytest.raises(
        InputError, match=r"the trace takes about .* beside the model and 1 kB are free"
    ):
        trace(config.model, config=config, out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_baseline_that_does_not_fit_beside_the_model_is_read_in_its_place_with_the_same_numbers(
    planted_folder, tmp_path, monkeypatch
):
    given = {"tokens": "random", "sequences": 6, "length": 16, "interventions": False}
    config = TraceConfig(model=str(planted_folder), device="cpu", **given)
    beside = trace(
        config.model, config=config, out=tmp_path / "beside", progress=False, report=False
    )
    lens = load(planted_folder)
    alone, both = (
        bytes_beside_model(lens, config),
        bytes_beside_model(lens, config, twin=4 * lens.plain.num_parameters()),
    )
    monkeypatch.setattr(tracing, "free_bytes", lambda: (alone + both) // 2)
    waited, real = [], store_parameters_on_disk
    monkeypatch.setattr(
        tracing, "store_parameters_on_disk", lambda *a, **k: waited.append(1) or real(*a, **k)
    )
    instead = trace(
        config.model, config=config, out=tmp_path / "instead", progress=False, report=False
    )
    assert waited
    for name in ("heads", "random_init_heads", "links"):
        pd.testing.assert_frame_equal(
            beside.tables[name], instead.tables[name], rtol=1e-5, atol=1e-5
        )


def test_a_model_without_a_sink_is_not_billed_the_interventions(planted_folder):
    cost = estimate_cost(TraceConfig(model=str(planted_folder), device="cpu"), count_trace_passes)
    parts = {part.name: cost.seconds_of(part) for part in cost.passes.parts}
    assert [part.name for part in cost.passes.parts if part.only_if] == ["interventions"]
    time = next(
        line for line in render_lines(cost_table(cost), width=999) if line.startswith("time")
    )
    assert f"{duration_text(parts['interventions'])} more if the model has a sink" in time
    assert (
        f"{duration_text(cost.seconds + cost.seconds_around - parts['interventions'])}, and about"
        in time
    )
    counted, left = time.split("not included")
    assert "for loading, tables and the page" in counted
    assert "second measuring pass" in left
