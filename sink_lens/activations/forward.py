"""One forward pass: its tokens are checked, and each tensor is passed to a function as soon as it is computed.

The functions are registered at hook points of the bridge. Its blocks run with Hugging Face's attention inside
(``models.delegation``), so that a fused kernel can compute it; what is read of the attention itself
(``attention.OBSERVED``) then comes from the attention function. A model that can only be measured has no bridge: module
hooks read its plain module.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..data.described import BosCondition, InputConfig
from ..data.tokens import (
    Prompts,
    TokenBatch,
    as_batch,
    begins_with_bos,
    unmasked_padding_text,
)
from ..errors import InputError, KernelError, SiteError
from ..measures.sink_tokens import SAMPLED_QUERIES
from ..models.delegation import attention_component, delegate_attention, stop_pass_after
from ..models.inputs import load_model, make_tokens
from ..models.interfaced import use_attention, watch_attention_inputs
from ..models.lens import LensModel
from ..models.load import ModelLike, as_lens
from ..models.points import has_user_hooks, register_hooks
from ..models.private_apis import kernel_of
from ..models.running import check_unchanged, prepare_pass
from ..models.sites import SITES, bridge_hook_name, read_site
from .attention import OBSERVED, Kernel, Put, Watch, observe_attention

_TOKENS_A_FORWARD = 2048


def resolve(
    model: ModelLike,
    tokens: Prompts | None,
    *,
    config: InputConfig | None = None,
    bos: BosCondition = "auto",
) -> tuple[LensModel, TokenBatch]:
    """Return the model, loaded or wrapped if need be, and its checked tokens; texts begin as ``bos`` says.

    ``config`` says how a model is loaded that is given by name, and describes the tokens if they are None.
    """
    lens = load_model(config) if config and isinstance(model, str | Path) else as_lens(model)
    if tokens is None:
        assert config is not None
        batch = make_tokens(lens, config=config, bos=config.bos)
    else:
        batch = as_batch(tokens, lens.tokenizer, bos=bos)
    if batch.source == "tensor" and lens.tokenizer is not None:
        batch = replace(batch, bos=bool(begins_with_bos(batch, lens.tokenizer).all()))
    unknown = ~batch.valid & (batch.tokens >= lens.d_vocab)  # a pad token of the tokenizer's alone
    if bool(unknown.any()):
        batch = replace(batch, tokens=batch.tokens.masked_fill(unknown, 0))
    check_tokens(lens, batch)
    return lens, batch


def check_tokens(lens: LensModel, batch: TokenBatch) -> None:
    """Refuse sequences that the model cannot take; warn of unmasked padding, and of BOS twice.

    Raises:
        ModelError: the model was changed since it was wrapped.
        InputError: sequences are longer than the model's context, have ids outside its vocabulary, or are rotated
            otherwise alone than in this batch.
    """
    check_unchanged(lens)
    limit = lens.n_context
    if limit is not None and batch.n_positions > limit:
        raise InputError(
            f"the sequences have {batch.n_positions} tokens; {lens.name} takes at most {limit}: use a shorter length"
        )
    switch, shortest = lens.rotation_switch, int(batch.lengths.min())
    if switch is not None and shortest <= switch < batch.n_positions:
        raise InputError(
            f"rows of {batch.n_positions} positions hold a text of {shortest} tokens, and {lens.name} rotates texts of "
            f"up to {switch} otherwise than longer rows (longrope); need texts of one kind in a call, and rows no wider"
        )
    if int(batch.tokens.max()) >= lens.d_vocab:
        raise InputError(
            f"token id {int(batch.tokens.max())} is outside the vocabulary of {lens.d_vocab}; "
            "need tokens from this model's tokenizer"
        )
    if batch.source != "tensor" or lens.tokenizer is None or batch.n_positions < 2:
        return
    if said := unmasked_padding_text(batch, lens.tokenizer):
        warnings.warn(said, stacklevel=4)
    bos: Any = lens.tokenizer.bos_token_id
    first, second = batch.tokens[:, 0], batch.tokens[:, 1]
    if bos is not None and (
        n := int(((first == bos) & (second == bos) & (batch.lengths > 1)).sum())
    ):
        warnings.warn(
            f"{n} of {batch.n_sequences} sequences begin with BOS twice (id {bos}); the second is taken for text. Make "
            "the ids with add_special_tokens=False, or without the BOS of the text or chat template",
            stacklevel=4,
        )


def sequences_per_forward(asked: int | None, n_positions: int) -> int:
    """Return ``asked``; None is as many sequences as have 2,048 positions together, at least one."""
    return max(1, _TOKENS_A_FORWARD // n_positions) if asked is None else asked


def pieces_by_length(
    batch: TokenBatch, *, batch_size: int | None = None
) -> Iterator[tuple[Int[Tensor, " sample"], TokenBatch]]:
    """Yield pieces of a batch, each for one forward pass: the sequences' indices, and their tokens cut to the longest.

    The lengths in a piece are within a factor of 2, and of texts whose query rows are sampled the same, since each
    length has its own rows. A piece has at most ``batch_size`` sequences; None takes as many as have 2,048 positions
    together.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"the batch size is {batch_size}; need at least 1. Give a larger one.")
    lengths = batch.lengths.cpu()
    kinds = lengths.double().log2().ceil().long().where(lengths <= SAMPLED_QUERIES, lengths)
    for kind in kinds.unique().tolist():
        alike = (kinds == kind).nonzero().flatten()
        width = int(lengths[alike].max())
        for where in alike.split(sequences_per_forward(batch_size, width)):
            # no row fits a single token
            longest = max(int(lengths[where].max()), min(2, batch.n_positions))
            yield where, batch[where].cut(longest)


