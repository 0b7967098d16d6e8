"""Reading a model: tensors kept (capture) or reduced on the fly (stream).

The package bears the name of its main function, so it can be called: `sink_lens.capture(...)` is
`sink_lens.capture.record.capture(...)`, whichever of the two was imported first.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from sink_lens.capture.record import capture

        return capture(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
