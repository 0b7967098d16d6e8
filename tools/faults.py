"""What the tests are worth: faults that a seed plants in the library, and which tier of tests finds each.

    python tools/faults.py --out faults.jsonl             # 48 faults, some hours on one core; it goes on where it was
    python tools/faults.py --out faults.jsonl --summary   # counts, intervals, and the faults that nothing finds
    python tools/faults.py --draw                         # what would be planted

A fault is one change of one function: a flipped sign, an off-by-one, a dropped argument, a swapped axis, a flipped
comparison, a product for a quotient, `and` for `or`. Rooms take turns. One process imports and collects everything. It
runs the first tier once, to see which test files reach which of the chosen functions; then it forks for each fault,
swaps the function's code, and runs the room's tests of the first tier, of a survivor the other tests of the first tier,
and of one that is left the exhaustive tests of its room. In the first tier only files that reach the function are run:
no other file can tell. Tests that start a process of their own do not see the fault.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import json
import math
import os
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "sink_lens"
STAGES = ("room", "first tier", "exhaustive")
KINDS = ("sign", "off by one", "argument", "axis", "comparison", "product", "and, or")
AXES = ("dim", "axis", "dims")
ALONG = (
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "softmax",
        "cumsum",
        "flip",
        "unsqueeze",
    ),
    *(
        "squeeze",
        "flatten",
        "unflatten",
        "norm",
        "std",
        "var",
        "transpose",
        "any",
        "all",
        "index_select",
        "gather",
    ),
)
"""Methods whose whole numbers are axes."""
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS = {ast.Add: ("sign", ast.Sub), ast.Sub: ("sign", ast.Add)}
OPERATIONS |= {ast.Mult: ("product", ast.Div), ast.Div: ("product", ast.Mult)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of one function."""

    number: int
    room: str
    file: str
    function: str
    kind: str
    change: int
    """Which of the function's changes, in their order."""
    line: int
    before: str
    after: str


def functions_in(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; what stands inside a function belongs to it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{part.name}", part)
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            )


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is in it, without the texts of errors and without annotations."""
    if isinstance(node, ast.Raise):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _nodes(part)


def _whole(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _axis(node: ast.expr) -> ast.Constant | None:
    """The number of an axis, below its sign."""
    inner = (
        node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    )
    return inner if isinstance(inner, ast.Constant) and _whole(inner) else None


def changes_of(function: ast.FunctionDef) -> list[tuple[str, ast.AST, Callable[[], None]]]:
    """Kind, place and act of every change that can be made in a function's body, in the order of the text."""
    found: list[tuple[str, ast.AST, Callable[[], None]]] = []
    axes = set[int]()

    def add(kind: str, node: ast.AST, act: Callable[[], None]) -> None:
        found.append((kind, node, act))

    for node in (one for statement in function.body for one in _nodes(statement)):
        if isinstance(node, ast.Call):
            for at, keyword in enumerate(node.keywords):
                if keyword.arg in AXES and (axis := _axis(keyword.value)):
                    axes.add(id(axis))
                    add(
                        "axis",
                        keyword.value,
                        lambda axis=axis: setattr(axis, "value", axis.value ^ 1 or 2),
                    )
                elif keyword.arg is not None:
                    add(
                        "argument",
                        keyword.value,
                        lambda node=node, at=at: node.keywords.pop(at) and None,
                    )
            if isinstance(node.func, ast.Attribute) and node.func.attr in ALONG:
                for given in node.args:
                    if axis := _axis(given):
                        axes.add(id(axis))
                        add(
                            "axis",
                            given,
                            lambda axis=axis: setattr(axis, "value", axis.value ^ 1 or 2),
                        )
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            if not (_is_text(node.left) or _is_text(node.right)):
                kind, other = OPERATIONS[type(node.op)]
                add(kind, node, lambda node=node, other=other: setattr(node, "op", other()))
        elif isinstance(node, ast.Compare):
            for at, operator in enumerate(node.ops):
                new = COMPARED[type(operator)]
                add("comparison", node, lambda node=node, at=at, new=new: _put(node.ops, at, new()))
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            add("and, or", node, lambda node=node, other=other: setattr(node, "op", other()))
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            if isinstance(node.op, ast.USub):
                add("sign", node, lambda node=node: setattr(node, "op", ast.UAdd()))
        elif _whole(node) and id(node) not in axes:
            add("off by one", node, lambda node=node: setattr(node, "value", node.value + 1))
    return found


