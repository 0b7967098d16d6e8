"""The causal part of the page: its figures and tables from small tables, and what is said without interventions."""

from types import SimpleNamespace

import pandas as pd
import pytest

from sink_lens.chain.page import tables as pages
from sink_lens.chain.page.figures import draw_mediation
from sink_lens.errors import RunError
from sink_lens.schema import ALL_STEPS

MEDIATION = pd.DataFrame(
    {
        "intervention": ["isolation"] * 4, "frozen": ["z", "neurons", "dimensions", "key"], "step": 0, "position": 9,
        "layers_from": 3, "layers_to": 7, "surviving_share": [0.0, 0.1, 1.2, 0.0],
        "control_surviving_share": [1.0, 1.0, 1.0, float("nan")],
    }
)  # fmt: skip


def test_the_matrix_writes_each_share_with_its_control_and_its_step():
    texts = [text.get_text() for text in draw_mediation(MEDIATION).axes[0].texts]
    assert texts == ["0.00\n(1.00)", "0.10\n(1.00)", "1.20\n(1.00)", "0.00"]
    both = pd.concat([MEDIATION.assign(step=1), MEDIATION.assign(step=ALL_STEPS)])
    rows = [label.get_text() for label in draw_mediation(both).axes[0].get_yticklabels()]
    assert rows == ["isolation, step 1,\nlayers 3–7", "isolation, all steps,\nlayers 3–7"]


@pytest.mark.parametrize(
    ("effects", "is_sink", "said"),
    [
        (
            {"link": ["key_sink"]},
            True,
            "the sink is there before the layers in which it would be read",
        ),
        ({"link": []}, False, "there is no sink to break"),
        (None, True, "the sequences are too short"),
    ],
)
def test_a_page_says_why_a_causal_table_is_empty(monkeypatch, effects, is_sink, said):
    tables = {
        "mediation": MEDIATION.iloc[:0],
        "effects": effects if effects is None else pd.DataFrame(effects),
    }
    run = SimpleNamespace(
        need=lambda name, columns: tables[name], optional=lambda name, columns: tables[name]
    )
    monkeypatch.setattr(pages, "find_story", lambda of: SimpleNamespace(is_sink=is_sink))
    with pytest.raises(RunError, match=said):
        pages.read_intervention_table(run, "mediation", [])
