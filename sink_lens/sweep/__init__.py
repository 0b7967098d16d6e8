"""Sweeps: thousands of cells, each an edit and what it does to some metrics, with what they share computed once.

The package bears the name of its main function, so it can be called: ``sink_lens.sweep(...)`` is
``sink_lens.sweep.runner.sweep(...)``, whichever of the two was imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from sink_lens.sweep.runner import sweep

        return sweep(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
