"""What the repository says about itself is true: layers, names, paths, and what loads when."""

import ast
import functools
import re
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
import typer
from jaxtyping import Float, TypeCheckError
from shape_checks import shaped
from torch import Tensor

import sink_lens
from sink_lens.axes import AXES
from sink_lens.chain import links as chain
from sink_lens.cli import app
from sink_lens.lazy import read_stub
from sink_lens.measures.attention import sink_mass

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "sink_lens").rglob("*.py"))
LINKS = {link.name for link in chain.LINKS}
WRITES_OF_OTHERS = "sink_lens/circuits/files.py"
"""The one file that calls torch.save: EAP-IG's own format, read back as weights."""
JAXTYPING = {
    "Bool",
    "Complex",
    "Float",
    "Inexact",
    "Int",
    "Integer",
    "Num",
    "Real",
    "Shaped",
    "UInt",
    "UInt8",
}


def name(path):
    return str(path.relative_to(ROOT))


@functools.cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path):
    """The modules that a file imports, at its head or inside its functions."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def python(code):
    """What a fresh interpreter, without the shape checks of this one, prints for the code."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_follow_the_layers():
    # In a process of its own: import-linter switches off every logger that there is.
    command = [
        Path(sys.executable).with_name("lint-imports"),
        "--config",
        ROOT / "pyproject.toml",
        "--no-cache",
    ]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stdout


def test_only_the_tests_of_analyses_import_analyses():
    paths = (ROOT / "tests").rglob("*.py")
    found = [
        name(path)
        for path in paths
        if any(f"{one}.".startswith("analyses.") for one in imported(path))
    ]
    assert [one for one in found if not one.startswith("tests/analyses/")] == []


def mentioned(tree):
    """Every file and folder that docs/tree.md names, a description's too, each below the folder of its line."""
    parents: list[tuple[int, str]] = []
    for line in tree.splitlines():
        indent, (first, *_) = len(line) - len(line.lstrip()), [*line.split(), ""]
        if indent < 6 and first.endswith("/"):
            while parents and parents[-1][0] >= indent:
                parents.pop()
            parents.append((indent, first))
        folder = "".join(name for _, name in parents)
        yield from (
            folder + one
            for one in re.findall(r"(?<![\w/.])(\w+(?:\.py|/))", line)
            if one != first or "." in one
        )
        yield folder


