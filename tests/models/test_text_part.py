"""A model that reads images too is measured as the language model within it."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from sink_lens.models.header import read_folder
from sink_lens.models.load import load, random_init, wrap
from sink_lens.models.tiny import config_of


@pytest.fixture(scope="module")
def whole():
    text = config_of("gemma3").to_dict()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = sizes | {"image_size": 28, "patch_size": 14}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4, image_token_index=299)
        return Gemma3ForConditionalGeneration(config).eval()


@torch.no_grad()
def test_the_language_model_of_gemma3_gives_its_logits_and_shares_its_parameters(whole, tmp_path):
    whole.save_pretrained(tmp_path)
    tokens = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = whole(tokens).logits
    given, read = wrap(whole), load(tmp_path)
    for lens in (given, read):
        assert type(lens.plain).__name__ == "Gemma3ForCausalLM"
        for found in (lens.plain(tokens).logits, lens.bridge(tokens)):  # other masks: no claim to the last bit
            assert ((found - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()
    assert given.plain.get_input_embeddings() is whole.get_input_embeddings()
    assert read.notes == ("the language model of Gemma3ForConditionalGeneration, which reads images too",)
    assert type(random_init(read, seed=1).plain) is type(read.plain)


def test_its_header_counts_the_language_model_alone(whole, tmp_path):
    whole.save_pretrained(tmp_path)
    header = read_folder(tmp_path)
    assert header is not None
    assert header.architecture == "Gemma3ForCausalLM"
    assert header.n_weights == sum(one.numel() for one in wrap(whole).plain.parameters())
