"""What is written for an axis, and the values that it stands for."""

import pytest

from sink_lens.edits.index_notation import axis_values
from sink_lens.edits.part import index_text
from sink_lens.errors import InputError


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("all", [None]),  # one value: everything together
        ("each", [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9,)]),
        (3, [(3,)]),
        ("3", [(3,)]),
        ("0-3,7", [(0,), (1,), (2,), (3,), (7,)]),  # by itself: each of these
        (" 7 , 0-1", [(0,), (1,), (7,)]),  # in the order of the indices
        ([3, "4-6", [7, 9]], [(3,), (4, 5, 6), (7, 9)]),  # in a list: an entry is a set
        ([[9, 7]], [(7, 9)]),  # a set has no order
        ([[0, 1], [1, 2], 1], [(0, 1), (1, 2), (1,)]),  # sets may overlap
    ],
)
def test_what_is_written_stands_for_these_values(given, values):
    assert axis_values(given, name="layers", size=10) == values


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            None,
            "layers is None; need each, all, a number, a range such as 0-3,7, or a list of these",
        ),
        ("some", "layers is 'some'; need each, all, or numbers and ranges such as 0-3,7"),
        ("3-1", "layers is '3-1'; need each, all"),
        ("-1", "layers is '-1'; need each, all"),
        (["all"], "layers is 'all'; need numbers and ranges"),
        (True, "layers holds True; need numbers, ranges such as 0-3,7, or lists of numbers"),
        ([[True]], r"layers holds \[True\]; need numbers"),
        ([[1, "2"]], r"layers holds \[1, '2'\]; need numbers"),
        ([], "layers is empty; need at least one value, or all"),
        ([[2, 2]], r"layers holds \[2, 2\]; need at least one index, and each once"),
        ("1,0-2", r"layers holds \[1, 0, 1, 2\]; need at least one index, and each once"),
        ([1, 1], r"layers names a value twice: \[1, 1\]; need each once"),
        (["0-1", [1, 0]], r"layers names a value twice: .*; need each once"),
        (-1, "layers: -1 does not exist; need 0 to 9"),
        ([[1, 12]], "layers: 12 does not exist; need 0 to 9"),
        (
            "0-999999999999",
            "layers: 999999999999 does not exist; need 0 to 9",
        ),  # and is not written out before
    ],
)
def test_what_stands_for_nothing_is_refused(given, text):
    with pytest.raises(InputError, match=text):
        axis_values(given, name="layers", size=10)
    with pytest.raises(InputError, match="neurons is empty"):
        axis_values("each", name="neurons", size=0)


@pytest.mark.parametrize(
    ("indices", "text"),
    [(None, "all"), ((4,), 4), ((0, 1, 2, 3, 7), "0-3,7"), ((7, 9), "7,9"), ((9, 8, 1), "1,8-9")],
)
def test_a_value_is_shown_as_it_is_written(indices, text):
    assert index_text(indices) == text
    assert axis_values([text] if indices else text, name="layers", size=10) == [
        indices and tuple(sorted(indices))
    ]
