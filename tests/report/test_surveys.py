"""Pages of surveys where names are long, or seeds are not known."""

from sink_lens.identity.pages.contraction import relation_text


def test_a_seed_that_is_not_known_is_no_other_seed():
    nan = float("nan")
    rows = [
        {"variant": name, "seed": seed}
        for name, seed in zip("abcd", (0.0, 1.0, nan, nan), strict=True)
    ]
    one, two, unknown, other = rows
    assert relation_text(one, two) == "two variants, two seeds"
    assert relation_text(one, one | {"variant": "b"}) == "two variants, one seed"
    assert (
        relation_text(one, unknown)
        == relation_text(unknown, other)
        == "two variants, seeds not known"
    )
