"""What is tried: each category draws one attempt on a folder that is a fresh copy of the workspace."""

import io
import json
import os
import random
import shutil
import signal
import tarfile
import tomllib
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import bad_calls
import options
import pages
import trainings
import workspace
from bad_values import change_bytes, change_file, change_some_file
from child import Outcome, attempt, begun

from analyses.texts import packages
from sink_lens.data.cache import sha256_of
from sink_lens.models.load import load
from sink_lens.records.reading import RUN_FILE

_NAMES = ("a\u202eb", "=1+1", "[red]x[/red]", "\x1b[31mx", "two words", "日本", "-x", "x" * 200, "a\nb", "\u200b")
_ENCODINGS = ("utf-8", "utf-8", "utf-8", "ascii", "cp1252")


@dataclass(kw_only=True)
class Attempt:
    """What is done, and how it is looked at."""

    label: str
    action: Callable[[], object] = lambda: None
    call: bool = False
    """A call of Python, whose errors are ours; else a command, whose errors are lines."""
    encoding: str = "utf-8"
    out: str | None = None
    """The run's folder."""
    may_fail: bool = False
    """Exit code 1 says that a part failed."""
    run: Callable[[Path], Outcome] | None = None
    """Instead of one process: what makes several."""
    keeps: bool = False
    """Nothing that was there may be changed, even where the command is accepted; but for what is below ``out``."""
    patience: float = 3.0
    """Seconds of the CPU before a Ctrl-C."""
    kind: str = ""
    """What is counted besides the category, such as the signal."""


def warm(template: Path, folder: Path) -> None:
    """Import here what every attempt needs, so that none imports it again."""
    shutil.copytree(template, folder, symlinks=True)
    os.chdir(folder)
    for one in (
        "report runs/sweep",
        "cache",
        "patch --quiet --out warm MODEL",
    ):
        held = attempt(lambda one=one: workspace.invoke(one.split()), folder)  # noqa: F841  # in a child, for its errors
    import sink_lens.chain.page.trace
    import sink_lens.chain.trace
    import sink_lens.report.html
    import sink_lens.studies.quantise
    import sink_lens.sweeps.sweep
    import sink_lens.training.compare
    import sink_lens.training.train
    import sink_lens.training.watch

    sink_lens.report.html.page_html("runs/sweep")
    os.chdir(folder.parent)


def _command_line(rng: random.Random, folder: Path) -> Attempt:
    """A command with options from its configuration, and values that are bad, or absent, or given twice."""
    name = rng.choice(list(options.COMMANDS))
    words = options.small(name)
    given = options.bad_options(name, words, rng)
    out = None
    if options.takes_out(name) and "--out" not in given and name != "report":
        out = rng.choice(["new", "deep/new", f"runs/{name}", "runs/sweep", "MODEL"])
        given += ["--out", out]
    line = [name, *(words + given if rng.random() < 0.9 else given + words)]
    if "cache" in line and "--clear" in line:
        line.append("--yes")
    return Attempt(
        label=" ".join(map(repr, line)),
        action=lambda: workspace.invoke(line),
        encoding=rng.choice(_ENCODINGS),
        out=out,
        may_fail=name == "sweep",
    )


def _hostile_names(rng: random.Random, folder: Path) -> Attempt:
    """Good input under names that a terminal, a page or a table could stumble over."""
    name = rng.choice(_NAMES)
    kind = rng.choice(["model", "run", "settings", "out"])
    (folder / name).parent.mkdir(exist_ok=True)
    if kind == "model":
        (folder / "MODEL").rename(folder / name)
        line = ["patch", *options.small("patch")[1:], "--out", "new", "--", name]
    elif kind == "run":
        (folder / "runs/sweep").rename(folder / name)
        line = ["report", "--", name]
    elif kind == "settings":
        (folder / "SWEEP.toml").rename(folder / f"{name}.toml")
        line = ["sweep", "--out", "new", "--", f"{name}.toml"]
    else:
        line = ["sweep", "SWEEP.toml", f"--out={name}"]
    return Attempt(
        label=" ".join(map(repr, line)), action=lambda: workspace.invoke(line), encoding=rng.choice(_ENCODINGS)
    )


def _reseal(folder: Path) -> None:
    """Make a run's or a checkpoint's list of files agree with what lies there, so that the content itself is read."""
    for name in (RUN_FILE, "checkpoint.json"):
        path = folder / name
        try:
            listed = json.loads(path.read_text())
            for file, entry in listed["files"].items():
                if (folder / file).is_file():
                    entry |= {"bytes": (folder / file).stat().st_size, "sha256": sha256_of(folder / file)}
            path.write_text(json.dumps(listed))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue


