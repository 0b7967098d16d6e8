"""What may differ between two computations of one number: the order of sums.

A library chooses the kernel of a matrix product by its number of rows, and by the instruction set. Bits are asked for
only where the same products have the same rows (``equal_bits.py``, on every family and three instruction sets). Where
cells share a forward, one begins at a later position or layer, a sequence is run without the others, or other rows
of a batch change, sums come in another order, and rounding is allowed.
"""

import pytest
import torch

CLOSE = 1e-5
"""As a share of the number's magnitude."""
NEAR_ZERO = 2e-6
"""The same where numbers cancel."""


def assert_close(found, wanted, message=None):
    """Equal but for rounding; of tensors of one shape and type."""
    torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE, equal_nan=True, msg=message)


def assert_same_rows(found, wanted, *, lens):
    """Equal bits, as every product has the same rows; but for rounding with experts, whose number of tokens changes."""
    if lens.family.experts is None:
        assert torch.equal(found, wanted)
    assert_close(found, wanted)


def close(wanted):
    """A number, or a list of them, to compare with ``==``."""
    return pytest.approx(wanted, rel=CLOSE, abs=NEAR_ZERO)
