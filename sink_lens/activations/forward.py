"""One forward pass of either path; each tensor is passed to a function as soon as it is computed."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.tokens import TokenBatch
from ..errors import InputError
from ..models.evaluating import evaluating
from ..models.lens import LensModel
from ..models.sites import SITES, Address, bridge_hook, read
from .attention import OBSERVED, Kernel, Put, Watch, observed


class _FinishedError(Exception):
    """Raised to end a forward pass after the last layer that is needed."""


def check_tokens(lens: LensModel, batch: TokenBatch) -> None:
    """Refuse sequences that the model cannot take.

    Raises:
        InputError: the sequences are longer than the model's context, or have ids outside its vocabulary.
    """
    limit = lens.n_context
    if limit is not None and batch.n_positions > limit:
        raise InputError(
            f"the sequences have {batch.n_positions} tokens; {lens.name} takes at most {limit}: use a shorter length"
        )
    if int(batch.tokens.max()) >= lens.d_vocab:
        raise InputError(
            f"token id {int(batch.tokens.max())} is outside the vocabulary of {lens.d_vocab}; "
            "need tokens from this model's tokenizer"
        )


def plain_forward(
    lens: LensModel,
    part: TokenBatch,
    *,
    plan: Mapping[int, frozenset[str]],
    put: Put,
    keys: tuple[int, ...] = (),
    rows: Tensor | None = None,
    kernel: Kernel | None,
) -> None:
    """Run the plain model without its unembedding, up to the last layer of the plan.

    Args:
        lens: the model; dropout is off during the pass.
        part: the sequences of this pass.
        plan: layer -> sites and observed names to read; the final norm's output is at layer ``n_layers``.
        put: called with layer, name and tensor.
        keys: key positions for ``mass`` and ``key_scores``.
        rows: query positions for ``rows``.
        kernel: kernel of the observed attention; None keeps the model's own attention.
    """
    with contextlib.ExitStack() as stack:
        for layer, names in plan.items():
            for name in sorted(names - set(OBSERVED)):
                site = SITES[name]
                address = site.address(lens.family)
                assert address is not None  # site_of has refused sites that the family lacks
                root = lens.layer(layer) if site.per_layer else lens.plain
                take = partial(_take, lens=lens, address=address, place=(layer, name), part=part, put=put)
                handle = _listen(root.get_submodule(address.module), address=address, take=take)
                stack.callback(handle.remove)
        last = max(plan, default=0)
        if last < lens.n_layers:
            stack.callback(lens.layer(last).register_forward_hook(_finish).remove)
        if kernel is not None:
            watch = Watch(
                kernel=kernel,
                names=lambda layer: plan.get(layer, frozenset()) & frozenset(OBSERVED),
                keys=keys,
                rows=rows,
                put=put,
            )
            stack.enter_context(observed(lens.plain, watch=watch))
        stack.enter_context(evaluating(lens.plain))
        stack.enter_context(torch.no_grad())
        stack.enter_context(contextlib.suppress(_FinishedError))
        lens.plain.base_model(input_ids=part.tokens.to(lens.device), use_cache=False)


def bridge_forward(lens: LensModel, part: TokenBatch, *, wanted: Mapping[int, frozenset[str]], put: Put) -> None:
    """Run the bridge once and pass its tensors to ``put``."""
    hooks = []
    for layer, names in wanted.items():
        for name in sorted(names):
            hook_name = bridge_hook(SITES[name], family=lens.family, layer=layer)
            hooks.append((hook_name, partial(_keep, place=(layer, name), put=put)))
    with evaluating(lens.bridge), torch.no_grad():
        lens.bridge.run_with_hooks(part.tokens.to(lens.device), fwd_hooks=hooks, use_cache=False)


def _finish(module: nn.Module, args: Any, output: Any) -> None:
    raise _FinishedError


def _take(
    tensor: Tensor, *, lens: LensModel, address: Address, place: tuple[int, str], part: TokenBatch, put: Put
) -> None:
    sizes = {"n_heads": lens.n_heads, "n_kv_heads": lens.n_kv_heads, "d_head": lens.d_head}
    put(*place, read(tensor, address=address, family=lens.family, batch=part.n_sequences, **sizes))


def _listen(module: nn.Module, *, address: Address, take: Callable[[Tensor], None]) -> Any:
    if address.side == "output":

        def after(module: nn.Module, args: Any, output: Any) -> None:
            take(output[0] if isinstance(output, tuple) else output)

        return module.register_forward_hook(after)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _keep(tensor: Tensor, hook: object, *, place: tuple[int, str], put: Put) -> None:
    put(*place, tensor)