def forward(
    lens: LensModel,
    part: TokenBatch,
    *,
    wanted: Mapping[int, frozenset[str]],
    put: Put,
    keys: tuple[int, ...] = (),
    rows: Tensor | None = None,
    kernel: Kernel | None,
    plain: bool = False,
) -> None:
    """Run the model up to the last layer that is read, without its unembedding, and pass what is read to ``put``.

    ``wanted`` is layer -> sites and observed names; the final norm's output is at layer ``n_layers``. ``keys`` are
    positions for ``mass`` and ``key_scores``, ``rows`` those of queries. A ``kernel`` of None keeps the model's own
    attention. ``plain`` runs the plain module even where there is a bridge.

    Raises:
        KernelError: a hook of the user's is at the scores or the pattern, which this pass does not make.
    """
    last = max(wanted, default=0)
    at_sites = [
        (layer, name) for layer, names in wanted.items() for name in sorted(names - set(OBSERVED))
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(prepare_pass(lens))
        if plain or lens.why_measured_only is not None:
            model, layers = lens.plain, lens.layers
            for layer, name in at_sites:
                stack.enter_context(_read_plain_site(lens, layer, name, part=part, put=put))
        else:
            at_attention = [attention_component(lens, layer) for layer in lens.attention_layers]
            for point in (
                point for one in at_attention for point in (one.hook_attn_scores, one.hook_pattern)
            ):
                if has_user_hooks(point):
                    raise KernelError(
                        f"a hook stands at {point.name}, and this pass makes no scores or pattern; remove it, or read "
                        "the run with lens.bridge.run_with_hooks and reading.fwd_hooks(lens)"
                    )
            model = stack.enter_context(delegate_attention(lens, layers=range(last + 1)))
            layers = lens.bridge.blocks
            stack.enter_context(
                register_hooks(lens, [_site_hook(lens, *place, put=put) for place in at_sites])
            )
        if kernel is not None:
            watch = Watch(
                kernel=kernel,
                names=lambda layer: wanted.get(layer, frozenset()) & frozenset(OBSERVED),
                keys=keys,
                rows=rows,
                put=put,
                own=lens.own_attention,
            )
            stack.enter_context(observe_attention(model, watch=watch))
        elif model is not lens.plain:
            stack.enter_context(use_attention(model, kernel_of(lens.plain.config)))
        stack.enter_context(torch.no_grad())
        if last < lens.n_layers:
            stack.enter_context(stop_pass_after(layers[last]))
        model.base_model(input_ids=part.tokens.to(lens.device), use_cache=False)


def bridge_forward(
    lens: LensModel, part: TokenBatch, *, wanted: Mapping[int, frozenset[str]], put: Put
) -> None:
    """Run the sequences on the bridge with its own attention, and pass each site of ``wanted`` to ``put``.

    The logits of one position are computed, or none if the pass can end before.
    """
    hooks: list[Any] = [
        _site_hook(lens, layer, name, put=put)
        for layer, names in wanted.items()
        for name in sorted(names)
    ]
    end = 1 + max(wanted, default=0)
    ends: dict[str, Any] = {"stop_at_layer": end} if end < lens.n_layers else {}
    # Gemma 4 computes its last layers at the kept positions alone
    if not ends and not lens.family.shared_keys:
        ends = {"logits_to_keep": 1}
    with prepare_pass(lens), torch.no_grad():
        lens.bridge.run_with_hooks(
            part.tokens.to(lens.device), fwd_hooks=hooks, use_cache=False, **ends
        )


def never_fired_error(names: Iterable[str], *, layer: int, lens: LensModel) -> SiteError:
    return SiteError(
        f"the hook point of {', '.join(sorted(names))} did not fire in layer {layer} of {lens.name}, so that nothing "
        "was read there; need a site that this model's forward goes through"
    )


def _site_hook(
    lens: LensModel, layer: int, name: str, *, put: Put
) -> tuple[str, Callable[..., None]]:
    point = bridge_hook_name(SITES[name], family=lens.family, layer=layer)
    return point, lambda x, hook: put(layer, name, x)


@contextlib.contextmanager
def _read_plain_site(
    lens: LensModel, layer: int, name: str, *, part: TokenBatch, put: Put
) -> Iterator[None]:
    site = SITES[name]
    family = lens.family_of_layer(layer) if site.per_layer else lens.family
    address = site.address(family)
    assert address is not None  # site_of has refused sites that the family lacks
    module = (lens.layer(layer) if site.per_layer else lens.plain).get_submodule(address.module)
    sizes = lens.head_sizes(layer if site.per_layer else 0)

    def take(tensor: Tensor) -> None:
        found = read_site(tensor, address=address, family=family, batch=part.n_sequences, **sizes)
        put(layer, name, found)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        take(args[0] if args else kwargs["hidden_states"])

    def inside(which: str, tensor: Tensor) -> Tensor:
        if which == address.part:
            put(layer, name, tensor.transpose(1, 2))
        return tensor

    with contextlib.ExitStack() as stack:
        if address.side == "inside":
            stack.enter_context(watch_attention_inputs(module, inside))
        elif address.side == "output":
            stack.callback(module.register_forward_hook(after).remove)
        else:
            # before a hook of the user's, as the bridge's hook points are
            stack.callback(
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove
            )
        yield
