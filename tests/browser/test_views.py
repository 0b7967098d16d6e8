"""Views in a real browser, network off: they draw, they answer, and no token runs a script."""

import numpy as np
import pytest

from sink_lens.report import views

from ..report.test_page import HOSTILE
from ..report.test_views import PATTERN

SHOWN = {
    "heads": views.attention_heads(PATTERN, HOSTILE),
    "patterns": views.attention_patterns(HOSTILE, PATTERN),
    "tokens": views.colored_tokens(np.arange(8), HOSTILE),
}
AS_TEXT = ("</script><script>alert", "⟨U+202E⟩evil", "aaaa…", "$\\frac{1}{0}$", "{{·7")


def text_of(frame, selector):
    """What a reader sees there, without the joiners that nobody sees."""
    return frame.locator(selector).inner_text().replace("\u2060", "").replace("\xa0", " ")


@pytest.mark.parametrize("name", SHOWN)
def test_every_view_draws_and_hostile_tokens_are_text(name, opened, tmp_path):
    found = opened(SHOWN[name].save(tmp_path / "view.html"))
    page = found.page
    page.wait_for_selector("#view *")
    if name == "tokens":
        page.locator("#view", has_text="evil").wait_for()
        for text in AS_TEXT:
            assert text in text_of(page, "#view")
    else:
        page.wait_for_selector("#view canvas")
        text = (
            HOSTILE[0][:12].replace(" ", "·") if name == "patterns" else "head·0"
        )  # there tokens are on the canvas
        assert text in text_of(page, "#view")
    hovered = (
        "#view span" if name == "tokens" else "#view canvas >> nth=1"
    )  # and what appears under the mouse
    page.locator(hovered).first.hover(force=True)
    assert page.locator("img, iframe, svg[onload]").count() == 0
    assert found.quiet, vars(found)


def test_a_notebook_frame_draws_and_reaches_nothing(opened, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!doctype html><body>{SHOWN['tokens']._repr_html_()}</body>", encoding="utf-8"
    )
    found = opened(path)
    page = found.page
    inside = page.frame_locator("iframe")
    inside.locator(".colored-tokens").wait_for()
    assert AS_TEXT[0] in text_of(inside, "body")
    frame = page.frames[1]
    reach = "(() => { try { return parent.document.title } catch (error) { return 'refused' } })()"
    assert frame.evaluate(reach) == "refused"
    assert found.quiet, vars(found)
