"""The bench: segments, controls, and runs that begin late and end equal."""

import dataclasses

import pytest
import torch

from sink_lens.chain.bench import bar, bench, cannot_cut, from_layer, generator_of, interior_position, segments
from sink_lens.chain.locate import Finding, GrowthStep
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import scale, zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError


def finding(*spans, positions=(0,)):
    steps = tuple(
        GrowthStep(first_layer=first, last_layer=last, ratio_before=1.0, ratio_after=4.0, dimension=7)
        for first, last in spans
    )
    return Finding(positions=positions, sink_found=True, steps=steps, outliers={})


def of_length(*lengths):
    return from_tensor(torch.zeros(len(lengths), max(lengths)).long() + 5, lengths=torch.tensor(lengths))


# --- where the sink is read


@pytest.mark.parametrize(
    ("spans", "n_layers", "layers"),
    [
        ([(1, 2), (5, 5)], 8, [(3, 4), (6, 7)]),
        ([(1, 2)], 8, [(3, 4, 5, 6, 7)]),
        ([(1, 1), (7, 7)], 8, [(2, 3, 4, 5, 6)]),  # nothing comes after the last layer
    ],
)
def test_a_segment_is_what_lies_between_two_steps(spans, n_layers, layers):
    found = segments(finding(*spans), n_layers=n_layers)
    assert [segment.layers for segment in found] == layers
    assert [segment.number for segment in found] == list(range(len(layers)))
    assert [segment.first_layer for segment in found] == [first for first, _ in spans][: len(layers)]


@pytest.mark.parametrize(
    ("spans", "n_layers", "layers"),
    [([], 8, (2, 3, 4, 5, 6, 7)), ([], 3, (0, 1, 2)), ([], 1, (0,)), ([(7, 7)], 8, (2, 3, 4, 5, 6, 7))],
)
def test_without_layers_after_a_step_it_is_the_last_three_quarters(spans, n_layers, layers):
    (segment,) = segments(finding(*spans), n_layers=n_layers)
    assert (segment.number, segment.step, segment.layers, segment.first_layer) == (-1, None, layers, layers[0])


def test_late_is_all_segments(planted_at):
    place = planted_at()
    many = dataclasses.replace(place.bench, segments=segments(finding((0, 0), (3, 3)), n_layers=5))
    assert many.late == (1, 2, 4)
    assert place.bench.late == tuple(range(place.truth.layer + 1, 5))


# --- the new position and its controls


def test_the_new_position_is_a_third_of_the_length_and_no_sink():
    assert interior_position(of_length(30, 24), finding=finding()) == 8
    assert interior_position(of_length(30, 24), finding=finding(positions=(0, 8, 9))) == 10
    assert interior_position(of_length(2), finding=finding()) == 1


def test_controls_are_five_later_positions(planted_at):
    place = planted_at().bench
    assert (place.old, place.new, place.tokens.n_positions) == (0, 6, 20)
    assert place.controls(6) == [7, 10, 13, 15, 18]  # 7 to 18 in even steps: 7, 9.75, 12.5, 15.25, 18
    assert place.controls(0) == [1, 5, 10, 14, 18]  # 1 to 18 without 6


def test_controls_are_any_positions_where_few_come_later(planted_at):
    place = dataclasses.replace(planted_at().bench, new=16)
    assert place.controls(16) == [1, 5, 9, 13, 18]
    assert not {0, 16} & set(place.controls(16))


def test_controls_are_no_sink(planted_at):
    place = planted_at().bench
    several = dataclasses.replace(place.finding, positions=(0, 7, 18))
    assert not {0, 6, 7, 18} & set(dataclasses.replace(place, finding=several).controls(6))


# --- the clean run


def test_the_baseline_is_a_run_of_the_first_positions_of_the_first_sequences(planted_at):
    place = planted_at()
    assert torch.equal(place.bench.tokens.tokens, place.tokens.tokens[:3, :20])
    plain = run_with(place.lens, place.bench.tokens, keys=(6, 0))
    assert torch.equal(plain.mass, place.bench.baseline.mass)
    assert torch.equal(plain.loss, place.bench.baseline.loss)
    assert sorted(place.bench.baseline.tensors) == [("resid_post", layer) for layer in range(5)]


def test_sequences_are_cut_to_the_shortest(planted_at, config):
    place = planted_at()
    ids = place.tokens.tokens
    unequal = from_tensor(ids, lengths=torch.tensor([24, 14, 24, 2]))  # the fourth is not among the first three
    found = bench(place.lens, unequal, finding=place.finding, config=config)
    assert (found.tokens.lengths.tolist(), found.new) == ([14, 14, 14], 4)


