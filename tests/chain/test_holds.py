"""Holds: what is held, at which values, and random holds of the same size."""

import pytest
import torch

from sink_lens.activations.record import capture
from sink_lens.chain import holds
from sink_lens.chain.bench import generator_of
from sink_lens.chain.holds import Holder, random_dimensions
from sink_lens.engine.forward import run_with


def mass(bench, edits, position):
    return float(bench.run(edits, layers=bench.late).mass_at(position, layers=bench.late).mean())


def held(bench, one, site, layer):
    """What stands at a site under a hold."""
    return run_with(bench.lens, bench.tokens, one, sites=(site,)).tensors[site, layer]


def test_a_site_is_captured_once(planted_at, monkeypatch):
    holder, calls = Holder(bench=planted_at().bench), []

    def counted(*args, **options):
        calls.append(options["layers"])
        return capture(*args, **options)

    monkeypatch.setattr(holds, "capture", counted)
    first = holder.clean("z", layers=[1, 2])
    again = holder.clean("z", layers=[2, 3])
    assert calls == [[1, 2], [3]]
    assert again[2] is first[2]


def test_the_mean_of_others_is_over_positions_from_8_on_that_are_no_sink(planted_at):
    holder = Holder(bench=planted_at().bench)
    clean = torch.arange(3 * 20 * 2.0).reshape(3, 20, 2)
    # positions 8 to 19 have the mean 13.5; value = 40 sequence + 2 position + unit
    assert holder.others_mean(clean).tolist() == [[[40 + 27.0, 40 + 28.0]]]


def test_at_the_new_position_it_is_the_clean_value(planted_at, triggered):
    bench = planted_at().bench
    one = Holder(bench=bench).at("k", layers=[3, 4], place=bench.new, natural=False)
    clean = capture(bench.lens, bench.tokens, sites=["k"], path="bridge")
    found = run_with(bench.lens, bench.tokens, [triggered, one], sites=("k",)).tensors
    for layer in (3, 4):
        assert torch.equal(found["k", layer][:, bench.new], clean["k", layer][:, bench.new])
    assert not torch.equal(found["k", 2][:, bench.new], clean["k", 2][:, bench.new])


def test_of_the_natural_sink_it_is_the_mean_over_others(planted_at):
    bench = planted_at().bench
    one = Holder(bench=bench).at("attn_out", layers=[1], place=0, natural=True)
    clean = capture(bench.lens, bench.tokens, sites=["attn_out"], path="bridge")["attn_out", 1]
    found = held(bench, one, "attn_out", 1)
    torch.testing.assert_close(found[:, 0], clean[:, 8:].mean((0, 1)).expand(3, -1), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[:, 1:], clean[:, 1:])


def test_units_are_held_and_no_others(planted_at):
    bench = planted_at().bench
    (one,) = Holder(bench=bench).units("neurons", {2: [5, 70]}, place=0, natural=True)
    clean = capture(bench.lens, bench.tokens, sites=["neurons"], path="bridge")["neurons", 2]
    found = held(bench, one, "neurons", 2)
    assert set((found != clean).any(1).any(0).nonzero().flatten().tolist()) == {5, 70}
    assert one.label == "hold 2 neurons at 0"


def test_every_layer_is_labelled_with_its_own_count(planted_at):
    bench = planted_at().bench
    edits = Holder(bench=bench).units("neurons", {1: [3], 2: [5, 70]}, place=0, natural=True)
    assert [one.label for one in edits] == ["hold 1 neurons at 0", "hold 2 neurons at 0"]


# --- the holds of the planted chain


@pytest.mark.parametrize("seed", [0, 1])
def test_holding_the_super_neuron_removes_the_sink_and_random_ones_do_not(planted_at, seed):
    place = planted_at(seed=seed)
    bench, truth = place.bench, place.truth
    one = Holder(bench=bench).neurons(place.supers, place=0, natural=True, generator=generator_of(bench))
    assert (one.name, one.size, len(one.controls)) == ("neurons", 1, 5)
    assert [(edit.layers, edit.units) for edit in one.edits] == [((truth.layer,), (truth.neuron,))]
    before = float(bench.baseline.mass_at(0, layers=bench.late).mean())
    assert before > 0.9
    assert mass(bench, one.edits, 0) < 0.2 * before
    for control in one.controls:
        assert control[0].units != (truth.neuron,)
        assert mass(bench, control, 0) == pytest.approx(before, rel=1e-3)


def test_holding_the_outlier_dimension_or_the_key_removes_it_too(planted_at):
    place = planted_at()
    bench, truth = place.bench, place.truth
    (segment,) = bench.segments
    holder = Holder(bench=bench)
    dims = holder.dimensions(segment, place=0, natural=True, generator=generator_of(bench))
    key = holder.key(segment, place=0, natural=True)
    assert (dims.size, dims.edits[0].units, dims.edits[0].layers) == (1, (truth.outlier_dimension,), (truth.layer,))
    assert key.size == 2 * 2 * 12  # layers x key-value heads x head size
    for one in (dims, key):
        assert mass(bench, one.edits, 0) < 0.2
        assert len(one.controls) == 5
        for control in one.controls:
            assert mass(bench, control, 0) > 0.95
    assert {control[0].positions for control in key.controls} == {(place,) for place in bench.controls(0)}


def test_holding_z_undoes_an_induced_sink_to_the_last_bit(planted_at, triggered):
    bench = planted_at().bench
    (segment,) = bench.segments
    layers = list(segment.layers)
    made = bench.run([triggered], layers=layers).mass_at(bench.new, layers=layers)
    clean = bench.baseline.mass_at(bench.new, layers=layers)
    assert (made > 0.3).all()
    assert (clean < 0.01).all()
    one = Holder(bench=bench).z(segment, place=bench.new, natural=False)
    assert one.edits[0].layers == tuple(range(5))
    undone = bench.run([triggered, *one.edits], layers=layers)
    assert torch.equal(undone.mass, bench.baseline.mass[3:])
    for control in one.controls:
        assert mass(bench, [triggered, *control], bench.new) == pytest.approx(float(made.mean()), rel=0.01)


# --- what is not there


def test_without_super_neurons_there_is_no_hold_of_them(planted_at):
    bench = planted_at().bench
    holder, nobody = Holder(bench=bench), {2: torch.zeros(80).bool()}
    for masks in ({}, nobody):
        assert holder.neurons(masks, place=0, natural=True, generator=generator_of(bench)) is None


def test_without_a_growth_step_there_are_no_dimensions(planted_at):
    bench = planted_at(sink=False).bench
    (segment,) = bench.segments
    assert segment.step is None
    found = Holder(bench=bench).dimensions(segment, place=0, natural=True, generator=generator_of(bench))
    assert found is None


def test_random_dimensions_are_as_many_others():
    drawn = random_dimensions([3, 7], d_model=10, generator=torch.Generator().manual_seed(0))
    assert len(drawn) == 5
    for dims in drawn:
        assert len(set(dims)) == 2
        assert not {3, 7} & set(dims)
    assert len({tuple(dims) for dims in drawn}) > 1
