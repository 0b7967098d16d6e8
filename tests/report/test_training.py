"""Figures of training: what is drawn where, on which scale, from frames alone."""

import numpy as np
import pandas as pd
import pytest

from sink_lens.records import read_run
from sink_lens.report.style import ORANGE, figure_bytes
from sink_lens.training.pages.training import _course_figure, draw_comparison, draw_training

from ..training.runs import log, watched, write_run
from .circuits import grid


def panels(figure):
    return {axes.get_ylabel(): axes for axes in figure.axes}


def texts(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()] if axes.get_legend() else []


def tables(*, sinks=True, low=-0.6):
    finals = grid(variant=["none", "shared"], seed=[0, 1]).assign(
        curve="evaluation", loss=[3, 3, 2.4, 2.6]
    )
    finals = finals.assign(difference=[0.0, 0.0, -0.6, -0.4])
    bands = grid(variant=["none", "shared"], quantity=["loss", "difference"], tokens=[64.0, 128.0])
    bands = bands.assign(curve="evaluation", n=3, mean=[5.0, 3.0, 0.0, 0.0, 5.0, 2.5, 0.0, -0.5])
    made = {
        "bands": bands.assign(low=bands["mean"] - 0.1, high=bands["mean"] + 0.1),
        "finals": finals,
    }
    made["curves"] = pd.concat([finals.assign(tokens=tokens) for tokens in (64, 128)])
    row = {"variant": "shared", "curve": "evaluation", "mean": -0.5, "low": low, "high": low + 0.2}
    made["differences"] = pd.DataFrame([row])
    if sinks:
        course = grid(variant=["none", "shared"], tokens=[0.0, 128.0]).assign(
            measure="top_mass", low=0.1, high=0.6
        )
        made["course"] = course.assign(mean=[0.1, 0.5] * 2)
    return made


def test_the_course_has_a_panel_for_each_measure():
    figure = draw_training(watched([0.0, 0.2, 0.6]), log=log([5.0, 4.0, 3.0]))
    assert set(panels(figure)) == {
        "loss, nats", "share of heads with a sink", "attention to position 0", "S2: first token ÷ others",
        "norm ÷ others' median", "dominance ratio", "effective rank, layer mean", "how many", "layer",
    }  # fmt: skip
    assert texts(panels(figure)["loss, nats"]) == ["training", "evaluation", "watched sequences"]
    assert texts(panels(figure)["share of heads with a sink"]) == ["above 0.1", "above 0.3"]
    assert figure_bytes(figure, "png").startswith(b"\x89PNG")


def test_lines_hold_the_numbers_and_zero_tokens_have_a_place():
    figure = draw_training(watched([0.1, 0.2, 0.6]))
    mass = panels(figure)["attention to position 0"]
    line = mass.get_lines()[1]  # of layer 1
    assert line.get_ydata().tolist() == [0.1, 0.2, 0.6]
    x = line.get_xdata()
    assert x[1:].tolist() == [640, 1280]
    assert 0 < x[0] < 640
    ticks = dict(
        zip(mass.get_xticks(), (text.get_text() for text in mass.get_xticklabels()), strict=True)
    )
    assert ticks[x[0]] == "0"
    assert mass.get_xscale() == "log"


def test_the_birth_and_the_uniform_level_are_marked():
    figure = draw_training(watched([0.1, 0.2, 0.6]), born=640)
    mass = panels(figure)["attention to position 0"]
    assert texts(mass) == ["uniform attention"]
    level = next(line for line in mass.get_lines() if line.get_label() == "uniform attention")
    assert level.get_ydata()[0] == 0.25
    marks = [line for line in mass.get_lines() if line.get_color() == ORANGE]
    assert [line.get_xdata()[0] for line in marks] == [640]
    without = panels(draw_training(watched([0.1, 0.2])))["attention to position 0"]
    assert not [line for line in without.get_lines() if line.get_color() == ORANGE]


@pytest.mark.parametrize(("masses", "at"), [([0.0, 0.2, 0.6], [640]), ([0.4, 0.4], [])])
def test_only_a_birth_between_two_checkpoints_is_marked(tmp_path, masses, at):
    run = read_run(write_run(tmp_path / "run", [5.0, 4.0], masses=masses))
    _, figure = _course_figure(run)
    lines = panels(figure)["attention to position 0"].get_lines()
    assert [line.get_xdata()[0] for line in lines if line.get_color() == ORANGE] == at


@pytest.mark.parametrize("masses", [[0.1], [0.0], [0.1, np.nan], [np.nan, 0.1]])
def test_short_and_undefined_courses_are_drawn(masses):
    line = panels(draw_training(watched(masses)))["attention to position 0"].get_lines()[0]
    assert np.array_equal(
        line.get_ydata(), np.array(masses) / 2, equal_nan=True
    )  # layer 0 has half of the mass


def test_arms_are_drawn_with_their_differences_and_sinks():
    figure = draw_comparison(tables(), variants=("none", "shared"), group_by="value_norm")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "value_norm none",
        "value_norm shared",
    ]
    by_label = panels(figure)
    loss = by_label["evaluation loss, nats"]
    assert [line.get_ydata().tolist() for line in loss.get_lines()[:2]] == [[5.0, 3.0], [5.0, 2.5]]
    assert len(loss.collections) == 2  # the bands
    gap = by_label["evaluation loss − baseline, nats"]
    assert [0.0, -0.5] in [list(line.get_ydata()) for line in gap.get_lines()]
    ends = by_label["final evaluation loss − baseline"]
    assert [text.get_text() for text in ends.get_xticklabels()] == ["shared"]
    assert ends.collections[0].get_offsets()[:, 1].tolist() == [-0.6, -0.4]
    assert len(by_label["attention to position 0, top layer"].get_lines()) == 2


def test_what_was_not_watched_evaluated_or_repeated_is_drawn_without_it():
    figure = draw_comparison(tables(sinks=False), variants=("none", "shared"))
    assert [
        text.get_text() for text in panels(figure)["attention to position 0, top layer"].texts
    ] == ["not watched"]
    ends = panels(draw_comparison(tables(low=np.nan), variants=("none", "shared")))[
        "final evaluation loss − baseline"
    ]
    assert [type(one).__name__ for one in ends.collections] == [
        "PathCollection"
    ]  # the dots, and no interval
    assert ends.get_lines()[0].get_ydata().tolist() == [-0.5]
    made = {name: table.replace("evaluation", "training") for name, table in tables().items()}
    assert "training loss, nats" in panels(draw_comparison(made, variants=("none", "shared")))
