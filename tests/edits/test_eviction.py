"""Which keys a cache that evicts still shows, by hand and against a list that evicts."""

import caches
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from sink_lens.edits.constructors import EditError
from sink_lens.edits.eviction import visible_keys, window
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from tests.tiny_families import tiny

TOKENS = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(0))


@given(data=st.data(), length=st.integers(2, 14))
@settings(max_examples=60, deadline=None)
def test_the_mask_is_a_list_that_evicts(data, length):
    kept = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    size = data.draw(st.integers(sum(kept) + 1, length + 2))
    seen = visible_keys(torch.tensor([kept]), size=size)[0]
    cache: list[int] = []
    for token in range(length):
        cache.append(token)
        if len(cache) > size:
            cache.remove(next(one for one in cache if not kept[one]))
        assert seen[token].nonzero().flatten().tolist() == cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
def test_the_edit_hides_what_left_the_cache(family):
    lens = wrap(tiny(family))
    pattern, clean = (
        run_with(lens, TOKENS, edits, layers=[0], sites=["pattern"], loss=False).tensors[
            "pattern", 0
        ]
        for edits in (window(5, keep=2), ())
    )
    seen = visible_keys((torch.arange(16) < 2).expand(2, 16), size=5)[:, None]
    assert torch.equal(pattern > 0, (clean > 0) & seen)  # its own window holds too


def logits_of_a_real_cache(model, tokens, kept, *, size):
    """Logits of generating token by token, where entries of the cache that it evicts are cut out."""
    rows = []
    for row, keep in zip(tokens, kept, strict=True):
        cache, held, found = DynamicCache(config=model.config), [], []
        for token in range(len(row)):
            if len(held) == size:
                leaving = next(at for at, one in enumerate(held) if not keep[one])
                for layer in cache.layers:
                    stay = [at for at in range(size) if at != leaving]
                    layer.keys, layer.values = layer.keys[:, :, stay], layer.values[:, :, stay]
                del held[leaving]
            held.append(token)
            where = {
                "position_ids": torch.tensor([[token]]),
                "attention_mask": torch.zeros(1, 1, 1, len(held)),
            }
            with torch.no_grad():
                logits, _ = caches.run(model, row[None, token, None], cache, **where)
            found.append(logits[0, -1])
        rows.append(torch.stack(found))
    return torch.stack(rows)


INNER = torch.zeros(2, 16, dtype=torch.bool)
INNER[0, [0, 4]] = True
INNER[1, 2] = True


@pytest.mark.parametrize("keep", [0, 3, INNER], ids=["nothing", "first", "inner"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_the_edit_gives_the_logits_of_a_real_cache(family, keep):
    model = tiny(family)
    found = run_with(wrap(model), TOKENS, window(7, keep=keep), layers=[0], logits=True).logits
    kept = (torch.arange(16) < keep).expand(2, 16) if isinstance(keep, int) else keep
    assert torch.allclose(found, logits_of_a_real_cache(model, TOKENS, kept, size=7), atol=1e-5)


def test_a_cache_that_holds_everything_changes_no_bit():
    lens = wrap(tiny("llama"))
    clean = run_with(lens, TOKENS, layers=[0], logits=True).logits
    assert torch.equal(
        run_with(lens, TOKENS, window(16), layers=[0], logits=True, quiet=True).logits, clean
    )


def test_caches_too_small_and_tokens_of_other_sequences_are_refused():
    with pytest.raises(InputError, match="a cache of 2 tokens cannot keep 2 of them"):
        window(2, keep=2)
    with pytest.raises(InputError, match="a cache of 1 tokens cannot keep 1"):
        window(1, keep=torch.tensor([[True, False]]))
    wrong = torch.zeros(1, 16, dtype=torch.bool)
    with pytest.raises(EditError, match=r"shape \(1, 16\) and the run has 2 sequences"):
        run_with(wrap(tiny("llama")), TOKENS, window(4, keep=wrong), layers=[0])
