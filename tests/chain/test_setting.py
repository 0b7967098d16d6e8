"""The setting: segments, controls, and runs that begin late and end equal."""

import dataclasses

import pytest
import torch
from lenses import lens_of
from rounding import assert_close, assert_moved, assert_rows_close

from sink_lens.activations.record import capture
from sink_lens.chain import setting as setting_of
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.locate import GrowthStep, Location
from sink_lens.chain.measure import scout_and_measure
from sink_lens.chain.screen import read_embeddings
from sink_lens.chain.setting import (
    Run,
    choose_target_position,
    draw_other_indices,
    find_segments,
    hangs_on_controls,
    make_setting,
    sequences_to_choose_by,
    why_no_interventions,
)
from sink_lens.chain.setting import sequences_to_test as held_out
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import edit, scale, zero
from sink_lens.edits.isolation import isolate
from sink_lens.engine.baseline_run import BaselineRun
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError

CONFIG = TraceConfig(model="tiny", random_init=False)


def location(*spans, positions=(0,)):
    steps = tuple(
        GrowthStep(
            first_layer=first, last_layer=last, ratio_before=1.0, ratio_after=4.0, dimension=7
        )
        for first, last in spans
    )
    return Location(sink_positions=positions, sink_found=True, steps=steps, outliers={})


def of_length(*lengths):
    return from_tensor(
        torch.zeros(len(lengths), max(lengths)).long() + 5, lengths=torch.tensor(lengths)
    )


@pytest.mark.parametrize(
    ("spans", "n_layers", "layers"),
    [
        ([(1, 2), (5, 5)], 8, [(3, 4), (6, 7)]),
        ([(1, 2)], 8, [(3, 4, 5, 6, 7)]),
        ([(1, 1), (7, 7)], 8, [(2, 3, 4, 5, 6)]),  # nothing comes after the last layer
    ],
)
def test_a_segment_is_what_lies_between_two_steps(spans, n_layers, layers):
    found = find_segments(location(*spans), n_layers=n_layers, attention=range(n_layers))
    assert [segment.layers for segment in found] == layers
    assert [segment.number for segment in found] == list(range(len(layers)))
    assert [segment.steps[0].first_layer for segment in found] == [first for first, _ in spans][
        : len(layers)
    ]


@pytest.mark.parametrize(
    ("spans", "n_layers", "layers"),
    [
        ([], 8, (2, 3, 4, 5, 6, 7)),
        ([], 3, (0, 1, 2)),
        ([], 1, (0,)),
        ([(7, 7)], 8, (2, 3, 4, 5, 6, 7)),
    ],
)
def test_without_layers_after_a_step_it_is_the_last_three_quarters(spans, n_layers, layers):
    (segment,) = find_segments(location(*spans), n_layers=n_layers, attention=range(n_layers))
    assert (segment.number, segment.steps, segment.layers) == (-1, (), layers)


def test_late_is_all_segments(planted_at):
    place = planted_at()
    segments = find_segments(location((0, 0), (3, 3)), n_layers=5, attention=range(5))
    assert dataclasses.replace(place.setting, segments=segments).layers_after_growth == (1, 2, 4)
    assert place.setting.layers_after_growth == tuple(range(place.truth.layer + 1, 5))


def test_the_new_position_is_a_third_of_the_length_and_no_sink():
    assert choose_target_position(of_length(30, 24), location=location()) == 8
    assert choose_target_position(of_length(30, 24), location=location(positions=(0, 8, 9))) == 10
    assert choose_target_position(of_length(2), location=location()) == 1


def test_control_positions_are_five_later_ones_any_where_few_come_later_and_no_sink(planted_at):
    place = planted_at().setting
    assert (place.sink_position, place.target_position, place.tokens.n_positions) == (0, 6, 20)
    assert place.control_positions(6) == [
        7,
        10,
        13,
        15,
        18,
    ]  # 7 to 18 in even steps: 7, 9.75, 12.5, 15.25, 18
    assert place.control_positions(0) == [1, 5, 10, 14, 18]  # 1 to 18 without 6
    assert dataclasses.replace(place, target_position=16).control_positions(16) == [1, 5, 9, 13, 18]
    several = dataclasses.replace(place.location, sink_positions=(0, 7, 18))
    assert not {0, 6, 7, 18} & set(
        dataclasses.replace(place, location=several).control_positions(6)
    )


