"""The table of families and sites in the documentation is what the models do."""

import pytest
from family_table import found, made, read, written
from tiers import REPRESENTATIVES

MEND = "run python tests/checking/family_table.py"


def test_the_table_of_the_documentation_says_what_is_found_of_a_family_for_each_mechanism():
    said = read()
    for architecture, cells in found(REPRESENTATIVES).items():
        assert said[architecture] == cells, (architecture, MEND)


@pytest.mark.exhaustive
def test_the_table_of_the_documentation_is_what_is_found():
    assert made() == written(), MEND
