"""The bridge's hook points: functions are put on them, and sites that lack one, or need another tensor, get their own.

Three sites need one: what a hybrid's mixer adds to the stream (``mixer_out``), the queries of a projection that also
gives a gate (``q``), and what attention adds where the layer multiplies it (``attn_out`` of Falcon-H1). A point is
fired behind the component whose output holds the site, and what hooks change is written back into the output.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformer_lens.conversion_utils.conversion_steps.rearrange_tensor_conversion import (
    RearrangeTensorConversion,
)
from transformer_lens.hook_points import HookPoint, LensHandle
from transformer_lens.model_bridge import TransformerBridge

from ..errors import InputError
from .families import head_sizes
from .family import Family
from .lens import LensModel
from .private_apis import n_in_place_changes, register_hook_point
from .running import exclusive_use
from .sites import SITES, Address, read_site

_LIBRARIES = ("transformer_lens", "sink_lens")
"""Packages whose own hook functions may stand on a bridge."""


def add_hook_points(bridge: TransformerBridge, *, family: Family) -> None:
    if not family.sites_with_own_points:
        return
    config: Any = bridge.original_model.config  # type: ignore[union-attr]  # of transformers
    sizes = head_sizes(config, family=family, layer=0)  # the same in all layers of these
    for layer, block in enumerate(bridge.blocks):
        for name in family.sites_with_own_points:
            address = SITES[name].address(family)
            assert address is not None  # of a site that the family has
            whole = block.original_component
            if (
                getattr(whole, address.module.partition(".")[0], None) is None
            ):  # another kind of layer
                continue
            module = whole.get_submodule(address.module)
            point, own = HookPoint(), f"hook_own_{name}"
            point.name = f"blocks.{layer}.{own}"
            point.train(block.training)
            block.add_module(own, point)
            register_hook_point(bridge, point)
            module.register_forward_hook(
                partial(_run_point, point=point, address=address, family=family, sizes=sizes)
            )


def reshape_head_hooks(bridge: TransformerBridge, *, family: Family) -> None:
    """Make the bridge's hooks of queries, keys, values and z show tensors with the axes of our sites.

    TransformerLens orders or splits the axes in another way in latent attention and in models whose layers differ in
    the width of their heads.
    """
    if family.kv_latent is None and not family.own_sizes:
        return
    for block in bridge.blocks:
        by_head = RearrangeTensorConversion(
            "... (head d_value) -> ... head d_value", head=bridge.cfg.n_heads
        )
        block.attn.o.hook_in.hook_conversion = by_head
        if family.kv_latent is not None:
            for point in (block.attn.hook_q, block.attn.hook_k, block.attn.hook_v):
                point.hook_conversion = RearrangeTensorConversion(
                    "batch head position d -> batch position head d"
                )
                point.pos_dim = 1


def _run_point(
    module: nn.Module,
    args: object,
    output: Any,
    *,
    point: HookPoint,
    address: Address,
    family: Family,
    sizes: dict[str, int],
) -> Any:
    """Run a hook point on a site in a module's output; return the output with the hook's edits, if there are any."""
    if not point.has_hooks():
        return None
    whole: Tensor = output[0] if isinstance(output, tuple) else output
    read = partial(read_site, address=address, family=family, batch=len(whole), **sizes)
    old = read(whole)
    version = n_in_place_changes(old)
    new = point(old)
    if new is old and n_in_place_changes(old) == version:
        return None
    if address.part == "whole":
        changed = new / address.scale
    else:
        changed = whole.clone()
        read(changed).copy_(new)
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def _find_hook_point(lens: LensModel, name: str) -> HookPoint:
    found: Any = lens.bridge
    for part in name.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part, None)
    return found if isinstance(found, HookPoint) else lens.bridge.hook_dict[name]


@contextlib.contextmanager
def register_hooks(
    lens: LensModel, hooks: Iterable[tuple[str, Callable[..., Tensor | None]]]
) -> Iterator[None]:
    placed: list[tuple[HookPoint, LensHandle]] = []
    try:
        for name, function in hooks:
            point = _find_hook_point(lens, name)
            placed.append((point, point.add_hook(function)))
        yield
    finally:
        for point, handle in reversed(placed):
            handle.hook.remove()
            point.fwd_hooks.remove(handle)


def check_no_user_hooks(lens: LensModel) -> None:
    """Raise InputError if the user put functions at hook points of the bridge.

    A pass over several cells would give these functions the rows of all cells at once.
    """
    with exclusive_use(lens):  # else another thread's pass has some of its own there
        standing = [name for name, point in lens.bridge.hook_dict.items() if has_user_hooks(point)]
    if standing:
        raise InputError(
            f"a hook stands on the bridge at {standing[0]}, and a forward of several cells would show it the rows of "
            "all of them; remove it, and give its function as an edit: sink_lens.edits.from_hook(name, function)"
        )


def has_user_hooks(point: HookPoint) -> bool:
    """Check whether a hook point has a function that is not of TransformerLens or of ours."""
    handles = (*point.fwd_hooks, *point.bwd_hooks)
    modules = [str(getattr(handle.user_hook, "__module__", "")) for handle in handles]
    return any(module.partition(".")[0] not in _LIBRARIES for module in modules)