def test_the_length_counts_from_the_sink_on(planted_at, config):
    place = planted_at()
    ids = torch.cat([place.tokens.tokens[:, 1:9], place.tokens.tokens], dim=1)  # BOS at position 8 of 32
    later = dataclasses.replace(place.finding, positions=(8,))
    found = bench(place.lens, from_tensor(ids), finding=later, config=config)
    assert (found.tokens.n_positions, found.old, found.new) == (28, 8, 9)


@pytest.mark.parametrize(("position", "text"), [(23, "is 23; need one from 1 to 22"), (0, "is 0; need one from 1")])
def test_a_position_without_tokens_on_both_sides_is_refused(planted_at, config, position, text):
    place = planted_at()
    with pytest.raises(InputError, match=text):
        bench(place.lens, place.tokens, finding=place.finding, config=config, position=position)


def test_a_given_position_has_tokens_after_it_where_the_sequences_have_them(planted_at, config):
    place = planted_at()
    found = bench(place.lens, place.tokens, finding=place.finding, config=config, position=21)
    assert (found.new, found.tokens.n_positions) == (21, 24)


def test_the_sink_as_the_new_position_is_refused(planted_at, config):
    place = planted_at()
    at_3 = dataclasses.replace(place.finding, positions=(3,))
    with pytest.raises(InputError, match="position 3 is the sink already; need another one"):
        bench(place.lens, place.tokens, finding=at_3, config=config, position=3)


# --- runs


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_run_that_begins_late_is_the_whole_run(planted_at, layer):
    place = planted_at()
    one = scale("attn_out", 3.0, layers=[layer], positions=[3])
    short = place.bench.run([one], layers=[4])
    whole = run_with(place.lens, place.bench.tokens, [one], keys=(6, 0))
    assert torch.equal(short.mass[0], whole.mass[4])
    assert short.loss is None
    assert place.bench.run([one], loss=True).loss.tolist() == whole.loss.tolist()


def test_a_run_goes_on_from_another_run(planted_at):
    place = planted_at()
    early, late = (zero("neurons", layers=[layer], positions=[2]) for layer in (0, 3))
    source = run_with(place.lens, place.bench.tokens, early, keys=(6, 0), sites=("resid_post",))
    found = place.bench.run([late], layers=[4], of=source)
    both = run_with(place.lens, place.bench.tokens, [early, late], keys=(6, 0))
    assert torch.equal(found.mass[0], both.mass[4])
    assert not torch.equal(found.mass[0], place.bench.run([late], layers=[4]).mass[0])


def test_without_an_edit_it_is_the_baseline(planted_at):
    place = planted_at().bench
    assert torch.equal(place.run([], layers=[3, 4]).mass, place.baseline.mass[3:])


def test_an_edit_that_changes_nothing_warns_unless_it_is_a_control(planted_at):
    place = planted_at().bench
    same = scale("attn_out", 1.0, layers=[3])
    with pytest.warns(UserWarning, match="changed nothing"):
        place.run([same], layers=[4])
    place.run([same], layers=[4], quiet=True)


def test_of_edits_the_later_layers_are_kept():
    edits = [scale("attn_out", 2.0, layers=[0, 2]), scale("attn_out", 2.0, layers=[1]), scale("attn_out", 2.0)]
    kept = from_layer(edits, first=2, n_layers=4)
    assert [one.layers for one in kept] == [(2,), (2, 3)]


def test_the_generator_is_the_seed_again_each_time(planted_at):
    a, b = (torch.rand(3, generator=generator_of(planted_at().bench)) for _ in range(2))
    assert torch.equal(a, b)


def test_the_bar_hands_on_the_items(capsys):
    assert list(bar([1, 2], label="cutting", progress=False)) == [1, 2]
    assert capsys.readouterr().err == ""


# --- what cannot be cut


def test_twelve_tokens_can_be_cut_and_eleven_cannot(planted_at):
    lens = planted_at().lens
    assert cannot_cut(lens, of_length(20, 12)) is None
    assert cannot_cut(lens, of_length(20, 11)) == "the shortest sequence has 11 tokens, and cuts need 12"


def test_a_delegated_attention_cannot_be_cut(planted_at):
    stock = dataclasses.replace(planted_at().lens, uneditable=frozenset({"pattern", "scores"}))
    assert "delegated" in cannot_cut(stock, of_length(20))
