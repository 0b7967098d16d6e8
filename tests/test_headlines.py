"""Every phrase that a kind of run can print above its figures is in tests/headlines.md."""

import re

import pytest
from said import listed, phrases

from sink_lens.kinds import all_kinds

NO_SENTENCE = {
    "tokens": {"batch position", "sink token", "sink tokens"},
    "isolate": {"a position isolated by the attention mask", "aggregated values", "norm only"},
    "amplify": {"a position isolated by the attention mask", "aggregated values", "norm only"},
    "ablate": {"the neurons that carry the sink"},
    "compare": {
        *("a whole number", "true or false", "did you mean"),
        *("leave runs out, or name what is compared with by (--by)", "the runs also differ in"),
        "need variants that differ in what is compared and the seed only",
        *("not every run was measured at a later one", "sinks are compared at step"),
        *("findings.txt is not in this folder", "{} the baseline's final"),
    },
    "circuit": {"sink mass"},
    "diff": {"the second model", "two models compared"},
    "quantise": {"nats that it costs", "the format", "what a low-precision format costs"},
    "patch": {"the metric"},
    "sweep": {"a sweep of", "a sweep of edits"},
    "preference": {"as it is", "no attention", "no gate", "no mlp"},
    "contraction": {"as it is", "no attention", "no gate", "no mlp", "not measured"},
}
"""Texts that name something, refuse, warn, head a run without its table, or that the code compares with."""

SHARED = {"watch": ("train",), "isolate": ("amplify",), "amplify": ("isolate",)}
"""Kind -> kinds whose sentences the same functions make."""


@pytest.mark.parametrize("kind", [kind for kind in all_kinds() if kind != "trace"])  # its phrases have own keys
def test_no_phrase_of_the_code_is_missing_in_the_table(kind):
    table = "\n".join(one for name in (kind, *SHARED.get(kind, ())) for one in listed(name).values()).lower()
    pieces = {piece.strip(" .;,:").lower() for one in phrases(kind) for piece in re.split(r"[.;:] ", one)}
    assert {one for one in pieces if one not in table} <= NO_SENTENCE.get(kind, set())
