"""Attention mass without the pattern, against the eager attention of Hugging Face."""

import functools
import math

import pytest
import torch
from lenses import lens_of as lens
from rounding import assert_rows_close

from sink_lens.activations import attention
from sink_lens.activations.attention import OBSERVED, choose_kernel
from sink_lens.activations.record import Reading, capture, stream
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import KernelError
from sink_lens.models.families import family_of
from sink_lens.models.load import wrap
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import (
    BY_LAYER_FAMILIES,
    LATENT_FAMILIES,
    MORE_FAMILIES,
    TINY_FAMILIES,
    tiny,
)

LENGTH = 27  # over three windows of 8, and no multiple of anything
KEYS = tuple(range(LENGTH))
ALL_FAMILIES = (*TINY_FAMILIES, *MORE_FAMILIES, *BY_LAYER_FAMILIES, *LATENT_FAMILIES)
FUSED = tuple(
    family
    for family in ALL_FAMILIES
    if family not in ("gemma2", "vaultgemma", "headnorm_sigmoid", "bloom")
)
OWN_EAGER = ("gemma2", "vaultgemma", "gpt_oss", "gptj", "gpt_neo", "bloom")


def tokens(batch=2, length=LENGTH):
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(1))


@functools.cache
@torch.no_grad()
def eager_patterns(family, length=LENGTH):
    """The attentions that Hugging Face returns: [batch, head, query, key] a layer."""
    return tiny(family, attn_implementation="eager")(
        tokens(length=length), output_attentions=True
    ).attentions


def eager_masses(family, length=LENGTH):
    """Attention to each key under eager attention; for sigmoid attention as a share of the row's sum."""
    patterns = eager_patterns(family, length)
    return (
        [pattern / pattern.sum(-1, keepdim=True) for pattern in patterns]
        if "sigmoid" in family
        else patterns
    )


def keep(*names):
    return [
        Reading(name=name, sites=(name,), function=lambda view, name=name: view[name])
        for name in names
    ]


