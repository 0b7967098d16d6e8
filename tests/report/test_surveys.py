"""Pages of surveys where names are long, seeds are not known, or checkpoints are calibrated."""

import pandas as pd

from sink_lens.identity.surveys import calibrations_compared
from sink_lens.records import create_run, read_run
from sink_lens.report.contraction import CONTRACTION, relation
from sink_lens.report.survey import variant_rows

NONE = float("nan")


def summary_of(models):
    """Rows of a summary: model, variant, seed, step and value of one measure, with and without a calibration."""
    rows = []
    for model, variant, seed, step, value in models:
        one = {"model": model, "variant": variant, "seed": seed, "step": step, "measure": "loss"}
        rows += [one | {"calibration": name, "value": value + more} for name, more in (("none", 0), ("amplify", 1))]
    return pd.DataFrame(rows)


def test_the_calibrated_checkpoints_of_a_training_are_no_seeds():
    summary = summary_of([(f"run step {step}", "run", 3, step, float(step)) for step in (0, 10)])
    arms = calibrations_compared({"summary": summary}, {})["arms"].set_index(["variant", "calibration"])
    assert arms["n"].tolist() == [1] * 4
    assert arms.loc[("run step 10", "amplify"), "mean"] == 11
    assert arms.loc[("run step 10", "amplify"), "difference"] == 1
    lines = list(variant_rows(arms.reset_index(), summary, measures=("loss",)))
    assert [(name, texts[0]) for name, texts in lines] == [
        ("run step 0, none", "0.000"),
        ("run step 0, amplify", "1.000"),
        ("run step 10, none", "10"),
        ("run step 10, amplify", "11"),
    ]


def test_models_whose_names_begin_alike_have_rows_of_their_own(tmp_path):
    models = ["a-name-that-goes-on-for-more-than-forty-four-characters/one", "b"]
    models.insert(1, models[0].replace("one", "two"))
    summary = summary_of([(model, model, NONE, NONE, float(at)) for at, model in enumerate(models)])
    with create_run(tmp_path / "run", kind="contraction", config={}, provenance={}) as writer:
        writer.write_csv("summary", summary[summary["calibration"] == "none"].assign(measure="sink_mass"))
    listed = next(one for one in CONTRACTION.tables if "sink" in one.title.lower())
    _, table = listed.make(read_run(tmp_path / "run"))
    assert len(table.rows) == 3


def test_a_seed_that_is_not_known_is_no_other_seed():
    known, other = ({"variant": name, "seed": seed} for name, seed in (("a", 0.0), ("b", 1.0)))
    unknown = {"variant": "c", "seed": NONE}
    assert relation(known, other) == "two variants, two seeds"
    assert relation(known, known | {"variant": "b"}) == "two variants, one seed"
    assert relation(known, unknown) == relation(unknown, unknown | {"variant": "d"}) == "two variants, seeds not known"
