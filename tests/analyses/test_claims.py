"""The pages of claims are those of the results, and what is said of a claim elsewhere has their numbers."""

import dataclasses
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from analyses.__main__ import of_model
from analyses.answers import (
    PARTS,
    Part,
    Results,
    Row,
    answer,
    claims_page,
    committed,
    cost,
    flips,
    long_page,
    models,
    read_page,
    several,
    verdict_of,
)
from analyses.verdicts import Claim, Rule, read_claim
from sink_lens.errors import InputError
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.schema import DEFAULT_MODEL

ROOT = Path(__file__).parents[2]
ANALYSES = ROOT / "analyses"
PAGE = read_page(ANALYSES / "claims.toml")
RESULTS = committed(
    PAGE, [read_claim(path.parent) for path in sorted(ANALYSES.glob("*/*/claim.md"))]
)
WRITTEN, LONG = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("claims", "claims_in_detail")
)


def words(text):
    return " ".join(re.sub(r'"\n\s*f?"', "", text).replace("\n> ", " ").split())


def test_the_pages_are_those_of_their_rows_and_the_results():
    assert claims_page(PAGE, RESULTS, folder=ANALYSES / "by_model") == WRITTEN
    assert long_page(PAGE, RESULTS, folder=ANALYSES / "by_model") == LONG


def test_the_first_line_answers_and_the_readme_leads_there():
    _, _, answer, *_ = WRITTEN.splitlines()
    whole, _, holds, part = (
        int(number) for number in re.findall(r"\d+", answer.replace("four", "4"))
    )
    assert answer.startswith("**Often only in part: of ")
    told = {
        verdict: int(n)
        for verdict, n in re.findall(r"^\| [●◐○·] \| ([\w ,]+) \| (\d+) \|", WRITTEN, flags=re.M)
    }
    assert sum(told.values()) == whole == len(PAGE.rows)
    assert (told["holds"], sum(told[verdict] for verdict in PARTS.values())) == (holds, part)
    fails, stay_open = told["does not hold"], told["not shown"] + told["not tested here"]
    does = "does" if fails == 1 else "do"
    counted = (
        f"We checked {whole} claims of four papers: {holds} hold, {part} hold in part, "
        f"{fails} {does} not hold, and"
    )
    readme = words((ROOT / "README.md").read_text("utf-8"))
    assert f"{counted} {stay_open} stay open ([claims](docs/claims.md)," in readme


def test_every_claim_has_a_link_or_a_reason_in_the_long_table():
    assert len(PAGE.rows) >= 40
    for row in PAGE.rows:
        (line,) = (
            one for one in LONG.splitlines() if one.startswith(f'| <a id="{row.id.lower()}"></a>')
        )
        assert f"| **{verdict_of(row, RESULTS)}** |" in line, row.id
        folders = re.findall(r"\]\(\.\./(analyses/[\w/]+/result\.csv)\)", line)
        assert len(folders) == len(row.decides)
        assert all((ROOT / folder).is_file() for folder in folders)
        assert row.decides or len(row.why) > 10, row.id
        assert not row.decides or row.on, row.id


def test_a_claim_that_holds_in_part_says_how_and_no_other_does():
    decides, numbers = (Part(of="one/x @ *"),), {"a": (1.2, 1.8), "b": (3.0, 4.0)}
    row = Row(id="A1", where="A", words="x", decides=decides, part="settings")
    assert verdict_of(row, results(**numbers)) == PARTS["settings"]
    with pytest.raises(InputError, match="A1 holds and has part 'settings'"):
        verdict_of(row, results(a=(1.2, 1.8)))
    with pytest.raises(InputError, match="A1 holds in part and has part ''"):
        verdict_of(Row(id="A1", where="A", words="x", decides=decides), results(**numbers))


@pytest.mark.parametrize("said", PAGE.said, ids=lambda said: f"{said.file}-{'-'.join(said.claims)}")
def test_a_sentence_elsewhere_has_the_numbers_of_the_page(said):
    assert {*said.claims} <= {row.id for row in PAGE.rows}
    assert words(RESULTS.fill(said.text)) in words((ROOT / said.file).read_text(encoding="utf-8"))


def results(**numbers):
    """Results of one analysis, ``one``, whose rule ``x`` wants 1 to 2."""
    rule = Rule(says="x", theirs="3", reproduced=(1.0, 2.0), contradicted=(-1.0, 0.0))
    claim = Claim(folder=Path("one"), title="one", paper="A", model=None, rules={"x": rule})
    rows = [
        {"number": f"x @ {name}", "value": (low + high) / 2, "low": low, "high": high, "n": 4}
        for name, (low, high) in numbers.items()
    ]
    return Results(claims={"one": claim}, tables={"one": pd.DataFrame(rows)})


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ({"a": (1.2, 1.8)}, "holds"),
        ({"a": (1.2, 1.8), "b": (3.0, 4.0)}, "holds in part"),
        ({"a": (0.5, 1.5)}, "not shown"),
        ({"a": (0.5, 1.5), "b": (3.0, 4.0)}, "not shown"),
        ({"a": (2.5, 3.0), "b": (-1.0, 0.5)}, "does not hold"),
        ({"a": (math.nan, math.nan)}, "not tested here"),
    ],
)
def test_the_verdict_of_a_claim_is_that_of_its_intervals(numbers, verdict):
    row = Row(id="A1", where="A", words="x", decides=(Part(of="one/x @ *"),))
    assert answer(row, results(**numbers)) == verdict


