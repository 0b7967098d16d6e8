"""sink_lens traces where a language model's attention sinks come from, and which links of the chain hold.

The names below are read from their modules when they are first used, so `import sink_lens` loads neither torch nor
numpy. The reference in the documentation has a line for each.
"""

from . import lazy as _lazy

_get, _known, __all__ = _lazy.lazy_exports(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("sink-lens")
    return _get(name)


def __dir__() -> list[str]:
    return sorted({*_known(), "__version__"})
