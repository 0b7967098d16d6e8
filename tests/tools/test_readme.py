"""The README's picture and output are those of one run, which ``make readme`` made."""

import hashlib
import json
from pathlib import Path

import pandas as pd

from tools import readme

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_the_numbers_that_are_kept():
    kept = json.loads((readme.IMAGES / "readme.json").read_text(encoding="utf-8"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.with_output(page, kept["printed"]) == page
    picture = (readme.IMAGES / "circuit.png").read_bytes()
    assert hashlib.sha256(picture).hexdigest() == kept["picture_sha256"]
    assert kept["arrows"]


def test_what_the_readme_prints_is_what_its_lines_print():
    links = pd.DataFrame({"link": ["a", "b", "a"], "verdict": ["holds", "fails", "holds"], "null_name": list("xyz")})
    assert readme.output(links) == ["link verdict", "   a   holds", "   b   fails"]
    line = '[["link", "verdict"]].drop_duplicates().to_string(index=False)'
    assert line in (ROOT / "README.md").read_text("utf-8")
