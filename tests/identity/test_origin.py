"""From seed to sink: planted dimensions are found again, and an initialisation foretells what it really foretells."""

import math
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from sink_lens import cli, read_run
from sink_lens.chain.config import TraceConfig
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError, RunError
from sink_lens.identity import along, origin
from sink_lens.identity.becoming import became
from sink_lens.identity.foretelling import Candidates, foretold, holm
from sink_lens.identity.initial import DIMENSION_STATISTICS, NEURON_STATISTICS, dimension_statistics, neuron_statistics
from sink_lens.identity.measured_models import Draws
from sink_lens.identity.origin import OriginConfig, seed_to_sink
from sink_lens.models.load import wrap
from sink_lens.models.tiny import BOS_ID, planted, tiny, tiny_tokenizer
from sink_lens.records import create_run
from sink_lens.report.origins import ORIGIN

from ..training.tiny_run import LENGTH, VOCAB_SIZE, trained

CONFIG = {"attention": "softmax", "lr": 0.001, "length": 24, "batch": 4, "steps": 20, "data_seed": 0}
PROVENANCE = {"data_source": "given", "data_sha256": "d" * 64, "tokenizer_sha256": "t" * 64}
SEEDS = (0, 1, 2)
QUICK = OriginConfig(random_sequences=50, random_length=10, permutations=4000)


