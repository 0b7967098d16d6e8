"""Position or token: the kinds by hand, and the planted sink, which follows BOS."""

import dataclasses

import pandas as pd
import pytest
import torch

from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.placement import binding_kind, placement_table
from sink_lens.chain.setting import make_setting
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.isolation import isolate
from sink_lens.engine.forward import run_with
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, tiny_tokenizer
from sink_lens.schema import column_names
from tests.tiny_families import tiny
from tests.zoo import build


@pytest.fixture(scope="module")
def table(planted_at):
    return placement_table(planted_at().setting)


def cells(*sinks):
    """A table in which the named cells, as "0 bos" or "6 ordinary isolated", are sinks, out of all."""
    rows = []
    for position in (0, 6):
        for token in ("ordinary", "bos"):
            for isolated in (False, True) if position else (False,):
                name = f"{position} {token}" + " isolated" * isolated
                rows.append(
                    {
                        "position": position,
                        "token": token,
                        "isolated": isolated,
                        "is_sink": name in sinks,
                    }
                )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("sinks", "kind"),
    [
        (["0 ordinary", "0 bos"], "positional"),
        (["0 bos", "6 bos"], "token"),
        (["0 ordinary", "0 bos", "6 bos"], "position or token"),
        (["0 bos"], "position and token"),
        ([], "no sink"),
        (["6 ordinary isolated", "6 bos isolated"], "no sink"),  # isolated cells do not count
    ],
)
def test_kinds(sinks, kind):
    assert binding_kind(cells(*sinks)) == kind


@pytest.mark.parametrize(
    ("other", "own", "kind"),
    [
        (True, False, "own position"),
        (False, True, "own token"),
        (True, True, "own position or token"),
        (False, False, "own position and token"),
    ],
)
def test_a_sink_that_is_not_at_position_0_has_kinds_of_its_own(other, own, kind):
    cell = {"isolated": False}
    rows = [
        {"position": 1, "token": "other", "is_sink": other},
        {"position": 6, "token": "own", "is_sink": own},
    ]
    assert binding_kind(pd.concat([cells(), pd.DataFrame([row | cell for row in rows])])) == kind


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("second", "own token"),
        ("behind_bos", "own position"),
        ("either_embedding", "own position or token"),
    ],
)
def test_a_sink_at_position_1_is_bound_to_what_the_truth_says(name, kind, family, config):
    zoo = build(name, seed=3, family=family)
    batch = from_tensor(zoo.draw(4, length=24, generator=torch.Generator().manual_seed(0)))
    lens = wrap(zoo.model, tokenizer=tiny_tokenizer())
    location = scout_and_measure(lens, batch, config=config).location
    assert location.sink_positions == (1,)
    assert (
        binding_kind(placement_table(make_setting(lens, batch, location=location, config=config)))
        == kind
    )


def test_without_bos_or_without_cells_a_kind_is_said_all_the_same():
    assert binding_kind(pd.DataFrame(columns=column_names("trace", "placement"))) == "undecided"
    assert binding_kind(cells("0 ordinary").query("token == 'ordinary'")) == "positional"
    assert binding_kind(cells().query("token == 'ordinary'")) == "no sink"


def test_the_planted_sink_follows_bos(table):
    found = table.set_index(["position", "token", "isolated"])
    assert len(table) == 6
    assert found["is_sink"].to_dict() == {
        (0, "ordinary", False): False, (6, "ordinary", False): False, (6, "ordinary", True): False,
        (0, "bos", False): True, (6, "bos", False): True, (6, "bos", True): True,
    }  # fmt: skip
    assert binding_kind(table) == "token"
    assert (found.loc[(slice(None), "bos"), "norm_ratio"] > 10).all()
    assert (found.loc[(slice(None), "ordinary"), "norm_ratio"] < 5).all()


def test_bos_first_is_the_clean_run_of_the_same_tokens_with_bos_in_front(planted_at, table):
    # the ordinary cells are the sequences without their BOS, so that BOS replaces the first text token
    place = planted_at()
    ids = place.setting.tokens.tokens[:, 1:].clone()
    ids[:, 0] = BOS_ID
    found = run_with(place.lens, ids, positions=(0,))
    cell = table.query("position == 0 and token == 'bos'").iloc[0]
    assert cell["sink_mass"] == pytest.approx(
        float(found.mass_at(0, layers=place.setting.layers_after_growth).mean())
    )
    assert cell["loss_nats"] == pytest.approx(float(found.loss.mean()))


def test_an_isolated_cell_is_the_run_under_isolation(planted_at, table):
    place = planted_at()
    ids = place.setting.tokens.tokens[:, 1:]
    found = run_with(place.lens, ids, isolate([6]), positions=(6,))
    cell = table.query("position == 6 and token == 'ordinary' and isolated").iloc[0]
    assert cell["sink_mass"] == pytest.approx(
        float(found.mass_at(6, layers=place.setting.layers_after_growth).mean())
    )


def test_the_ordinary_mass_is_of_five_other_positions_of_the_same_run(planted_at, table):
    place = planted_at()
    ids = place.setting.tokens.tokens[
        :, 1:
    ]  # 19 positions: 8 to 17 in even steps are 8, 10.25, 12.5, 14.75, 17
    others = (8, 10, 12, 15, 17)
    found = run_with(place.lens, ids, positions=(0, *others))
    cell = table.query("position == 0 and token == 'ordinary'").iloc[0]
    masses = [
        found.mass_at(other, layers=place.setting.layers_after_growth).mean() for other in others
    ]
    assert cell["ordinary_mass"] == pytest.approx(float(torch.stack(masses).mean()))
    norms = found.state.norm(dim=-1)
    assert cell["norm_ratio"] == pytest.approx(
        float((norms[..., 0] / norms[..., 1:].median(-1).values).mean(1).max())
    )


def test_a_typed_in_bos_is_no_ordinary_token(planted_at, config):
    # a bare tensor does not say that it begins with BOS
    place = planted_at()
    bare = make_setting(
        place.lens, from_tensor(place.tokens.tokens), location=place.location, config=config
    )
    assert not bare.tokens.bos
    assert binding_kind(placement_table(bare)) == "token"


def test_without_a_tokenizer_there_are_the_ordinary_cells(config, tiny_at):
    place = tiny_at("llama")
    bare = wrap(tiny("llama", num_hidden_layers=2))
    table = placement_table(dataclasses.replace(place.setting, lens=bare))
    assert table["token"].tolist() == ["ordinary"] * 3
    assert table[["sink_mass", "ordinary_mass", "norm_ratio", "loss_nats"]].notna().all(axis=None)


def test_a_new_position_at_the_end_leaves_no_cells(planted_at):
    place = (
        planted_at()
    )  # 20 positions, and 19 without BOS: position 18 has no token after it there
    table = placement_table(dataclasses.replace(place.setting, target_position=18))
    assert table.empty
    assert list(table.columns) == list(column_names("trace", "placement"))
    assert binding_kind(table) == "undecided"