def _run_folder(rng: random.Random, folder: Path) -> Attempt:
    """A damaged run folder, and a command that reads it."""
    run = rng.choice(sorted(path.name for path in (folder / "runs").iterdir()))
    path = folder / "runs" / run
    done = [change_file(path / RUN_FILE, rng) if rng.random() < 0.35 else change_some_file(path, rng)]
    if rng.random() < 0.6:
        _reseal(path)
        done.append("listed so")
    lines = [
        ["report", f"runs/{run}"],
        ["report", f"runs/{run}", "--figures", "figures"],
        ["report", f"runs/{run}", "runs/sweep"],
    ]
    if run in ("train", "other"):
        lines += [["compare", "runs/train", "runs/other", "--out", "new"], ["watch", *options.small("watch")]] * 2
    if run in options.COMMANDS:
        again = [run, *options.small(run), "--out", f"runs/{run}", "--quiet"]
        lines += [again, [*again, "--overwrite"]]
    line = rng.choice(lines)
    return Attempt(
        label=f"{run} with {', '.join(done)}: {' '.join(line)}",
        action=lambda: workspace.invoke(line),
        out=f"runs/{run}",
        encoding=rng.choice(_ENCODINGS),
    )


def _model(rng: random.Random, folder: Path) -> Attempt:
    """A damaged model folder or GGUF file."""
    if rng.random() < 0.4:
        done = f"model.gguf: {change_file(folder / 'model.gguf', rng)}"
        name = "model.gguf"
    else:
        done, name = change_some_file(folder / "MODEL", rng), "MODEL"
        if rng.random() < 0.2:
            (folder / "MODEL/model.safetensors.index.json").write_text(
                json.dumps(
                    {"metadata": {}, "weight_map": {"a": rng.choice(["../x.safetensors", "/etc/passwd", "", 3, None])}}
                )
            )
            done += ", an index that leads away"
    if rng.random() < 0.3:
        line = ["patch", name, *options.small("patch")[1:], "--out", "new"]
        return Attempt(label=f"{done}: {' '.join(line)}", action=lambda: workspace.invoke(line), out="new")
    return Attempt(label=f"{done}: load", action=lambda: load(name, device="cpu") and None, call=True)


def _settings(rng: random.Random, folder: Path) -> Attempt:
    """A damaged file of settings, as TOML or as JSON."""
    command, file = rng.choice([("sweep", "SWEEP.toml"), ("train", "TRAIN.toml"), ("trace", "TRACE.toml")])
    if rng.random() < 0.7:
        path = folder / file.replace("toml", "json")
        path.write_text(json.dumps(tomllib.loads((folder / file).read_text())))
        file = path.name
    done = change_file(folder / file, rng)
    line = [command, *(["--config"] if command == "trace" else []), file, "--out", "new", "--quiet"]
    if rng.random() < 0.3:
        line.append("--dry-run")
    return Attempt(
        label=f"{file} is {done} ({(folder / file).read_bytes()[:300] if (folder / file).is_file() else ''!r}): {line}",
        action=lambda: workspace.invoke(line),
        out="new",
    )


def _checkpoint(rng: random.Random, folder: Path) -> Attempt:
    """A stopped training with a damaged checkpoint; the same command continues, or refuses."""
    held = folder / "runs/stopped/checkpoints"
    chosen = rng.choice(sorted(path for path in held.iterdir() if (path / "optimizer.pt").exists()))
    done = change_some_file(chosen, rng, pattern=rng.choice(["*", "*.pt", "*.pth", "*.json"]))
    if rng.random() < 0.7:
        _reseal(chosen)
        done += ", listed so"
    line = ["train", "TRAIN.toml", "--out", "runs/stopped", "--quiet"]
    return Attempt(
        label=f"{chosen.name}/{done}: {' '.join(line)}", action=lambda: workspace.invoke(line), out="runs/stopped"
    )


def _cache(rng: random.Random, folder: Path) -> Attempt:
    """A damaged cache."""
    entry = folder / "cache/models"
    if not entry.is_dir():
        made = attempt(lambda: load("model.gguf", device="cpu") and None, folder, patience=60)
        assert not made.trace, made.trace
    (converted,) = (path for path in entry.iterdir() if path.is_dir())
    done = change_file(converted / "manifest.json", rng) if rng.random() < 0.5 else change_some_file(converted, rng)
    line = rng.choice([["cache"], ["cache", "--clear", "--yes"], None])
    if line is None:
        return Attempt(
            label=f"cache: {done}: load", action=lambda: load("model.gguf", device="cpu") and None, call=True
        )
    return Attempt(label=f"cache: {done}: {line}", action=lambda: workspace.invoke(line))


