"""Fixtures that the tests of pages share."""

import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made and not drawn: for tests of what stands around them."""
    monkeypatch.setattr(
        "sink_lens.report.html.figure_svg", lambda figure, *, name: f"<svg id='{name}'></svg>"
    )
