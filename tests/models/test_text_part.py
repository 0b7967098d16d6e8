"""A model that reads images too is measured as the language model within it."""

import pytest
import torch
from rounding import assert_rows_close
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from sink_lens.models.families import TEXT_PART
from sink_lens.models.header import read_folder_header
from sink_lens.models.load import load, random_init, wrap
from tests.tiny_families import config_of

IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "patch_size": 4}
QWEN = {"depth": 1, "out_hidden_size": 48, "num_position_embeddings": 16}
CASES = {
    "gemma3": (Gemma3ForConditionalGeneration, Gemma3Config, {"image_size": 28, "patch_size": 14}),
    "gemma4": (
        Gemma4ForConditionalGeneration,
        Gemma4Config,
        {"num_key_value_heads": 2, "head_dim": 8},
    ),
    "qwen3_5": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, QWEN),
    "qwen3_5_moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, QWEN),
}
"""Family -> the class of the whole model, that of its configuration, and the sizes of the part that reads images."""
GEMMA = {
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 299},
    "gemma4": {"audio_config": None},
}
HYBRIDS = (Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration)
BY_LAYER = (*HYBRIDS, Gemma4ForConditionalGeneration)


@pytest.fixture(scope="module", params=CASES)
def whole(request):
    model, config, images = CASES[request.param]
    images = IMAGES | images | ({"num_hidden_layers": 1} if request.param in GEMMA else {})
    text = config_of(request.param, pad_token_id=0).to_dict()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(
            config(text_config=text, vision_config=images, **GEMMA.get(request.param, {}))
        ).eval()


@pytest.fixture(scope="module")
def saved(whole, tmp_path_factory):
    """Its folder, with the weights for several tokens at once that Qwen 3.5 is published with."""
    folder = tmp_path_factory.mktemp("whole")
    whole.save_pretrained(folder)
    if isinstance(whole, HYBRIDS):
        file = folder / "model.safetensors"
        save_file(
            load_file(file) | {"mtp.norm.weight": torch.zeros(16)}, file, metadata={"format": "pt"}
        )
    return folder


@torch.no_grad()
def test_the_language_model_gives_its_logits_and_shares_its_parameters(whole, saved):
    name = type(whole).__name__
    tokens = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = whole(tokens).logits
    given, read = wrap(whole), load(saved)
    for lens in (given, read):
        assert type(lens.plain).__name__ == TEXT_PART[name]
        for found in (
            lens.plain(tokens).logits,
            lens.bridge(tokens),
        ):  # other masks: no claim to the last bit
            assert_rows_close(found, expected)
    assert given.plain.get_input_embeddings() is whole.get_input_embeddings()
    assert f"the language model of {name}, which reads images too" in read.notes
    assert type(random_init(read, seed=1).plain) is type(read.plain)


def test_its_header_counts_the_language_model_alone(whole, saved):
    header = read_folder_header(saved)
    if isinstance(whole, BY_LAYER):
        assert header is None  # the headers do not say how layers differ
        return
    assert header is not None
    assert header.architecture == TEXT_PART[type(whole).__name__]
    assert header.n_weights == sum(one.numel() for one in wrap(whole).plain.parameters())