def _archive(rng: random.Random, folder: Path) -> Attempt:
    """A damaged package of text."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for name in ("package/a.txt", "package/b.txt", rng.choice(["../out", "/abs", "x" * 300, "package/c.txt"])):
            info = tarfile.TarInfo(name)
            info.size = 40
            info.type = rng.choice(
                [tarfile.REGTYPE] * 5 + [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, b"S", b"x", b"L"]
            )
            if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname, info.size = "/etc/passwd", 0
            tar.addfile(info, io.BytesIO(b"content " * 5))
    content = held.getvalue()
    if rng.random() < 0.6:
        content = change_bytes(content, rng)
    if rng.random() < 0.3:  # sizes that cannot be, with a checksum that fits
        header = bytearray(content[:512].ljust(512, b"\0"))
        header[124:136] = rng.choice([b"77777777777\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"-0000000001\0"])
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        content = bytes(header) + content[512:]
    import gzip

    packed = gzip.compress(content)
    if rng.random() < 0.3:
        packed = change_bytes(packed, rng)
    path = folder / "package.tgz"
    path.write_bytes(packed)
    return Attempt(label="an archive", action=lambda: packages.read_members(path, "*.txt") and None, call=True)


def _killed(rng: random.Random, folder: Path) -> Attempt:
    """A run that is killed, and the same command again: it must end as the run that was never killed."""
    name = rng.choice(workspace.MADE)
    line = [name, *options.small(name), "--out", "new", "--quiet"]
    at = [rng.uniform(0.0, 2.5) for _ in range(rng.choice([1, 1, 2]))]
    by = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])

    def run(folder: Path) -> Outcome:
        for after in at:
            attempt(lambda: workspace.invoke(line), folder, killed_after=after, by=by)
        found = attempt(lambda: workspace.invoke(line), folder, patience=120)
        if found.code == 2 and "finished" in found.err:  # the kill came after its end
            found.code = 0
        if not found.trace and found.code == 0 and (said := _differs(folder / "new", folder / "runs" / name)):
            found.trace = said
        return found

    told = f"{' '.join(line)} gets {by.name} after {', '.join(f'{one:.2f} s' for one in at)}"
    return Attempt(label=told, run=run, kind=by.name)


def _differs(found: Path, needed: Path) -> str:
    """Compare the tables of two runs to the last bit, but for times; nothing if they are equal."""
    from sink_lens.records import read_run

    a, b = read_run(found), read_run(needed)
    if a.missing or set(a.tables) != set(b.tables) or a.status != b.status:
        return f"lost: {sorted(set(b.tables) ^ set(a.tables))}, missing {a.missing}, {a.status}"
    for name in a.tables:
        one, other = (run.tables[name].drop(columns="seconds", errors="ignore") for run in (a, b))
        if not one.equals(other):
            return f"the table {name} differs after a kill"
    left = [path.name for path in found.rglob("*.part*")]
    return f"left behind: {left}" if left else ""


def _call(rng: random.Random, folder: Path) -> Attempt:
    """A public function with an argument that it cannot take."""
    name, function, given = bad_calls.drawn(rng)
    shown = ", ".join(f"{key}={value!r:.60}" for key, value in given.items())

    def act() -> None:
        made = {key: value() if isinstance(value, bad_calls.Made) else value for key, value in given.items()}
        found = function(**made)
        if isinstance(found, typing.Iterator):
            next(found, None)

    return Attempt(label=f"{name}({shown})", action=act, call=True)


def _monitor(rng: random.Random, folder: Path) -> Attempt:
    """A training that is watched, and something that happens to it."""
    label, act = trainings.drawn(rng, folder)
    return Attempt(label=label, action=act, call=True, patience=60)


_TARGETS = ("link.csv", "/dev/full", "missing/below/x.csv", "text.txt/x.csv", "new.csv", "new.md", ".")


def _output(rng: random.Random, folder: Path) -> Attempt:
    """A result that is to be written over something else."""
    for name in ("script.py", "mine.csv", "mine.md", "mine.tex", "mine.html"):
        (folder / name).write_text("mine")
    (folder / "link.csv").symlink_to("MODEL/config.json")
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    where = rng.choice([*_TARGETS, *rng.choices(there, k=12)])
    made = [name for name in options.COMMANDS if options.takes_out(name)]
    name = rng.choice([*made, "card", "card", "report", "figures"])
    if name == "report":
        line = ["report", rng.choice(["runs/sweep", "runs/trace"]), "--out", where]
    elif name == "figures":
        line = ["report", "runs/trace", "--figures", where]
    else:
        line = [name, *options.small(name), "--out", where]
    out = where if name not in ("report", "figures") else "runs/trace/report.html"
    new = not (folder / where).exists() or (name == "report" and where.endswith(".html"))  # a page is drawn again
    return Attempt(
        label=" ".join(line),
        action=lambda: workspace.invoke(line),
        keeps=True,
        out=where if new else out,
        may_fail=name == "sweep",
        patience=10,
    )


_TEMPLATES = (
    *("{{ raise_exception('no') }}", "{{ messages[9].content }}", "{{ 1/0 }}", "{% for m in messages %}", "{# "),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include 'x' %}", "{{ range(10**9) | list }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "\x00", "{{ bos_token * 3 }}", "{{ messages | x }}"),
    *("{{ cycler.__init__.__globals__.os.system('touch canary') }}", "", "{{ undefined.x.y }}"),
    *("{{ self.__init__.__globals__.__builtins__.open('canary', 'w') }}", "{{ 'a' * 10**10 }}", "{{ namespace() }}"),
)


def _template(rng: random.Random, folder: Path) -> Attempt:
    """Two models whose chat templates are what somebody wrote."""
    shutil.copytree(folder / "MODEL", folder / "OTHER")
    for name in rng.choice([("OTHER",), ("OTHER",), ("MODEL",), ("MODEL", "OTHER")]):
        (folder / name / "chat_template.jinja").write_text(rng.choice(_TEMPLATES))
    if rng.random() < 0.3:
        change_file(folder / "OTHER/tokenizer_config.json", rng)
    line = ["card", "MODEL", "OTHER", *options.small("card")[1:], "--out", "new"]
    return Attempt(label=" ".join(line), action=lambda: workspace.invoke(line), out="new", patience=10)


def _page(rng: random.Random, folder: Path) -> Attempt:
    """A run whose texts are hostile, and its page in a browser."""
    run = rng.choice(sorted(path.name for path in (folder / "runs").iterdir()))
    done = pages.poison(folder / "runs" / run, rng)
    _reseal(folder / "runs" / run)

    def act(folder: Path) -> Outcome:
        found = attempt(lambda: workspace.invoke(["report", f"runs/{run}", "--out", "page.html"]), folder, patience=20)
        if found.code == 0 and not found.trace and (folder / "page.html").exists():
            found.trace = pages.ran(folder / "page.html")
        return found

    return Attempt(label=f"{run}: {done}", run=act)


def _together(rng: random.Random, folder: Path) -> Attempt:
    """Several processes at once: on an empty cache, in one run folder, or at one page."""
    kind = rng.choice(["cache", "folder", "page"])
    name = rng.choice(workspace.MADE)
    again = [name, *options.small(name), "--out", "new", "--quiet"]

    def run(folder: Path) -> Outcome:
        if kind == "cache":
            shutil.rmtree(folder / "cache", ignore_errors=True)
            started = [
                begun(lambda: load("model.gguf", device="cpu") and None, folder, patience=120) for _ in range(12)
            ]
        else:
            line = again if kind == "folder" else ["report", f"runs/{name}"]
            started = [begun(lambda: workspace.invoke(line), folder, patience=120) for _ in range(6)]
        ends = [one.ended() for one in started]
        bad = [one.trace or one.err for one in ends if one.trace or (one.code and "in use" not in one.err + one.trace)]
        bad = [one for one in bad if "finished" not in one]
        found = Outcome(code=0, trace=f"{len(bad)} of {len(ends)}: {bad[0][-1500:]}" if bad else "")
        if kind == "folder" and not bad:
            attempt(lambda: workspace.invoke(again), folder, patience=120)
            found.trace = _differs(folder / "new", folder / "runs" / name)
        return found

    return Attempt(label=f"{kind}, {name}", run=run, kind=kind)


CATEGORIES: dict[str, Callable[[random.Random, Path], Attempt]] = {
    "command lines": _command_line,
    "hostile names": _hostile_names,
    "settings": _settings,
    "run folders": _run_folder,
    "models": _model,
    "checkpoints": _checkpoint,
    "cache": _cache,
    "archives": _archive,
    "kills": _killed,
    "calls": _call,
    "monitors": _monitor,
    "outputs": _output,
    "templates": _template,
    "pages": _page,
    "at once": _together,
}
_WEIGHTS = {"command lines": 26, "calls": 20, "run folders": 12, "models": 12, "settings": 9, "checkpoints": 5}
_WEIGHTS |= {"monitors": 9, "outputs": 9, "templates": 5, "pages": 2, "at once": 1}


def category_of(rng: random.Random, *, only: Sequence[str] | None) -> str:
    """Draw a category."""
    names = list(only or CATEGORIES)
    return rng.choices(names, weights=[_WEIGHTS.get(name, 3) for name in names])[0]
