"""Every phrase that a kind of run can print above its figures is in tests/headlines.md."""

import re

import pytest
from said import listed, phrases

NO_SENTENCE = {
    "circuit": {"sink mass"},
    "diff": {"the second model", "two models compared"},
    "quantise": {"nats that it costs", "the format", "what a low-precision format costs"},
    "patch": {"the metric"},
    "sweep": {"a sweep of", "a sweep of edits"},
    "preference": {"as it is", "no attention", "no gate", "no mlp"},
    "contraction": {"as it is", "no attention", "no gate", "no mlp", "not measured"},
}
"""Texts that name something, that head a run without its table, or that the code compares with."""


@pytest.mark.parametrize(
    "kind",
    ["circuit", "diff", "quantise", "patch", "sweep", "train", "monitor", "preference", "contraction", "fingerprint"],
)
def test_no_phrase_of_the_code_is_missing_in_the_table(kind):
    table = "\n".join(listed(kind).values()).lower()
    pieces = {piece.strip(" .;,:").lower() for one in phrases(kind) for piece in re.split(r"[.;:] ", one)}
    assert {one for one in pieces if one not in table} <= NO_SENTENCE.get(kind, set())
