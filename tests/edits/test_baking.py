"""A baked model, saved and read again, does what the edit does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from sink_lens.edits.baking import bake
from sink_lens.edits.constructors import scalar, zero
from sink_lens.engine.forward import run_with
from sink_lens.errors import InputError, SiteError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import TINY_FAMILIES, tiny

TOKENS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", [name for name in TINY_FAMILIES if name != "gpt_oss"])
def test_a_baked_model_read_from_its_folder_is_the_edited_one(family, tmp_path):
    lens = wrap(tiny(family))
    clean = run_with(lens, TOKENS, layers=[0], logits=True).logits
    edits = [
        zero("neurons", layers=[1], units=[3, 7]),
        zero("down_out", layers=[0], units=[5]),
        scalar(lens, layer=2, neurons=[4], dimensions=[9]),
    ]
    wanted = run_with(lens, TOKENS, edits, layers=[0], logits=True).logits
    baked = bake(lens, neurons={1: [3, 7]}, dimensions={0: [5]}, entries={2: [(9, 4)]})
    baked.save_pretrained(tmp_path / "baked")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "baked").eval()
    with torch.no_grad():
        found = again(TOKENS).logits
    assert torch.allclose(found, wanted, atol=1e-4)
    assert not torch.allclose(found, clean, atol=1e-3)
    assert torch.equal(run_with(lens, TOKENS, layers=[0], logits=True).logits, clean)  # the model itself is as it was


def test_what_cannot_be_baked_is_refused():
    lens = wrap(tiny("llama"))
    with pytest.raises(InputError, match="nothing was given to bake"):
        bake(lens, neurons={0: []})
    with pytest.raises(InputError, match="neuron 80 does not exist; need 0 to 79"):
        bake(lens, neurons={0: [80]})
    with pytest.raises(InputError, match="layer 3 does not exist"):
        bake(lens, dimensions={3: [0]})
    with pytest.raises(SiteError):
        bake(wrap(tiny("gpt_oss")), neurons={0: [1]})
