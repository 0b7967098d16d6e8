"""An intervention at a position that some sequences lack: all are cut to the shortest, or the position is refused."""

import pytest
import torch

from sink_lens.chain.setting import setting_of
from sink_lens.data.tokens import from_tensor
from sink_lens.edits.isolation import isolate
from sink_lens.errors import InputError


def test_every_sequence_counts_at_positions_that_all_have(planted_at, config):
    place = planted_at()
    lengths = torch.full((place.tokens.n_sequences,), 20)
    lengths[2] = 15  # one of the three that are intervened on
    unequal = from_tensor(place.tokens.tokens, lengths=lengths)
    found, cut = (
        setting_of(place.lens, one, location=place.location, config=config) for one in (unequal, place.tokens.cut(15))
    )
    assert torch.equal(found.tokens.tokens, cut.tokens.tokens)
    assert (found.tokens.lengths == 15).all()
    one, other = (setting.run([isolate([setting.target_position])], loss=True) for setting in (found, cut))
    assert one.mass.shape[1] == 3
    assert torch.equal(one.mass, other.mass)
    assert one.mass.isfinite().all()
    with pytest.raises(InputError, match="the target position is 14; need one from 1 to 13"):
        setting_of(place.lens, unequal, location=place.location, config=config, target_position=14)
