"""Names of 0.1 work for one version, each with a warning that says the new one; CHANGELOG.md lists them all."""

import warnings
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from lenses import lens_of

import sink_lens
from sink_lens import renamed
from sink_lens.chain.config import TraceConfig
from sink_lens.configuration import with_fields
from sink_lens.data.tokens import from_tensor
from sink_lens.edits import metrics
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.patching.config import PatchConfig
from sink_lens.records import create_run, read_run
from sink_lens.records.old_names import COLUMNS, CONFIG, VALUES, current_table
from sink_lens.schema import table_of
from sink_lens.studies.config import AmplifyConfig, IsolateConfig
from sink_lens.sweeps.reads import MetricSpec

CHANGELOG = (Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("old", renamed.ROOT)
def test_a_root_name_is_what_the_new_one_is(old):
    new = renamed.ROOT[old]
    with pytest.warns(FutureWarning, match=rf"sink_lens\.{old} is now sink_lens\.{new}; the old name goes"):
        found = getattr(sink_lens, old)
    there = sink_lens
    for name in new.split("."):
        there = getattr(there, name)
    assert found is there
    assert f"| `{old}` | `{new}` |" in CHANGELOG


def test_no_root_name_of_now_is_an_old_one():
    assert not set(renamed.ROOT) & set(sink_lens.__all__)


@pytest.mark.parametrize(("kind", "old"), [(kind, old) for kind, names in renamed.FIELDS.items() for old in names])
def test_the_changelog_has_every_field(kind, old):
    assert f"| `{kind}` | `{old}` | `{renamed.FIELDS[kind][old]}` |" in CHANGELOG


@pytest.mark.parametrize(
    ("kind", "given", "now"),
    [
        (TraceConfig, {"cuts": False, "twin": False}, {"interventions": False, "random_init": False}),
        (TraceConfig, {"cut_length": 32, "cut_sequences": 4}, {"intervention_length": 32, "intervention_sequences": 4}),
        (TraceConfig, {"position": 7}, {"target_position": 7}),
        (AmplifyConfig, {"position": 7}, {"target_position": 7}),
        (IsolateConfig, {"positions": (7, 9)}, {"target_positions": (7, 9)}),
        (PatchConfig, {"key": 3}, {"sink_position": 3}),
        (PatchConfig, {"by": ("layer", "pos", "head_index", "src_pos")}, {"by": ("layer", "position", "head", "key")}),
    ],
)
def test_a_configuration_takes_its_old_fields(kind, given, now):
    with pytest.warns(FutureWarning, match="the old name goes in the next version"):
        direct = kind(**given)
    with pytest.warns(FutureWarning, match="the old name goes in the next version"):
        filled = with_fields(kind, None, given)
    assert direct == filled == kind(**now)


def test_a_configuration_is_read_by_its_old_fields():
    config = TraceConfig(target_position=7)
    with pytest.warns(FutureWarning, match=r"TraceConfig\.position is now target_position"):
        assert config.position == 7
    with pytest.raises(AttributeError, match="no attribute 'cutz'"):
        _ = config.cutz


def test_a_warning_points_at_the_line_that_used_the_name():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        TraceConfig(cuts=False)
        sink_lens.from_tensor(torch.ones(1, 4, dtype=torch.int64))
        run_with(lens_of(), torch.arange(3, 15)[None], keys=(0,), loss=False)
    assert [Path(one.filename) for one in seen] == [Path(__file__)] * 3


def test_an_unknown_field_is_refused_as_before():
    with pytest.raises(TypeError, match="cutz"):
        TraceConfig(cutz=False)
    with pytest.raises(InputError, match="cutz"):
        with_fields(TraceConfig, None, {"cutz": False})


@pytest.mark.parametrize(("command", "old"), [(name, old) for name, of in renamed.OPTIONS.items() for old in of])
def test_an_option_is_the_new_one(command, old):
    new = renamed.OPTIONS[command][old]
    with pytest.warns(FutureWarning, match=f"{old} is now {new}"):
        found = renamed.current_options(command, ["model", old, f"{old}=3", "--", old])
    assert found == ["model", new, f"{new}=3", "--", old]
    assert f"| `{command}` | `{old}` | `{new}` |" in CHANGELOG


def test_other_commands_keep_their_options():
    assert renamed.current_options("sweep", ["--key", "--position"]) == ["--key", "--position"]


@pytest.mark.parametrize(("module", "old"), [(name, old) for name, of in renamed.FUNCTIONS.items() for old in of])
def test_a_function_is_the_new_one(module, old):
    room = import_module(f"sink_lens.{module}")
    with pytest.warns(FutureWarning, match=f"{old} is now"):
        found = getattr(room, old)
    assert found is getattr(room, renamed.FUNCTIONS[module][old])
    with pytest.raises(AttributeError, match="never_was"):
        _ = room.never_was


def test_functions_take_their_old_arguments():
    ids = torch.arange(3, 15)[None]
    with pytest.warns(FutureWarning, match="keys= of run_with is now positions="):
        found = run_with(lens_of(), ids, keys=(0, 4), loss=False)
    assert found.positions == (0, 4)
    with pytest.warns(FutureWarning, match=r"Outcome\.keys is now positions"):
        assert found.keys == (0, 4)
    for make, options in ((metrics.sink_mass, {}), (metrics.norm, {"layer": 0}), (metrics.dominance, {"layer": 0})):
        with pytest.warns(FutureWarning, match="key= of .* is now sink_position="):
            assert make(key=2, **options).positions == (2,)
    with pytest.warns(FutureWarning, match=r"TokenBatch\.bos_arm is now bos_condition"):
        assert from_tensor(ids).bos_arm == "auto"


@pytest.mark.parametrize("name", renamed.METRIC_OPTIONS)
def test_a_metric_of_a_sweep_takes_its_old_option(name):
    with pytest.warns(FutureWarning, match=f"key of the metric {name} is now sink_position"):
        old = MetricSpec(name=name, options={"key": 2})
    assert old == MetricSpec(name=name, options={"sink_position": 2})


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_new_column_is_in_the_schema_and_no_old_one_is(kind):
    for name, columns in COLUMNS[kind].items():
        known = {column.name for column in table_of(kind, name).columns}
        assert set(columns.values()) & known, (kind, name)
        assert not set(columns) & known, (kind, name)


def test_a_run_of_0_1_opens_under_the_new_names(tmp_path):
    heads = pd.DataFrame({"layer": [0], "head": [1], "position": [0], "sink_score": [0.5]})
    links = {"link": ["key_sink"] * 2, "statistic": ["cut_share", "s"], "null_name": ["random_twin", "none"]}
    config = {"cuts": True, "twin": False, "position": 7, "cut_length": 16, "model": "m"}
    provenance = {"bos_arm": "with", "seeds": {"twin": 3}}
    with create_run(tmp_path / "run", kind="trace", config=config, provenance=provenance) as writer:
        writer.write_table("heads", heads)
        writer.write_table("links", pd.DataFrame(links | {"cut": ["not cut", "holds"]}))
    run = read_run(tmp_path / "run")
    assert run.tables["heads"].columns.tolist() == ["layer", "head", "sink_position", "sink_score"]
    found = run.tables["links"]
    assert found["statistic"].tolist() == ["intervention_share", "s"]
    assert found["null_name"].tolist() == ["random_init", "none"]
    assert found["intervened"].tolist() == ["no intervention", "holds"]
    now = {"interventions": True, "random_init": False, "target_position": 7, "intervention_length": 16, "model": "m"}
    assert run.config == now
    assert run.provenance == {"bos_condition": "with", "seeds": {"random_init": 3}}


def test_an_unfinished_run_of_0_1_is_continued(tmp_path):
    old = {"config": {"cuts": True, "twin": False}, "provenance": {"bos_arm": "with"}}
    now = {"config": {"interventions": True, "random_init": False}, "provenance": {"bos_condition": "with"}}
    with pytest.raises(KeyboardInterrupt), create_run(tmp_path / "run", kind="trace", **old) as writer:
        writer.write_table("heads", pd.DataFrame({"position": [0]}))
        raise KeyboardInterrupt
    with create_run(tmp_path / "run", kind="trace", **now) as writer:
        assert writer.has("heads")


def test_names_of_now_are_left_alone():
    table = pd.DataFrame({"sink_position": [0], "position": [1]})
    pd.testing.assert_frame_equal(current_table(table, kind="trace", name="heads"), table, check_frame_type=False)


@pytest.mark.parametrize("kind", sorted({*CONFIG, *VALUES}))
def test_every_kind_is_one_of_the_schema(kind):
    assert table_of(kind, "summary") is not None
