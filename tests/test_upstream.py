"""The defects of TransformerLens that ``docs/upstream.md`` lists are there, in the release that is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "upstream.md"

_ALONE = """\
import importlib.metadata as about

named = about.entry_points  # this library names an adapter there
about.entry_points = lambda **of: () if of.get("group") == "transformer_lens.architectures" else named(**of)
"""


@pytest.mark.exhaustive
def test_each_block_of_python_prints_what_stands_below_it_without_this_library(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.M | re.S)
    blocks, said = ([text for of, text in fences if of == language] for language in ("python", ""))
    code = "\n".join([_ALONE, *blocks, "import sys", 'assert "sink_lens" not in sys.modules'])
    (tmp_path / "upstream.py").write_text(code, encoding="utf-8")
    asked = [sys.executable, "-I", "-W", "ignore", "upstream.py"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(said)
