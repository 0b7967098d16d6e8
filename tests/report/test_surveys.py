"""Pages of surveys where names are long, or seeds are not known."""

from sink_lens.identity.pages.contraction import relation_text

NONE = float("nan")


def test_a_seed_that_is_not_known_is_no_other_seed():
    known, other = ({"variant": name, "seed": seed} for name, seed in (("a", 0.0), ("b", 1.0)))
    unknown = {"variant": "c", "seed": NONE}
    assert relation_text(known, other) == "two variants, two seeds"
    assert relation_text(known, known | {"variant": "b"}) == "two variants, one seed"
    assert (
        relation_text(known, unknown)
        == relation_text(unknown, unknown | {"variant": "d"})
        == "two variants, seeds not known"
    )
