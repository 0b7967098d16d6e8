"""The site builds without a warning, opens without a network, and what it says can be run is run."""

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from evidences import random_batch
from typer.main import get_command

import sink_lens
from sink_lens import run_with, wrap
from sink_lens.cli import app
from sink_lens.kinds import all_kinds
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.schema import UNITS, tables_of
from tests.tiny_families import tiny
from tests.zoo import ZOO

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: warnings are errors. The sidebar's list of every function, a quarter of the time, is left out."""
    out = tmp_path_factory.mktemp("site")
    options = ("-W", "--keep-going", "-q", "-D", "toc_object_entries=0", "-d", out / "doctrees")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, out / "html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return out / "html"


@pytest.mark.exhaustive
def test_the_site_asks_the_network_for_nothing(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(
            r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^\s>]+", text
        )
        fetched += re.findall(r"<link[^>]*\shref=[\"']?(?:https?:)?//[^\s>]+", text)
        fetched += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s)]+", text)
        assert fetched == [], path


@pytest.mark.exhaustive
def test_every_command_has_a_page_with_its_options_and_the_sidebar_has_five_groups(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    assert len(re.findall(r'class="caption"', index)) == 5
    for name, command in get_command(app).commands.items():
        text = (site / "commands" / f"{name}.html").read_text(encoding="utf-8")
        assert f'href="commands/{name}.html"' in index
        for one in command.params:
            assert (
                one.hidden or html.escape(one.opts[0]) in text or (one.metavar or one.name) in text
            ), (name, one.opts)


@pytest.mark.exhaustive
def test_the_example_reports_open_from_the_site(site):
    found = re.findall(
        r'href="(reports/\w+\.html)"', (site / "index.html").read_text(encoding="utf-8")
    )
    assert len(found) == 3
    assert all((site / page).read_bytes() == (DOCS / page).read_bytes() for page in found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(sink_lens.__all__) - {"__version__"}))
def test_every_public_name_is_in_the_reference(site, name):
    index = (site / "api" / "index.html").read_text(encoding="utf-8")
    thing = getattr(sink_lens, name)
    home = f"module-{thing.__name__}" if isinstance(thing, ModuleType) else rf"[\w.]+\.{name}"
    link = re.search(rf'<a class="reference internal" href="([\w.]+)#({home})"', index)
    assert link, f"{name} has no entry that the table of public names can lead to"
    assert f'id="{link[2]}"' in (site / "api" / link[1]).read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_every_table_is_in_the_reference_with_its_columns_in_order(site):
    text = (site / "api" / "tables.html").read_text(encoding="utf-8")
    _, *sections = re.split(r"<h3>", text)
    every = [(kind, table) for kind in sorted(all_kinds()) for table in tables_of(kind)]
    assert len(sections) == len(every)
    for section, (kind, table) in zip(sections, every, strict=True):
        assert section.startswith(f"{kind}: {table.name}.{table.file}<")
        rows = re.findall(r"<tr.*?</tr>", section, flags=re.S)[1:]
        cells = [
            [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td>.*?</td>", row, flags=re.S)]
            for row in rows
        ]
        assert [(name, unit) for name, _, unit, _ in cells] == [
            (one.name, one.unit) for one in table.columns
        ]
        assert all(meaning.strip().endswith(".") for *_, meaning in cells)
    assert all(f"<p>{unit}</p>" in text for unit in UNITS)


@pytest.mark.parametrize("name", ["troubleshooting", "sink_tokens", "api/index"])
def test_the_code_of_a_page_runs_in_its_order(name, tmp_path, monkeypatch):
    path = DOCS / f"{name}.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sink_lens.records.display.draw_page", lambda folder: folder
    )  # the report has its own tests
    blocks = re.findall(
        r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, path.name, "exec"), names)


def test_the_check_of_attention_without_the_tool_counts_the_queries_whose_window_reaches_the_sink():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    (block,) = [
        one
        for one in re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
        if "expected =" in one
    ]
    lens = wrap(tiny("mistral"), tokenizer=tiny_tokenizer(), name="windowed")
    assert lens.reach(0) < 24
    exec(block, {"torch": torch, "lens": lens, "tokens": random_batch(3, 24), "run_with": run_with})


def test_every_path_that_a_page_names_exists():
    folders = r"sink_lens|tests|benchmarks|examples|analyses|docs"
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        named = re.findall(rf"`((?:{folders})/[\w./-]*\w/?)`", page.read_text(encoding="utf-8"))
        assert [path for path in named if not (ROOT / path).exists()] == [], page.name


def test_every_name_that_the_code_of_a_page_imports_exists():
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S
        ):
            for line in re.findall(
                r"^ *from (?:sink_lens|analyses|tests)\b.* import .*$", block, flags=re.M
            ):
                exec(line.strip(), {})


def test_every_link_leads_to_a_file_of_the_repository():
    """Pages that exist only in the built site are named there, and not linked from files that people read here."""
    for page in [
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        ROOT / "analyses/README.md",
        ROOT / "benchmarks/README.md",
    ]:
        if not _is_built(page):
            links = re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
            assert [
                to for to in links if not (path := page.parent / to).exists() or _is_built(path)
            ] == [], page


def _is_built(path):
    made = {DOCS / "commands", DOCS / "notebooks"} & {*path.resolve().parents}
    return bool(made) or path.resolve() in (DOCS / "gallery.md", DOCS / "api" / "tables.md")


@pytest.mark.parametrize(
    "page", ["chain", "evidence", "limits", "pages", "zoo", "../benchmarks/README", "../README"]
)
def test_no_sentence_is_longer_than_thirty_words(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "\n\n", text, flags=re.S)
    for part in re.split(r"\n\s*\n|\n(?=[|-] ?|\d\. )", text):
        for sentence in re.split(r"(?<=[.:;?!])\s|\|", re.sub(r"\]\([^)]*\)", "]", part)):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            assert len(words) <= 30, " ".join(words)


def test_every_example_is_listed():
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    found = {
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    }
    assert found == set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.M))


def test_every_model_of_the_zoo_is_drawn():
    text = (DOCS / "zoo.md").read_text(encoding="utf-8").partition("## How often")[0]
    assert re.findall(r"^\| `(\w+)` \| \w.*\|$", text, flags=re.M) == list(ZOO)
    assert f"random, in {len(ZOO['untrained'].families)} families |" in text


def test_the_citation_file_says_what_is_cited():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    newest = re.search(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.M
    )
    assert newest is not None
    assert newest[1] == project["version"]
    numbers = {one["identifiers"][0]["value"].removeprefix("arXiv:") for one in cited["references"]}
    site = (DOCS / "index.md").read_text(encoding="utf-8")
    assert numbers == set(re.findall(r"\d{4}\.\d{5}", site.partition("## Cite")[2]))
