"""Packed weights: the parameters of quantised layers, whose numbers are not the matrix that the layer multiplies by.

bitsandbytes, torchao, GPTQ, AWQ and 8-bit floats each store a weight in a layout of their own. None of them is unpacked
here: a layer's product with the identity is the matrix that it multiplies by, whoever packed it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .offload import in_memory


def is_packed(module: nn.Module, name: str = "weight") -> bool:
    """Check whether a module's parameter ``name`` is anything but plain floating-point numbers of 16 bits or more."""
    weight: Any = getattr(module, name, None)
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and weight.itemsize > 1
    return not plain


def unpacked_weight(module: Any, *, dtype: torch.dtype) -> Tensor:
    """Return a module's weight as stored; for a packed (quantised) layer, the matrix [out, in] that it multiplies by.

    That matrix is computed by multiplying the identity, in type ``dtype``. It is exact for all formats that pack
    weights alone. A packed module that is not a linear layer raises ModelError.
    """
    with in_memory(module), torch.no_grad():
        if not is_packed(module):
            return module.weight.detach()
        if not hasattr(module, "in_features"):
            check_not_packed(module)
        device = next(iter([*module.parameters(), *module.buffers()])).device
        # not module(...): no hook may see this input
        rows = module.forward(torch.eye(module.in_features, dtype=dtype, device=device))
        bias = getattr(module, "bias", None)
        return (rows if bias is None else rows - bias).T.to(dtype)


def check_not_packed(module: nn.Module, name: str = "weight") -> None:
    """Raise ModelError if a module's parameter ``name`` is packed (quantised), and so cannot be changed or sliced."""
    if is_packed(module, name):
        raise ModelError(
            f"the weight of {type(module).__name__} is packed, so its numbers cannot be changed or sliced; need it in "
            "16 or 32 bit. Load the checkpoint without quantisation"
        )
