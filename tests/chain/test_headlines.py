"""What a headline can say is in tests/headlines.md, is said if what it stands on holds, and else not."""

import re
from pathlib import Path

import pandas as pd
import pytest
from headlines import keys

from sink_lens.chain.links.words import WORDS
from sink_lens.chain.page.first_screen import word_meanings
from sink_lens.chain.page.words import BOUND, headline_phrases, join_phrases
from sink_lens.chain.summary import sink_binding
from sink_lens.chain.terminal import _link_lines
from sink_lens.schema import DIRECTION, DISTANCE, RESCALED, SIZE, SPAN

DOCS = Path(__file__).parents[2] / "docs"
YES = ("yes", "yes", "yes")
ALL = dict.fromkeys(WORDS, ("no", "undecided", "undecided"))


def summary(**values):
    return pd.DataFrame({"quantity": list(values), "value": [str(one) for one in values.values()]})


def links(answers, *, of_the_key=()):
    names = ("present", "necessary_or_sufficient", "carries")
    rows = [
        dict(zip(names, given, strict=True)) | {"link": link}
        for link, given in (ALL | answers).items()
    ]
    rows = [row | {"statistic": f"of_{row['link']}", "ci_low": 0.0, "ci_high": 9.0} for row in rows]
    key = next(row for row in rows if row["link"] == "dimension_key")
    for name, low, high in of_the_key:
        rows.append(key | {"statistic": name, "ci_low": low, "ci_high": high})
    return pd.DataFrame(rows)


def effects(*more):
    row = {
        "link": "dimension_key",
        "edit": "x",
        "share": 0.5,
        "ci_low": 0.4,
        "ci_high": 0.6,
        "control_largest": 0.0,
    }
    row |= {"is_primary": True, "read_layers": "3-4", "position": 0}
    return pd.DataFrame(
        [row, *(row | {"link": "neurons_dimension", "is_primary": False} | one for one in more)]
    )


def dimensions():
    return pd.DataFrame({"layer": [2], "sink_position": 0, "dimension": 7, "is_outlier": True})


def sets(**values):
    row = {
        "set": "half",
        "control_of": "",
        "target": "sink",
        "size": 2,
        "removed": 0.59,
        "ci_low": 0.5,
        "baseline_loss_nats": 4.5,
        "loss_nats": 4.5,
    }
    return pd.DataFrame([row | {"control_largest": 0.1} | values])


def costly(*, masked):
    made = effects().assign(masked_loss_nats=masked, uniform_loss_nats=12.5)
    return intervened({}, effects=made, maker_sets=sets(loss_nats=7.4))


def intervened(answers, **tables):
    made = effects().assign(masked_loss_nats=6.0, uniform_loss_nats=12.5)
    return {"links": links(answers), "effects": made, "dimensions": dimensions()} | tables


def carried(link, given=YES):
    """Tables in which a link carries the sink, and in which it is undecided whether it does."""
    more = {"neurons_dimension": YES} if link == "dimension_key" else {}
    return intervened({link: given} | more), intervened({link: ("yes", "yes", "undecided")} | more)


def bound(kind, other):
    return {"summary": summary(sink_bound_to=kind)}, {"summary": summary(sink_bound_to=other)}


def along(control):
    answers = links({"dimension_key": ("yes", "no", "no")})
    span = {"edit": SPAN, "ci_low": 0.6, "ci_high": 0.8, "control_largest": control}
    return intervened({}, links=answers, effects=effects(span, {"edit": RESCALED, "ci_high": 0.1}))


def cancelled(high):
    given = {"dimension_key": YES, "neurons_dimension": YES}
    return intervened(
        {},
        links=links(
            given, of_the_key=[("bias_cancelled", 0.8, 0.9), ("key_norm_ratio", 0.1, high)]
        ),
    )