def test_controls_come_within_the_positions_that_they_run_on(planted_at, monkeypatch):
    monkeypatch.setattr(setting_of, "CONTROL_LENGTH", 8)
    place = dataclasses.replace(planted_at().setting)
    assert place.control_positions(6) == [7, 8, 9, 11, 12]  # of 7 to 12
    assert place.control_positions(0) == [
        1,
        2,
        3,
        4,
        5,
    ]  # the last of the eight predicts nothing; 6 is the target
    of_target, of_sink, whole = (
        place.control_run(6),
        place.control_run(0),
        place.control_run(0, whole=True),
    )
    assert [one.tokens.n_positions for one in (of_target, of_sink, whole)] == [14, 8, 20]
    assert place.control_run(6) is of_target
    later = dataclasses.replace(
        place, location=dataclasses.replace(place.location, sink_positions=(10,))
    )
    assert later.control_run(6).tokens.n_positions == 18
    isolated = place.edited_baseline_run([isolate([6])])
    shorter = run_with(place.lens, place.tokens.cut(14), isolate([6]), positions=(6, 0))
    assert_close(place.control_run(6, of=isolated).outcome.mass, shorter.mass)


@pytest.mark.parametrize(
    ("largest", "ends", "hangs"),
    [
        (0.30, (0.45, 0.9), False),  # 0.40 at most
        (0.36, (0.45, 0.9), True),
        (0.54, (0.2, 0.9), False),  # within the interval, and far from both ends
        (0.85, (0.2, 0.9), True),
        (0.01, (0.0, 0.04), False),  # what moves less than 5% decides nothing
        (0.01, (0.06, 0.2), True),
        (float("nan"), (0.06, 0.2), False),
    ],
)
def test_a_control_decides_where_a_tenth_more_or_less_passes_an_end(largest, ends, hangs):
    assert hangs_on_controls(largest, ends=ends, least=0.05) == hangs


def test_of_equal_runs_one_is_made_that_reads_what_all_read(planted_at, monkeypatch):
    place, asked, real = (
        dataclasses.replace(planted_at().setting),
        [],
        setting_of.outcomes_in_one_queue,
    )
    counted = lambda some, **how: asked.append(len(some)) or real(some, **how)  # noqa: E731
    monkeypatch.setattr(setting_of, "outcomes_in_one_queue", counted)
    one, again = (
        (place.freeze_site_edit("k", layers=[3, 4], position=0, mean=True),) for _ in range(2)
    )
    units = place.freeze_unit_edits("neurons", {2: [5]}, position=0, mean=True)
    both = [
        Run(edits=one, layers=[3]),
        Run(edits=again, layers=[4], loss=True),
        Run(edits=units, layers=[4]),
    ]
    first, second, other = place.run_each(both)
    assert asked == [2]
    assert first is second
    wanted = run_with(place.lens, place.tokens, one, positions=(6, 0))
    assert_close(first.mass, wanted.mass[[3, 4]])
    assert_close(first.loss, wanted.loss)
    assert_moved(other.mass, first.mass[1:])
    assert torch.equal(place.run(again, layers=[4]).mass, first.mass)
    assert place.run(again, layers=[2]).layers == (2,)
    place.run(
        again, layers=[4], of=place.control_run(0, of=place.edited_baseline_run([isolate([6])]))
    )
    assert asked == [2, 0, 1, 1]


def test_sites_that_were_read_together_are_read_in_one_pass_and_equal(
    planted_at, config, monkeypatch
):
    place, made, real = planted_at(), [], BaselineRun.with_edits
    one, other = (
        make_setting(place.lens, place.tokens, location=place.location, config=config)
        for _ in range(2)
    )
    counted = lambda *given, **how: made.append(0) or real(*given, **how)  # noqa: E731
    monkeypatch.setattr(BaselineRun, "with_edits", counted)
    places = {"neurons": [2, 3], "z": [1], "resid_pre": [0, 4]}
    one.read_baseline(places)
    found = {site: one.baseline_tensors(site, layers=layers) for site, layers in places.items()}
    assert made == [0]
    for site, layers in places.items():
        for layer, x in other.baseline_tensors(site, layers=layers).items():
            assert torch.equal(found[site][layer], x)
    assert len(made) == 4


