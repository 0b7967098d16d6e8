"""Attention to what followed the same token earlier."""

import math

import pytest
import torch
from lenses import lens_of
from transformer_lens import head_detector

from sink_lens.activations.record import capture
from sink_lens.measures.heads import induction

ROWS = torch.tensor([[1.0, 0, 0, 0, 0], [0.6, 0.4, 0, 0, 0], [0.1, 0.7, 0.2, 0, 0], [0.2, 0.5, 0.1, 0.2, 0],
                     [0.3, 0.1, 0.25, 0.15, 0.2]])  # fmt: skip
VALID = torch.ones(1, 5, dtype=torch.bool)


def test_induction_by_hand():
    # a b c a b: query 3 (a) after a at 0 -> key 1: 0.5; query 4 (b) after b at 1 -> key 2: 0.25
    tokens = torch.tensor([[7, 8, 9, 7, 8]])
    assert induction(ROWS[None, None], tokens=tokens, valid=VALID).item() == pytest.approx(0.375)
    # a a a: query 1 -> key 1: 0.4; query 2 -> keys 1 and 2: 0.7 + 0.2
    tokens = torch.tensor([[7, 7, 7, 8, 9]])
    assert induction(ROWS[None, None], tokens=tokens, valid=VALID).item() == pytest.approx(
        (0.4 + 0.9) / 2
    )
    unlike = induction(ROWS[None, None], tokens=torch.arange(5)[None], valid=VALID)
    assert math.isnan(unlike.item())
    padded = induction(
        ROWS[None, None], tokens=torch.tensor([[7, 8, 9, 7, 7]]), valid=torch.arange(5)[None] < 4
    )
    assert padded.item() == pytest.approx(0.5)


def test_the_score_is_that_of_transformer_lens_s_detector():
    """Its score is a share of all attention: the mean over all queries, with 0 for those that have no such key."""
    lens = lens_of()
    half = torch.randint(3, 300, (1, 8), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([half, half], dim=1)
    wanted = head_detector.get_induction_head_detection_pattern(tokens)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    captured = capture(lens, tokens, sites=["pattern"])
    for layer in range(lens.n_layers):
        ours = (
            induction(captured["pattern", layer], tokens=tokens, valid=valid)[0]
            * wanted.any(-1).sum()
            / 16
        )
        theirs = [
            head_detector.compute_head_attention_similarity_score(
                one, wanted, exclude_bos=False, exclude_current_token=False, error_measure="mul"
            )
            for one in captured["pattern", layer][0]
        ]
        assert ours.tolist() == pytest.approx(theirs, abs=1e-6)
