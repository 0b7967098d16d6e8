"""The fingerprints that SeedPrint is compared with, against their definitions and against renumbered models."""

import copy

import numpy as np
import pytest
import torch

from analyses.fingerprint_baselines import (
    cka,
    intrinsic_correlation,
    invariant_cosine,
    parameter_cosine,
)
from sink_lens import wrap
from tests.tiny_families import tiny

IDS = range(3, 40)


def model(family="llama", *, seed=0, **fields):
    return wrap(tiny(family, seed=seed, **fields), name=f"{family}-{seed}")


def changed(lens, change):
    other = copy.deepcopy(lens.plain)
    with torch.no_grad():
        change(other)
    return wrap(other, name="changed")


def renumbered(module):
    """The neurons of every MLP in another order: the same function."""
    for layer in module.model.layers:
        order = torch.randperm(
            layer.mlp.up_proj.out_features, generator=torch.Generator().manual_seed(0)
        )
        for one in (layer.mlp.up_proj, layer.mlp.gate_proj):
            one.weight.copy_(one.weight[order])
        layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order])


def test_cka_is_the_alignment_of_centred_gram_matrices():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 4)), rng.standard_normal((30, 7)) + 3
    centre = np.eye(30) - 1 / 30
    of_x, of_y = (centre @ (one @ one.T) @ centre for one in (x, y))
    expected = (of_x * of_y).sum() / np.sqrt((of_x * of_x).sum() * (of_y * of_y).sum())
    assert cka(x, y) == pytest.approx(expected, rel=1e-12)


def test_the_cosine_of_the_parameters_leaves_embeddings_out():
    first, second = (model(seed=seed, tie_word_embeddings=False) for seed in (0, 1))
    other = changed(
        first, lambda one: (one.model.embed_tokens.weight.normal_(), one.lm_head.weight.normal_())
    )
    assert parameter_cosine(first, other) == pytest.approx(1, abs=1e-12)
    flat = [
        torch.cat(
            [
                v.flatten().double()
                for k, v in one.plain.state_dict().items()
                if "embed" not in k and "head" not in k
            ]
        )
        for one in (first, second)
    ]
    assert parameter_cosine(first, second) == pytest.approx(
        torch.cosine_similarity(*flat, dim=0).item(), rel=1e-9
    )


def test_only_the_invariant_products_survive_renumbered_neurons():
    first = model()
    other = changed(first, renumbered)
    assert invariant_cosine(first, other, ids=IDS) == pytest.approx(1, abs=1e-9)
    assert parameter_cosine(first, other) < 0.99


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_invariant_products_are_those_of_the_whole_matrices(family):
    """With the matrices as Hugging Face has them, keys and values repeated for the heads that share them."""
    a, b = model(family), model(family, seed=1)
    x, y = (torch.cat([whole(one, layer).flatten() for layer in (-2, -1)]) for one in (a, b))
    expected = float(x @ y / (x.norm() * y.norm()))
    assert invariant_cosine(a, b, ids=IDS) == pytest.approx(expected, abs=1e-9)


def whole(lens, layer):
    """The three products of one layer; rows are inputs, as in ``x @ W``."""
    plain = lens.plain
    if lens.family.q == "q_proj":
        embedded, block = plain.model.embed_tokens.weight[list(IDS)], plain.model.layers[layer]
        q, k, v, o, up, down = (
            block.get_submodule(name).weight.T.double()
            for name in (
                *(f"self_attn.{letter}_proj" for letter in "qkvo"),
                "mlp.up_proj",
                "mlp.down_proj",
            )
        )
        times = q.shape[1] // k.shape[1]
        k, v = (
            one.reshape(len(one), -1, lens.d_head).repeat_interleave(times, dim=1).flatten(1)
            for one in (k, v)
        )
    else:
        embedded, block = plain.transformer.wte.weight[list(IDS)], plain.transformer.h[layer]
        q, k, v = block.attn.c_attn.weight.double().chunk(3, dim=1)
        o, up, down = (
            one.weight.double() for one in (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        )
    e = embedded.double()
    return torch.stack([e @ q @ k.T @ e.T, e @ v @ o @ e.T, e @ up @ down @ e.T]).detach()


def scaled(lens, factors):
    def change(module):
        for layer, factor in zip(module.model.layers, factors, strict=True):
            for name in "qkvo":
                layer.self_attn.get_submodule(f"{name}_proj").weight.mul_(factor)

    return changed(lens, change)


def test_the_intrinsic_fingerprint_is_the_course_of_deviations_along_the_layers():
    rising, falling = [1.0, 2.0, 3.0, 5.0], [5.0, 3.0, 2.0, 1.0]
    first, second = (model(seed=seed, num_hidden_layers=4) for seed in (0, 1))
    up, again, down = scaled(first, rising), scaled(second, rising), scaled(first, falling)
    assert intrinsic_correlation(up, up) == pytest.approx(1)
    assert intrinsic_correlation(up, again) > 0.9  # other weights, the same course
    assert intrinsic_correlation(up, down) < -0.5