MARKED = {
    "summary": summary(
        marked_tokens="'.'",
        marked_sequences=13,
        marked_attention=0.994,
        attention_behind_marked=0.003,
    )
}
CASES = {
    "no sink": ({}, True),
    "strongest": ({"summary": summary(strongest_position=7, strongest_rate=0.03)}, {}),
    "marked": (MARKED, {"summary": summary(loss=1)}),
    "state": ({"summary": summary(mixer_layers="0")}, {"summary": summary(loss=1)}),
    "sink logit": ({"maker_sets": sets(target="sink logit")}, {"maker_sets": sets()}),
    "sink": ({}, False),
    "others": (
        {"summary": summary(other_sink_positions="1", other_sink_rate=0.3)},
        {"summary": summary(loss=1)},
    ),
    "elsewhere": ({"summary": summary(sequences_elsewhere=3)}, {"summary": summary(loss=1)}),
    "some": (
        {"summary": summary(sequences_with_sink=21, sequences_asked=32)},
        {"summary": summary(loss=1)},
    ),
    "bound: positional": bound("positional", "position or token"),
    "bound: positional, not BOS": bound("positional, not BOS", "positional"),
    "bound: token": bound("token", "position or token"),
    "bound: position or token": bound("position or token", "positional"),
    "bound: position and token": bound("position and token", "token"),
    "bound: own position": bound("own position", "own position or token"),
    "bound: own token": bound("own token", "own position or token"),
    "bound: own position or token": bound("own position or token", "own position"),
    "bound: own position and token": bound("own position and token", "own token"),
    "bound: some tokens": bound("some tokens", "positional"),
    "untested": ({"links": links({})}, intervened({})),
    "by aggregation_variance": carried("aggregation_variance"),
    "by variance_preserved": carried("variance_preserved"),
    "by variance_neurons": carried("variance_neurons"),
    "by dimension_key": carried("dimension_key"),
    "by key_sink": carried("key_sink"),
    "part by variance_neurons": (
        intervened({"variance_neurons": ("yes", "in part", "in part")}),
        intervened({"variance_neurons": ("yes", "undecided", "in part")}),
    ),
    "nothing shown": (intervened({}), intervened({"key_sink": YES})),
    "cancels bias": (cancelled(0.3), cancelled(0.7)),
    "direction": (along(0.1), along(0.7)),
    "makers": (
        intervened({}, maker_sets=sets()),
        intervened({}, maker_sets=sets(control_largest=0.55)),
    ),
    "makers, costly": (costly(masked=6.0), costly(masked=7.3)),
    "no variance": (
        intervened(
            {"aggregation_variance": ("yes", "no", "no"), "variance_preserved": ("yes", "no", "no")}
        ),
        intervened(
            {
                "aggregation_variance": ("yes", "no", "no"),
                "variance_preserved": ("yes", "yes", "yes"),
            }
        ),
    ),
}
WITHOUT = ("no sink", "strongest", "state", "sink logit")


def said(tables, *, is_sink):
    return {
        one.key: one.text
        for one in headline_phrases(tables, is_sink=is_sink, rate=0.61, position=0)
    }


def test_the_table_has_every_sentence_that_can_be_said():
    asked = {f"bound: {kind}" for kind in BOUND} | {
        f"by {link}" for link, words in WORDS.items() if words.asks
    }
    assert keys("trace") == {*CASES, "sink: own", "some: few", "by all", "by direction"}
    assert asked <= keys("trace")


@pytest.mark.parametrize("key", CASES)
def test_a_sentence_is_said_if_what_it_stands_on_holds_and_else_not(key):
    true, false = CASES[key]
    is_sink = key not in WITHOUT
    assert said(true, is_sink=is_sink)[key]
    assert key not in (
        said(true, is_sink=false) if isinstance(false, bool) else said(false, is_sink=is_sink)
    )


def test_tokens_that_are_sinks_beside_the_position_are_counted_and_so_are_heads_with_a_sink_logit():
    found = said(MARKED, is_sink=True)["marked"]
    assert "13 sequences" in found
    assert "99% of attention" in found
    assert "0% to position 0" in found
    assert "marked" not in said(
        {"summary": pd.concat([MARKED["summary"], summary(aligned_position=8)])}, is_sink=True
    )
    found = said({"summary": summary(sink_logit_rate=0.5)}, is_sink=True)
    assert "50% of heads" in found["sink logit"]


def test_a_sink_that_only_some_sequences_have_is_counted_and_not_that_of_any_first_token():
    found = said({"summary": summary(sequences_with_sink=3, sequences_asked=32)}, is_sink=True)
    assert "61%" not in found["sink"]
    assert "3 of 32 sequences" in found["some"]
    assert "61%" in found["some"]
    assert "too few" in found["some"]
    found = said({"summary": summary(sequences_with_sink=4, sequences_asked=32)}, is_sink=True)
    assert "too few" not in found["some"]
    placed = [
        {"position": 0, "token": name, "isolated": False, "is_sink": True}
        for name in ("ordinary", "bos")
    ]
    placed.append(placed[1] | {"position": 9, "is_sink": False})
    for some, kind in ((False, "positional"), (True, "some tokens")):
        assert sink_binding(pd.DataFrame(placed), some=some) == kind


