"""Modules of 0.1 are found where they are now, with a warning that says so."""

import subprocess
import sys
import warnings
from importlib import import_module

import pytest

from sink_lens.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_is_the_new_one(old, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("sink_lens.interventions")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"sink_lens.{old}", raising=False)
    new = import_module(f"sink_lens.{MOVED[old]}")
    spec = new.__spec__
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = import_module(f"sink_lens.{old}")
    assert f"sink_lens.{old} is now sink_lens.{MOVED[old]}; the old name goes in the next version" in [
        str(one.message) for one in seen if one.category is FutureWarning
    ]
    assert found is new
    assert new.__spec__ is spec


def test_both_ways_to_import_from_an_old_package():
    code = (
        "from sink_lens.interventions import metrics\n"
        "from sink_lens.interventions.edits import freeze, scalar, zero\n"
        "from sink_lens.edits import metrics as new\n"
        "print(metrics is new, zero.__module__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "sink_lens.edits.constructors"]


def test_old_names_in_a_module_that_moved_are_found_there():
    code = (
        "from sink_lens.identity.measured_models import Draws, Subject, subjects\n"
        "from sink_lens.identity.contrasts import contrasts\n"
        "print(Draws.__name__, Subject.__name__, subjects.__name__, contrasts.__name__)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["RandomSequences", "ModelToMeasure", "models_to_measure", "switched_configs"]


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"sink_lens\.interventionz"):
        import_module("sink_lens.interventionz")
