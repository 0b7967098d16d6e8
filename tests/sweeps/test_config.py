"""What a sweep is asked in a file: the same in TOML and JSON, every default, and what is refused."""

import json
import tomllib

import pytest
import torch

from sink_lens import TokenBatch
from sink_lens.edits.named_edits import KINDS
from sink_lens.engine.measured import resolve_metrics
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.schema import DEFAULT_MODEL
from sink_lens.sweeps import EditGrid, Grid, MetricSpec, SweepConfig, read_sweep
from sink_lens.sweeps.config import EXAMPLE, sweep_config
from tests.tiny_families import tiny

EDITS = [{"kind": "zero", "site": "z", "heads": "each"}]
TOML = """
model = "a/model"
controls = 2
seed = 7
device = "cpu"
dtype = "float64"
[tokens]
kind = "random"
bos = "without"
sequences = 3
length = 9
[[metrics]]
name = "sink_mass"
sink_position = 1
layers = "0-1"
[[metrics]]
name = "loss"
[[edits]]
kind = "scale"
site = "z"
layers = [0, "1-2"]
heads = [[0, 1], 3]
factors = [0.5, 2]
[[edits]]
units = "each"
"""
WANTED = SweepConfig(
    model="a/model",
    seed=7,
    device="cpu",
    dtype="float64",
    tokens="random",
    bos="without",
    sequences=3,
    length=9,
    metrics=(
        MetricSpec(name="sink_mass", options={"sink_position": 1, "layers": "0-1"}),
        MetricSpec(name="loss"),
    ),
    grid=Grid.of(
        EditGrid(kind="scale", site="z", layers=[0, "1-2"], heads=[[0, 1], 3], factors=[0.5, 2.0]),
        EditGrid(units="each"),
        controls=2,
        seed=7,
    ),
)


def written(folder, text, *, name="sweep.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_json_give_the_same_configuration(tmp_path):
    as_json = tomllib.loads(TOML)
    assert read_sweep(written(tmp_path, TOML)) == WANTED
    assert read_sweep(written(tmp_path, json.dumps(as_json), name="sweep.json")) == WANTED
    assert sweep_config(as_json) == WANTED


def test_sources_of_tokens_and_changes_replace_what_the_file_says(tmp_path):
    text = written(tmp_path, "some prose", name="mine.txt")
    assert sweep_config({"tokens": {"prompts": ["one", "two"]}, "edits": EDITS}).prompts == (
        "one",
        "two",
    )
    assert sweep_config({"tokens": {"text": str(text)}, "edits": EDITS}).text == str(text)
    config = read_sweep(written(tmp_path, TOML), model="another", seed=11)
    assert (config.model, config.seed, config.grid.seed) == ("another", 11, 11)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"colour": 1, "edits": EDITS}, "the sweep has 'colour', which is not known; .*controls"),
        ({"tokens": {"width": 3}, "edits": EDITS}, r"\[tokens\] of the sweep has 'width'"),
        (
            {"edits": [{"layer": 3}]},
            r"\[\[edits\]\] of the sweep has 'layer', .*did you mean layers",
        ),
        ({}, r"has no edits; need at least one table \[\[edits\]\]"),
        ({"edits": {"kind": "zero"}}, "need a list of tables"),
        ({"edits": [3]}, "is 3; need a table"),
        ({"edits": [{"kind": 3}]}, r"kind of \[\[edits\]\] of the sweep is 3; need a text"),
        (
            {"tokens": {"prompts": []}, "edits": EDITS},
            r"prompts of the sweep is \[\]; need a list of texts, one",
        ),
        (
            {"tokens": {"prompts": ["one"], "length": 9}, "edits": EDITS},
            "length is 9, which nothing reads here",
        ),
        ({"controls": "5", "edits": EDITS}, "controls is '5'; need a whole number"),
        ({"metrics": [], "edits": EDITS}, "there is no metric; need at least one"),
        (
            {"metrics": [{"sink_position": 0}], "edits": EDITS},
            "a metric of the sweep has no name; need one of sink_mass",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(given, text):
    with pytest.raises(InputError, match=text):
        sweep_config(given)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("sweep.toml", "edits = ", "cannot be read as a sweep"),
        ("sweep.json", "{", "cannot be read as a sweep"),
        ("sweep.json", "[1]", "holds no table"),
        (
            "sweep.toml",
            "[[edits]]\nkind = 'zero'\ncolour = 1\n",
            r"\[\[edits\]\] of .*sweep\.toml has 'colour'",
        ),
    ],
)
def test_a_file_that_is_no_sweep_is_named(tmp_path, name, text, says):
    with pytest.raises(InputError, match=rf"{name}.*{says}|{says}"):
        read_sweep(written(tmp_path, text, name=name))


# --- the example of the command


def test_the_example_of_the_command_is_a_grid_that_can_be_run(tmp_path):
    config = read_sweep(written(tmp_path, EXAMPLE))
    assert (config.model, config.tokens) == (DEFAULT_MODEL, "text")
    lens = wrap(
        tiny("llama", num_hidden_layers=30), tokenizer=tiny_tokenizer()
    )  # the default model has as many layers
    cells, controls = config.grid.specs(lens, n_positions=config.length)
    assert len(cells) == 32 + 30 * lens.n_heads
    assert controls
    (mass,) = resolve_metrics(
        config.metrics, lens, tokens=TokenBatch.from_tensor(torch.zeros(1, config.length).long())
    )
    assert mass.layers == tuple(range(12, 30))
    (kinds,) = (
        line.partition("#")[2] for line in EXAMPLE.splitlines() if line.startswith("[[edits]] ")
    )
    assert [name.strip() for name in kinds.split(",")] == list(KINDS)
