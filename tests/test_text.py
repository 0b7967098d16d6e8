"""Numbers, names and sets of indices as people write them."""

import re

import pytest

from sink_lens.errors import InputError
from sink_lens.text import (
    as_ranges,
    as_text,
    edge_label,
    label_parts,
    node_label,
    parse_ranges,
    safe_for_terminal,
    short_count,
    signed_change,
)


@pytest.mark.parametrize(
    ("indices", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([11, 1, 2, 2], "1-2,11"), ([4, 0, 2], "0,2,4")],
)
def test_span(indices, text):
    assert as_ranges(indices) == text


@pytest.mark.parametrize(
    ("text", "indices"),
    [("3", [3]), ("0-3,7", [0, 1, 2, 3, 7]), ("7, 0-1", [7, 0, 1]), ("2-2", [2]), ("1,1", [1, 1])],
)
def test_ranges(text, indices):
    assert parse_ranges(text, name="layers") == indices


@pytest.mark.parametrize(
    "text", ["", "3-", "-3", "3-1", "1,,2", "1.5", "0-2-4", "\N{SUPERSCRIPT TWO}"]
)
def test_what_is_no_range_is_refused(text):
    with pytest.raises(
        InputError, match=re.escape(f"layers is {text!r}; need all, or numbers and ranges such as")
    ):
        parse_ranges(text, name="layers", also="all, or ")


def test_a_range_without_end_is_refused_at_once():
    with pytest.raises(InputError, match="layers is '0-99999999999'; need indices below 1,000,000"):
        parse_ranges("0-99999999999", name="layers")


def test_a_terminal_gets_no_character_that_hides_and_numbers_of_three_digits():
    assert safe_for_terminal("plain") == "plain"
    assert safe_for_terminal("日本 ü\n\t| α") == "日本 ü\n\t| α"
    assert safe_for_terminal("a\u202eb\x1b[31m\r\udcff") == "a⟨U+202E⟩b⟨U+001B⟩[31m↵⟨U+DCFF⟩"
    assert [as_text(one) for one in (999.4, 999.6, -999.6, 1000.4)] == [
        "999",
        "1,000",
        "−1,000",
        "1,000",
    ]
    assert [short_count(one) for one in (950, 999_499, 999_500, 16_400)] == [
        "950",
        "999k",
        "1M",
        "16.4k",
    ]


def test_a_change_has_its_sign_and_one_that_rounds_to_nothing_has_none():
    assert [signed_change(one, 2) for one in (0.125, -1.5, -0.004, 0.0)] == [
        "+0.12",
        "−1.50",
        "0.00",
        "0.00",
    ]


def test_parts_are_named_so_that_none_reads_as_a_number():
    listed = "11.1229, head 18.8, embedding 5, position embedding 0, key bias 3.1"
    said = "L11.N1229, L18.H8, embedding of token 5, embedding of position 0, key bias of L3.H1"
    assert label_parts(listed) == said
    assert label_parts("2.90,2.430") == "L2.N90,L2.N430"
    assert label_parts("removes 2.5% at 0.3 nats") == "removes 2.5% at 0.3 nats"
    edges = {"a3.h1->a4.h1<q>": "L3.H1 → query of L4.H1", "input->m0@last": "input → MLP 0 at last"}
    assert {name: edge_label(name) for name in edges} == edges
    names = {
        "a18.h8": "L18.H8",
        "a4.kv0": "L4.KV0",
        "m5": "MLP 5",
        "m11.n": "neurons L11",
        "input": "input",
    }
    assert {name: node_label(name) for name in names} == names