def read(family, *names, kernel="auto", ids=None, **options):
    return stream(
        lens(family), tokens() if ids is None else ids, keep(*names), kernel=kernel, **options
    )


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("kernel", ["auto", "eager"])
def test_the_mass_on_every_key_is_that_of_eager_attention(family, kernel):
    found = read(family, "mass", kernel=kernel, keys=KEYS)
    assert found.kernel == ("fused" if kernel == "auto" and family in FUSED else "eager")
    for layer, pattern in enumerate(eager_masses(family)):
        assert found["mass", layer].dtype == torch.float32
        torch.testing.assert_close(found["mass", layer], pattern, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_mass_is_right_past_one_block_of_rows(family):
    assert attention._BLOCK < 200
    for kernel in ("auto", "eager"):
        found = read(family, "mass", kernel=kernel, ids=tokens(length=200), keys=(0, 150))
        for layer, pattern in enumerate(eager_masses(family, 200)):
            torch.testing.assert_close(
                found["mass", layer], pattern[..., [0, 150]], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_rows_and_pattern_are_the_eager_pattern(family):
    rows = torch.tensor([0, 3, 20, LENGTH - 1])
    found = read(family, "rows", "pattern", rows=rows)
    for layer, pattern in enumerate(eager_patterns(family)):
        torch.testing.assert_close(found["pattern", layer], pattern, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["rows", layer], pattern[:, :, rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_scores_are_those_of_the_bridge_and_key_scores_their_columns(family):
    found = read(family, "scores", "key_scores", keys=(0, 5))
    bridge = capture(lens(family), tokens(), sites=["scores"], path="bridge")
    lowest = torch.finfo(torch.float32).min
    for layer in range(3):
        expected = bridge["scores", layer]
        blocked = expected <= lowest / 2
        assert torch.equal(found["scores", layer] == lowest, blocked)
        wanted, keys = expected.masked_fill(blocked, 0), [0, 5]
        scores = found["scores", layer].masked_fill(blocked, 0)
        assert_rows_close(scores.flatten(2), wanted.flatten(2))  # a row is a head
        columns = found["key_scores", layer]
        assert torch.equal(columns <= lowest / 2, blocked[..., keys])
        assert_rows_close(
            columns.masked_fill(blocked[..., keys], 0).flatten(2), wanted[..., keys].flatten(2)
        )


@pytest.mark.parametrize("family", FUSED)
def test_rotated_queries_and_keys_multiply_to_the_scores(family):
    found = read(family, "rotated_q", "rotated_k", "scores")
    for layer in range(3):
        query, key = found["rotated_q", layer], found["rotated_k", layer]
        sizes = lens(family).head_sizes(layer)
        assert key.shape == (2, sizes["n_kv_heads"], LENGTH, sizes["d_head"])
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        seen = found["scores", layer] > -1e30
        torch.testing.assert_close((query @ key.mT)[seen], found["scores", layer][seen])


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_an_observed_pass_gives_the_stream_of_the_models_own_attention(family):
    own, observed = read(family, "resid_post"), read(family, "resid_post", "mass")
    assert own.kernel == ("eager" if family in OWN_EAGER else "sdpa")
    for layer in range(3):
        assert_rows_close(observed["resid_post", layer], own["resid_post", layer])


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_right_padding_changes_nothing_at_real_positions(family):
    lengths = torch.tensor([LENGTH, 13, 2])
    ids = tokens(3)
    padded = ids.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0)
    rows = torch.tensor([1, 12, LENGTH - 1])
    together = read(
        family, "mass", "rows", ids=from_tensor(padded, lengths=lengths), rows=rows, keys=(0, 1)
    )
    for index, length in enumerate(lengths.tolist()):
        real = rows[rows < length]
        alone = read(
            family, "mass", "rows", ids=ids[index : index + 1, :length], rows=real, keys=(0, 1)
        )
        for layer in range(3):
            mass, row = together["mass", layer][index], together["rows", layer][index]
            torch.testing.assert_close(mass[:, :length], alone["mass", layer][0], atol=1e-5, rtol=0)
            torch.testing.assert_close(
                row[:, : len(real), :length], alone["rows", layer][0], atol=1e-5, rtol=0
            )
            assert (row[:, : len(real), length:] == 0).all()


def test_half_precision_is_close_to_the_pattern_of_the_same_tensors():
    model = wrap(tiny("llama").to(torch.bfloat16))
    found = stream(model, tokens(), keep("mass", "rotated_q", "rotated_k"), keys=KEYS)
    assert found.kernel == "fused"
    query, key = (
        found["rotated_q", 0].float(),
        found["rotated_k", 0].float().repeat_interleave(2, dim=1),
    )
    pattern = (
        (query @ key.mT)
        .masked_fill(~torch.ones(LENGTH, LENGTH).bool().tril(), -math.inf)
        .softmax(-1)
    )
    assert found["mass", 0].dtype == torch.float32
    torch.testing.assert_close(found["mass", 0], pattern, atol=2e-2, rtol=0)


def test_a_fused_kernel_is_refused_where_scores_are_capped_or_the_device_gives_no_log_sum_exp():
    with pytest.raises(
        KernelError, match=r"Gemma2ForCausalLM caps its attention scores.*kernel='eager'"
    ):
        read("gemma2", "mass", kernel="fused")
    family, device = family_of("LlamaForCausalLM"), torch.device("mps")
    with pytest.raises(KernelError, match=r"'mps' gives no log-sum-exp.*kernel='eager'"):
        choose_kernel(family, device=device, asked="fused")
    assert choose_kernel(family, device=device) == "eager"
    assert choose_kernel(family, device=torch.device("cuda")) == "fused"


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (lambda output, lse: (output, lse + 0.01), "is off by 1.0e-02"),
        (lambda output, lse: (output * 1.01, lse), "is off by"),
        (lambda output, lse: (output, lse * math.nan), "is off by nan"),
    ],
)
def test_a_fused_kernel_that_lies_is_found(monkeypatch, lie, text):
    honest = attention._fused_attention
    monkeypatch.setattr(
        attention, "_fused_attention", lambda *args, **options: lie(*honest(*args, **options))
    )
    attention._check_fused_kernel.cache_clear()
    with pytest.raises(
        KernelError, match=rf"the fused kernel on cpu in torch.float32 .*{text}.*kernel='eager'"
    ):
        read("llama", "mass")
    attention._check_fused_kernel.cache_clear()
    assert lens("llama").plain.config._attn_implementation == "sdpa"


def test_a_fused_kernel_that_does_not_take_the_heads_is_found(monkeypatch):
    def fused(*args, **options):
        raise RuntimeError("head_dim should be a multiple of 8\nat kernel.cu")

    monkeypatch.setattr(attention, "_fused_attention", fused)
    attention._check_fused_kernel.cache_clear()
    with pytest.raises(
        KernelError,
        match=r"does not take torch.float32 with heads of 12 \(head_dim should be a .*8\)",
    ):
        read("llama", "mass")
    attention._check_fused_kernel.cache_clear()


@pytest.mark.parametrize("length", [1, 16, 27])
def test_the_rows_of_an_aligned_mask_begin_at_multiples_of_16(length):
    mask = torch.randn(2, 1, length, length, generator=torch.Generator().manual_seed(0))
    aligned = attention._align_rows(mask)
    assert torch.equal(aligned, mask)
    assert all(stride % 16 == 0 for stride in aligned.stride()[:-1])


def test_every_observed_name_can_be_read():
    found = read("llama", *OBSERVED, rows=torch.tensor([5]))
    assert {name: found[name, 0].shape[1:] for name in OBSERVED} == {
        "mass": (4, LENGTH, 1), "key_scores": (4, LENGTH, 1), "rows": (4, 1, LENGTH), "rotated_q": (4, LENGTH, 12),
        "rotated_k": (2, LENGTH, 12), "scores": (4, LENGTH, LENGTH), "pattern": (4, LENGTH, LENGTH),
    }  # fmt: skip
