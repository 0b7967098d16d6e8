"""The site: ``sphinx-build -W docs build/site``. Nothing that it writes asks the network for anything when opened."""

import ast
import re
import shutil
from importlib.util import resolve_name
from inspect import Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from typer.main import get_command

import sink_lens
from sink_lens.cli import app as commands
from sink_lens.edits.named_edits import KINDS
from sink_lens.kinds import all_kinds
from sink_lens.lazy import read_stub
from sink_lens.measures.table import MEASURES
from sink_lens.models.families import FAMILIES
from sink_lens.models.sites import SITES
from sink_lens.schema import UNITS, tables_of
from sink_lens.signatures import full_docstring, full_signature, taken_options

project = "sink_lens"
author = "sink_lens authors"
copyright = "sink_lens authors, MIT licence"
release = sink_lens.__version__
extensions = ["sphinx.ext.autodoc", "myst_nb", "sphinx_design"]
nb_execution_mode = "off"  # a notebook is shown with the outputs that it has
nb_mime_priority_overrides = [("html", "image/png", 0)]
default_role = "code"

html_theme = "furo"
html_title = "sink_lens"
html_copy_source = False
html_math_renderer = "mathml"

autodoc_default_options = {"members": True, "member-order": "bysource", "ignore-module-all": True}
autodoc_inherit_docstrings = False  # a method without one of its own is left out
add_module_names = False
maximum_signature_line_length = 88

myst_enable_extensions = ["dollarmath", "substitution", "colon_fence"]
myst_heading_anchors = 3


ROOMS = {
    "models": "Models",
    "data": "Tokens and text",
    "measures": "Measures",
    "activations": "Reading a model",
    "edits": "Edits and metrics",
    "engine": "Runs under edits",
    "patching": "Patching",
    "sweeps": "Sweeps",
    "circuits": "Circuits",
    "chain": "The chain",
    "studies": "Studies",
    "training": "Training",
    "identity": "Before training, and seeds",
    "records": "Run folders",
    "report": "Pages and figures",
    "": "Errors, statistics, text and schema",
}
"""Room (empty: what all share) -> the title of its page in the reference."""


def _write_reference() -> None:
    """``api/ROOM.rst`` for every room: its modules in the order of the alphabet, those that define something public."""
    here = Path(__file__).parent
    package = here.parent / "sink_lens"
    for room, title in ROOMS.items():
        parts = [title, "=" * len(title), ""]
        for path in sorted((package / room).rglob("*.py") if room else package.glob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = [
                node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
            ]
            shows = path.name == "__init__.py" and "lazy_exports(__name__" in path.read_text(
                encoding="utf-8"
            )
            if not shows and not any(not name.startswith("_") for name in names):
                continue
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
                ".__init__"
            )
            headnorm = module == "sink_lens.models.headnorm.modeling"
            options = ["   :no-members:"] if headnorm or shows else []
            hidden = (
                ["   :exclude-members: Picture"] if room == "report" else []
            )  # matplotlib writes its docstrings
            parts += [
                module,
                "-" * len(module),
                "",
                f".. automodule:: {module}",
                *options,
                *hidden,
                "",
            ]
            if headnorm:  # of its classes, which transformers documents, only the model
                parts += [f".. autoclass:: {module}.HeadNormForCausalLM", "   :no-members:", ""]
        (here / "api" / f"{room or 'shared'}.rst").write_text("\n".join(parts), encoding="utf-8")


def _rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *cells])


_BEFORE_TABLES = """What each kind of run writes, made from `sink_lens/schema`, to which the tests hold every
written table. Read one with `pandas.read_parquet(folder / "heads.parquet")`, or all with `read_run(folder).tables`.
Layers, heads, positions, neurons and dimensions are counted from 0. A number that is undefined is nan, never 0. An
*optional* column is there in some runs only."""


