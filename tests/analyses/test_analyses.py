"""Every analysis gives in tiny mode what it is expected to, and what is written about it is current."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from tiers import first

from analyses.__main__ import claims, coverage_page, list_page
from analyses.claims import run_claim
from analyses.verdicts import read_claim, read_coverage, read_result, with_table
from sink_lens.circuits.config import CircuitConfig
from sink_lens.circuits.methods import METHODS
from sink_lens.circuits.sentences import _node_sentences
from sink_lens.errors import InputError
from sink_lens.schema import ERROR_RATES, FINGERPRINT_ERRORS
from sink_lens.signatures import field_docs

ROOT = Path(__file__).parents[2] / "analyses"
FOLDERS = sorted(
    (path.parent for path in ROOT.glob("*/*/claim.md")), key=lambda folder: folder.name
)
OF_EACH_HELPER = (
    "chain_by_paths",  # a finished trace
    "variance_by_layer",  # readings
    "mask_isolation",  # edits
    "token_preference",  # untrained models
    "circuit_truth",  # the zoo and its rates
    "calibration_on_the_trigger_task",  # a training
)
"""The analyses of the first tier."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("analyses")


def name(folder):
    return folder.name


@pytest.mark.parametrize(
    "folder", first(FOLDERS, stay=lambda folder: folder.name in OF_EACH_HELPER), ids=name
)
def test_tiny_mode_gives_the_expected_numbers(folder, runs):
    found = run_claim(folder, out=runs / folder.name, tiny=True, progress=False).set_index("number")
    expected = pd.read_csv(folder / "expected.csv").set_index("number")
    assert list(found.index) == list(expected.index)
    columns = ["value", "low", "high"]
    # Bounds of a bootstrap of 8 sequences move a little where rounding reorders its draws.
    np.testing.assert_allclose(found["value"], expected["value"], rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(found[columns[1:]], expected[columns[1:]], rtol=5e-2, atol=5e-3)
    assert (runs / folder.name / "figure.png").stat().st_size > 3000


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_an_analysis_imports_no_private_name_and_no_other_analysis(folder):
    own = f"analyses.{folder.parent.name}.{folder.name}."
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(
            r"^ *from (\S+) import (\([^)]*|[^#\n]+)", text, flags=re.M
        ):
            assert not re.search(r"[\s.(]_[a-z]", f"{module} {names}"), (module, names)
            assert not re.match(
                r"analyses\.(?:[a-d]_|our_own\b)", module
            ) or f"{module}.".startswith(own), module


@pytest.mark.parametrize(
    "folder", first(FOLDERS, stay=lambda folder: folder.name in OF_EACH_HELPER), ids=name
)
def test_tiny_mode_does_not_expect_the_committed_result(folder):
    """Where it does, it reads the committed tables back and computes nothing."""
    result, expected = (
        pd.read_csv(folder / f"{table}.csv").set_index("number") for table in ("result", "expected")
    )
    values = expected["value"].reindex(result.index)
    assert not np.isclose(result["value"], values, rtol=1e-4, atol=0, equal_nan=True).all()


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_claim_says_what_was_predicted_and_would_refute_it_and_its_result_is_that_of_the_file(
    folder,
):
    result = read_result(read_claim(folder))
    assert not result.empty, "not run yet: python -m analyses --keep " + folder.name
    text = (folder / "claim.md").read_text(encoding="utf-8")
    before, _, after = text.partition("## Result")
    for heading in ("**Question.**", "**Prediction", "**What would refute it.**"):
        assert heading in before
    assert "<!-- result -->\n" in after
    assert with_table(text, result) == text
    written = pd.read_csv(folder / "result.csv", dtype={"number": str})
    pd.testing.assert_frame_equal(
        written, result, check_dtype=False
    )  # no cell is that of an older rule
    assert (folder / "figure.png").is_file()


def test_an_analysis_is_named_without_the_folder_of_its_paper():
    assert [claim.place for claim in claims(["mediation"])] == ["a_structural_origin/mediation"]
    assert {claim.name for claim in claims()} == {folder.name for folder in FOLDERS}
    with pytest.raises(
        InputError, match=r"no analysis is called nowhere; need some of .*mediation"
    ):
        claims(["nowhere"])


def test_overview_and_coverage_page_are_those_of_their_rows_and_the_result_files():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == list_page()
    assert (ROOT.parent / "docs/coverage.md").read_text(encoding="utf-8") == coverage_page()
    assert "docs/coverage.md" in (ROOT.parent / "README.md").read_text(encoding="utf-8")


def test_every_figure_and_table_has_a_folder_or_a_reason():
    found = [read_claim(folder) for folder in FOLDERS]
    rows = read_coverage(ROOT / "coverage.toml", claims=found)
    assert {row.where[0] for row in rows} == set("ABCD")
    known = {folder.name: folder / "run.py" for folder in FOLDERS}
    for row in rows:
        assert known[row.folder].is_file() if row.folder else len(row.reason) > 20, row.where
        assert not row.folder or row.theirs, row.where
    of_papers = {
        claim.name
        for claim in found
        if claim.paper.startswith(("A, figure", "A, table", "C,", "D,"))
    }
    assert of_papers <= {row.folder for row in rows}


@pytest.fixture(scope="module")
def calibration():
    folder = ROOT / "our_own" / "verdict_calibration"
    rows = pd.read_csv(folder / "answers.csv", dtype={"said": str}, keep_default_na=False)
    return folder, runpy.run_path(str(folder / "run.py")), rows


def test_the_table_of_the_zoo_is_that_of_its_rows(calibration):
    folder, functions, rows = calibration
    assert (folder / "table.md").read_text(encoding="utf-8") == functions["markdown"](rows)
    assert set(zip(rows["model"], rows["family"], strict=True)) <= set(functions["combinations"]())


@pytest.fixture(scope="module")
def circuit_truth():
    folder = ROOT / "our_own" / "circuit_truth"
    rows, circuits = (pd.read_csv(folder / f"{name}.csv") for name in ("answers", "circuits"))
    return runpy.run_path(str(folder / "run.py")), rows, circuits


def test_the_table_of_circuits_and_the_numbers_in_the_readme_are_those_of_its_rows(circuit_truth):
    functions, rows, circuits = circuit_truth
    assert (ROOT / "our_own" / "circuit_truth" / "table.md").read_text(
        encoding="utf-8"
    ) == functions["markdown"](rows, circuits)
    assert set(zip(rows["mechanism"], rows["family"], strict=True)) == set(
        functions["combinations"]()
    )
    assert set(circuits.loc[circuits["ablation"] == "core", "seeds"]) == {10}
    told = " ".join((ROOT.parent / "README.md").read_text(encoding="utf-8").split())
    sentence = functions["sentence_of"](circuits)
    (models,) = re.findall(r"On ([\d,]+) models", sentence)
    ((false, edges),) = re.findall(r"([\d,]+) of ([\d,]+) core edges are \*false\*", sentence)
    assert f"[{models} small models](docs/zoo.md" in told
    assert f"| {false} of {edges} connections" in told


def test_a_circuits_sentences_on_its_nodes_follow_the_rates_that_were_measured():
    rate = read_result(read_claim(ROOT / "our_own" / "circuit_nodes")).set_index("number")["value"]
    zero = (
        pd.read_csv(ROOT / "our_own" / "circuit_nodes" / "answers.csv")
        .query("ablation == 'zero'")
        .sum(numeric_only=True)
    )
    quiet = {kind: zero[kind] - zero[f"{kind}_warned"] for kind in ("wrong", "between", "right")}
    row = {"ablation": "zero", "method": "eap-ig", "patched_nodes": 9, "unseen_nodes": "m0"}
    assert (
        f"of {zero['right']} right ones in the zoo, {zero['right_warned']} have"
        in _node_sentences(row)
    )
    assert f"of {sum(quiet.values())} without such nodes, {quiet['right']} were" in _node_sentences(
        row | {"unseen_nodes": ""}
    )
    for ablation in ("resample", "mean_ordinary"):
        assert rate[f"alarm_eap @ eap, {ablation}"] > 0.2
        assert rate[f"alarm @ eap-ig, {ablation}"] == 0


def test_help_names_every_method_that_real_patches_outdo(circuit_truth):
    _, rows, _ = circuit_truth
    worse = set(rows.loc[rows["over_exact"] < -0.02, "method"]) & set(METHODS)
    named = (
        field_docs(CircuitConfig)["method"]
        .partition("(exact; small models).")[2]
        .partition("miss edges")[0]
    )
    assert worse == {method for method in METHODS if re.search(rf"\b{method}(?![\w-])", named)}


def test_the_error_rates_on_every_page_are_those_of_the_table(calibration):
    _, functions, rows = calibration
    table = functions["judge"](rows)

    def told(question, truth):
        of = table[(table["question"] == question) & (table["truth"] == truth)]
        return f"{of.loc[of['answer'] == 'wrong', 'n'].sum():,} of {of['n'].sum():,}"

    numbers = [
        told("verdict", "intact"),
        told("verdict", "broken"),
        told("position", "no"),
        told("phrases", "true"),
    ]
    assert re.findall(r"\d+ of [\d,]+\d", ERROR_RATES) == numbers
    assert f"{rows.loc[rows['question'] == 'position', 'n'].sum():,} traces" in ERROR_RATES


def test_the_error_rate_of_a_fingerprint_is_that_of_its_analysis():
    pairs = pd.read_csv(ROOT / "c_seedprints" / "fingerprint_calibration" / "pairs.csv")
    asked = pairs.loc[pairs["inputs"].eq("tokens") & pairs["null"].eq("relabelled")]
    assert f"of {len(asked)} pairs" in FINGERPRINT_ERRORS
    assert f", {(asked['p'] < 0.01).sum()} were said" in FINGERPRINT_ERRORS


@pytest.mark.parametrize(
    ("question", "truth", "said", "answer"),
    [
        ("present", "yes", "no", "wrong"),
        ("present", "no", "undecided", "undecided"),
        ("carries", "not applicable", "not applicable", "right"),
        ("verdict", "intact", "fails", "wrong"),
        ("verdict", "intact", "in part", "wrong"),
        ("verdict", "broken", "in part", "wrong"),
        ("verdict", "in part", "in part", "right"),
        ("verdict", "in part", "holds", "wrong"),
        ("verdict", "in part", "undecided", "undecided"),
        ("verdict", "not applicable", "in part", "wrong"),
        ("carries", "in part", "yes", "wrong"),
        ("necessary_or_sufficient", "in part", "yes", "right"),
        ("verdict", "broken", "not applicable", "undecided"),
        ("verdict", "broken", "not in this basis", "wrong"),
        ("verdict", "not applicable", "not in this basis", "wrong"),
        ("verdict", "turned", "not in this basis", "right"),
        ("verdict", "turned", "fails", "wrong"),
        ("position", "yes", "none", "wrong"),
        ("position", "no", "misplaced", "wrong"),
        ("F1", "known", "0.94", "wrong"),
        ("F1", "known", "0.95", "right"),
    ],
)
def test_what_an_answer_about_the_zoo_is_worth(question, truth, said, answer, calibration):
    _, functions, _ = calibration
    row = SimpleNamespace(question=question, truth=truth, said=said)
    assert functions["right_of"](row) == answer
