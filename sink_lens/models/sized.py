"""The sizes of a model, of its header or of the model itself; torch is not imported."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .header import Header
    from .lens import LensModel

Sized: TypeAlias = "Header | LensModel"
"""What has the sizes of a model: numbers of layers and heads, widths, the family."""
