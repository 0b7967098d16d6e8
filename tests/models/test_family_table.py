"""The table of families and sites in the documentation is what the models do."""

from family_table import made, written


def test_the_table_of_the_documentation_is_what_is_found():
    assert made() == written(), "run python tests/checking/family_table.py"
