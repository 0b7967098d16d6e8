"""How two computations of one number are compared, when they are two code paths: within rounding, and never to the bit.

A library chooses the kernel of a matrix product by its shape, the instruction set and the number of threads, and each
kernel sums in an order of its own. So bits are asked for only where one code path runs twice with the same shapes in
one process (``torch.equal``). Everything else is compared here: the bridge with the plain module, cells that share a
forward with single runs, a pass that begins at a later position or layer with a whole one, a sequence with the same one
in a batch. What is compared must have moved by a hundred times the bound, or a dropped edit would pass it.
"""

import pytest
import torch

CLOSE = 1e-5
"""As a share of the norm of a row, or of a number's magnitude."""
NEAR_ZERO = 2e-6
"""The same where numbers cancel."""
MOVED = 1e-3
"""An edit whose effect is compared moves the number by so much at least."""


def gap(found, wanted, *, least=1e-9):
    """The largest difference of two tensors: of a row, as a share of its norm; a vector or a number is one row."""
    rows, own = torch.atleast_1d(wanted).double(), torch.atleast_1d(found).double()
    assert own.shape == rows.shape
    return float(((own - rows).norm(dim=-1) / rows.norm(dim=-1).clamp(min=least)).max())


def assert_rows_close(found, wanted, message=""):
    """Every row is within 1e-5 of its norm: activations, logits."""
    off = gap(found, wanted)
    assert off <= CLOSE, f"{message} a row is off by {off:.1e} of its norm"


def assert_close(found, wanted, message=None):
    """Numbers that stand for themselves (loss, mass, norm) agree but for rounding, in shape and type too."""
    torch.testing.assert_close(found, wanted, rtol=CLOSE, atol=CLOSE, equal_nan=True, msg=message)


def assert_gradients_close(found, wanted, message=""):
    """The gradient of a whole parameter; one that cancels to nearly nothing has rounding only."""
    off = float((found - wanted).norm())
    assert off <= CLOSE * float(wanted.norm()) + 1e-7, (
        f"{message}: off by {off:.1e} of {float(wanted.norm()):.1e}"
    )


def assert_moved(edited, baseline, message=""):
    """An edit moved some row by at least 1e-3 of its norm, so that the bound on what it gives says something."""
    moved = gap(edited, baseline)
    assert moved >= MOVED, f"{message} moved the number by {moved:.1e} only: need {MOVED:g}"


def close(wanted):
    """A number, or a list of them, to compare with ``==``."""
    return pytest.approx(wanted, rel=CLOSE, abs=NEAR_ZERO)
