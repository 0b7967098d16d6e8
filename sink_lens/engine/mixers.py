"""Mixers in a pass over cells: linear attention, Mamba and convolutions, which carry a state from position to position.

What is kept of the baseline run is not the state but the mixer's input: continuing from a state is wrong in
transformers' own code of several families. A cell's rows are laid back into whole sequences, whose earlier positions
are the baseline's inputs; the mixer runs from position 0, and the rows are taken out again.
"""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from ..models.interfaced import replace_forward
from ..models.lens import LensModel
from .layout import Layout

Place = int | tuple[str, int]
"""A layer, whose keys and values are held; or ("mixer", layer), whose mixer's input is."""
Held = Mapping[Place, tuple[Tensor, ...]]
Kept = dict[Place, tuple[Tensor, ...]]

_OF_ROWS = ("attention_mask", "position_ids", "seq_idx")
"""Arguments that say something of the rows of a pass, and nothing of whole sequences."""


def mix_whole_sequences(
    lens: LensModel, layer: int, *, layout: Layout, held: Held, keep: Kept | None
) -> contextlib.AbstractContextManager[None]:
    """Within the block, a layer's mixer (its part in place of attention) runs over whole sequences.

    At positions that no cell computes it gets the baseline's inputs, from ``held``; ``keep`` takes those of this pass.
    """
    component: Any = lens.bridge.blocks[layer].original_component.get_submodule(lens.family.mixer)
    mix = partial(
        _run_mixer,
        forward=component.forward,
        layout=layout,
        held=held,
        keep=keep,
        place=("mixer", layer),
    )
    return replace_forward(component, mix)


def _run_mixer(
    *args: Any,
    forward: Callable[..., Any],
    layout: Layout,
    held: Held,
    keep: Kept | None,
    place: tuple[str, int],
    **kwargs: Any,
) -> Any:
    x: Float[Tensor, "1 row d_model"] = args[0] if args else kwargs.pop("hidden_states")
    sequences, positions, _ = layout.row_places(x.device)
    if layout.is_whole:
        whole = x[0].unflatten(0, (-1, layout.n_positions))
    else:
        (before,) = held[place]
        whole = before.to(x.device).repeat(len(layout.begins), 1, 1)
        whole[sequences, positions] = x[0]
    if keep is not None:
        keep[place] = (whole,)
    out = forward(whole, *args[1:], **kwargs | {name: None for name in _OF_ROWS if name in kwargs})
    first: Tensor = out[0] if isinstance(out, tuple) else out
    rows = first[sequences, positions][None]
    return (rows, *out[1:]) if isinstance(out, tuple) else rows
