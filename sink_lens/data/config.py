"""Configurations of ``cache`` and ``examples``: one frozen record each."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Part of the cache that is shown or cleared."""

    name: str | None = None
    """Only this entry, or the entries of this kind; both are named as sink-lens cache lists them."""
    clear: bool = False
    """Remove these entries from the cache; what is needed later is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesConfig:
    """Example scripts to copy, and the folder to copy them into."""

    names: tuple[str, ...] = field(default=(), metadata={"positional": True, "metavar": "NAME"})
    """Names or beginnings of names, such as 02. Default: list all."""
    to: str = field(default=".", metadata={"metavar": "DIR"})
    """Folder to copy the named examples into."""
