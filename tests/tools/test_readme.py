"""The README's picture and output are those of one run, which ``make readme`` made."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from tools import readme

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_numbers_that_are_kept():
    kept = json.loads((readme.IMAGES / "readme.json").read_text(encoding="utf-8"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.with_output(page, kept["output"]) == page
    picture = (readme.IMAGES / "circuit.png").read_bytes()
    assert hashlib.sha256(picture).hexdigest() == kept["picture_sha256"]
    assert len(kept["output"]) <= 30
    assert max(map(len, kept["output"])) <= readme.WIDTH
    assert kept["arrows"]
    rate = re.search(r"\((\d+)% of heads\)", kept["output"][0])
    below = re.search(r"sink rate at 0\.3: ([\d.]+)%", "\n".join(kept["output"]))
    assert rate is not None
    assert below is not None
    assert round(float(below[1])) == int(rate[1])  # one claim, one number


def test_the_output_is_put_between_its_marks_and_a_page_without_them_is_refused():
    page = f"a\n{readme.BEGIN}\nold\n{readme.END}\nb\n"
    assert readme.with_output(page, ["x"]) == f"a\n{readme.BEGIN}\n```\nx\n```\n{readme.END}\nb\n"
    with pytest.raises(AssertionError, match="lost its marks"):
        readme.with_output("a\n", ["x"])
