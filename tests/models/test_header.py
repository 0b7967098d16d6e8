"""The headers of a folder say what the model is, so that what it cannot do is refused before its weights are read."""

import pytest

from sink_lens.models.header import axis_sizes, read_folder_header
from sink_lens.models.load import wrap
from sink_lens.models.sites import sites_of
from tests.tiny_families import MORE_FAMILIES, TINY_FAMILIES, tiny

SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_context")
REPRESENTATIVES = ("llama", "gpt2", "gpt_neox", "phi3", "gemma3", "bloom")
FAMILIES = [
    one if one in REPRESENTATIVES else pytest.param(one, marks=pytest.mark.exhaustive)
    for one in (*TINY_FAMILIES, *MORE_FAMILIES)
]


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_have_the_sizes_and_the_sites_of_the_model(family, tmp_path):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    header = read_folder_header(tmp_path)
    if header is None:  # experts, or a mixer: the headers do not say it all
        return
    lens = wrap(model)
    assert {name: getattr(header, name) for name in SIZES} == {
        name: getattr(lens, name) for name in SIZES
    }
    assert sites_of(header.family) == sites_of(lens.family)
    assert header.family.architecture == lens.family.architecture
    for axes in (
        "batch position head d_head",
        "batch position kv_head d_head",
        "batch position d_mlp",
    ):
        assert axis_sizes(header, axes, n_positions=5) == lens.axis_sizes(axes, n_positions=5)
    if family != "apertus":  # whose activations have constants in the files
        assert header.n_weights == model.num_parameters()
    assert header.n_vocab == model.get_input_embeddings().weight.numel()
    ends = {
        id(one): one.numel()
        for one in model.parameters()
        if one.shape == (lens.d_vocab, lens.d_model)
    }
    assert header.n_body == header.n_weights - sum(ends.values())
