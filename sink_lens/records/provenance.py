"""Provenance: what a run was made from, as strict JSON, and whether two runs may be compared."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any

import numpy as np

from sink_lens.errors import RunError
from sink_lens.records.reading import RUN_FILE, Run

IDENTITY = ("weights_sha256", "tokens_sha256", "bos_condition", "dtype")
"""Provenance fields that must be equal in two runs, except the field that is being compared."""
CIRCUMSTANCE = ("versions", "device", "kernel")
"""Provenance fields that may differ between two runs; a difference only causes a warning."""


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that affect the numbers; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": python_version()}
    for package in ("torch", "transformers", "transformer-lens", "sink-lens"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def strict(value: Any) -> Any:
    """Convert a value to plain JSON types; nan and infinities, which JSON lacks, become None.

    Raises:
        RunError: The value holds something other than text, numbers, lists and mappings.
    """
    if isinstance(value, Mapping):
        return {str(name): strict(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(entry) for entry in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return strict(value.tolist())
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


def compare_runs(a: Run, b: Run, *, by: str | Sequence[str] | None) -> dict[str, tuple[Any, Any]]:
    """Check that two runs may be compared; return the fields that differ: field -> (value in a, value in b).

    Args:
        a: The first run.
        b: The second run.
        by: The field or fields that are being compared, such as "weights_sha256"; None allows no difference. Another
            BOS condition has other tokens, so "bos_condition" also allows another token hash of the same source.

    Raises:
        RunError: A field of IDENTITY that `by` does not name differs, or is missing from both runs.
    """
    named = {by} if isinstance(by, str) else set(by or ())
    if unknown := named - set(IDENTITY):
        raise RunError(f"runs cannot be compared by {sorted(unknown)}; need some of {', '.join(IDENTITY)}.")
    pairs = {field: (a.provenance.get(field), b.provenance.get(field)) for field in IDENTITY + CIRCUMSTANCE}
    admitted = set(named)
    if "bos_condition" in named and a.provenance.get("token_source") == b.provenance.get("token_source"):
        admitted.add("tokens_sha256")
    refused = [
        field
        for field in IDENTITY
        if field not in admitted and (pairs[field][0] != pairs[field][1] or pairs[field][0] is None)
    ]
    if refused:
        listed = "; ".join(f"{field}: {pairs[field][0]} and {pairs[field][1]}" for field in refused)
        raise RunError(
            f"{a.folder} and {b.folder} have {listed}; need equal values. To compare by them, pass by={refused!r}."
        )
    differing = {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
    for field in CIRCUMSTANCE:
        if field in differing:
            was, now = differing[field]
            warnings.warn(f"{a.folder} and {b.folder} differ in {field}: {was} and {now}", stacklevel=2)
    return differing
