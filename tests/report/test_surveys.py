"""Pages of surveys where names are long, or seeds are not known."""

import pandas as pd

from sink_lens.identity.pages.contraction import CONTRACTION, relation
from sink_lens.records import create_run, read_run

NONE = float("nan")


def summary_of(models):
    """Rows of a summary: model, variant, seed, step and value of one measure."""
    rows = pd.DataFrame(models, columns=["model", "variant", "seed", "step", "value"])
    return rows.assign(measure="sink_mass")


def test_models_whose_names_begin_alike_have_rows_of_their_own(tmp_path):
    models = ["a-name-that-goes-on-for-more-than-forty-four-characters/one", "b"]
    models.insert(1, models[0].replace("one", "two"))
    summary = summary_of([(model, model, NONE, NONE, float(at)) for at, model in enumerate(models)])
    with create_run(tmp_path / "run", kind="contraction", config={}, provenance={}) as writer:
        writer.write_csv("summary", summary)
    listed = next(one for one in CONTRACTION.tables if "sink" in one.title.lower())
    _, table = listed.make(read_run(tmp_path / "run"))
    assert len(table.rows) == 3


def test_a_seed_that_is_not_known_is_no_other_seed():
    known, other = ({"variant": name, "seed": seed} for name, seed in (("a", 0.0), ("b", 1.0)))
    unknown = {"variant": "c", "seed": NONE}
    assert relation(known, other) == "two variants, two seeds"
    assert relation(known, known | {"variant": "b"}) == "two variants, one seed"
    assert relation(known, unknown) == relation(unknown, unknown | {"variant": "d"}) == "two variants, seeds not known"
