"""Every link intervened on, on the planted model beside random places; all causal tables, resumed and empty."""

import copy
import dataclasses
import functools
import json
import math

import pandas as pd
import pytest
import torch

from sink_lens.chain import interventions
from sink_lens.chain.amplification import amplification_curve, best_factor
from sink_lens.chain.interventions import TABLES, Studied, intervention_table, write_causal_tables
from sink_lens.chain.judge import intervention_verdict
from sink_lens.chain.links import LINKS
from sink_lens.chain.page.words import binding_sentence
from sink_lens.chain.placement import binding_kind
from sink_lens.chain.setting import Setting, make_setting
from sink_lens.edits.amplification import centring_means
from sink_lens.edits.constructors import scalar
from sink_lens.engine.forward import run_with
from sink_lens.models.load import wrap
from sink_lens.schema import column_names

REMOVING = [
    "variance_preserved",
    "variance_neurons",
    "neurons_dimension",
    "dimension_key",
    "key_sink",
]


@pytest.fixture(scope="module")
def changed(planted_at, tiny_at):
    """The builder of (curve, effects) of a model, over three factors: ``changed("planted")``, ``changed("gpt2")``."""

    @functools.cache
    def build(name):
        place = planted_at(sink=name == "planted") if name.startswith("planted") else tiny_at(name)
        means = centring_means(place.lens, n_tokens=128)
        curve = amplification_curve(place.setting, means=means, factors=(1.0, 5.0, 30.0))
        return curve, intervention_table(place.setting, means=means, curve=curve)

    return build


def test_each_link_is_changed_once_in_the_order_of_the_chain(changed):
    _, effects = changed("planted")
    assert effects.columns.tolist() == column_names("trace", "effects")
    primary = effects[effects["is_primary"]]
    assert primary["link"].tolist() == ["aggregation_variance", *REMOVING]
    assert (primary["n_controls"] == 5).all()
    assert primary["edit"].is_unique
    assert (effects["n"] == 3).all()
    assert (effects["length"] == 20).all()


def test_the_planted_links_hold_under_their_interventions(changed):
    _, effects = changed("planted")
    rows = {row["link"]: row for row in effects.to_dict("records") if row["is_primary"]}
    for link in REMOVING[1:]:
        row = rows[link]
        assert row["baseline_sink_mass"] > 0.95, link
        assert row["sink_mass"] < 0.2, link
        assert row["share"] > 0.8, link
        assert row["ci_low"] <= row["share"] <= row["ci_high"], link
        assert row["control_mean"] > 0.95, link  # random ones leave it where it is
        assert abs(row["control_share"]) < 0.02, link
        assert row["outcome"] == "removed", link
        assert intervention_verdict(row) == "holds", link


def test_controls_of_fewer_sequences_are_near_those_of_all(planted_at, changed, monkeypatch):
    curve, whole = changed("planted")
    place = planted_at()
    monkeypatch.setattr("sink_lens.chain.config.CONTROL_SEQUENCES", 2)
    few = dataclasses.replace(place.setting)  # whose controls are not made yet
    found = intervention_table(few, means=centring_means(place.lens, n_tokens=128), curve=curve)
    made = found["n_controls"] > 0
    assert made.any()
    assert (found.loc[made, "control_n"] == 2).all()
    assert (whole.loc[made, "control_n"] == 3).all()
    assert (found.loc[~made, "control_n"] == 0).all()
    for name in ("control_mean", "control_share", "control_loss_nats"):
        assert found.loc[made, name].tolist() == pytest.approx(
            whole.loc[made, name].tolist(), abs=0.05
        ), name
    same = [name for name in found.columns if not name.startswith(("control_", "ci_", "beyond_"))]
    pd.testing.assert_frame_equal(found[same], whole[same])


def test_controls_of_fewer_positions_are_near_those_of_all_which_are_run_where_one_is_near(
    planted_at, changed, monkeypatch
):
    curve, whole = changed("planted")
    place = planted_at()
    means = centring_means(place.lens, n_tokens=128)
    monkeypatch.setattr("sink_lens.chain.setting.CONTROL_LENGTH", 10)
    found = intervention_table(dataclasses.replace(place.setting), means=means, curve=curve)
    made = found["n_controls"] > 0
    assert (found.loc[made, "control_length"] <= 16).all()  # ten from the target on
    assert (whole.loc[made, "control_length"] == 20).all()
    assert (found.loc[~made, "control_length"] == 0).all()
    for name in ("control_mean", "control_share", "control_largest", "control_loss_nats"):
        assert found.loc[made, name].tolist() == pytest.approx(
            whole.loc[made, name].tolist(), abs=0.05
        ), name
    monkeypatch.setattr("sink_lens.chain.setting.CONTROL_MARGIN", 2.0)
    near = intervention_table(dataclasses.replace(place.setting), means=means, curve=curve)
    assert (near.loc[made & (near["ci_high"] > 0.05), "control_length"] == 20).all()
    same = [name for name in found.columns if not name.startswith("control_")]
    pd.testing.assert_frame_equal(found[same], whole[same])
    pd.testing.assert_frame_equal(near[same], whole[same])