def test_random_others_are_as_many_and_none_of_the_units_and_all_where_there_are_too_few():
    generator = torch.Generator().manual_seed(0)
    sets = [draw_other_indices([3, 7, 11], n=50, generator=generator) for _ in range(5)]
    assert all(len({*one} - {3, 7, 11}) == 3 for one in sets)
    assert len(set(map(tuple, sets))) == 5
    assert draw_other_indices([0, 1, 2], n=4, generator=generator) == [3]
    assert draw_other_indices([0, 1], n=2, generator=generator) == []


def test_the_baseline_is_a_run_of_the_first_positions_of_sequences_spread_over_the_text(planted_at):
    place = planted_at()
    assert torch.equal(place.setting.tokens.tokens, place.tokens.tokens[[0, 2, 3], :20])
    plain = run_with(place.lens, place.setting.tokens, positions=(6, 0))
    assert_close(plain.mass, place.setting.baseline.mass)
    assert_close(plain.loss, place.setting.baseline.loss)
    assert sorted(place.setting.baseline_run.batch(0).streams) == [1, 2, 3, 4, 5]


def test_sequences_are_cut_to_the_shortest(planted_at, config):
    place = planted_at()
    ids = place.tokens.tokens
    unequal = from_tensor(
        ids, lengths=torch.tensor([24, 2, 24, 14])
    )  # the second is not among the three
    with pytest.warns(UserWarning, match="read the first 14 of each, and not up to 20"):
        found = make_setting(place.lens, unequal, location=place.location, config=config)
    assert (found.tokens.lengths.tolist(), found.target_position) == ([14, 14, 14], 4)
    assert torch.equal(found.tokens.tokens, ids[[0, 2, 3], :14])


def test_the_length_counts_from_the_sink_on(planted_at, config):
    place = planted_at()
    ids = torch.cat(
        [place.tokens.tokens[:, 1:9], place.tokens.tokens], dim=1
    )  # BOS at position 8 of 32
    later = dataclasses.replace(place.location, sink_positions=(8,))
    found = make_setting(place.lens, from_tensor(ids), location=later, config=config)
    assert (found.tokens.n_positions, found.sink_position, found.target_position) == (28, 8, 9)


def test_a_given_position_has_tokens_on_both_sides_and_is_not_the_sink(planted_at, config):
    place = planted_at()
    given = {"config": config, "location": place.location}
    found = make_setting(place.lens, place.tokens, target_position=21, **given)
    assert (found.target_position, found.tokens.n_positions) == (21, 24)
    for position, text in ((23, "is 23; need one from 1 to 22"), (0, "is 0; need one from 1")):
        with pytest.raises(InputError, match=text):
            make_setting(place.lens, place.tokens, target_position=position, **given)
    given["location"] = dataclasses.replace(place.location, sink_positions=(3,))
    with pytest.raises(InputError, match="position 3 is the sink already; need another one"):
        make_setting(place.lens, place.tokens, target_position=3, **given)


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("position", [0, 3])
def test_a_run_that_begins_late_is_the_whole_run(planted_at, layer, position):
    place = planted_at()
    one = edit(
        "attn_out", lambda x, at: 20 * x.flip(-1) + 5.0, layers=[layer], positions=[position]
    )
    short = place.setting.run([one], layers=[4])
    whole = run_with(place.lens, place.setting.tokens, [one], positions=(6, 0))
    with_loss = place.setting.run([one], loss=True, state=True)
    for found, wanted in (
        (short.mass[0], whole.mass[4]),
        (with_loss.loss, whole.loss),
        (with_loss.state, whole.state),
    ):
        assert_close(found, wanted)
    assert_moved(with_loss.loss, place.setting.run([], loss=True).loss)
    assert short.loss is None


def test_bloom_embeds_no_position():
    """What its first norm does to a token is none."""
    tokens = from_tensor(torch.randint(3, 200, (2, 20), generator=torch.Generator().manual_seed(0)))
    kinds = {}
    for family in ("bloom", "gpt2", "llama"):
        lens = lens_of(family)
        found = scout_and_measure(lens, tokens, config=CONFIG).location
        kinds[family] = list(
            read_embeddings(make_setting(lens, tokens, location=found, config=CONFIG))
        )
    assert kinds == {
        "bloom": ["embedding"],
        "gpt2": ["embedding", "position embedding"],
        "llama": ["embedding"],
    }


