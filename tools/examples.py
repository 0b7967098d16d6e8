"""Make the outputs that the examples say they print: ``make examples`` (ONLY="04 05": those alone).

Each script runs on the default model in a folder of its own, with the arguments that its docstring names ("with
--interventions"), and what it prints replaces the block under "Prints on the default model".
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
_PRINTS = re.compile(
    r"^Prints on the default model(?:, with (?P<asked>--[^:]*)|, [^:]*)?:\n\n(?P<block>.*?)\n\"\"\"",
    re.M | re.S,
)
_MOST = 40
"""Lines of an output that are kept."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "only", nargs="*", help="how the names of the scripts begin; all if none is given"
    )
    only = tuple(parser.parse_args(arguments).only)
    for path in sorted(EXAMPLES.glob("*.py")):
        if not only or path.name.startswith(only):
            text = path.read_text(encoding="utf-8")
            path.write_text(with_output(text, printed(path, arguments_of(text))), encoding="utf-8")


def arguments_of(text: str) -> list[str]:
    """The arguments with which a script's docstring says that it prints its output."""
    found = _PRINTS.search(text)
    assert found, "the docstring has lost its output"
    return (found["asked"] or "").split()


def printed(path: Path, arguments: Sequence[str]) -> str:
    """Return what a script prints."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(path), *arguments]
        return subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout


def with_output(text: str, output: str) -> str:
    """A script whose docstring has this output."""
    lines = [
        line for line in output.rstrip().splitlines() if not line.startswith("{'")
    ]  # the Trainer's own
    shown = lines[:_MOST] + [f"... and {len(lines) - _MOST} lines more"] * (len(lines) > _MOST)
    block = "\n".join(f"    {line}".rstrip() for line in shown).replace("\\", "\\\\")
    found = _PRINTS.search(text)
    assert found, "the docstring has lost its output"
    return text[: found.start("block")] + block + text[found.end("block") :]


if __name__ == "__main__":
    main()