def test_only_controls_that_are_near_an_end_are_run_again(planted_at, changed, monkeypatch):
    (curve, _), place, asked = changed("planted"), planted_at(), []
    real, means = Setting.run_groups, centring_means(place.lens, n_tokens=128)

    def counted(self, groups, **how):
        asked.append(groups)
        return real(self, groups, **how)

    monkeypatch.setattr("sink_lens.chain.setting.CONTROL_LENGTH", 10)
    monkeypatch.setattr(Setting, "run_groups", counted)
    monkeypatch.setattr(interventions, "hangs_on_controls", lambda share, **_: share > 0)
    found = intervention_table(dataclasses.replace(place.setting), means=means, curve=curve)
    again = [run for group in asked[-1] for run in group]
    near = found["control_length"] == 20
    assert {run.of.tokens.n_positions for run in again} == {20}
    assert 0 < len(again) < found.loc[near, "n_controls"].sum()
    assert near.sum() == len(asked[-1])


def test_what_the_planted_model_has_no_part_in_fails_under_its_intervention(changed):
    # its sink is a token, not a variance: an ordinary token that sees itself only is none
    _, effects = changed("planted")
    rows = {row["link"]: row for row in effects.to_dict("records") if row["is_primary"]}
    for link in ("aggregation_variance", "variance_preserved"):
        assert abs(rows[link]["share"]) < 0.02
        assert rows[link]["outcome"] == "unchanged"
        assert intervention_verdict(rows[link]) == "fails"


def test_the_entries_of_the_planted_neuron_are_set_one_by_one(planted_at, changed):
    place, (_, effects) = planted_at(), changed("planted")
    truth, late = place.truth, place.setting.layers_after_growth
    one = scalar(
        place.lens, layer=truth.layer, neurons=[truth.neuron], dimensions=[truth.outlier_dimension]
    )
    whole = run_with(place.lens, place.setting.tokens, one, positions=(6, 0))
    row = effects[effects["edit"].str.startswith("entries of down_proj")].iloc[0]
    assert row["sink_mass"] == pytest.approx(float(whole.mass_at(0, layers=late).mean()))
    assert row["loss_nats"] == pytest.approx(float(whole.loss.mean()))
    share = 1 - row["sink_mass"] / row["baseline_sink_mass"]
    assert row["share"] == pytest.approx(share, rel=1e-5)
    assert (row["layers"], row["position"], row["read_layers"]) == ("2", 0, "3-4")


def test_an_amplification_is_a_row_where_some_factor_over_1_makes_more(changed):
    for name in ("planted", "gpt2", "gpt_oss"):
        curve, effects = changed(name)
        amplified = effects[effects["edit"].str.startswith(("amplification", "norm x"))]
        assert not amplified["is_primary"].any()
        factors = [best_factor(curve, centre=centre) for centre in ("values", "aggregated")]
        controls = amplified[amplified["control_of"] != ""]
        assert len(amplified) == 2 * len(controls) == 2 * sum(factor > 1 for factor in factors)
        assert (amplified["n_controls"] == 0).all()
        assert controls["edit"].tolist() == [
            f"norm x {factor:g}" for factor in factors if factor > 1
        ]
        for row in controls.to_dict("records"):
            amplification = effects.set_index("edit").loc[row["control_of"]]
            assert not amplification["is_primary"]
            assert (
                f"x {row['edit'].removeprefix('norm x ')} " in row["control_of"]
            )  # at the same factor


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "planted without"])
def test_links_without_neurons_or_dimensions_are_not_changed_and_without_a_sink_none_holds(
    changed, name
):
    _, effects = changed(name)
    primary = effects[effects["is_primary"]]
    assert name != "planted without" or "holds" not in {
        intervention_verdict(row) for row in primary.to_dict("records")
    }
    assert primary["link"].tolist() == ["aggregation_variance", "variance_preserved", "key_sink"]
    assert primary[["share", "sink_mass", "loss_nats", "control_mean"]].notna().all(axis=None)


def test_one_sequence_has_shares_without_intervals(planted_at, config):
    place = planted_at()
    one = dataclasses.replace(config, intervention_sequences=1)
    alone = make_setting(place.lens, place.tokens, location=place.location, config=one)
    means = centring_means(place.lens, n_tokens=64)
    curve = pd.DataFrame(
        {"centre": ["values", "aggregated", "none"], "factor": [1.0] * 3, "mass": [0.1] * 3}
    )
    effects = intervention_table(alone, means=means, curve=curve)
    assert effects["share"].notna().all()
    assert effects["ci_low"].isna().all()
    assert {intervention_verdict(row) for row in effects.to_dict("records")} == {"undecided"}
    assert math.isclose(effects.set_index("link").loc["key_sink", "share"], 0.88, abs_tol=0.1)


