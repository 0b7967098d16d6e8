"""Which keys a cache that evicts still shows, by hand and against a list that evicts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sink_lens.edits.constructors import EditError
from sink_lens.edits.eviction import first_tokens, seen_keys, window
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny

TOKENS = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(0))


def test_a_cache_of_three_that_keeps_the_first_token():
    seen = seen_keys(first_tokens(1, sequences=1, length=5), size=3)[0]
    assert seen.long().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0],  # token 1 has left
        [1, 0, 0, 1, 1],
    ]


@given(data=st.data(), length=st.integers(2, 14))
@settings(max_examples=60, deadline=None)
def test_the_mask_is_a_list_that_evicts(data, length):
    kept = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    size = data.draw(st.integers(sum(kept) + 1, length + 2))
    seen = seen_keys(torch.tensor([kept]), size=size)[0]
    cache: list[int] = []
    for token in range(length):
        cache.append(token)
        if len(cache) > size:
            cache.remove(next(one for one in cache if not kept[one]))
        assert seen[token].nonzero().flatten().tolist() == cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_the_edit_hides_what_left_the_cache(family):
    lens = wrap(tiny(family))
    found = run_with(lens, TOKENS, window(5, keep=2), layers=[0], sites=["pattern"], loss=False)
    pattern, clean = found.tensors["pattern", 0], run_with(lens, TOKENS, layers=[0], sites=["pattern"], loss=False)
    seen = seen_keys(first_tokens(2, sequences=2, length=16), size=5)[:, None]
    assert float(pattern.masked_fill(seen, 0).abs().max()) == 0
    assert torch.equal((pattern > 0) & seen, (clean.tensors["pattern", 0] > 0) & seen)  # its own window holds too


def test_a_cache_that_holds_everything_changes_no_bit():
    lens = wrap(tiny("llama"))
    clean = run_with(lens, TOKENS, layers=[0], logits=True).logits
    assert torch.equal(run_with(lens, TOKENS, window(16), layers=[0], logits=True, quiet=True).logits, clean)


def test_caches_too_small_and_tokens_of_other_sequences_are_refused():
    with pytest.raises(InputError, match="a cache of 2 tokens cannot keep 2 of them"):
        window(2, keep=2)
    with pytest.raises(InputError, match="a cache of 1 tokens cannot keep 1"):
        seen_keys(torch.tensor([[True, False]]), size=1)
    wrong = torch.zeros(1, 16, dtype=torch.bool)
    with pytest.raises(EditError, match=r"shape \(1, 16\) and the run has 2 sequences"):
        run_with(wrap(tiny("llama")), TOKENS, window(4, keep=wrong), layers=[0])
