"""What a patch would cost, by the headers of a model's files and the tokens that differ."""

from dataclasses import replace

import pytest
from lenses import speaking

from sink_lens.data.tokens import from_prompts
from sink_lens.errors import InputError
from sink_lens.estimate import Sizes
from sink_lens.models.bundled import read_header
from sink_lens.patching.config import PatchConfig
from sink_lens.patching.passes import _BESIDE, count_patch_passes

PAIR = ["--clean", "the cat and the", "--corrupted", "the bat and the"]


def test_passes_are_counted_from_the_files_and_from_the_first_token_that_differs(tmp_path):
    lens = speaking()
    lens.plain.save_pretrained(tmp_path / "model")
    lens.tokenizer.save_pretrained(tmp_path / "model")
    clean, corrupted = (
        from_prompts([text], lens.tokenizer).tokens[0].tolist() for text in PAIR[1::2]
    )
    (first,) = [
        place
        for place, (one, other) in enumerate(zip(clean, corrupted, strict=True))
        if one != other
    ]
    header = read_header(tmp_path / "model")
    n, length, body, vocab = lens.n_layers, len(clean), header.n_body, header.n_vocab
    assert 0 < first < length - 1
    asked = PatchConfig(clean=PAIR[1:2], corrupted=PAIR[3:4], metric="loss")
    sizes = Sizes(header=header, files=tmp_path / "model")
    (made,) = count_patch_passes(asked, sizes).parts
    # a patch at layer L runs n - L layers and the unembedding; controls at other positions are cells of the sweep
    by_hand = (length - first) * sum(
        ((n - layer) / n * body + vocab) / (body + vocab) for layer in range(n)
    )
    assert (made.forwards, made.tokens) == (pytest.approx(_BESIDE + by_hand), length)
    near = replace(
        asked, metric="norm", metric_layers=(0,), layers=(0,), positions=(length - 1,), controls=0
    )
    assert count_patch_passes(near, sizes).parts[0].forwards == pytest.approx(
        _BESIDE + 1 / n * body / (body + vocab)
    )
    with pytest.raises(
        InputError, match=r"sequence 0 has . clean and . corrupted tokens; need the same number"
    ):
        count_patch_passes(replace(asked, clean=("the cat",)), sizes)
    with pytest.raises(InputError, match="norm is read at one layer"):
        count_patch_passes(replace(asked, metric="norm"), sizes)