def test_a_claim_that_says_more_than_was_measured_or_has_a_range_of_the_page():
    row = Row(id="A1", where="A", words="x", decides=(Part(of="one/x @ a"),), more="at scale")
    assert answer(row, results(a=(1.2, 1.8))) == "holds in part"
    assert answer(row, results(a=(2.5, 3.0))) == "does not hold"
    row = Row(
        id="A1", where="A", words="x", decides=(Part(of="one/x @ a", by="page", range=(2.0, 3.0)),)
    )
    assert answer(row, results(a=(2.5, 3.0))) == "holds"
    marked = [part.of for one in PAGE.rows for part in one.decides if part.by == "page"]
    assert len(marked) == LONG.count("†]") > 0


def test_one_number_on_several_texts_is_one_number():
    assert several(results(a=(1.0, 2.0), b=(1.0, 2.0)).tables["one"]) == "1.5 (1 to 2)"
    assert several(results(a=(1.0, 2.0), b=(2.0, 5.0)).tables["one"]) == "1.5 to 3.5 (1 to 5)"
    assert several(results(a=(1.0, 1.0), b=(1.0001, 1.0001)).tables["one"]) == "1"
    assert several(results(a=(1.0, 2.0), b=(1.0001, 2.0)).tables["one"]) == "1.5 (1 to 2)"


def test_places_are_filled_from_the_results():
    found = results(a=(0.5, 1.0))
    assert (
        found.fill("{one/x @ a} or {one/x @ a|.0%} or {one/x @ a|low:.2f}")
        == "0.75 (0.5 to 1) or 75% or 0.50"
    )
    with pytest.raises(InputError, match="has 2 numbers; a sentence needs one"):
        results(a=(0.5, 1.0), b=(0.5, 1.0)).fill("{one/x @ *}")
    with pytest.raises(InputError, match="no number one/y"):
        found.fill("{one/y}")


def test_a_timed_run_of_the_default_model_says_what_others_cost_and_leaves_its_column_of_more_texts(
    tmp_path,
):
    row = {
        "model": DEFAULT_MODEL,
        "parameters": 1e8,
        "folder": "mediation",
        "seconds": 600,
        "number": "z",
    }
    pd.DataFrame([row | {"value": 9.0, "low": 8.0, "high": 10.0, "n": 8, "note": None}]).to_csv(
        tmp_path / "default.csv", index=False
    )
    with_cost, without = (
        long_page(PAGE, RESULTS, folder=one) for one in (tmp_path, tmp_path / "none")
    )
    told = cost(tmp_path, parameters=6.7e9)
    assert told.startswith(f"{DEFAULT_MODEL} (100M parameters) took 10 minutes on two busy cores.")
    (tmp_path / "more").mkdir()
    pd.DataFrame([row, row | {"folder": "neuron_sets"}]).to_csv(
        tmp_path / "more" / "whole.csv", index=False
    )
    pd.DataFrame([row | {"model": "partly", "parameters": 9e8}]).to_csv(
        tmp_path / "more" / "part.csv", index=False
    )
    assert cost(tmp_path / "more", parameters=6.7e9).startswith(
        f"{DEFAULT_MODEL} (100M parameters) took 20 minutes"
    )
    assert with_cost == without.replace(cost(tmp_path / "none", parameters=6.7e9), told)


def test_a_claim_that_another_model_answers_otherwise_is_listed_by_the_numbers_that_it_has():
    """``x @ b`` is lacking there: by ``x @ a`` alone, this model's claim holds, where that of the other does not."""
    rows = [
        Row(id=f"A{n}", where="A", words="x", plain=f"plain {n}", decides=decides)
        for n, decides in enumerate(DECIDES)
    ]
    own, other = results(a=(1.2, 1.8), b=(3.0, 4.0)), results(a=(2.5, 3.0))
    found = flips(
        dataclasses.replace(PAGE, rows=tuple(rows)),
        own,
        {"another": dataclasses.replace(other, of_another_model=True)},
    )
    assert "**another**: 2 of 3 claims were asked, and 2 have another verdict." in found
    assert next(one for one in found.splitlines() if "plain 0" in one).split(" | ")[1:3] == [
        "holds",
        "does not hold",
    ]
    assert "plain 2" not in found
    assert "All have the same verdict" in flips(
        dataclasses.replace(PAGE, rows=tuple(rows)), own, {"same": own}
    )
    with pytest.raises(InputError, match="x @ b"):
        other.numbers("one/x @ b")


DECIDES = (
    (Part(of="one/x @ a"),),
    (Part(of="one/x @ a"), Part(of="one/x @ b")),
    (Part(of="one/x @ b"),),
)


def test_the_column_of_a_model_is_written_and_read_and_keeps_its_time(
    tmp_path, capsys, monkeypatch
):
    model, name, kept = tmp_path / "model", "down_projection_column", tmp_path / "none" / "kept"
    monkeypatch.setattr("analyses.__main__.TABLES", kept)
    planted().model.save_pretrained(model)
    tiny_tokenizer(adds_bos=True).save_pretrained(model)
    assert of_model(str(model), [name], out=tmp_path, keeps=False) == 0
    (found,) = models(tmp_path, RESULTS).values()
    assert set(found.tables) == {name}
    assert "| not run |" in capsys.readouterr().out
    (tmp_path / name / "seconds.txt").write_text("781\n", encoding="utf-8")
    assert of_model(str(model), [name], out=tmp_path, keeps=True) == 0
    assert set(pd.read_csv(kept / "model.csv")["seconds"]) == {781}
