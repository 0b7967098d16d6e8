"""The page in a real browser with no network: whole, quiet, interactive, and harmless whatever the tokens say."""

import csv
import io

import numpy as np
import pytest
from tiers import first

from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.report.html import render
from sink_lens.studies import card

from ..report.test_page import HOSTILE, SIZE, SMALL, hostile_run, patterns, synthetic_run, tables
from ..report.test_pages import SAYS, a_run
from ..studies.test_card_table import a_card
from . import edges


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser") / "run"
    return render(synthetic_run(folder, frames=tables(**SMALL), drawn=patterns(**SIZE)))


def test_the_first_screen_has_the_chain_the_heads_and_a_pattern(opened, report):
    page = opened(report, viewport={"width": 1280, "height": 900}).page
    heads, pattern = (
        page.locator("[data-map] svg").bounding_box(),
        page.locator(".viewer canvas").bounding_box(),
    )
    assert pattern["x"] > heads["x"] + heads["width"]
    picture = page.locator("#circuit-figure svg").bounding_box()
    assert picture["y"] + picture["height"] < min(900, heads["y"], pattern["y"])
    assert max(heads["y"], pattern["y"]) < 900 < page.locator("nav").bounding_box()["y"]


def test_a_click_on_a_head_shows_its_pattern(opened, report):
    found = opened(report)
    page = found.page
    strongest = page.locator(".chosen").inner_text()
    image = page.locator("[data-map] image").first
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / 6, box["y"] + box["height"] * 3.5 / 4)
    chosen = page.locator(".chosen").inner_text()
    assert chosen.startswith("L2.H3: sink score 0.")
    assert chosen != strongest
    page.locator(".viewer canvas").hover(position={"x": 2, "y": 2})
    assert (
        page.locator(".cell").inner_text()
        == "Query 0 “Call” gives key 0 “Call” 100% of its attention."
    )
    drawn = page.evaluate(
        "[...document.querySelector('canvas').getContext('2d').getImageData(0, 1, 1, 1).data]"
    )
    share = patterns(**SIZE)[2, 3, 1, 0]
    light, dark = np.array([253, 231, 37]), np.array([68, 1, 84])  # the ends of viridis
    nearer_light = np.abs(drawn[:3] - light).sum() < np.abs(drawn[:3] - dark).sum()
    assert nearer_light == (share > 128)
    assert found.quiet


def test_the_keyboard_chooses_heads_and_reads_cells(opened, report):
    page = opened(report).page
    page.locator("[data-map]").focus()
    page.locator("[data-layer]").fill("1")
    page.locator("[data-head]").fill("1")
    page.locator("[data-head]").press("Enter")
    page.locator("[data-map]").press("ArrowRight")
    page.locator("[data-map]").press("ArrowDown")
    assert page.locator(".chosen").inner_text().startswith("L2.H2:")
    for _ in range(9):
        page.locator("[data-map]").press("ArrowLeft")
    assert page.locator(".chosen").inner_text().startswith("L0.H2:")
    page.locator(".viewer canvas").press("ArrowUp")
    page.locator(".viewer canvas").press("ArrowRight")
    assert page.locator(".cell").inner_text().startswith("Query 14 “·years” gives key 1 “·me” ")
    page.get_by_role("button", name="Weaker").click()
    assert page.locator(".chosen").inner_text() != ""


def test_numbers_are_copied_as_csv(opened, report):
    found = opened(report)
    page = found.page
    page.locator("#scores-figure [data-copy]").click()
    page.locator("#scores-figure .said", has_text="24 rows copied").wait_for()
    copied = list(csv.DictReader(io.StringIO(page.evaluate("navigator.clipboard.readText()"))))
    assert len(copied) == 24
    frame = tables(**SMALL)["heads"]
    assert float(copied[7]["sink_score"]) == pytest.approx(frame["sink_score"][7], rel=1e-4)
    buttons = page.locator("[data-copy]").all()
    assert len(buttons) == 8
    for button in buttons:
        button.click()
    assert found.quiet


def test_hostile_text_runs_nothing_and_is_shown(opened, tmp_path):
    found = opened(render(hostile_run(tmp_path / "run")))
    page = found.page
    assert page.locator(".kicker").inner_text() == HOSTILE[0]
    page.locator(".viewer canvas").press("ArrowUp")
    assert "gives key 0 “<img·src=x·onerror=alert" in page.locator(".cell").inner_text()
    for button in page.locator("[data-copy]").all():
        button.click()
    assert page.locator("main img[src='x'], main script:not([type])").count() == 0
    assert found.quiet, vars(found)


def a_diff(folder):
    lenses = [
        wrap(planted(seed=seed).model, tokenizer=tiny_tokenizer(adds_bos=True)) for seed in (0, 1)
    ]
    card(*lenses, tokens="random", sequences=4, length=16, out=folder, progress=False)
    return folder


ALSO = {"card": a_card, "circuit": edges.a_run, "diff": a_diff}


@pytest.mark.parametrize("kind", first([*SAYS, *ALSO], stay=3))
def test_no_page_scrolls_sideways_on_a_phone(opened, tmp_path, kind):
    """Tables and figures do, each in its own box."""
    path = render(ALSO[kind](tmp_path / kind) if kind in ALSO else a_run(tmp_path / kind, kind))
    page = opened(path, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    widths = page.evaluate(
        "[document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]"
    )
    assert widths == [390, 390]


def test_dark_and_light_follow_the_reader(opened, report):
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    assert opened(report, color_scheme="dark").page.evaluate(shade) < 150
    assert opened(report, color_scheme="light").page.evaluate(shade) > 600


def test_print_leaves_out_what_cannot_be_pressed(opened, report):
    page = opened(report, color_scheme="dark").page
    page.emulate_media(media="print")
    assert not any(button.is_visible() for button in page.locator("button").all())
    assert (
        page.evaluate(
            "getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()"
        )
        == "#fff"
    )


def test_without_its_script_the_page_can_be_read(opened, report):
    page = opened(report, java_script_enabled=False).page
    assert not any(button.is_visible() for button in page.locator("button").all())
    assert page.locator("#scores-figure svg").is_visible()
    assert page.locator("#verdicts tbody tr").first.is_visible()