def _put(things: list[Any], at: int, new: Any) -> None:
    things[at] = new


def read(file: str, name: str) -> tuple[ast.Module, ast.FunctionDef]:
    """A file's tree, and the function in it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return tree, dict(functions_in(tree))[name]


def code_of(tree: ast.Module, file: str, name: str) -> CodeType:
    """The compiled function of a tree."""

    def inside(code: CodeType) -> Iterator[CodeType]:
        for one in code.co_consts:
            if isinstance(one, CodeType):
                yield one
                yield from inside(one)

    whole = compile(ast.fix_missing_locations(tree), str(ROOT / file), "exec", dont_inherit=True)
    return next(code for code in inside(whole) if code.co_qualname == name)


def changed(file: str, name: str, change: int) -> tuple[str, int, str, str, CodeType]:
    """Kind, line, the statement before and after, and the code, of one change."""
    tree, function = read(file, name)
    kind, node, act = changes_of(function)[change]
    statements = [
        one for one in ast.walk(function) if isinstance(one, ast.stmt) and one is not function
    ]
    around = [one for one in statements if any(part is node for part in ast.walk(one))]
    smallest = min(around, key=lambda one: sum(1 for _ in ast.walk(one)))
    before = ast.unparse(smallest).partition("\n")[0]
    act()
    after = ast.unparse(smallest).partition("\n")[0]
    return kind, getattr(node, "lineno", function.lineno), before, after, code_of(tree, file, name)


def draw(seed: int, n: int) -> list[Fault]:
    """Faults, room after room and kind after kind; no function has two."""
    drawn = random.Random(seed)
    rooms: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        inside = path.relative_to(LIBRARY).parts
        if inside[0] in ("examples", "references"):
            continue
        file = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = [name for name, function in functions_in(tree) if changes_of(function)]
        rooms.setdefault(inside[0] if len(inside) > 1 else "", []).extend(
            (file, name) for name in named
        )
    order, found = sorted(rooms), list[Fault]()
    drawn.shuffle(order)
    while len(found) < n:
        room, wanted = order[len(found) % len(order)], KINDS[len(found) % len(KINDS)]
        for file, name in drawn.sample(rooms[room], len(rooms[room])):
            tree, function = read(file, name)
            fitting = [at for at, (kind, _, _) in enumerate(changes_of(function)) if kind == wanted]
            if fitting:
                break
        else:  # the room has no such change
            file, name = drawn.choice(rooms[room])
            tree, function = read(file, name)
            fitting = range(len(changes_of(function)))
        rooms[room].remove((file, name))
        change = drawn.choice(fitting)
        old, (kind, line, before, after, new) = (
            code_of(tree, file, name),
            changed(file, name, change),
        )
        if old.co_freevars != new.co_freevars or old == new:
            continue
        found.append(
            Fault(
                number=len(found),
                room=room,
                file=file,
                function=name,
                kind=kind,
                change=change,
                line=line,
                before=before,
                after=after,
            )
        )
    return found


def live(file: str, name: str) -> FunctionType:
    """The function that runs, below whatever decorates it."""
    path, line = str(ROOT / file), read(file, name)[1].lineno
    alike = [
        one
        for one in gc.get_objects()
        if type(one) is FunctionType
        and (one.__code__.co_filename, one.__code__.co_qualname) == (path, name)
    ]
    return min(alike, key=lambda one: abs(one.__code__.co_firstlineno - line))


def tests_of(room: str) -> tuple[str, ...]:
    """Where a room's tests are: its folder, or the files beside the folders."""
    if room and (ROOT / "tests" / room).is_dir():
        return (f"tests/{room}/", "tests/browser/") if room == "report" else (f"tests/{room}/",)
    return ("tests/test_",)


