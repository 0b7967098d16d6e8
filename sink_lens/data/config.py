"""Configuration of ``cache``."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Part of the cache that is shown or cleared."""

    name: str | None = None
    """Only this entry, or the entries of this kind; both are named as sink-lens cache lists them."""
    clear: bool = False
    """Remove these entries from the cache; what is needed later is made again."""