def test_a_sequence_without_a_counted_loss_leaves_the_others_theirs(planted_at, config):
    place = planted_at()
    labelled = torch.ones_like(place.tokens.tokens, dtype=torch.bool)
    labelled[0] = False
    tokens = dataclasses.replace(place.tokens, labelled=labelled)
    setting = make_setting(place.lens, tokens, location=place.location, config=config)
    assert setting.baseline.loss.isnan().tolist() == [True, False, False]
    (row,) = intervention_table(
        setting, means=None, curve=pd.DataFrame(), links=LINKS[-1:]
    ).to_dict("records")
    assert row["baseline_loss_nats"] == pytest.approx(float(setting.baseline.loss[1:].mean()))
    assert math.isfinite(row["loss_nats"] + row["masked_loss_nats"])
    assert row["control_loss_nats"] == pytest.approx(row["baseline_loss_nats"], abs=0.5)


class Keeper:
    """Keeps tables as a run folder does."""

    def __init__(self):
        self.frames, self.centring, self.writer = {}, [], self

    def write_tensors(self, name, tensors):
        assert name == "centring_means"
        self.centring.append(tensors)

    def write_text(self, name, text):
        assert json.loads(text)["deviation"] >= 0

    def read_or_make(self, name, make):
        self.frames[name] = make()
        return self.frames[name]


def made(place, config):
    keeper = Keeper()
    studied = Studied(
        lens=place.lens, batch=place.tokens, location=place.location, supers=place.supers
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interventions, "FACTORS", (1.0, 10.0))
        patched.setattr(interventions, "CENTRING_TOKENS", 64)
        write_causal_tables(studied, keeper, config=config)
    return keeper


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "gpt_neox", "opt"])
def test_every_kind_of_family_is_changed(tiny_at, config, family):
    # learned positions and no gate; norms behind and soft caps; no neurons; fused projections; ReLU
    found = made(
        tiny_at(family),
        dataclasses.replace(config, intervention_sequences=2, intervention_length=16),
    )
    assert list(found.frames) == list(TABLES)
    for name in TABLES:
        assert found.frames[name].columns.tolist() == column_names("trace", name)
        assert (
            len(found.frames[name]) or name == "maker_sets"
        )  # no set removes half of what is no sink
    assert (
        found.frames["effects"][["share", "target_mass", "sink_mass", "loss_nats"]]
        .notna()
        .all(axis=None)
    )
    assert len(found.centring) == 1


def test_a_model_of_one_layer_is_changed(tiny_at, config):
    found = made(tiny_at("llama", n_layers=1), config)
    assert list(found.frames) == list(TABLES)
    assert (
        found.frames["amplification"]["times"] == 1
    ).all()  # nothing is read after the only layer


def test_half_precision_is_changed(planted_at, config):
    place = planted_at()
    half = wrap(copy.deepcopy(place.truth.model).to(torch.bfloat16), tokenizer=place.lens.tokenizer)
    found = made(
        dataclasses.replace(place, lens=half), dataclasses.replace(config, intervention_sequences=2)
    )
    shares = found.frames["effects"].query("is_primary").set_index("link")["share"]
    assert shares["variance_neurons"] > 0.8
    z = found.frames["mediation"].query("frozen == 'z' and intervention == 'isolation'").iloc[0]
    unfrozen = abs(z["mass_without_freeze"] - z["baseline_mass"])
    assert (
        abs(z["mass"] - z["baseline_mass"]) < unfrozen / 5
    )  # in bfloat16; frozen, nothing is left of the change


def test_a_model_without_bos_was_not_tried_with_it(planted_at, config):
    found = made(planted_at(), config).frames["placement"]
    assert binding_kind(found) == "token"
    assert binding_sentence("token", bos=True) == "BOS makes it wherever it stands"
    for kind in ("positional", "no sink"):
        assert binding_sentence(kind, bos=False).endswith("there is no BOS token to try")


def test_without_a_sink_every_table_is_made(planted_at, config):
    found = made(planted_at(sink=False), config).frames
    assert binding_kind(found["placement"]) == "no sink"
    assert found["mediation"].query("intervention != 'natural'")["surviving_share"].isna().all()


def test_a_delegated_attention_has_empty_tables(tiny_at, config):
    place = tiny_at("llama")
    stock = dataclasses.replace(
        place, lens=dataclasses.replace(place.lens, uneditable=frozenset({"scores"}))
    )
    assert all(table.empty for table in made(stock, config).frames.values())
