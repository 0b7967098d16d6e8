"""What headlines must say, by the keys of ``tests/headlines.md``; how they say it is free."""

import re
from pathlib import Path

_KEY = re.compile(r"^\| `(.+?)` \| .+? \| .+? \|$", flags=re.M)
_NUMBER = re.compile(r"[−+]?\d+(?:[.,]\d+)*")


def keys(kind: str) -> set[str]:
    """The keys of a kind's table."""
    text = (Path(__file__).parents[1] / "headlines.md").read_text(encoding="utf-8")
    sections = {one.split("\n")[0].split()[-1].strip("`"): one for one in text.split("\n## ")[1:]}
    return set(_KEY.findall(sections[kind]))


def without_numbers(text: str) -> str:
    """A text with every number as N: two that differ say different things."""
    return _NUMBER.sub("N", text)
