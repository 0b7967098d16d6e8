"""Head-wise RMSNorm for any model, between the heads' aggregated values and W_O (arXiv 2605.06611, section 5)."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import InputError


class HeadNorm(nn.Module):
    """``z / RMS(z) * gain`` for each head, ``RMS(z) = sqrt(mean(z ** 2) + eps)`` over the last axis, in float32.

    Args:
        d_head: size of a head.
        n_heads: number of query heads, each with a gain of its own, as in the released code; None is one gain that all
            heads share, as in the paper's text.
        eps: added to the mean square.
        device: of the gain.
        dtype: of the gain.
    """

    def __init__(
        self,
        d_head: int,
        n_heads: int | None = None,
        *,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        shape = (d_head,) if n_heads is None else (n_heads, d_head)
        self.gain = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))

    def forward(self, z: Float[Tensor, "... head d_head"]) -> Float[Tensor, "... head d_head"]:
        """Return the normed values of each head, in the type of ``z`` if the gain has that type.

        Raises:
            InputError: the last axes are not those of the gain, such as heads before positions.
        """
        if z.shape[-self.gain.ndim :] != self.gain.shape:
            raise InputError(
                f"z has the shape {tuple(z.shape)} and the gain {tuple(self.gain.shape)}; need head and d_head as the "
                "last axes of z: transpose or unflatten it"
            )
        return head_norm(z, self.gain, eps=self.eps)

    def extra_repr(self) -> str:
        heads = "shared gain" if self.gain.ndim == 1 else f"n_heads={len(self.gain)}"
        return f"d_head={self.gain.shape[-1]}, {heads}, eps={self.eps:g}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.gain.fill_(1.0)

    @torch.no_grad()
    def set_gain(self, sizes: Float[Tensor, " value"]) -> None:
        """Set each head's gain to its entry of ``sizes``; set a gain that heads share to their mean.

        There may be fewer sizes than heads, as there are value heads: then as many heads in a row have one size.

        Raises:
            InputError: the number of sizes does not divide that of the heads.
        """
        if self.gain.ndim == 2 and len(self.gain) % len(sizes):
            raise InputError(
                f"{len(sizes)} sizes for {len(self.gain)} heads; need one for each head or value head"
            )
        sizes = (
            sizes.mean()
            if self.gain.ndim == 1
            else sizes.repeat_interleave(len(self.gain) // len(sizes))[:, None]
        )
        self.gain.copy_(sizes.to(self.gain.dtype).expand_as(self.gain))

    @torch.no_grad()
    def draw_gain(
        self,
        w_v: Float[Tensor, "value d_model"],
        bias: Float[Tensor, " value"] | None = None,
        *,
        draws: int = 1,
    ) -> None:
        """Set the gain to the deviation over d_head of a first token's values, whose input is N(0, 1).

        The first token sees only itself, so the output of its heads is its value. With one draw this is the released
        code of arXiv 2605.06611.

        Args:
            w_v: weight of the value projection, heads side by side along its first axis, as ``nn.Linear`` has it.
            bias: of the value projection.
            draws: random inputs, from torch's generator; the deviation is their mean. More than one make it unbiased.

        Raises:
            InputError: the weight does not have whole heads.
        """
        d_head = self.gain.shape[-1]
        if len(w_v) % d_head:
            raise InputError(
                f"W_V has {len(w_v)} rows and a head {d_head}; need whole heads along axis 0"
            )
        self.set_gain(first_token_std(w_v, bias, d_head=d_head, draws=draws, biased=draws == 1))


def match_gains(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the gain of every ``HeadNorm`` in a model to the root mean square of its input without any such norm.

    Attention then writes as much as it would without the norm when training begins. The start that the paper's code
    draws is the size of the first token's values, which is larger than that of later tokens. A gain for each head gets
    the head's size, a shared gain the mean over heads.

    Args:
        model: with initialised weights; it runs in evaluation mode, without gradients, and is put back.
        batches: what the model is called with, one forward pass each: sequences as long as those of the training, such
            as ``[tokens]``. Random tokens will do.

    Raises:
        InputError: the model has no ``HeadNorm``, or one that no pass reached.
    """
    for norm, sizes in z_rms_without_norm(model, batches).items():
        norm.set_gain(sizes)


@torch.no_grad()
def z_rms_without_norm(
    model: nn.Module, batches: Iterable[Tensor], **options: Any
) -> dict[HeadNorm, Tensor]:
    """Return for every ``HeadNorm`` of a model the root mean square of each head's input, while none of them norms.

    ``options`` go to the model with each batch. The model runs in evaluation mode, without gradients, and is put back.

    Raises:
        InputError: the model has no ``HeadNorm``, or one that no pass reached.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, HeadNorm)}
    if not names:
        raise InputError(
            f"{type(model).__name__} has no HeadNorm; need one between attention and W_O of each layer"
        )
    squares: dict[HeadNorm, Tensor] = {}
    n_rows = dict.fromkeys(names, 0)

    def pass_on(norm: HeadNorm, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        z = inputs[0] if inputs[0].ndim > 2 else inputs[0][None]
        of_heads = z.float().square().mean((*range(1, z.ndim - 2), -1)).sum(0).cpu().double()
        squares[norm] = squares.get(norm, 0.0) + of_heads
        n_rows[norm] += len(z)
        return inputs[0]

    modes = {module: module.training for module in model.modules()}
    handles = [norm.register_forward_hook(pass_on) for norm in names]
    try:
        model.eval()
        for batch in batches:
            model(batch, **options)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    if unreached := [name for norm, name in names.items() if norm not in squares]:
        raise InputError(
            f"no pass reached {unreached[0]}; need batches that run through every layer of the model"
        )
    return {norm: (squares[norm] / n_rows[norm]).sqrt().float() for norm in names}


@torch.no_grad()
def first_token_std(
    w_v: Float[Tensor, "value d_model"],
    bias: Float[Tensor, " value"] | None,
    *,
    d_head: int,
    draws: int,
    biased: bool,
) -> Float[Tensor, " kv_head"]:
    """Return the standard deviation over d_head of each value head at a first token whose input is N(0, 1).

    It is a mean over ``draws`` inputs. ``biased`` divides by d_head instead of d_head - 1.
    """
    inputs = torch.randn(draws, w_v.shape[1], device=w_v.device, dtype=torch.float32)
    values = nn.functional.linear(inputs, w_v.float(), None if bias is None else bias.float())
    return values.unflatten(-1, (-1, d_head)).std(-1, correction=0 if biased else 1).mean(0)


def head_norm(
    z: Float[Tensor, "... d_head"], gamma: Tensor, *, eps: float
) -> Float[Tensor, "... d_head"]:
    """Compute ``z / RMS(z) * gamma`` over the last axis, as ``HeadNorm`` says."""
    found: Tensor = _Norm.apply(z, gamma, eps)
    return found


class _Norm(torch.autograd.Function):
    """``head_norm`` with a hand-written gradient, which takes half the time of autograd's and stores only ``z``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor, gamma: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = z.float()
        return gamma * (wide * _inverse_rms(wide, eps)).to(z.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        z, gamma, ctx.eps = inputs
        ctx.save_for_backward(z, gamma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        z, gamma = ctx.saved_tensors
        wide = z.float()
        inverse = _inverse_rms(wide, ctx.eps)
        normed = wide * inverse
        by_element = grad * normed
        along = (by_element * gamma).mean(-1, keepdim=True)
        to_z = torch.addcmul(grad * gamma, normed, along, value=-1) * inverse
        return to_z.to(z.dtype), by_element.sum_to_size(gamma.shape).to(gamma.dtype), None


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
