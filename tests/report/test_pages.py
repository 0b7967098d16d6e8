"""Every kind of run has a page, from its tables; what is not there is named; figures go to files; numbers to CSV."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sink_lens.cli import app
from sink_lens.errors import InputError, RunError
from sink_lens.kinds import all_kinds
from sink_lens.records import create_run, read_run
from sink_lens.report import html
from sink_lens.report.export import save_figures
from sink_lens.report.html import page_content, page_html
from sink_lens.report.page import csv_text, page_table
from sink_lens.report.pages import page_of_kind

from .circuits import grid, write_run

MASSES = {
    "baseline_target_mass": 0.01,
    "target_mass": 0.3,
    "baseline_sink_mass": 0.6,
    "sink_mass": 0.2,
}
LOSSES = {"loss_change_nats": 0.1, "loss_change_low": 0.05, "loss_change_high": 0.2}
READ = {"outcome": "shared", "read_layers": "3-7", "layers": "all"}


def frames_of(kind):
    """Small tables of a kind of run, as its command writes them."""
    if kind == "patch":
        at = grid(layer=range(3), position=range(4))
        share, changed = at["position"] / 3, at["position"] > 0
        patches = at.assign(
            value=1.0, effect=at["position"] * 0.1, normalised_effect=share, changed=changed
        )
        differences = pd.DataFrame(
            {"sequence": [0], "position": [3], "clean": [" <b>"], "corrupted": [" Spain"]}
        )
        return {
            "patches": patches,
            "differences": differences,
            "tokens": pd.DataFrame({"position": [3], "text": [" <b>/ Spain"]}),
        }
    if kind == "sweep":
        cells = pd.DataFrame(
            {"cell": range(6), "kind": "zero", "site": "z", "layer": [0, 0, 0, 1, 1, 1]}
        )
        cells = cells.assign(
            head=[0, 1, 2] * 2,
            where="somewhere",
            metric="loss",
            effect=[0.1, -0.9, 0, 0, 0, 0.2],
            effect_in_sds=9.0,
        )
        cells = cells.assign(
            ci_low=-1.0,
            ci_high=0.0,
            control_effect=0.01,
            over_low=-1.0,
            over_high=0.0,
            baseline=3.0,
            n=8,
            n_controls=1,
            corrected_p=0.0,
            changed=True,
        )
        return {"cells": cells.assign(error=pd.array([None] * 5 + ["no room"], dtype="string"))}
    if kind == "train":
        log = pd.DataFrame(
            {"step": [0, 10, 20], "tokens": [0, 100, 200], "loss": [np.nan, 5.0, 4.0]}
        )
        rows = []
        for step, rate in ((0, 0.0), (10, 0.0), (20, 0.4)):
            rows.append((step, step * 10, "sink_rate", np.nan, np.nan, 0.3, rate))
            rows.append((step, step * 10, "uniform_mass", np.nan, np.nan, np.nan, 0.1))
            rows += [(step, step * 10, "sink_mass", layer, 0, np.nan, rate) for layer in (0, 1)]
        columns = ["step", "tokens", "measure", "layer", "position", "threshold", "value"]
        return {
            "log": log.assign(eval_loss=[6.0, np.nan, 4.5]),
            "watch": pd.DataFrame(rows, columns=columns).assign(unit=""),
        }
    if kind == "quantise":
        kept = [
            ("clean", False, 0),
            ("all", False, 0),
            ("tokens", True, 0),
            ("channels", False, 2),
            ("both", True, 2),
        ]
        rows = pd.DataFrame(
            [*kept, ("random", True, 2)], columns=["kept", "sink_tokens", "channels"]
        )
        rows = rows.assign(loss_nats=[3.0, 4.0, 3.5, 3.4, 3.1, 3.9], closed_share=0.9, draw=pd.NA)
        rows = rows.assign(
            chosen=rows["kept"] == "tokens",
            closed_low=0.8,
            closed_high=1.0,
            perplexity=20.0,
            change_nats=0.1,
        )
        summary = {
            "verdict": "keep",
            "sentence": "Keep <b> the sink tokens.",
            "format": "int8_tensor",
        }
        return {
            "conditions": pd.concat(
                [rows.assign(part=part) for part in ("choose", "judge")], ignore_index=True
            ),
            "summary": pd.DataFrame([summary]),
        }
    if kind == "monitor":
        keys = ("rate_first", "rate_strongest", "mass_first", "norm_ratio", "entropy")
        readings = grid(step=[0, 50], key=keys, layer=[pd.NA, 0, 1]).astype({"layer": "Int64"})
        alarm = {
            "step": 50,
            "rule": "sink_born",
            "position": 0,
            "sentence": "sink born by step 50 in layer 1",
        }
        return {"monitor": readings.assign(value=0.4, unit="1"), "alarms": pd.DataFrame([alarm])}
    bands = grid(
        variant=list("ab"), curve=["evaluation"], quantity=["loss", "difference"], tokens=[0, 100]
    )
    bands = bands.assign(mean=4.0 - bands["tokens"] / 100, low=3.0, high=5.0)
    finals = pd.DataFrame(
        {
            "variant": ["a", "b"],
            "seed": 0,
            "curve": "evaluation",
            "loss": 4.0,
            "difference": [0.0, 0.1],
        }
    )
    curves = finals.assign(tokens=100)
    found = {"variant": ["b"], "curve": "evaluation", "mean": 0.1, "low": 0.0, "high": 0.2}
    measures = pd.DataFrame(
        {"measure": "sink_rate", "threshold": 0.3, "variant": ["a", "b"], "mean": 0.5}
    )
    tables = {
        "bands": bands,
        "curves": curves,
        "finals": finals,
        "differences": pd.DataFrame(found),
    }
    return tables | {"measures": measures.assign(low=0.4, high=0.6)}


CONFIGS = {
    "patch": {"site": "resid_pre", "direction": "denoising"},
    "train": {"attention": "softmax", "value_norm": "shared"},
    "compare": {"group_by": ["value_norm"], "baseline": "a", "runs": {"a": {}, "b": {}}},
}
SAYS = {
    "quantise": ("int8 tensor: keep", "Keep <b> the sink tokens."),
    "monitor": (
        "Training watched: a sink is born at position 0 by step 50",
        "At step 50, the last of 2 readings: 40.0% of layers",
    ),
    "patch": (
        "The metric is carried at position 2 up to layer 2 (67%), at position 3 ·<b>/·Spain from layer 0 (100%)",
        "Largest effect at layer 0, position 3: 0.3, 100% of the way.",
    ),
    "sweep": (
        "None of 6 edits is shown to change loss",
        "Random edits of the same size change it by",
    ),
    "train": (
        "softmax attention and value norm shared",
        "became a sink between 100 and 200 tokens: at the last",
    ),
    "compare": ("Value norm b against a", "findings.txt is not in this folder."),
}


def a_run(folder, kind, *, without=(), empty=None):
    frames = frames_of(kind) | (empty or {})
    kept = {name: frame for name, frame in frames.items() if name not in without}
    aside = {"value": [1]}  # the type checks of the tests look at the first
    return write_run(
        folder, kind, config=CONFIGS.get(kind), expects=tuple(frames), aside=aside, **kept
    )


@pytest.mark.parametrize("kind", SAYS)
def test_every_kind_of_run_has_a_page_that_says_what_was_found(tmp_path, kind):
    part = page_content(read_run(a_run(tmp_path / "run", kind)))
    title, sentence = SAYS[kind]
    assert title in part.title
    assert any(sentence in line for line in part.headline)
    shown = [*part.figures, *part.tables]
    assert [one.missing for one in shown if one.missing] == []
    assert all(one.see for one in shown)
    assert part.figures or part.tables
    assert sum(bool(one.csv) for one in shown)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", SAYS)
def test_what_is_not_there_damaged_or_empty_breaks_nothing_but_its_own_part(tmp_path, kind):
    frames = frames_of(kind)
    bare = page_content(read_run(a_run(tmp_path / "bare", kind, without=tuple(frames))))
    assert bare.title
    assert all(one.missing for one in bare.figures)
    assert "Not in this folder: " in bare.incomplete

    folder = a_run(tmp_path / "damaged", kind)
    paths = set(folder.glob("*.parquet")) - {folder / "aside.parquet"}
    for path in paths:
        path.write_bytes(b"PAR1 not really")
    damaged = page_content(read_run(folder))
    assert damaged.figures or damaged.tables
    assert not paths or "damaged" in " ".join(
        one.missing for one in (*damaged.figures, *damaged.tables)
    )

    for name, frame in frames.items():
        part = page_content(read_run(a_run(tmp_path / name, kind, empty={name: frame.head(0)})))
        assert part.title
        assert part.tables


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", ["quantise", "sweep", "train"])
@pytest.mark.parametrize("value", ["a text", [1, 2], None], ids=str)
def test_whole_tables_of_other_types_break_nothing_but_their_own_part(tmp_path, kind, value):
    frames = frames_of(kind)
    changed = {
        name: frame.assign(**{one: [value] * len(frame) for one in frame})
        for name, frame in frames.items()
    }
    with create_run(tmp_path, kind=kind, config={}, provenance={}) as writer:
        for name, frame in changed.items():
            writer.write_table(name, frame)
    part = page_content(read_run(tmp_path))
    assert part.title
    missing = " ".join(one.missing for one in (*part.figures, *part.tables))
    assert value is None or re.search(r"is damaged \(the column .* is \w+; need \w+\)", missing)


def test_three_reports_on_one_run_at_once_all_succeed(tmp_path, monkeypatch):
    write_run(tmp_path, "other")
    together = threading.Barrier(3)

    def slow(*folders, group_by=None):
        together.wait()
        return "a page"

    monkeypatch.setattr(html, "page_html", slow)
    with ThreadPoolExecutor(3) as pool:
        drawn = [
            future.result() for future in [pool.submit(html.render, tmp_path) for _ in range(3)]
        ]
    assert drawn == [tmp_path / "report.html"] * 3
    assert drawn[0].read_text() == "a page"
    assert not list(tmp_path.glob("*.part"))


def test_a_kind_without_a_page_shows_its_tables(tmp_path):
    text = page_html(write_run(tmp_path, "other", things={"a<b": [1, 2], "name": ["x", "<i>"]}))
    assert "A run of other" in text
    assert "a&lt;b" in text
    assert "<i>" not in text


def test_every_page_that_is_listed_is_whole():
    for kind in all_kinds():
        page = page_of_kind(kind)
        keys = [one.key for one in (*page.figures, *page.tables)]
        assert len(keys) == len(set(keys)), kind


def test_a_failed_cell_is_listed(tmp_path):
    part = page_content(read_run(a_run(tmp_path / "run", "sweep")))
    assert "1 edit failed" in part.headline[-1]
    assert part.tables[-1].table.rows[0][-1] == "no room"


def test_csv_holds_the_numbers_and_no_formula_and_is_thinned_where_it_is_long():
    frame = pd.DataFrame({"token": ["=1+1", "-x", "plain"], "value": [1 / 3, np.nan, 2e9]})
    assert csv_text(frame).splitlines() == ["token,value", "'=1+1,0.333333", "'-x,", "plain,2e+09"]
    text = csv_text(pd.DataFrame({"value": range(4_500)}))
    assert text.splitlines()[:3] == ["value", "0", "3"]
    assert text.splitlines()[-1] == "# every 3th of 4500 rows; all are in the run's folder"


def test_a_shown_table_is_copied_whole_though_only_its_first_rows_are_shown():
    table = page_table(pd.DataFrame({"a": range(30), "b": 0}), {"a": "A"})
    assert len(table.rows) == 25
    assert table.numbers["a"].tolist() == list(range(30))


def test_figures_are_written_in_every_format_and_the_missing_are_named(tmp_path):
    folder = a_run(tmp_path / "run", "train", without=("watch",))
    files, missing = save_figures([folder], tmp_path / "figures")
    assert sorted(path.name for path in files) == ["loss.csv", "loss.pdf", "loss.png", "loss.svg"]
    assert [path.read_bytes()[:4] for path in sorted(files)] == [
        b"step",
        b"%PDF",
        b"\x89PNG",
        b"<?xm",
    ]
    assert missing == [
        "course: The checkpoints of this run were not watched. Run sink-lens watch on its folder to see it."
    ]
    again, _ = save_figures([folder, folder], tmp_path / "twice")
    assert {path.name for path in again} >= {"run-1-loss.png", "run-2-loss.png"}
    assert (tmp_path / "twice" / "run-1-loss.svg").read_bytes() == (
        tmp_path / "figures" / "loss.svg"
    ).read_bytes()


def test_one_figure_has_the_formats_that_were_asked_for_and_its_numbers_and_a_name_that_is_none_is_refused(
    tmp_path,
):
    folder = a_run(tmp_path / "run", "patch")
    for name, only in (("all", []), ("one", ["map"])):
        files, missing = save_figures([folder], tmp_path / name, formats=["svg"], only=only)
        assert (sorted(path.name for path in files), missing) == (["map.csv", "map.svg"], [])
    numbers = pd.read_csv(tmp_path / "all" / "map.csv")
    assert numbers["effect"].tolist() == pytest.approx(
        frames_of("patch")["patches"]["effect"].tolist()
    )
    with pytest.raises(InputError, match=r"no figure 'maps'; need some of .*map"):
        save_figures([folder], tmp_path / "none", only=["maps"])
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    folder = a_run(tmp_path / "run", "train")
    (tmp_path / "figures").write_text("a file")
    with pytest.raises(RunError, match="cannot be written"):
        save_figures([folder], tmp_path / "figures")


@pytest.mark.parametrize(("only", "code"), [([], 0), (["--only", "course"], 1)])
def test_a_figure_asked_for_by_name_that_is_not_drawn_is_an_error(tmp_path, only, code):
    folder = a_run(tmp_path / "run", "train", without=("watch",))
    asked = ["report", str(folder), "--figures", str(tmp_path / "out"), "--format", "png", *only]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, asked)
    assert done.exit_code == code, done.output
    assert f"figures: {tmp_path / 'out'} (" in done.output
    assert (
        f"{'error' if code else 'warning'}: not drawn: course: The checkpoints of this run"
        in done.output
    )


def test_every_column_of_a_table_says_what_it_means(tmp_path):
    found = {}
    for kind in SAYS:
        part = page_content(read_run(a_run(tmp_path / kind, kind)))
        shown = [one.table for one in part.tables if one.table is not None]
        unsaid = [
            name
            for table in shown
            for name, said in zip(table.columns, table.meanings, strict=True)
            if not said
        ]
        found |= {kind: unsaid} if unsaid else {}
    assert found == {}