def test_the_tree_of_the_documentation_is_the_real_one():
    tree = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8").split("```")[1]
    named = set(mentioned(tree.strip("\n")))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for path in MODULES
        if path.parent.parent == ROOT / "sink_lens"
    }
    top = {
        name(path)
        for path in MODULES
        if path.parent.name == "sink_lens" and path.name != "__init__.py"
    }
    assert {
        *packages,
        *top,
        "tests/",
        "tools/",
        "analyses/",
        "examples/",
        "docs/",
        "benchmarks/",
    } - named == set()


def test_the_table_of_getting_started_has_every_command_once_with_one_sentence():
    page = (ROOT / "docs" / "getting_started.md").read_text(encoding="utf-8")
    table = page.partition("| command | purpose |\n| --- | --- |\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+\.) \|$", table, flags=re.M))
    assert set(rows) == set(typer.main.get_group(app).commands)
    assert len(rows) == len(table.splitlines()) == 16


def test_every_make_command_in_the_readme_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(
        re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    )
    asked = set(
        re.findall(
            r"(?:^|`|\s)make ([a-z]\w*)(?=[`\s]|$)", "\n".join(re.findall(r"`[^`]+`", readme))
        )
    )
    assert {"trace", "test"} <= asked
    assert asked <= targets


def test_every_public_name_resolves_and_the_root_has_few():
    rooms = [
        getattr(sink_lens, name)
        for name, where in read_stub(sink_lens.__file__).items()
        if where.endswith(":")
    ]
    assert rooms
    for namespace in (sink_lens, *rooms):
        for public in namespace.__all__:
            assert getattr(namespace, public) is not None
            assert public in dir(namespace)
            shown = [(public, found := getattr(namespace, public))]
            if isinstance(found, type) and found.__module__.startswith("sink_lens."):
                shown += vars(found).items()
            undescribed = [name for name, one in shown if callable(one) and not one.__doc__]
            assert [name for name in undescribed if not name.startswith("_")] == []
    results = {"Captured", "Generated", "Run", "Streamed", "Trace"}
    assert len({*sink_lens.__all__} - {"__version__"} - results) <= 30


def test_an_unknown_public_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'lode'; it has .*load"):
        sink_lens.lode  # noqa: B018


def test_importing_the_package_and_reading_a_run_load_nothing_heavy():
    code = (
        "import sys, sink_lens; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert python(code) == "[]\n"
    code = "import sys, sink_lens; sink_lens.read_run; print('torch' in sys.modules)"
    assert python(code) == "False\n"
    code = (
        "import sys\nfrom sink_lens.kinds import all_kinds\nfrom sink_lens.report.page import Page\n"
        "from sink_lens.report.pages import page_of_kind\n"
        "print(all(isinstance(page_of_kind(kind), Page) for kind in all_kinds()), 'torch' in sys.modules)"
    )
    assert python(code) == "True False\n"
    code = (
        "import os\nos.environ.pop('TRANSFORMERS_VERBOSITY', None)\n"
        "import sink_lens.models.load, sink_lens.training.compare, sink_lens.sweeps.sweep\n"
        "print(os.environ.get('TRANSFORMERS_VERBOSITY'))\n"
        "print(callable(sink_lens.training.compare), callable(sink_lens.sweeps.sweep))"
    )
    assert python(code) == "None\nTrue True\n"  # the command quiets them: tests/test_cli.py


def test_no_file_but_those_of_the_links_names_a_link():
    said = []
    for path in MODULES:
        constants = [node.value for node in nodes(path) if isinstance(node, ast.Constant)]
        said += [f"{name(path)}: {value}" for value in constants if value in LINKS]
    assert [one for one in said if not one.startswith("sink_lens/chain/links/")] == []


@pytest.mark.parametrize("words", ["--help", "trace --help", "isolate --help", "patch --help"])
def test_help_answers_without_torch(words):
    code = (
        f"import sys\nfrom sink_lens.cli import main\nsys.argv = ['sink-lens', *{words.split()}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'pandas', 'numpy', 'matplotlib', 'gguf'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = python(code)
    assert "sink-lens" in shown
    assert shown.splitlines()[-1] == "[]"


def test_only_the_command_line_prints():
    for path in MODULES:
        calls = [
            one.func.id
            for one in nodes(path)
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
        ]
        assert "print" not in calls or "cli" in path.parts, name(path)


def test_axes_are_spelled_with_the_words_of_the_list():
    for path, node in [(module, node) for module in MODULES for node in nodes(module)]:
        if not (
            isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute)
        ):
            continue
        kind = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
        if (
            kind not in JAXTYPING
            or not isinstance(node.slice, ast.Tuple)
            or len(node.slice.elts) != 2
        ):
            continue
        axes, place = node.slice.elts[1], f"{name(path)}:{node.lineno}"
        assert isinstance(axes, ast.Constant), f"{place}: the axes are not written out"
        words = {word.lstrip("*#") for word in str(axes.value).split()} - {"..."}
        assert {word for word in words if not word.isdigit()} <= set(AXES), place


def test_nothing_is_pickled():
    for path in MODULES:
        modules = {module.split(".")[0] for module in imported(path)}
        assert not {"pickle", "cloudpickle", "dill", "joblib"} & modules, name(path)
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called, place = ast.unparse(node.func), f"{name(path)}:{node.lineno}"
                allowed = name(path) == WRITES_OF_OTHERS and called == "torch.save"
                assert allowed or called not in ("torch.save", "pandas.to_pickle"), (
                    f"{place}: {called}"
                )
                if called == "torch.load":
                    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
                    assert options.get("weights_only") == "True", (
                        f"{place}: torch.load reads pickle"
                    )


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "test"]
    lines = sum(extras, project["dependencies"])
    declared = {re.split(r"[^\w-]", line)[0].lower().replace("_", "-") for line in lines}
    provided = packages_distributions()
    needed = {
        module.split(".")[0]
        for path in MODULES
        for module in imported(path)
        if not module.startswith("sink_lens")
    } - set(sys.stdlib_module_names)
    missing = {
        module
        for module in needed
        if not declared
        & {dist.lower().replace("_", "-") for dist in provided.get(module, [module])}
    }
    assert missing == set()


def test_no_test_reaches_the_network():
    # 192.0.2.1 is set aside for documentation (RFC 5737), and .invalid is no domain (RFC 2606).
    with pytest.raises((RuntimeError, UserWarning), match=r"192\.0\.2\.1"):
        socket.create_connection(("192.0.2.1", 9), timeout=1)
    with pytest.raises(RuntimeError, match="only loopback"):
        socket.getaddrinfo("sink-lens.invalid", 80)
    with (
        pytest.raises(RuntimeError, match="only loopback"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out,
    ):
        out.sendto(b"", ("192.0.2.1", 9))


def test_a_wrong_shape_is_found_while_the_tests_run():
    scores = torch.rand(2, 3, 4)
    with pytest.raises(TypeCheckError, match="sink_mass"):
        sink_mass(scores, valid=torch.ones(2, 5, dtype=torch.bool), key=0)


def test_a_wrong_shape_is_found_in_a_call_like_one_that_was_right():
    @shaped
    def cut(values: Float[Tensor, "rows width"], *, at: int) -> Float[Tensor, "rows width"]:
        return values[:at]

    assert len(cut(torch.ones(3, 2), at=3)) == len(cut(torch.zeros(3, 2), at=4)) == 3
    with pytest.raises(TypeCheckError, match=r"checking the return value of .*cut"):
        cut(torch.ones(3, 2), at=2)
    with pytest.raises(TypeCheckError, match=r"checking the parameters of .*cut"):
        cut(torch.ones(3), at=3)
