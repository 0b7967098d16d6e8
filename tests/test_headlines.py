"""Every phrase that a kind of run can print above its figures is in docs/headlines.md."""

import re

import pytest
from said import listed, phrases

NO_SENTENCE = {"sink mass"}
"""Texts that the code compares with, and prints in none."""


@pytest.mark.parametrize("kind", ["circuit"])
def test_no_phrase_of_the_code_is_missing_in_the_table(kind):
    table = "\n".join(listed(kind).values()).lower()
    pieces = {piece.strip(" .;,").lower() for one in phrases(kind) for piece in re.split(r"[.;] ", one)}
    assert {one for one in pieces if one not in table} <= NO_SENTENCE
