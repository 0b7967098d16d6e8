"""What a trace can be asked, and what is refused before anything is loaded."""

import math
from dataclasses import replace

import pytest

from sink_lens.chain.config import TraceConfig
from sink_lens.configuration import make_config
from sink_lens.errors import InputError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens": "prose"}, "need one of text, random, repeated"),
        ({"length": 1}, "length is 1; need at least 2"),
        ({"sequences": 0}, "sequences is 0; need at least 1"),
        ({"batch_size": 0}, "batch_size is 0; need at least 1"),
        ({"max_outliers": 0}, "max_outliers is 0; need at least 1"),
        ({"intervention_sequences": 0}, "intervention_sequences is 0; need at least 1"),
        (
            {"intervention_length": 15},
            "intervention_length is 15; need at least 16",
        ),
        ({"target_position": 0}, "target_position is 0; need an interior position, from 1 on"),
        ({"seed": -1}, "seed is -1; need a whole number from 0 on"),
        ({"threshold": 0.0}, "threshold is 0.0; need a number between 0 and 1"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": 0.02}, "threshold is 0.02; need at least 0.03125"),
        ({"min_sink_rate": 2.0}, "min_sink_rate is 2.0"),
        ({"energy_frac": 0.0}, "energy_frac is 0.0"),
        ({"super_share": 1.0}, "super_share is 1.0"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0; need a number above 1"),
        ({"dominance_threshold": 0.5}, "dominance_threshold is 0.5; need a number above 1"),
        ({"text": "no-such-file.txt"}, "there is no file no-such-file.txt"),
        ({"text": __file__, "prompts": ("a",)}, "both a text file and prompts"),
        ({"prompts": ("a b",), "tokens": "random"}, "together with tokens 'random'"),
    ],
)
def test_refuses(given, text):
    with pytest.raises(InputError, match=text.replace("(", r"\(")):
        TraceConfig(model="m", **given)


def test_a_number_that_is_asked_for_wins_over_a_quick_look():
    numbers = lambda config: (config.controls, config.intervention_sequences)  # noqa: E731
    assert numbers(TraceConfig()) == (19, 20)
    assert numbers(TraceConfig(quick=True)) == numbers(TraceConfig().quickly()) == (5, 8)
    asked = TraceConfig(quick=True, controls=19, intervention_sequences=20)
    assert numbers(asked) == numbers(replace(asked, sequences=9)) == (19, 20)
    assert numbers(TraceConfig(controls=7).quickly()) == (7, 8)
    assert numbers(make_config(TraceConfig, None, {"quick": True, "controls": None})) == (5, 8)
