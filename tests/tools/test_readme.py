"""The README's pictures and output are those of one run, which ``make readme`` made."""

import json

from sink_lens.schema import VERDICTS
from tools import readme


def test_the_readme_shows_what_is_kept():
    kept = json.loads((readme.IMAGES / "readme.json").read_text(encoding="utf-8"))
    page = readme.README.read_text(encoding="utf-8")
    assert kept["printed"]
    assert readme.with_output(page, kept["printed"]) == page
    for name, sha256 in kept["pictures_sha256"].items():
        assert f"images/{name}.png" in page + (
            readme.ROOT / "docs/tutorials/patch_my_model.md"
        ).read_text("utf-8")
        assert readme.sha256_of(name) == sha256
        assert (readme.IMAGES / f"{name}.png").stat().st_size < 100_000
    assert len(kept["links"]) == 6
    assert {link["verdict"] for link in kept["links"]} <= set(VERDICTS)