class Reached:
    """Which test files reach which fault's function, shared models included."""

    def __init__(self) -> None:
        self.file = ""
        self.files: dict[int, set[str]] = {}

    def hit(self, number: int) -> None:
        """One call of a fault's function."""
        files = self.files.setdefault(number, set())
        if self.file in files and "*" in files:
            return
        files.add(self.file)
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith("tests/checking/lenses.py"):
                files.add("*")  # a model that every later file is given as it is
                return
            frame = frame.f_back


class Planting:
    """The session's own loop: it maps, then plants one fault after another."""

    def __init__(self, faults: list[Fault], out: Path) -> None:
        self.faults, self.out = faults, out

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's."""
        gc.unfreeze()
        for module in pkgutil.walk_packages([str(LIBRARY)], "sink_lens."):
            if not module.name.startswith("sink_lens.examples"):
                importlib.import_module(module.name)
        where = {fault.number: live(fault.file, fault.function) for fault in self.faults}
        gc.freeze()
        lines = (
            [json.loads(line) for line in self.out.read_text().splitlines()]
            if self.out.exists()
            else []
        )
        first = [item for item in session.items if not item.get_closest_marker("exhaustive")]
        rest = [item for item in session.items if item.get_closest_marker("exhaustive")]
        if not any("reached" in line for line in lines):
            lines.append(self.in_fork(lambda: self.map(first, where)))
            if "reached" not in lines[-1]:
                raise RuntimeError(
                    f"the first tier could not be run on the library as it is: {lines[-1]['failed']}"
                )
            self.write(lines[-1])
        known = next(line for line in lines if "reached" in line)
        flaky, costs = set(known["failed"]), known["seconds"]
        for fault in self.faults:
            if any(line.get("number") == fault.number for line in lines):
                continue
            files = set(known["reached"].get(str(fault.number), []))
            near = [
                one
                for one in first
                if one.nodeid not in flaky and ("*" in files or one.location[0] in files)
            ]
            own = [one for one in near if one.nodeid.startswith(tests_of(fault.room))]
            far = [one for one in near if not one.nodeid.startswith(tests_of(fault.room))]
            # of the function's own name first: it ends sooner
            own.sort(key=lambda one: Path(fault.file).stem not in one.location[0])
            last = [one for one in rest if one.nodeid.startswith(tests_of(fault.room))]
            result: dict[str, Any] = asdict(fault) | {
                "files": len(files),
                "stage": None,
                "test": None,
            }
            for stage, items in zip(STAGES, (own, far, last), strict=True):
                limit = 120 + 4 * sum(costs.get(one.nodeid, 5.0) for one in items)
                test = self.in_fork(partial(self.planted, fault, where, items), limit=limit)[
                    "failed"
                ]
                if test:
                    result |= {"stage": stage, "test": test}
                    break
            self.write(result)
        return True

    def write(self, line: dict[str, Any]) -> None:
        """Add a line to the results."""
        with self.out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def in_fork(
        self, act: Callable[[], dict[str, Any]], *, limit: float = math.inf
    ) -> dict[str, Any]:
        """What an act gives in a fork. One that dies, or takes much more processor time than it should, has failed."""
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setsid()
                    nothing = os.open(os.devnull, os.O_RDWR)
                    os.dup2(nothing, 1)
                    os.dup2(nothing, 2)
                    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
                    if limit < math.inf:
                        resource.setrlimit(
                            resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 5)
                        )
                    Path(folder, "result").write_text(json.dumps(act()))
                    code = 0
                except BaseException:
                    Path(folder, "error").write_text(traceback.format_exc())
                    raise
                finally:
                    os._exit(code)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what a test that failed left running
            if ended == 0:
                return json.loads(Path(folder, "result").read_text())
            if Path(folder, "error").exists():
                raise RuntimeError(Path(folder, "error").read_text())
            return {
                "failed": "does not end"
                if ended == -signal.SIGXCPU
                else f"the process ends with {ended}"
            }

    def map(self, items: list[pytest.Item], where: dict[int, FunctionType]) -> dict[str, Any]:
        """Run the first tier on functions that say who calls them."""
        reached = Reached()
        sys.modules["reached_functions"] = reached  # type: ignore[assignment]
        for fault in self.faults:
            tree, function = read(fault.file, fault.function)
            said = ast.parse(
                f"__import__('sys').modules['reached_functions'].hit({fault.number})"
            ).body
            function.body[:0] = said
            where[fault.number].__code__ = code_of(tree, fault.file, fault.function)
        failed, seconds = list[str](), dict[str, float]()
        for item, after in _in_turn(items):
            reached.file, begun = item.location[0], _processor()
            if not _passes(item, after):
                failed.append(item.nodeid)
            seconds[item.nodeid] = round(_processor() - begun, 3)
        files = {number: sorted(files) for number, files in reached.files.items()}
        return {"reached": files, "failed": failed, "seconds": seconds}

    def planted(
        self, fault: Fault, where: dict[int, FunctionType], items: list[pytest.Item]
    ) -> dict[str, Any]:
        """The first test that fails, if one does."""
        where[fault.number].__code__ = changed(fault.file, fault.function, fault.change)[-1]
        for item, after in _in_turn(items):
            if not _passes(item, after):
                return {"failed": item.nodeid}
        return {"failed": None}


