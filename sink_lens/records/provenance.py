"""Provenance: what a run was made from, as strict JSON."""

import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import numpy as np

from ..errors import RunError
from .reading import RUN_FILE

IDENTITY = (
    "weights_sha256",
    "config_sha256",
    "tokens_sha256",
    "corrupted_sha256",
    "answers_sha256",
)
IDENTITY += ("circuit_sha256", "bos_condition", "dtype")
"""Fields by which a run is told from another."""
CIRCUMSTANCE = ("versions", "device", "kernel")
"""Fields that are where a run was made, not what it is of."""


def package_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": python_version()}
    for package in ("torch", "transformers", "transformer-lens", "sink-lens"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def plain_json(value: Any) -> Any:
    """Convert a value to plain JSON types; nan and infinities become None, and other types are refused."""
    if isinstance(value, Mapping):
        return {str(name): plain_json(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain_json(entry) for entry in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return plain_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise RunError(
        f"{RUN_FILE} cannot hold {value!r} of type {type(value).__name__}; need text, numbers, lists and "
        "mappings. Convert it first."
    )
