"""Rules for the backward pass, under which one gradient sees what a plain one misses.

Two operations hide what an edge does from the gradient at the clean run. A norm does not see, to first order, how long
the stream is, so that against zero its largest part is worth nothing; and a softmax that gives one key everything has
no gradient. So, in the backward pass alone,

- the divisor of every norm on the stream is held: n(x) = c(x) / s is linear in c(x);
- a softmax has the slope that it has at temperature 2: dp = 2 d softmax(scores / 2); a sink logit is one of its scores.

Both are GIM's (Edin et al., arXiv 2505.17630). Its third rule, which divides the gradients of products, is left out:
with it, edges of known mechanisms were ranked worse (``docs/zoo.md``). Norms of queries and keys stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine.gradients import keep_tensor
from ..models.lens import LensModel
from ..models.weights import Norm
from .stream import Weights, hook_name_of

TEMPERATURE = 2.0


def rule_hooks(lens: LensModel, weights: Weights) -> list[tuple[str, Callable[..., Any]]]:
    """Return hooks by which the backward pass takes norms' divisors as constant, and smooths attention's softmax."""
    seen: dict[Any, Tensor] = {}
    found: list[tuple[str, Callable[..., Any]]] = []

    def add_rule(before: str, after: str, rule: Callable[..., Tensor], **how: Any) -> None:
        found.append((before, partial(keep_tensor, into=seen, key=before)))
        found.append((after, partial(rule, seen=seen, key=before, **how)))

    norms: dict[str, Norm | None] = {"ln_final": weights.final_norm}
    for layer, own in enumerate(weights.layers):
        norms[f"blocks.{layer}.ln1"] = own.attn_norm
        norms[f"blocks.{layer}.ln2"] = own.mlp_norm  # parallel blocks have one for both readers
        norms[f"blocks.{layer}.ln1_post"] = own.attn_after
        norms[f"blocks.{layer}.ln2_post"] = own.mlp_after
    for name, norm in norms.items():
        if norm is not None and norm.divides and f"{name}.hook_in" in lens.bridge.hook_dict:
            add_rule(f"{name}.hook_in", f"{name}.hook_out", _with_fixed_divisor, norm=norm)
    for layer in () if lens.family.sigmoid else range(lens.n_layers):
        scores, pattern = (hook_name_of(lens, site, layer) for site in ("scores", "pattern"))
        add_rule(scores, pattern, _with_smooth_softmax, sink=lens.family.sink_logit)
    return found


def _with_fixed_divisor(
    out: Tensor, hook: object, *, seen: dict[Any, Tensor], key: Any, norm: Norm
) -> Tensor:
    """Return a norm's output with the gradient of a norm with constant divisor; ``seen[key]``: its input."""
    x = seen[key].to(norm.gain.dtype)
    x = x - x.mean(-1, keepdim=True) if norm.centred else x
    inverse = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt().detach()
    return _replace_gradient(out, (x * inverse * norm.gain).to(out.dtype))


def _with_smooth_softmax(
    pattern: Tensor, hook: object, *, seen: dict[Any, Tensor], key: Any, sink: bool = False
) -> Tensor:
    """Return ``pattern`` with the gradient of the softmax at temperature 2 of its scores, ``seen[key]``.

    A ``sink`` logit, which no hook carries, is the score that gives no key what rows of the pattern lack.
    """
    scores = seen[key].to(torch.promote_types(pattern.dtype, torch.float32))
    n = scores.shape[-1]
    if sink:
        taken = pattern.to(scores.dtype).sum(-1, keepdim=True)
        least = torch.finfo(scores.dtype).eps
        odds = (1 - taken).clamp(min=least).log() - taken.clamp(min=least).log()
        scores = torch.cat([scores, scores.logsumexp(-1, keepdim=True) + odds], dim=-1)
    smooth = TEMPERATURE * torch.softmax(scores / TEMPERATURE, -1)[..., :n]
    return _replace_gradient(pattern, smooth.to(pattern.dtype))


def _replace_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + (gradient - gradient.detach())
