"""All tables of the causal half: on every kind of family, resumed, and empty where nothing can be cut."""

import copy
import dataclasses
import functools

import pandas as pd
import pytest
import torch

from sink_lens.chain import causes, cuts
from sink_lens.chain.causes import TABLES, Once, cause_tables
from sink_lens.chain.placement import kind_of
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.amplification import centring_means
from sink_lens.models.load import wrap


def make_less(patch):
    """Fewer factors and random tokens, so that a table takes a second."""
    patch.setattr(cuts, "FACTORS", (1.0, 10.0))
    patch.setattr(causes, "centring_means", functools.partial(centring_means, n_tokens=64))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    make_less(monkeypatch)


class Keeper:
    """Keeps tables as a run folder does: what is there is not made again."""

    def __init__(self, tables=()):
        self.tables = dict(tables)
        self.made = []
        self.means = []

    def __call__(self, name, make):
        if name not in self.tables:
            self.tables[name] = make()
            self.made.append(name)
        return self.tables[name]


def made(place, config, *, tables=(), tokens=None):
    keeper = Keeper(tables)
    cause_tables(
        place.lens,
        place.tokens if tokens is None else tokens,
        finding=place.finding,
        supers=place.supers,
        config=config,
        once=keeper,
        keep_means=keeper.means.append,
    )
    return keeper


def test_a_keeper_is_what_makes_tables_once():
    assert isinstance(Keeper(), Once)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "gpt_neox", "opt"])
def test_every_kind_of_family_is_cut(tiny_at, config, family):
    # learned positions and no gate; norms behind and soft caps; no neurons; fused projections; ReLU
    found = made(tiny_at(family), dataclasses.replace(config, cut_sequences=2, cut_length=16))
    assert found.made == list(TABLES)
    for name, columns in TABLES.items():
        assert tuple(found.tables[name].columns) == columns
        assert len(found.tables[name])
    assert found.tables["effects"][["share", "sink_mass_new", "sink_mass_old", "loss_nats"]].notna().all(axis=None)
    assert len(found.means) == 1


def test_a_model_of_one_layer_is_cut(tiny_at, config):
    found = made(tiny_at("llama", n_layers=1), config)
    assert found.made == list(TABLES)
    assert (found.tables["amplification"]["times"] == 1).all()  # nothing is read after the only layer


def test_half_precision_is_cut(planted_at, config):
    place = planted_at()
    half = wrap(copy.deepcopy(place.truth.model).to(torch.bfloat16), tokenizer=place.lens.tokenizer)
    found = made(dataclasses.replace(place, lens=half), dataclasses.replace(config, cut_sequences=2))
    shares = found.tables["effects"].set_index("link")["share"]
    assert shares["variance_neurons"] > 0.8
    z = found.tables["mediation"].query("hold == 'z' and intervention == 'isolation'").iloc[0]
    assert z["mass"] == z["baseline_mass"]


def test_the_planted_sink_is_told_apart(planted_at, config):
    found = made(planted_at(), config).tables
    assert kind_of(found["placement"]) == "token"
    shares = found["effects"].set_index("link")["share"]
    assert (shares[["variance_neurons", "neurons_dimension", "dimension_key", "key_sink"]] > 0.8).all()


def test_without_a_sink_every_table_is_made(planted_at, config):
    found = made(planted_at(sink=False), config).tables
    assert kind_of(found["placement"]) == "no sink"
    assert found["mediation"].query("intervention != 'natural'")["surviving_share"].isna().all()


# --- resumed


@pytest.fixture(scope="module")
def whole(tiny_at, config):
    """All tables of a Llama of two layers, made once."""
    with pytest.MonkeyPatch.context() as patch:
        make_less(patch)
        return made(tiny_at("llama"), config).tables


def test_what_is_finished_is_not_made_again(tiny_at, config, whole):
    again = made(tiny_at("llama"), config, tables={name: whole[name] for name in ("amplification", "mediation")})
    assert again.made == ["effects", "placement"]
    for name in TABLES:
        pd.testing.assert_frame_equal(again.tables[name], whole[name], check_exact=True)


def test_where_all_is_finished_no_model_is_run(tiny_at, config, monkeypatch, whole):
    monkeypatch.setattr(causes, "bench", None)  # not called
    again = made(tiny_at("llama"), config, tables=whole)
    assert (again.made, again.means) == ([], [])


@pytest.mark.parametrize("strongest", ["values", "aggregated", "none", ""])
def test_the_strongest_centred_amplification_is_mediated_where_one_makes_more(
    tiny_at, config, whole, strongest, monkeypatch
):
    curve, asked = whole["amplification"].copy(), []
    curve["mass"] = [0.1 if factor == 1 else 0.05 for factor in curve["factor"]]
    curve.loc[(curve["centre"] == strongest) & (curve["factor"] == 10), "mass"] = 0.9
    monkeypatch.setattr(
        causes, "mediation_table", lambda bench, *, amplified, **rest: asked.append(amplified) or pd.DataFrame()
    )
    made(tiny_at("llama"), config, tables={**without(whole, "mediation"), "amplification": curve})
    (amplified,) = asked
    if strongest in ("values", "aggregated"):
        assert amplified.label == f"amplification x 10 from {strongest}"
        assert (amplified.positions, amplified.layers) == ((6,), (0,))
    else:  # no factor makes more, or the norm alone does
        assert amplified is None


def without(tables, name):
    return {key: table for key, table in tables.items() if key != name}


# --- nothing can be cut


def test_short_sequences_have_empty_tables_with_their_columns(tiny_at, config):
    place = tiny_at("llama")
    found = made(place, config, tokens=from_tensor(place.tokens.tokens[:, :11]))
    assert found.made == list(TABLES)
    for name, columns in TABLES.items():
        assert found.tables[name].empty
        assert tuple(found.tables[name].columns) == columns


def test_a_delegated_attention_has_empty_tables(tiny_at, config):
    place = tiny_at("llama")
    stock = dataclasses.replace(place, lens=dataclasses.replace(place.lens, uneditable=frozenset({"scores"})))
    assert all(table.empty for table in made(stock, config).tables.values())
