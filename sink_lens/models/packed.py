"""Packed weights: the parameters of quantised layers, whose numbers are not the matrix that the layer multiplies by.

bitsandbytes, torchao, GPTQ, AWQ and 8-bit floats each store a weight in a layout of their own. None of them is unpacked
here: a layer's product with the identity is the matrix that it multiplies by.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import ModelError, first_line_of_error
from ..modes import disable_settings, plain_mode
from .offload import in_memory
from .private_apis import offload_device

_ROWS = 1024
"""Rows of the identity in one product."""
MOST_ROUNDING = 2e-2
"""How far a module's output may be from its matrix times the input, as a share; kernels of packed weights round."""


def is_packed(module: nn.Module, name: str = "weight") -> bool:
    """Check whether a parameter is anything but plain floating-point numbers of 16 bits or more."""
    return _is_packed_tensor(getattr(module, name, None))


def _is_packed_tensor(weight: Any) -> bool:
    return not (
        type(weight) in (Tensor, nn.Parameter)
        and weight.is_floating_point()
        and weight.itemsize > 1
    )


def packed_kinds(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module, _ in _packed_parameters(model)})


def _packed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for key, one in module._parameters.items():
            if one is not None and _is_packed_tensor(one):
                yield module, key


def _first_device(module: nn.Module) -> torch.device:
    return next(iter([*module.parameters(), *module.buffers()])).device


def unpacked_weight(module: Any, *, dtype: torch.dtype) -> Tensor:
    """Return the rows of an embedding as stored, and of any other module its matrix, as ``weight_and_bias`` does."""
    if not isinstance(module, nn.Embedding):
        return weight_and_bias(module, dtype=dtype)[0]
    check_not_packed(module)
    with in_memory(module):
        return module.weight.detach()


@plain_mode()
def weight_and_bias(module: Any, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the matrix [out, in] that a module multiplies by and what it adds, as it computes them.

    A ``Linear`` or ``Conv1D`` (which stores [in, out]) has them as they are stored. Of any other module they are its
    outputs for the identity, some rows at a time, in type ``dtype``, and for 0, in eval mode. That is exact for all
    formats that pack weights alone.

    Raises:
        ModelError: the module is not linear.
    """
    settings: list[dict[str, Any]] = [vars(one) for one in module.modules()]
    with in_memory(module), torch.no_grad(), disable_settings(settings, "training"):
        of_class = "forward" not in vars(module) or offload_device(module) is not None
        if type(module) in (nn.Linear, Conv1D) and of_class and not is_packed(module):
            stored = module.weight.detach()
            weight = stored.T if isinstance(module, Conv1D) else stored
            no_bias = module.bias is None
            return weight, weight.new_zeros(len(weight)) if no_bias else module.bias.detach()
        width, device = input_width(module), _first_device(module)
        # not module(...): no hook may see these inputs
        try:
            bias = module.forward(torch.zeros(1, width, dtype=dtype, device=device))[0]
            identity = torch.eye(width, dtype=dtype, device=device)
            rows = [module.forward(some) - bias for some in identity.split(_ROWS)]
            weight = torch.cat(rows).T.to(dtype)
            probe = torch.linspace(-1, 1, width, dtype=dtype, device=device)[None]
            off = (module.forward(probe)[0] - weight @ probe[0] - bias).abs().max()
        except Exception as error:
            raise _not_linear_error(module, first_line_of_error(error)) from error
        if not (off <= MOST_ROUNDING * (weight.abs() @ probe[0].abs()).max().clamp(min=1e-6)):
            raise _not_linear_error(module, f"it is off by {float(off):.1e}")
        return weight, bias.to(dtype)


def check_gradients_pass(model: nn.Module) -> None:
    """Raise ModelError if a layer with packed weights passes no gradient, or another one than that of its matrix.

    The kernel of bitsandbytes for 4 bit on a CPU passes none, so that what comes through the layer would be missing.
    """
    packed: dict[tuple[type, type], Any] = {
        (type(module), type(module._parameters[key])): module
        for module, key in _packed_parameters(model)
        if not isinstance(module, nn.Embedding)
    }
    whole = (one.dtype for one in model.parameters() if not _is_packed_tensor(one))
    dtype = next(whole, torch.float32)
    for part in packed.values():
        bias: Any = getattr(part, "bias", None)
        device = _first_device(part)
        probe = torch.linspace(-1, 1, input_width(part), dtype=dtype, device=device)[None]
        with in_memory(part), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leaf = probe.clone().requires_grad_(True)
            out = part.forward(leaf)
            size = out.detach() if bias is None else out.detach() - bias.detach().to(out.dtype)
            size, found = size.float(), None
            if out.requires_grad:
                total = (out.float() * size).sum()
                (found,) = torch.autograd.grad(total, [leaf], allow_unused=True)
        wanted = float(size.square().sum())
        slope = 0.0 if found is None else float((found.float() * probe.float()).sum())
        if not abs(slope - wanted) <= 3 * MOST_ROUNDING * max(wanted, 1e-12):
            raise ModelError(
                f"gradients do not pass through {type(part).__name__}, whose kernel for packed weights has no backward "
                f"here (a slope of {slope:.3g} for {wanted:.3g}); need real patches (patch; find with method='exact'), "
                "or weights in 16 or 32 bit (model.dequantize() of transformers)"
            )


def input_width(module: Any) -> int:
    """Return the width of a projection's inputs; a module around one has that of the first inside."""
    for one in module.modules():
        if hasattr(one, "in_features"):
            return one.in_features
        if isinstance(one, Conv1D):
            return one.weight.shape[0]
    raise _not_linear_error(module, "no module in it says the width of its inputs (in_features)")


def _not_linear_error(module: nn.Module, found: str) -> ModelError:
    return ModelError(
        f"a {type(module).__qualname__} stands in the place of a projection, and its output is no matrix times its "
        f"input ({found}); need a linear module here. Runs, edits and patches do without"
    )


def check_not_packed(module: nn.Module, name: str = "weight") -> None:
    if is_packed(module, name):
        raise ModelError(
            f"the weight of {type(module).__name__} is packed, so its numbers cannot be changed or sliced; need it in "
            "16 or 32 bit. Load the checkpoint without quantisation"
        )
