"""``isolate``, ``amplify`` and ``ablate`` on the planted model, whose answer is known."""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import speaking

from sink_lens import from_tensor, read_run
from sink_lens.chain.config import TraceConfig
from sink_lens.errors import InputError, RunError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import TINY_FAMILIES, planted, tiny_tokenizer
from sink_lens.studies.interventions import ablate, amplify, isolate


@functools.cache
def planted_lens():
    truth = planted(seed=1)
    return truth, wrap(truth.model, tokenizer=tiny_tokenizer(), name="planted")


@functools.cache
def sequences(n=4, length=32):
    """Ordinary tokens after BOS, which is the planted sink."""
    ids = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = planted_lens()[0].bos_id
    return from_tensor(ids)


def test_isolating_reports_both_positions_by_layer_and_the_loss(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, positions=[9, 15], tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.frames["summary"]["position"].tolist() == [9, 15]
    layers = study.frames["layers"]
    assert len(layers) == 2 * lens.n_layers
    assert {"mass_new", "baseline_mass_old", "norm_new", "value_old", "outlier_dimension"} <= set(layers.columns)
    summary = study.frames["summary"].iloc[0]
    assert summary["loss_change_nats"] == pytest.approx(summary["loss_nats"] - summary["baseline_loss_nats"], abs=1e-5)
    assert summary["outcome"] == "unchanged"  # the planted sink follows its token, not the variance
    assert "isolating position 9" in study.headline


def test_a_study_leaves_a_finished_run(tmp_path):
    _, lens = planted_lens()
    isolate(lens, positions=[9], tokens=sequences(), out=tmp_path / "run", progress=False)
    run = read_run(tmp_path / "run")
    assert (run.kind, run.status, run.missing) == ("isolate", "finished", [])
    assert run.config["isolate_positions"] == [9]
    assert len(run.provenance["weights_sha256"]) == 64
    with pytest.raises(RunError, match="finished"):
        isolate(lens, positions=[9], tokens=sequences(), out=tmp_path / "run", progress=False)


def test_amplifying_sweeps_factors_and_centres(tmp_path):
    _, lens = planted_lens()
    study = amplify(
        lens, position=9, layers=[0], factors=(1.0, 4.0), tokens=sequences(), out=tmp_path / "run", progress=False
    )
    summary = study.frames["summary"]
    assert list(zip(summary["centre"], summary["factor"], strict=True)) == [
        (centre, factor) for centre in ("values", "aggregated", "none") for factor in (1.0, 4.0)
    ]
    ones = summary.query("factor == 1")
    assert (ones["times"] == 1).all()
    assert (ones["loss_change_nats"] == 0).all()
    assert set(read_run(tmp_path / "run").tensors("centring_means")) >= {"values.0", "aggregated.4"}


def test_the_norm_only_control_needs_no_means(tmp_path):
    _, lens = planted_lens()
    out = tmp_path / "run"
    amplify(
        lens, position=9, layers=[0], factors=(2.0,), centres=("none",), tokens=sequences(), out=out, progress=False
    )
    assert not (out / "centring_means.safetensors").exists()


def test_the_planted_neuron_alone_is_the_smallest_set(tmp_path):
    truth, lens = planted_lens()
    study = ablate(lens, tokens=sequences(), out=tmp_path / "run", progress=False)
    (row,) = study.frames["summary"].to_dict("records")
    assert row["neurons"] == f"{truth.layer}.{truth.neuron}"
    assert row["removes"]
    assert row["removed_share"] > 0.5 > row["random_max"]
    assert row["neurons"] in study.headline
    assert "together remove" in study.headline


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_studies_run_on_families_without_special_cases(family, tmp_path):
    lens = speaking(family)
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens = from_tensor(ids)
    assert len(isolate(lens, tokens=tokens, out=tmp_path / "a", progress=False).frames["summary"]) == 1
    options = {"factors": (3.0,), "centres": ("values",), "layers": [0]}
    study = amplify(lens, tokens=tokens, out=tmp_path / "b", progress=False, **options)
    assert np.isfinite(study.frames["summary"]["mass_new"]).all()


def test_a_configuration_names_its_position_default_a_third(tmp_path):
    _, lens = planted_lens()
    study = isolate(lens, tokens=sequences(), out=tmp_path / "run", progress=False)
    assert study.frames["summary"]["position"].tolist() == [10]  # 32 // 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda lens, out: isolate(lens, positions=[0], tokens=sequences(), out=out), "interior position is 0"),
        (lambda lens, out: isolate(lens, positions=[99], tokens=sequences(), out=out), "need one from 1 to 30"),
        (lambda lens, out: isolate(lens, positions=[9], layers=[99], tokens=sequences(), out=out), "layer 99"),
        (lambda lens, out: amplify(lens, factors=(), tokens=sequences(), out=out), "no factor"),
        (lambda lens, out: amplify(lens, layers=[4], tokens=sequences(), out=out), "leave no layer to read"),
        (lambda lens, out: isolate(lens, tokens=sequences(2, 9), out=out), "9 tokens, and cuts need 12"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(call, text, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InputError, match=text):
        call(planted_lens()[1], out)
    assert not out.exists()


def test_a_model_without_growth_steps_or_neurons_is_not_ablated(tmp_path):
    lens = speaking("gpt_oss")
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="mixture of experts"):
        ablate(lens, tokens=from_tensor(ids), out=tmp_path / "run", progress=False)


def test_in_a_notebook_the_headline_is_text(tmp_path):
    from sink_lens.studies.interventions import Study

    frames = {"summary": pd.DataFrame({"a": [1]})}
    study = Study(folder=tmp_path, kind="isolate", frames=frames, headline="<b>bold</b>")
    assert "&lt;b&gt;" in study._repr_html_()


def test_a_study_can_be_asked_by_configuration(monkeypatch, tmp_path):
    from sink_lens.studies import interventions as studies

    _, lens = planted_lens()
    monkeypatch.setattr(studies, "model_of", lambda config: lens)
    config = TraceConfig(model="planted", tokens="random", sequences=3, length=24, cut_length=24)
    study = isolate(config, out=tmp_path / "run", progress=False)
    assert study.frames["summary"]["n"].tolist() == [3]
    assert len(read_run(tmp_path / "run").tables["tokens"]) == 3 * 24
