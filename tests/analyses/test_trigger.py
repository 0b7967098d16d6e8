"""The trigger task by loops."""

import torch

from analyses.trigger import FIRST, TRIGGER, trigger_rows


def test_the_answer_is_the_mean_of_what_was_before_the_trigger_and_nothing_elsewhere():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(20, 5, generator=generator)
    tokens, answers = trigger_rows(vectors, sequences=50, length=12, generator=generator)
    assert (tokens[:, 0] == FIRST).all()
    assert ((tokens == TRIGGER).sum(1) == 1).all()
    for row, answer in zip(tokens.tolist(), answers, strict=True):
        at = row.index(TRIGGER)
        assert (answer[[place for place in range(12) if place != at]] == 0).all()
        before = [vectors[token] for token in row[1:at]]
        torch.testing.assert_close(answer[at], torch.stack(before).mean(0), rtol=1e-5, atol=1e-6)
    assert set(tokens[:, 1:].unique().tolist()) == set(range(1, 20))