def test_sequences_that_have_a_sink_each_of_its_own_have_no_other_positions():
    aligned = {"aligned_position": 8, "other_sink_positions": "11, 15", "other_sink_rate": 0.09}
    found = said({"summary": summary(**aligned, sink_bound_to="own token")}, is_sink=True)
    assert [*found] == ["sink", "bound: own token"]
    assert "8" not in found["sink"]
    found = said({"summary": summary(**aligned, sequences_uncut=5)}, is_sink=True)
    assert "5 left out" in found["sink"]


def by(size, direction):
    """The value average carries the sink, and loses so much of it with an ordinary size or direction alone."""
    rows = [
        {"edit": edit, "ci_low": low, "ci_high": low + 0.1, "share": low + 0.05}
        for edit, low in ((SIZE, size), (DIRECTION, direction), (DISTANCE, 0.6))
    ]
    return intervened({"aggregation_variance": YES}, effects=effects(*rows))


@pytest.mark.parametrize(
    ("size", "direction", "named"),
    [
        (-0.04, 0.5, False),
        (0.5, 0.0, True),
        (0.5, 0.6, True),
        (0.0, 0.02, False),
        (0.3, 0.35, True),
    ],
)
def test_averaging_is_named_where_the_size_of_the_value_average_removes_the_sink(
    size, direction, named
):
    text = said(by(size, direction), is_sink=True)["by aggregation_variance"]
    assert ("veraging" in text) == named
    assert ("direction" in text) == (direction > 0.1 and size < 0.1)
    sentence, *_ = WORDS["aggregation_variance"].remarks(by(size, direction), {})
    assert f"{round(100 * direction + 5)}% in an ordinary direction (random" in sentence


def test_words_of_a_headline_have_a_meaning_and_a_line_in_the_glossary():
    glossary = "\n".join(
        re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text("utf-8"), flags=re.M)
    )
    for word in (
        "averaging",
        "direction",
        "dimension",
        "part",
        "switching off",
        "carry",
        "super neuron",
    ):
        assert re.search(rf"\b{word}\b", glossary), word
    said = "Super neurons and dimension 7 carry it. Switching off 2 parts removes 59% of it"
    meant = [word for word, _ in word_meanings(said)]
    assert meant == ["super neurons", "dimension", "carry", "parts", "switching off"]


def test_the_sentences_are_whole_and_say_what_carries_it_in_one():
    every = dict.fromkeys(WORDS, YES)
    found = headline_phrases(
        intervened(every, maker_sets=sets()), is_sink=True, rate=0.61, position=0
    )
    first, chain, makers = join_phrases(found).split(". ")
    assert "61%" in first
    assert "dimension 7" in chain
    assert "59%" in makers
    *_, two = said(
        intervened({"variance_neurons": YES, "variance_preserved": YES}), is_sink=True
    ).values()
    for link in ("variance_neurons", "variance_preserved"):
        assert WORDS[link].carries_as({}).lower() in two.lower()


def test_the_parts_that_make_the_sink_are_named():
    parts = "1.7, head 0.2, 2.5, embedding 3, 4.1"
    text = said(intervened({}, maker_sets=sets().assign(parts=parts, size=5)), is_sink=True)[
        "makers"
    ]
    assert "5 parts (L1.N7, L0.H2, L2.N5, embedding of token 3 and 1 more)" in text


@pytest.mark.parametrize(
    ("verdict", "claimed"), [("holds", True), ("in part", True), ("fails", False)]
)
def test_the_terminal_asserts_no_link_that_fails(verdict, claimed):
    chain = pd.DataFrame([{"link": "variance_preserved", "sentence": "W_O passes it on"}])
    table = pd.DataFrame([{"link": "variance_preserved", "verdict": verdict, "is_primary": True}])
    *_, below = _link_lines({"links": table, "chain": chain}, sink_position=0)
    assert str(below.renderable).startswith("W_O passes it on") == claimed