def _in_turn(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test and the one after it."""
    yield from zip(items, [*items[1:], None], strict=False)


def _processor() -> float:
    return sum(os.times()[:4])


def _passes(item: pytest.Item, after: pytest.Item | None) -> bool:
    """Whether a test passes, its fixtures included."""
    before = item.session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
    return item.session.testsfailed == before


def interval(k: int, n: int) -> tuple[float, float]:
    """Wilson's interval at 95%."""
    z, p = 1.959964, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def summary(out: Path) -> str:
    """Counts with their intervals, by tier, and what nothing found."""
    lines = [line for line in map(json.loads, out.read_text().splitlines()) if "number" in line]
    n, found, said = len(lines), 0, list[str]()
    for stage in STAGES:
        found += sum(line["stage"] == stage for line in lines)
        low, high = interval(found, n)
        said.append(
            f"found up to {stage}: {found} of {n} ({found / n:.0%}, 95% interval {low:.0%} to {high:.0%})"
        )
    for line in lines:
        if line["stage"] != "room":
            said.append(
                f"{line['number']}: {line['stage'] or 'nothing'}: {line['file']}:{line['line']} {line['function']}"
                f"\n    {line['before']}\n    {line['after']}"
            )
    return "\n".join(said)


def main() -> int:
    """Plant, or say what was found."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--out", type=Path, default=Path("faults.jsonl"))
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--faults", type=int, default=48)
    asked.add_argument("--draw", action="store_true", help="print the faults and stop")
    asked.add_argument("--summary", action="store_true", help="print what --out holds and stop")
    asked.add_argument(
        "tests", nargs="*", help="files or folders of tests, to try it out on these alone"
    )
    options = asked.parse_args()
    if options.summary:
        print(summary(options.out))
        return 0
    faults = draw(options.seed, options.faults)
    if options.draw:
        for fault in faults:
            print(f"{fault.number}: {fault.file}:{fault.line} {fault.function}: {fault.kind}")
            print(f"    {fault.before}\n    {fault.after}")
        return 0
    os.chdir(ROOT)
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", *options.tests],
        plugins=[Planting(faults, options.out.absolute())],
    )


if __name__ == "__main__":
    sys.exit(main())
