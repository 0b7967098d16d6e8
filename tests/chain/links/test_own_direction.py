"""Links about dimensions, in models whose sink token has a direction of its own instead."""

import pytest
import torch

from benchmarks.rewrites import TABLE, rewritten, table
from sink_lens.chain.links.words import WORDS
from sink_lens.chain.trace import trace
from sink_lens.data.tokens import from_tensor
from sink_lens.models.load import wrap
from sink_lens.schema import NOT_IN_BASIS, OWN, OWN_IN_KEY, OWN_RATIO, WRITTEN
from tests.zoo import build


def traced(zoo, model=None, **asked):
    tokens = zoo.draw(16, length=32, generator=torch.Generator().manual_seed(zoo.seed))
    options = {"random_init": False, "quick": True, "progress": False} | asked
    return trace(wrap(zoo.model if model is None else model), from_tensor(tokens), **options)


def verdicts(found):
    return found.links.drop_duplicates("link").set_index("link")["verdict"]


def test_a_rotation_leaves_links_about_function_and_takes_dimensions_out_of_the_basis():
    zoo = build("bos_neuron", seed=5)
    found = traced(zoo, rewritten(zoo, "rotation"), controls=7)
    said, rows = verdicts(found), found.links.set_index("statistic")
    assert said.tolist() == ["fails", "fails", "holds", NOT_IN_BASIS, NOT_IN_BASIS, "holds"]
    assert (rows.loc[OWN_RATIO, "ci_low"] > 2).all()
    effects = found.tables["effects"].set_index("edit")
    assert (effects.loc[[WRITTEN, OWN, OWN_IN_KEY], "ci_low"] > 0.5).all()
    assert (effects.loc[[WRITTEN, OWN, OWN_IN_KEY], "control_largest"] < 0.25).all()
    assert (effects.loc[[WRITTEN, OWN, OWN_IN_KEY], "n_controls"] == 7).all()
    beaten = effects["ci_low"] > effects["control_largest"].clip(lower=0.05)
    assert (effects.loc[beaten, "n_controls"] == 7).all()
    assert (effects["n_controls"] == 5).any()  # where the first ones decide
    for link, edits in (("neurons_dimension", (WRITTEN, OWN)), ("dimension_key", (OWN_IN_KEY,))):
        (sentence,) = WORDS[link].remarks(found.tables, {})
        assert all(f"% ({edit})" in sentence for edit in edits)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "family", "turned", "said"),
    [
        ("direction", "llama", False, (NOT_IN_BASIS, NOT_IN_BASIS)),
        ("common_beside_direction", "qwen3", False, (NOT_IN_BASIS, NOT_IN_BASIS)),
        (
            "beside",
            "llama",
            False,
            ("fails", "fails"),
        ),  # a dimension dominates, and no key reads it
        ("embedding", "llama", True, ("fails", NOT_IN_BASIS)),  # no neuron writes it
        ("bimodal", "qwen2", True, (NOT_IN_BASIS, NOT_IN_BASIS)),  # 66 makers
        ("key_bias", "llama", True, ("not applicable", "not applicable")),  # nothing stands out
    ],
)
def test_what_is_written_elsewhere_or_stands_out_nowhere_is_not_said_to_be_in_another_basis(
    name, family, turned, said
):
    zoo = build(name, seed=7, family=family)
    found = verdicts(traced(zoo, rewritten(zoo, "rotation") if turned else None))
    assert (found["neurons_dimension"], found["dimension_key"]) == said


def test_the_table_of_rewrites_is_that_of_its_rows():
    assert TABLE.read_text(encoding="utf-8") == table()