def test_a_run_goes_on_from_another_run(planted_at):
    place = planted_at()
    early, late = (zero("neurons", layers=[layer], positions=[2]) for layer in (0, 3))
    found = place.setting.run([late], layers=[4], of=place.setting.edited_baseline_run([early]))
    both = run_with(place.lens, place.setting.tokens, [early, late], positions=(6, 0))
    assert_close(found.mass[0], both.mass[4])
    assert not torch.equal(found.mass[0], place.setting.run([late], layers=[4]).mass[0])


def test_an_edit_that_changes_nothing_warns_unless_it_is_a_control(planted_at):
    place = planted_at().setting
    same = scale("attn_out", 1.0, layers=[3])
    with pytest.warns(UserWarning, match="changed nothing"):
        place.run([same], layers=[4])
    place.run([same], layers=[4], quiet=True)


def test_what_cannot_be_cut_says_why(planted_at):
    lens = planted_at().lens
    assert why_no_interventions(lens, of_length(20, 12)) is None
    said = why_no_interventions(lens, of_length(20, 11))
    assert said == "the shortest sequence has 11 tokens, and interventions need 12"
    stock = dataclasses.replace(lens, uneditable=frozenset({"pattern", "scores"}))
    assert "delegates" in why_no_interventions(stock, of_length(20))


def test_the_mean_is_over_all_positions_but_the_sink(planted_at):
    clean = torch.arange(3 * 20 * 2.0).reshape(3, 20, 2)
    # positions 1 to 19 have the mean 10; value = 40 sequence + 2 position + unit
    assert planted_at().setting.mean_ordinary(clean).tolist() == [[[40 + 20.0, 40 + 21.0]]]


def test_at_the_new_position_it_is_the_clean_value(planted_at, triggered):
    place = planted_at().setting
    one = place.freeze_site_edit("k", layers=[3, 4], position=place.target_position, mean=False)
    clean = capture(place.lens, place.tokens, sites=["k"], path="bridge")
    found = run_with(place.lens, place.tokens, [triggered, one], sites=("k",)).tensors
    for layer in (3, 4):
        assert_rows_close(
            found["k", layer][:, place.target_position], clean["k", layer][:, place.target_position]
        )
    assert_moved(found["k", 2][:, place.target_position], clean["k", 2][:, place.target_position])


def test_of_the_natural_sink_it_is_the_mean_over_others(planted_at):
    place = planted_at().setting
    one = place.freeze_site_edit("attn_out", layers=[1], position=0, mean=True)
    clean = capture(place.lens, place.tokens, sites=["attn_out"], path="bridge")["attn_out", 1]
    found = run_with(place.lens, place.tokens, one, sites=("attn_out",)).tensors["attn_out", 1]
    torch.testing.assert_close(
        found[:, 0], clean[:, 1:].mean((0, 1)).expand(3, -1), rtol=1e-5, atol=1e-6
    )
    assert_rows_close(found[:, 1:], clean[:, 1:])


def test_units_are_held_and_no_others(planted_at):
    place = planted_at().setting
    (one,) = place.freeze_unit_edits("neurons", {2: [5, 70]}, position=0, mean=True)
    clean = capture(place.lens, place.tokens, sites=["neurons"], path="bridge")["neurons", 2]
    found = run_with(place.lens, place.tokens, one, sites=("neurons",)).tensors["neurons", 2]
    assert set((found != clean).any(1).any(0).nonzero().flatten().tolist()) == {5, 70}
    assert one.label == "mean_ordinary of 2 neurons at 0"
    edits = place.freeze_unit_edits("neurons", {1: [3], 2: [5, 70]}, position=0, mean=True)
    assert [one.label.split()[2] for one in edits] == ["1", "2"]  # each layer has its own count


@pytest.mark.parametrize("n", [24, 32, 100])
def test_no_sequence_chooses_and_tests(n, config):
    asked = dataclasses.replace(config, intervention_sequences=20)
    test, choose = held_out(n, config=asked), sequences_to_choose_by(n, config=asked)
    assert len(test) == 20
    assert (test[0], test[-1]) == (0, n - 1)  # spread over the text
    assert 4 <= len(choose) <= 12
    assert not set(test) & set(choose)
    assert (
        sequences_to_choose_by(8, config=asked) == held_out(8, config=asked) == list(range(8))
    )  # every one tests
