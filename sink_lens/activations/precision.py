"""The effect of a model's 16-bit type on the numbers of its sink token.

The stream of a sink token holds a value of thousands beside values of one. In bfloat16 numbers of that size are 16 to
128 apart, and the layer that erases the value leaves that error behind. A few short sequences are run in the model's
own type and with its weights widened to float32.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..data.tokens import TokenBatch
from ..measures.reductions import median_where
from ..models.lens import LensModel
from ..models.running import prepare_pass

HALF = (torch.bfloat16, torch.float16)
USELESS = 0.1
"""Deviation of the sink token's logits from which a trace and a card warn: a tenth of their spread."""
_SEQUENCES, _LENGTH = 4, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Distance between a model's logits and those of the same weights in float32, over their standard deviation."""

    dtype: str
    position: int
    at_position: float
    """Root mean square deviation of the logits at the position, over their standard deviation in float32."""
    elsewhere: float
    """The same, median over other positions."""
    dimension: int
    """Dimension of the stream with the largest value at the position."""
    value: float
    """That value, in the layer where it is largest; mean over sequences."""
    spacing: float
    """Distance of neighbouring numbers of the type there; infinite past its largest number."""

    @property
    def spoils_logits(self) -> bool:
        """True if the logits at the position are mostly rounding error, or not finite."""
        return not self.at_position < USELESS

    def sentence(self) -> str:
        if math.isfinite(self.at_position):
            found = f"are off by {self.at_position:.0%} of their spread ({self.elsewhere:.1%} at other positions)"
        else:
            found = "are not finite"
        return (
            f"in {self.dtype} the logits at position {self.position} {found}: in float32 the stream's dimension "
            f"{self.dimension} is {self.value:,.0f} there, where {self.dtype}'s numbers "
            + (f"are {self.spacing:g} apart" if math.isfinite(self.spacing) else "end before")
            + (
                "; load the model in float32 for numbers of that token"
                if self.spoils_logits
                else ""
            )
        )


def measure_rounding(lens: LensModel, batch: TokenBatch, *, position: int) -> Rounding | None:
    """Compare a 16-bit model with the same weights in float32 at a position; warn if the difference matters.

    At most 4 sequences are read, of each the first 64 tokens, or more if the position is later. None if the model's
    type is not a 16-bit one, if its weights do not fit into memory, or if no sequence has the position.
    """
    if lens.dtype not in HALF or lens.offloaded:
        return None
    part = batch[slice(0, _SEQUENCES)].cut(min(batch.n_positions, max(_LENGTH, position + 2)))
    has = part.valid[:, position]
    if not has.any():
        return None
    own, _ = _logits_and_magnitudes(lens, part)
    exact, largest = _logits_and_magnitudes(lens, part, wide=True)
    off = (own - exact).pow(2).mean(dim=-1).sqrt() / exact.std(dim=-1)
    here = torch.zeros_like(part.valid)
    here[:, position] = True
    value, dimension = map(float, largest[has, position].mean(dim=0).max(dim=-1))
    kind = torch.finfo(lens.dtype)
    spacing = math.inf
    if value <= kind.max:
        spacing = kind.eps * 2.0 ** math.floor(math.log2(max(value, kind.tiny)))
    found = Rounding(
        dtype=str(lens.dtype).removeprefix("torch."),
        position=position,
        at_position=float(off[here & part.valid].mean()),
        elsewhere=float(median_where(off.flatten(), where=(~here & part.valid).flatten())),
        dimension=int(dimension),
        value=value,
        spacing=spacing,
    )
    if found.spoils_logits:
        warnings.warn(found.sentence(), stacklevel=2)
    return found


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Within the block, each module computes in float32; its weights are widened while it runs."""

    def widen(module: nn.Module, args: Any) -> None:
        held = {
            name: own.data
            for name, own in module._parameters.items()
            if own is not None and own.dtype in HALF
        }
        kept.append(held)
        for name, data in held.items():
            module._parameters[name].data = data.float()  # type: ignore[union-attr]

    def give_back(module: nn.Module, args: Any, output: Any) -> None:
        for name, data in kept.pop().items():
            module._parameters[name].data = data  # type: ignore[union-attr]

    kept: list[dict[str, Tensor]] = []
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(own is not None for own in module._parameters.values()):
                stack.callback(module.register_forward_pre_hook(widen).remove)
                stack.callback(module.register_forward_hook(give_back, always_call=True).remove)
        yield


def _logits_and_magnitudes(
    lens: LensModel, part: TokenBatch, *, wide: bool = False
) -> tuple[Float[Tensor, "batch position vocab"], Float[Tensor, "batch position d_model"]]:
    with (
        prepare_pass(lens),
        in_float32(lens.plain) if wide else contextlib.nullcontext(),
        torch.no_grad(),
    ):
        out = lens.plain(
            input_ids=part.tokens.to(lens.device), use_cache=False, output_hidden_states=True
        )
    largest = torch.stack([state.float().abs() for state in out.hidden_states[:-1]]).amax(dim=0)
    return out.logits.float().cpu(), largest.cpu()
