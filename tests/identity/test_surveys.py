"""A survey of several models goes on where it was stopped, and gives what one gives that nobody stopped."""

import pandas as pd
import pytest

from sink_lens import read_run
from sink_lens.identity import surveys
from sink_lens.identity.models_to_measure import ModelToMeasure

SMALL = "n_layers=2,d_model=32,n_heads=4,vocab_size=100,n_context=64"


def test_a_stopped_survey_goes_on_behind_what_is_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened, really = [], ModelToMeasure.open

    def stopping(self, **options):
        opened.append(self.seed)
        if self.seed == 1 and len(opened) == 2:
            raise KeyboardInterrupt
        return really(self, **options)

    monkeypatch.setattr(ModelToMeasure, "open", stopping)
    asked = {"untrained": [f"gpt2,{SMALL}"], "seeds": (0, 1, 2), "sinks": False, "sequences": 64, "length": 16}
    with pytest.raises(KeyboardInterrupt):
        surveys.survey("contraction", out="run", progress=False, **asked)
    assert read_run(tmp_path / "run").status == "interrupted"
    surveys.survey("contraction", out="run", progress=False, **asked)
    assert opened == [0, 1, 1, 2]
    surveys.survey("contraction", out="whole", progress=False, **asked)
    for name in ("summary", "layers", "agreement", "variants"):
        one, other = (read_run(tmp_path / folder).tables[name] for folder in ("run", "whole"))
        pd.testing.assert_frame_equal(one, other)
