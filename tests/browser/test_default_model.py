"""The report of a real trace of the default model, with interventions, in a real browser with no network.

The run in ``default_model`` was made by ``trace(DEFAULT_MODEL, config=TraceConfig(sequences=4, length=24,
random_init=False, intervention_sequences=2, intervention_length=24), out=...)``; its page and its centring means were
left out, of run.json too.
"""

from pathlib import Path

import pytest

from sink_lens.report.html import render

RUN = Path(__file__).parent / "default_model"
FIGURES = (
    "circuit",
    "scores",
    "paths",
    "norms",
    "variance",
    "neurons",
    "qk",
    "mediation",
    "amplification",
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return render(RUN, out=tmp_path_factory.mktemp("default") / "report.html")


def test_its_report_renders_every_section_answers_and_asks_nobody(opened, report):
    found = opened(report)
    page = found.page
    title = page.locator("h1").inner_text()
    assert title.startswith("Position 0 is the attention sink (83% of heads). So is position 2")
    assert "It does not matter which token comes first." in title
    assert "Super neurons carry it" in title
    assert page.locator("#verdicts tbody tr:not(.criterion)").count() == 6
    assert page.locator("main .missing:visible").all_inner_texts() == []
    drawn = [figure.get_attribute("id") for figure in page.locator("figure").all()]
    assert drawn == [f"{key}-figure" for key in FIGURES]
    for key in FIGURES:
        assert page.locator(f"#{key}-figure svg").first.bounding_box()["height"] > 100, key
    assert "super neurons" in " ".join(
        page.locator("#circuit-figure svg").first.text_content().split()
    )
    assert "weights_sha256" in page.locator("#provenance").text_content()  # folded

    assert found.quiet, vars(found)


def test_its_report_fits_a_phone(opened, report):
    found = opened(report, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = found.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("html:not(.starting)").wait_for()
    page.locator("[data-map]").tap()
    assert page.locator(".viewer canvas").bounding_box()["width"] > 200
    assert page.locator(
        "#circuit-figure .hint"
    ).is_visible()  # it slides: no smaller than it can be read
    assert found.quiet