def _write_tables() -> None:
    """``api/tables.md``: every table of every kind of run, column by column, and the units."""
    parts = [
        "# Tables of run folders",
        _BEFORE_TABLES,
        _rows(("unit", "what it is"), list(UNITS.items())),
    ]
    for kind in sorted(all_kinds()):
        parts.append(f"## {kind}")
        for table in tables_of(kind):
            when = f" Only in runs {table.when}." if table.when else ""
            further = " Cells of your own may add columns." if table.open else ""
            parts += [
                f"### {kind}: {table.name}.{table.file}",
                f"A row is {table.row}.{when}{further}",
            ]
            rows = [
                (
                    f"`{one.name}`",
                    f"{one.dtype}{', optional' * one.optional}",
                    one.unit,
                    one.meaning,
                )
                for one in table.columns
            ]
            parts.append(_rows(("column", "type", "unit", "meaning"), rows))
    text = "\n\n".join(part.replace("block-*", r"block-\*") for part in parts)
    (Path(__file__).parent / "api" / "tables.md").write_text(f"{text}\n", encoding="utf-8")


def _write_commands() -> None:
    """``commands/NAME.md`` for every command: its picture, its examples and its options; and ``gallery.md``."""
    here = Path(__file__).parent
    group: Any = get_command(commands)
    parent = group.context_class(group, info_name="sink-lens")
    cards = []
    (here / "commands").mkdir(exist_ok=True)
    for name, command in group.commands.items():
        inside = command.context_class(command, info_name=name, parent=parent)
        parts = [f"# sink-lens {name}", (command.help or "").replace("\n", " ")]
        if (here / "images" / "commands" / f"{name}.png").is_file():
            parts.append(
                f"![The first screen of a page of sink-lens {name}](../images/commands/{name}.png)"
            )
            cards.append(
                f":::{{grid-item-card}} {name}\n:img-top: images/commands/{name}.png\n:link: commands/{name}\n"
                f":link-type: doc\n:::"
            )
        if examples := re.findall(
            r"^(?:sink-lens|torchrun|accelerate) .*$", command.epilog or "", flags=re.M
        ):
            plain = (
                re.sub(r"^(.*?)\s*\[dim\](.*?)\[/dim\]", r"# \2\n\1", line) for line in examples
            )
            parts.append("```\n" + "\n".join(plain) + "\n```")
        known = {**getattr(command, "commands", {})}
        rows = [(f"`{one}`", sub.get_short_help_str(200)) for one, sub in known.items()]
        rows += [
            (f"`{record[0].partition(' <')[0]}`", record[1])
            for record in (one.get_help_record(inside) for one in command.get_params(inside))
            if record is not None
        ]
        parts.append(
            _rows(
                ("option", "meaning"), [(option, text.replace("<", "\\<")) for option, text in rows]
            )
        )
        parts.append("Words and measures are in the [glossary](../glossary.md).")
        (here / "commands" / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    cards.append(
        ":::{grid-item-card} views.attention_patterns\n:img-top: images/commands/attention.png\n:link: api/report\n"
        ":link-type: doc\n:::"
    )
    grid = "\n".join(["::::{grid} 1 2 2 3", ":gutter: 2", *cards, "::::"])
    shown = "The first screens of pages that commands write, and heads in CircuitsVis, on the default model."
    text = f"# Gallery\n\n{shown}\n\n{grid}\n"
    (here / "gallery.md").write_text(text, encoding="utf-8")


def _copy_notebooks() -> None:
    """``notebooks/NAME.ipynb``: Sphinx reads what lies below its folder."""
    here = Path(__file__).parent
    (here / "notebooks").mkdir(exist_ok=True)
    for path in (here.parent / "examples").glob("*.ipynb"):
        text = path.read_text(encoding="utf-8").replace("../docs/index.md", "../index.md")
        (here / "notebooks" / path.name).write_text(text, encoding="utf-8")


_write_reference()
_write_tables()
_write_commands()
_copy_notebooks()


def _first_sentence(thing: Any) -> str:
    text = (thing.__doc__ or "").strip().split("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0]


def _range(low: float, high: float) -> str:
    return f"{low:g} to {high:g}".replace("inf", "∞").replace("-", "−")


def _public() -> str:
    """One line for each name of the root, and for each name of its namespaces."""
    rooms: list[tuple[str, ModuleType]] = []
    rows = []
    for name in sorted(set(sink_lens.__all__) - {"__version__"}, key=str.lower):
        thing = getattr(sink_lens, name)
        if isinstance(thing, ModuleType):
            rooms.append((name, thing))
            rows.append((f"{{py:mod}}`{name} <{thing.__name__}>`", _first_sentence(thing)))
        else:
            rows.append(_named(name, thing, home=_home(name, sink_lens)))
    parts = [_rows(("name", "what it is"), rows)]
    for room, module in rooms:
        inner = [
            _named(name, getattr(module, name), home=_home(name, module))
            for name in sorted(module.__all__, key=str.lower)
        ]
        parts.append(_rows((f"in `{room}`", "what it is"), inner))
    return "\n\n".join(parts)


def _home(name: str, module: ModuleType) -> str:
    """The module that defines a name of a namespace."""
    file = Path(str(module.__file__))
    if not file.with_suffix(".pyi").exists():
        return module.__name__
    place = read_stub(str(file))[name]
    return resolve_name(f".{place.partition(':')[0]}", module.__name__)


def _named(name: str, thing: Any, *, home: str) -> tuple[str, str]:
    """A name that leads to its entry, and what it is."""
    if not callable(thing):
        return f"{{py:obj}}`{name} <{home}.{name}>`", "A table, name by name."
    return f"{{py:obj}}`{name} <{thing.__module__}.{thing.__qualname__}>`", _first_sentence(thing)


myst_substitutions = {
    "public_names": _public(),
    "measures": _rows(
        ("measure", "what it says", "unit", "range", "source"),
        [
            (f"`{name}`", m.meaning, m.unit, _range(m.low, m.high), m.reference)
            for name, m in MEASURES.items()
        ],
    ),
    "sites": _rows(
        ("site", "axes", "hook of the bridge", "what it is"),
        [(f"`{s.name}`", s.axes, f"`{s.bridge}`", s.meaning) for s in SITES.values()],
    ),
    "kinds": _rows(
        ("kind", "what is done", "needs"),
        [(f"`{name}`", kind.meaning, ", ".join(kind.takes) or "") for name, kind in KINDS.items()],
    ),
    "families": ", ".join(f"`{name}`" for name in FAMILIES),
}


def _as_markup(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Google sections become fields. A bar outside backticks is a magnitude, not a substitution."""
    if what == "function" and (taken := taken_options(thing)) is not None:
        lines[:] = full_docstring(thing, taken).split("\n")
    for number, line in enumerate(lines):
        parts = re.split(r"(``.+?``|`[^`]+`)", line)
        lines[number] = "".join(
            part if part.startswith("`") else part.replace("|", r"\|") for part in parts
        )
    if what not in (
        "attribute",
        "property",
        "data",
    ):  # there napoleon takes what stands before a colon for a type
        lines[:] = GoogleDocstring(lines, Config(), app, what, name, thing, options).lines()


def _with_options(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Write each option of a function into its signature."""
    if what != "function" or (taken := taken_options(thing)) is None:
        return None
    whole = full_signature(thing, taken)
    return str(whole.replace(return_annotation=Signature.empty)), str(whole.return_annotation)


def _not_ours(
    app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any
) -> bool | None:
    """What a module imports from elsewhere is not looked at, which halves the time."""
    home = getattr(thing, "__module__", None) or "sink_lens"
    return True if what == "module" and not home.startswith("sink_lens") else None


def _mathml(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """An equation as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    drawn = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def _with_reports(app: Sphinx, error: Exception | None) -> None:
    """The example reports, which pages link to as files that a browser opens."""
    if error is None and app.builder.format == "html":
        shutil.copytree(
            Path(__file__).parent / "reports", Path(app.outdir) / "reports", dirs_exist_ok=True
        )


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("build-finished", _with_reports)
    app.connect("autodoc-process-docstring", _as_markup)
    app.connect("autodoc-process-signature", _with_options)
    app.connect("autodoc-skip-member", _not_ours)
    app.add_html_math_renderer(
        "mathml", inline_renderers=(_mathml, None), block_renderers=(_mathml, None)
    )