def batch():
    tokens = torch.randint(3, 300, (3, 24), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = BOS_ID
    return from_tensor(tokens)


def write_run(folder, *, seed, models, **config):
    """A finished training run with these models at steps 0, 10, 20, ..."""
    with create_run(folder, kind="train", config=CONFIG | {"seed": seed} | config, provenance=PROVENANCE) as writer:
        writer.write_table("log", pd.DataFrame({"step": [10, 20], "tokens": [960, 1920], "loss": [5.0, 4.0]}))
        tiny_tokenizer(adds_bos=True).save_pretrained(folder / "tokenizer")
        for index, model in enumerate(models):
            model.save_pretrained(folder / "checkpoints" / f"checkpoint-{10 * index}")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds that end with a planted sink.

    The dimension that will be the outlier has a small column in the embedding and small rows in W_O from the beginning,
    as ``planted`` makes it: those two foretell it. The neuron's random weights foretell nothing.
    """
    folder = tmp_path_factory.mktemp("runs")
    models = {seed: [planted(seed=seed, sink=sink).model for sink in (False, True)] for seed in SEEDS}
    return [write_run(folder / f"run-{seed}", seed=seed, models=made) for seed, made in models.items()]


@pytest.fixture(scope="module")
def found(runs, tmp_path_factory):
    return seed_to_sink(
        runs, config=QUICK, tokens=batch(), out=tmp_path_factory.mktemp("out") / "origin", progress=False
    )


# --- the null


def test_a_mean_place_and_its_p_by_hand():
    """Of 10 candidates the largest, in two seeds: place 0.05; 1 of 100 pairs is as far up, twice that for two sides."""
    one = Candidates(values=np.arange(10.0), chosen=(9,))
    assert one.ranks.tolist() == list(range(10, 0, -1))
    assert one.places[9] == pytest.approx(0.05)
    found = foretold([[one], [one]], generator=np.random.default_rng(0), permutations=50_000)
    assert found.place == pytest.approx(0.05)
    assert found.p == pytest.approx(0.02, rel=0.1)
    bottom = Candidates(values=-np.arange(10.0), chosen=(9,))
    assert foretold([[bottom], [bottom]], generator=np.random.default_rng(0)).p == pytest.approx(0.02, rel=0.15)
    mixed = foretold([[one], [bottom]], generator=np.random.default_rng(0))
    assert (mixed.place, mixed.p) == (pytest.approx(0.5), 1.0)


def test_several_chosen_ones_are_drawn_without_repetition():
    """The two largest of 4 have places 1/8 and 3/8; no other of the 6 pairs has so small a mean."""
    one = Candidates(values=np.array([4.0, 3.0, 2.0, 1.0]), chosen=(0, 1))
    found = foretold([[one]], generator=np.random.default_rng(0), permutations=20_000)
    assert found.place == pytest.approx(0.25)
    assert found.p == pytest.approx(2 / 6, rel=0.05)
    # In two layers of one seed: 2 of 4 and 1 of 2, weighted by how many were chosen.
    other = Candidates(values=np.array([1.0, 2.0]), chosen=(1,))
    both = foretold([[one, other]], generator=np.random.default_rng(0), permutations=20_000)
    assert both.place == pytest.approx((1 / 8 + 3 / 8 + 1 / 4) / 3)
    assert both.p == pytest.approx(2 / 12, rel=0.1)


def test_under_the_null_p_is_not_small_more_often_than_it_says():
    generator = np.random.default_rng(1)
    found = []
    for _ in range(300):
        seeds = [[Candidates(values=generator.normal(size=48), chosen=(7,))] for _ in range(3)]
        found.append(foretold(seeds, generator=generator, permutations=999).p)
    assert np.mean(np.array(found) <= 0.05) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert np.mean(np.array(found) <= 0.5) == pytest.approx(0.5, abs=0.1)


def test_equal_values_share_a_rank_and_a_constant_tells_nothing():
    assert Candidates(values=np.array([2.0, 2.0, 1.0]), chosen=(0,)).ranks.tolist() == [1.5, 1.5, 3.0]
    flat = foretold([[Candidates(values=np.ones(5), chosen=(0,))]], generator=np.random.default_rng(0))
    assert math.isnan(flat.place)
    assert math.isnan(flat.p)
    with pytest.raises(InputError, match="a seed without a choice cannot be ranked; need one chosen candidate"):
        foretold([[Candidates(values=np.arange(5.0), chosen=())]], generator=np.random.default_rng(0))


def test_holm_by_hand():
    """0.01 x 3, then the largest of that and 0.02 x 2, then of those and 0.03 x 1; what is undefined is left out."""
    assert holm([0.03, math.nan, 0.01, 0.02])[[0, 2, 3]].tolist() == pytest.approx([0.04, 0.03, 0.04])
    assert math.isnan(holm([0.03, math.nan])[1])
    assert holm([0.6, 0.9]).tolist() == [1.0, 1.0]


# --- one checkpoint


def test_a_planted_dimension_and_neuron_are_what_became():
    truth = planted()
    one = became(wrap(truth.model), batch(), config=TraceConfig(model=""))
    assert (one.dimension, one.is_outlier, one.are_super) == (truth.outlier_dimension, True, True)
    assert [(writer.layer, writer.neuron) for writer in one.writers] == [(truth.layer, truth.neuron)]
    assert one.writers[0].share > 0.9
    assert one.sink_rate > 0.3
    assert int(one.states[one.layer].argmax()) == truth.outlier_dimension


def test_without_a_sink_the_largest_stands_in_and_is_marked():
    lens = wrap(tiny("headnorm"))
    one = became(lens, batch(), config=TraceConfig(model=""))
    assert not one.is_outlier
    assert not one.are_super
    (writer,) = one.writers
    tokens = batch().tokens
    seen = {}
    hook = lens.layer(one.layer).register_forward_hook(lambda module, args, output: seen.update(state=output[:, 0]))
    down = lens.layer(writer.layer).mlp.down_proj
    more = down.register_forward_pre_hook(lambda module, args: seen.update(neurons=args[0][:, 0]))
    with torch.no_grad():
        lens.plain(tokens)
    hook.remove()
    more.remove()
    assert int(seen["state"].square().mean(0).argmax()) == one.dimension
    terms = (seen["neurons"] * down.weight[one.dimension]).mean(0) * seen["state"][:, one.dimension].mean().sign()
    assert int(terms.argmax()) == writer.neuron


def test_the_statistics_are_those_of_the_weights_and_states():
    lens = wrap(tiny("headnorm"))
    draws = Draws(sequences=50, length=10, seed=0)
    found = dimension_statistics(lens, batch(), draws=draws, layer=1)
    assert set(found) == set(DIMENSION_STATISTICS)
    model = lens.plain
    with torch.no_grad():
        states = model(draws.chunk(lens, 0).tokens, output_hidden_states=True).hidden_states[2]
    last = states[:, -1] / states[:, -1].norm(dim=-1, keepdim=True)
    direction = last.mean(0) / last.mean(0).norm()
    assert found["contraction"] == pytest.approx(direction.abs().numpy(), rel=1e-3, abs=1e-5)
    with torch.no_grad():
        first = model(torch.arange(300)[:, None], output_hidden_states=True).hidden_states[2][:, 0]
    assert found["any_first_mean"] == pytest.approx(first.mean(0).abs().numpy(), rel=1e-3, abs=1e-5)
    assert found["any_first_std"] == pytest.approx(first.std(0).numpy(), rel=1e-3, abs=1e-5)
    dimension = 5
    rows = [layer.self_attn.o_proj.weight[dimension] for layer in model.model.layers]
    assert found["w_o_norm"][dimension] == pytest.approx(torch.cat(rows).norm().item(), rel=1e-5)
    columns = [layer.mlp.down_proj.weight[dimension] for layer in model.model.layers]
    assert found["down_row_norm"][dimension] == pytest.approx(torch.cat(columns).norm().item(), rel=1e-5)
    column = model.model.embed_tokens.weight[:, dimension]
    assert found["embedding_norm"][dimension] == pytest.approx(column.norm().item(), rel=1e-5)
    neurons = neuron_statistics(lens, batch(), layers=[0, 2], dimension=dimension)
    assert set(neurons) == set(NEURON_STATISTICS)
    mlp = model.model.layers[2].mlp
    assert neurons["gate_norm"][2][7] == pytest.approx(mlp.gate_proj.weight[7].norm().item(), rel=1e-5)
    assert neurons["down_column_norm"][2][7] == pytest.approx(mlp.down_proj.weight[:, 7].norm().item(), rel=1e-5)
    ratio = neurons["first_contribution"][2] / neurons["first_activation"][2]
    assert ratio == pytest.approx(mlp.down_proj.weight[dimension].abs().detach().numpy(), rel=1e-3)


# --- runs


def test_what_was_planted_is_found_in_every_seed(found):
    ends = found.course[found.course["step"] == 10].set_index("seed")
    last = found.writers[found.writers["step"] == 10].set_index("seed")
    for seed in SEEDS:
        truth = planted(seed=seed)
        assert ends.loc[seed, "dimension"] == truth.outlier_dimension
        assert ends.loc[seed, "final_rank"] == 1
        assert (last.loc[seed, "layer"], last.loc[seed, "neuron"]) == (truth.layer, truth.neuron)
    assert ends["is_outlier"].all()
    assert not found.course[found.course["step"] == 0]["is_outlier"].any()
    assert "position 0 has an outlier dimension in every seed" in found.headline


def test_what_really_foretells_is_told_and_what_does_not_is_not(found):
    p = found.tests.set_index("statistic")["p_holm"]
    assert (p[["embedding_norm", "w_o_norm"]] < 0.05).all()
    assert (p[list(NEURON_STATISTICS)] > 0.05).all()
    assert "the initialisation foretells the dimension: by" in found.headline
    assert "no statistic of the initialisation foretells the neurons: the nearest is" in found.headline
    assert len(found.tests) == len(DIMENSION_STATISTICS) + len(NEURON_STATISTICS)


def test_the_initialisation_of_another_seed_foretells_nothing(tmp_path):
    """What does it by itself, and not by what the last checkpoint is."""
    models = {seed: [planted(seed=seed + 10, sink=False).model, planted(seed=seed).model] for seed in SEEDS}
    made = [write_run(tmp_path / f"run-{seed}", seed=seed, models=both) for seed, both in models.items()]
    found = seed_to_sink(made, config=QUICK, tokens=batch(), progress=False)
    assert (found.tests["p_holm"] > 0.05).all()
    assert "no statistic of the initialisation foretells the dimension" in found.headline
    assert "so few seeds would show a mean place under" in found.headline


def test_runs_without_an_outlier_are_answered_for_the_largest_dimension(tmp_path):
    made = [
        write_run(tmp_path / f"run-{seed}", seed=seed, models=[tiny("headnorm", seed=2 * seed + n) for n in (0, 1)])
        for seed in (0, 1)
    ]
    found = seed_to_sink(made, config=QUICK, tokens=batch(), progress=False)
    assert "position 0 has no outlier dimension in the chain's sense in any seed" in found.headline
    assert "the largest dimension stands in for it, and a largest one there always is" in found.headline
    assert "no super neuron" in found.headline
    assert any("2 seeds say little" in note for note in found.notes)


def test_a_missing_initialisation_is_built_again_from_its_seed(tmp_path):
    trained(tmp_path / "run")
    tokens = from_tensor(torch.randint(VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(0)))
    with_it = seed_to_sink([tmp_path / "run"], config=QUICK, tokens=tokens, progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-0")
    without = seed_to_sink([tmp_path / "run"], config=QUICK, tokens=tokens, progress=False)
    pd.testing.assert_frame_equal(with_it.ranks, without.ranks)
    assert any("has no checkpoint 0: its initialisation was built again from its seed" in one for one in without.notes)


def test_a_run_folder_a_page_and_the_same_result_from_it(found):
    run = read_run(found.folder)
    assert (run.kind, run.status, run.missing) == ("origin", "finished", [])
    for name in origin.TABLES:
        pd.testing.assert_frame_equal(run.tables[name], getattr(found, name))
    assert ORIGIN.title(run) == "The initialisation foretells part of it"
    assert len(ORIGIN.headline(run)) == len(found.sentences)
    for part in (*ORIGIN.figures, *ORIGIN.tables):
        see, made = part.make(run)
        assert see
        assert made is not None


def test_it_goes_on_where_it_was_stopped(runs, found, tmp_path, monkeypatch):
    measured = []

    def counted(lens, *given, **named):
        measured.append(lens.name)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return became(lens, *given, **named)

    monkeypatch.setattr(along, "became", counted)
    options = {"config": QUICK, "tokens": batch(), "out": tmp_path / "origin", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        seed_to_sink(runs, **options)
    assert read_run(tmp_path / "origin").status == "interrupted"
    assert len(read_run(tmp_path / "origin").tables["course"]) == 2
    again = seed_to_sink(runs, **options)
    pd.testing.assert_frame_equal(again.course, found.course)
    pd.testing.assert_frame_equal(again.tests, found.tests)
    # Each last checkpoint is read again for what it is compared with, and of the others the two that were not kept.
    assert len(measured) == 4 + 3 + 2


# --- refusals and the command


def test_runs_that_differ_in_more_than_the_seed_are_refused(runs, tmp_path):
    other = write_run(tmp_path / "other", seed=5, models=[], value_norm="shared", lr=0.002)
    with pytest.raises(
        RunError, match=r"also differ in lr: 0.001 .*0.002.*value_norm.*; need runs that differ in the seed"
    ):
        seed_to_sink([*runs, other])
    with pytest.raises(RunError, match=r"has seed 0, as .*run-0 has; need runs of one seed each"):
        seed_to_sink([runs[0], runs[0]])
    with pytest.raises(InputError, match="no run was given"):
        seed_to_sink([])


@pytest.mark.parametrize(("field", "value"), [("sequences", 0), ("length", 9), ("permutations", 5), ("threshold", 1.0)])
def test_a_setting_that_cannot_be_is_refused(field, value):
    with pytest.raises(InputError, match=f"{field} is {value}; need"):
        OriginConfig(**{field: value})


def command(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(cli.app, ["origin", *map(str, arguments)])


@pytest.mark.filterwarnings("ignore:.*is measured on the bundled prose:UserWarning")
def test_the_command_says_what_it_would_do_does_it_and_refuses(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry = command(*runs, "--dry-run")
    assert "6 checkpoints of 3 runs (seeds 0, 1, 2), one pass over 32 sequences of 64 tokens" in dry.stdout
    assert list(tmp_path.iterdir()) == []
    done = command(*runs, "--last-only", "--sequences", 3, "--length", 24, "--permutations", 999, "--out", "made")
    assert done.exit_code == 0, done.output
    assert "place at the initialisation" in done.stdout
    assert done.stdout.splitlines()[-1] == "made/report.html"
    assert (tmp_path / "made" / "origin.png").stat().st_size > 0
    other = write_run(tmp_path / "other", seed=5, models=[], lr=0.002)
    refused = command(*runs, other)
    assert refused.exit_code == 2
    assert "need runs that differ in the seed only" in refused.stderr
