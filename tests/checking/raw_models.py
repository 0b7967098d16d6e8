"""Fixtures for edits, engine and patching: tiny models, and edits of the raw model made by torch alone."""

import functools

import lenses
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from sink_lens.models.families import family_of, head_sizes
from sink_lens.models.sites import SITES, read_site
from sink_lens.models.tiny import planted, tiny_tokenizer
from tests.tiny_families import tiny


@functools.cache
def _raw_of(family):
    return tiny(family, attn_implementation="eager")


@pytest.fixture(scope="session")
def lens_of():
    """The builder of each family's ``LensModel``, built once."""
    return lenses.lens_of


@pytest.fixture(scope="session")
def raw_of():
    """The builder of each family's eager Hugging Face model: the weights of the lens, no storage shared with it."""
    return _raw_of


@pytest.fixture(scope="session")
def planted_folder(tmp_path_factory):
    """A folder with the planted model and its tokenizer, to be read."""
    path = tmp_path_factory.mktemp("planted") / "model"
    planted().model.save_pretrained(path)
    tiny_tokenizer(adds_bos=True).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def raw_run():
    """``raw_run(family, tokens, changes, model=None)``: logits of the Hugging Face model under changes by hand."""
    return raw_logits


@torch.no_grad()
def raw_logits(family, tokens, changes=(), *, model=None, lens=None):
    """The raw model's logits; ``changes`` are (site, layer, function), the function writing into its argument.

    With a ``lens`` they are those of its plain module, in which layers may differ.
    """
    model = lens.plain if lens else _raw_of(family) if model is None else model
    handles, inside = [], {}
    for site, layer, change in changes:
        row = lens.family_of_layer(layer) if lens else family_of(type(model).__name__)
        address = SITES[site].address(row)
        if SITES[site].observed or address.side == "inside":
            inside.setdefault((site, layer), []).append(change)
        else:
            sizes = (
                lens.head_sizes(layer)
                if lens
                else head_sizes(model.config, family=row, layer=layer)
            )
            handles.append(
                _listen(
                    model, row, site, layer, change, address=address, batch=len(tokens), sizes=sizes
                )
            )
    before = model.config._attn_implementation
    if inside:
        AttentionInterface.register("written_out", functools.partial(_attention, inside=inside))
        AttentionMaskInterface.register("written_out", eager_mask)
        model.config._attn_implementation = "written_out"
    try:
        return model(tokens, use_cache=False).logits
    finally:
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()


def _listen(model, row, site, layer, change, *, address, batch, sizes):
    """A torch hook that writes into a copy of what the site's submodule takes or gives."""

    def changed(tensor):
        if address.scale != 1:  # the site is no view of the module's tensor
            change(scaled := tensor * address.scale)
            return scaled / address.scale
        tensor = tensor.clone()
        change(
            read_site(tensor, address=address, family=row, batch=batch, **sizes)
        )  # a view: written into the whole
        return tensor

    def after(module, args, output):
        return (changed(output[0]), *output[1:]) if isinstance(output, tuple) else changed(output)

    def before(module, args, kwargs):
        if args:
            return (changed(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": changed(kwargs["hidden_states"])}

    root = model.get_submodule(row.layers)[layer] if SITES[site].per_layer else model
    module = root.get_submodule(address.module)
    if address.side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


def _attention(
    module,
    query,
    key,
    value,
    mask,
    scaling,
    softcap=None,
    s_aux=None,
    weighting=None,
    alibi=None,
    *,
    inside,
    **rest,
):
    """Eager attention written out, with the changes of what has no module where they belong."""

    def changed(site, tensor):
        for change in inside.get((site, module.layer_idx), ()):
            change(tensor)
        return tensor

    query, key, value = (
        changed(site, one.transpose(1, 2).clone()).transpose(1, 2)
        for site, one in (("q", query), ("k", key), ("v", value))
    )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi is not None:
        scores = scores + alibi[:, None, None] * torch.arange(scores.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = (
        scores.masked_fill(~mask, torch.finfo().min) if mask.dtype == torch.bool else scores + mask
    )
    scores = changed("scores", scores)
    if weighting == "sigmoid":
        pattern = scores.sigmoid()
    elif s_aux is None:
        pattern = scores.softmax(-1)
    else:
        learned = s_aux[None, :, None, None].expand(*scores.shape[:3], 1)
        joined = torch.cat([scores, learned], dim=-1)
        pattern = (joined - joined.max(-1, keepdim=True).values).softmax(-1)[..., :-1]
    return (changed("pattern", pattern) @ value).transpose(1, 2).contiguous(), None
