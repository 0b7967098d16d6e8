"""Many models in one table: what cards and traces share, the formats, and what is refused."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from sink_lens import cli
from sink_lens.errors import InputError, RunError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.records import create_run, read_run
from sink_lens.studies.card_table import cards, choose_columns, make_table_rows, read_table_row
from sink_lens.studies.config import CardConfig

TRACE = Path(__file__).parents[1] / "browser" / "default_model"
NUMBER = {"value": 0.4, "low": 0.3, "high": 0.5, "n": 4}


def a_card(folder, *, config=None):
    loss = NUMBER | {
        "value": 6.0,
        "low": 5.9,
        "high": 6.1,
        "change": NUMBER | {"value": 0.0, "low": 0.0, "high": 0.0},
    }
    made = {
        "sentence": "Keep it.",
        "sink": {
            "positions": [0],
            "rate": NUMBER,
            "attention": NUMBER,
            "to_no_key": NUMBER | {"value": None},
        }
        | {"first_layer": 3},
        "outlier_dimensions": [{"dimension": 29}],
        "residual_sinks": [],
        "super_weights": [{"layer": 2, "row": 29, "column": 62}],
        "loss": {"clean": loss},
        "bos": {"needed": None, "why": "no BOS"},
        "largest_activations": [{"site": "z", "value": -3.0}],
        "chain": {"asked": False},
    }
    with create_run(
        folder, kind="card", config=config or {}, provenance={"model": "a_b|c", "dtype": "float32"}
    ) as writer:
        writer.write_text("card.json", json.dumps(made))
        writer.write_csv("summary", pd.DataFrame({"sentence": ["Keep it."]}))
    return folder


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(
        cli.app, ["card", *map(str, arguments)]
    )


def test_a_card_and_a_trace_share_the_names_of_what_both_have(tmp_path):
    card, trace = make_table_rows([str(a_card(tmp_path / "a")), str(TRACE)], CardConfig())
    shared = set(card) & set(trace)
    assert {
        "model",
        "sink_rate",
        "sink_positions",
        "outlier_dimensions",
        "loss",
        "sink_mass",
    } <= shared
    assert [card[f"sink_rate{end}"] for end in ("", "_low", "_high")] == [0.4, 0.3, 0.5]
    assert trace["sink_positions"] == "0, 2"
    assert [round(trace[f"sink_rate{end}"], 3) for end in ("", "_low", "_high")] == [
        0.827,
        0.816,
        0.837,
    ]
    assert card["super_weights"] == "2 [29, 62]"
    assert card["bos_needed"] is None


def test_one_outlier_dimension_is_no_number(tmp_path):
    rows = [("outlier_dimensions", 2533), ("growth_steps", 2), ("sink_rate", 0.5)]
    with create_run(tmp_path / "run", kind="trace", config={}, provenance={"model": "m"}) as writer:
        frame = pd.DataFrame([{"quantity": name, "value": value} for name, value in rows])
        writer.write_csv("summary", frame.assign(ci_low=None, ci_high=None, note=None))
    found = make_table_rows([str(tmp_path / "run")], CardConfig())[0]
    assert [found[name] for name, _ in rows] == ["2533", "2", 0.5]


@pytest.mark.parametrize("cut", ["", "at_token", "aligned_position"])
def test_a_position_without_a_sink_or_in_cut_sequences_is_no_sink_position(cut, tmp_path):
    summary = read_run(TRACE).tables["summary"]
    if cut:
        summary.loc[len(summary)] = {"quantity": cut, "value": "8"}
    else:
        summary.loc[summary["quantity"] == "sink_position", "note"] = (
            "no position has a sink rate; this one is studied"
        )
    with create_run(tmp_path / "run", kind="trace", config={}, provenance={"model": "m"}) as writer:
        writer.write_csv("summary", summary)
    assert "sink_positions" not in make_table_rows([str(tmp_path / "run")], CardConfig())[0]


def test_a_late_sink_of_a_trace_is_one_position(tmp_path):
    rows = [("sink_position", "1234"), ("other_sink_positions", "7, 9")]
    with create_run(tmp_path / "run", kind="trace", config={}, provenance={"model": "m"}) as writer:
        frame = pd.DataFrame([{"quantity": name, "value": value} for name, value in rows])
        writer.write_csv("summary", frame.assign(ci_low=None, ci_high=None, note=["", "weaker"]))
    found = make_table_rows([str(tmp_path / "run")], CardConfig())[0]
    assert found["sink_positions"] == "1234, 7, 9"


def test_rows_that_are_not_alike_say_so_and_what_measures_nothing_is_refused(tmp_path):
    runs = [a_card(tmp_path / "a"), a_card(tmp_path / "b", config={"threshold": 0.5}), TRACE]
    assert cards(runs)["threshold"].tolist() == [None, 0.5, 0.3]
    assert "threshold" not in cards(runs[::2])
    with pytest.raises(
        InputError, match=r"^threshold=\.\.\. was given and every row is that of a run"
    ):
        cards(runs, threshold=0.4)
    refused = run(*runs, "--length", "128")
    assert (refused.exit_code, "--length was given" in refused.stderr) == (2, True), refused.stderr


def test_columns_are_the_main_ones_or_those_asked_for(tmp_path):
    rows = make_table_rows([str(a_card(tmp_path / "a"))], CardConfig())
    main = ["model", "sink_rate", "sink_positions", "outlier_dimensions", "loss", "zeroing_cost"]
    assert choose_columns(rows, ()) == main
    assert choose_columns(rows, ("loss", "model")) == ["loss", "model"]
    with pytest.raises(InputError, match="did you mean sink_rate"):
        choose_columns(rows, ("sink_rates",))


def test_the_table_has_numbers_in_full_and_intervals_in_columns_of_their_own(tmp_path):
    table = cards([a_card(tmp_path / "a"), TRACE], columns=["model", "sink_rate", "bos_needed"])
    assert table.columns.tolist() == [
        "model",
        "sink_rate",
        "sink_rate_low",
        "sink_rate_high",
        "bos_needed",
    ]
    assert table.iloc[0].tolist() == ["a_b|c", 0.4, 0.3, 0.5, None]
    assert str(table["sink_rate"][1]).startswith("0.82685")


def test_other_runs_damaged_cards_and_no_run_are_refused(tmp_path):
    with create_run(tmp_path / "p", kind="patch", config={}, provenance={}):
        pass
    with pytest.raises(RunError, match="holds a run of patch; need one of card or trace"):
        read_table_row(read_run(tmp_path / "p"))
    shutil.copytree(a_card(tmp_path / "a"), tmp_path / "b")
    (tmp_path / "b" / "card.json").write_text('{"sink": 3}')
    with pytest.raises(RunError, match=r"card\.json cannot be read"):
        read_table_row(read_run(tmp_path / "b"))
    with pytest.raises(InputError, match="no model was given"):
        make_table_rows([], CardConfig())


def test_the_command_prints_and_answers_programs(tmp_path):
    folder = a_card(tmp_path / "a")
    assert "0.4 [0.3, 0.5]" in run(folder).stdout
    found = json.loads(run(folder, "--columns", "model,sink_rate,bos_needed", "--json").stdout)
    rate = {"sink_rate": 0.4, "sink_rate_low": 0.3, "sink_rate_high": 0.5}
    assert found["rows"] == [{"model": "a_b|c", **rate, "bos_needed": None}]
    for options, said in (
        (("--most-loss", "1"), "--most-loss was given; need two models that are compared for it"),
        (("--out", tmp_path / "new"), "out was given and every row is that of a run"),
        (("--dry-run",), "every row is that of a run"),
    ):
        refused = run(folder, *options)
        assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr


def test_models_are_measured_and_stand_beside_runs(tmp_path):
    folder = tmp_path / "mine"
    planted().model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    given = {"sequences": 4, "length": 24, "progress": False}
    table = cards(
        [a_card(tmp_path / "a"), folder, TRACE],
        columns=["model", "loss"],
        out=tmp_path / "out",
        **given,
    )
    assert list(table.columns) == ["model", "loss", "loss_low", "loss_high"]
    assert table["model"].tolist()[:2] == ["a_b|c", "mine"]
    text = (tmp_path / "out" / "2-mine" / "card.json").read_text()
    assert str(tmp_path) not in text
    made = json.loads(text)
    assert made["model"]["name"] == "mine"
    assert table["loss"].tolist()[1] == made["loss"]["clean"]["value"]
