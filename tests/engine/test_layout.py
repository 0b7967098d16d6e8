"""The attention of later queries to a position that is computed alone, in every kind of attention."""

import pytest
import torch
from lenses import lens_of
from rounding import assert_close

from sink_lens.data.tokens import from_tensor
from sink_lens.engine.forward import run_with
from sink_lens.engine.layout import Layout
from sink_lens.engine.partial_pass import Pass, Visit, partial_pass
from sink_lens.measures.attention import row_shares
from sink_lens.models.running import prepare_passes
from sink_lens.models.tiny import VOCAB_SIZE

TOKENS = from_tensor(
    torch.randint(3, VOCAB_SIZE, (3, 21), generator=torch.Generator().manual_seed(2))
)


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("llama", 1),
        ("gpt2", 1),
        ("gemma2", 0),
        ("gemma2", 1),
        ("gpt_oss", 0),
        ("gpt_oss", 1),
        ("bloom", 1),
    ],
)
@pytest.mark.parametrize("position", [0, 9])
def test_it_is_the_column_of_the_whole_pattern(family, layer, position):
    # soft caps, windows, sink logits, ALiBi; two cells, in each of which another stream stands at the position
    lens, held, queries, columns = lens_of(family), {}, {}, {}
    every = Layout(n_sequences=3, n_positions=21, begins=(0,))
    stream = run_with(lens, TOKENS, sites=["resid_pre"]).tensors["resid_pre", layer]
    changed = [stream.clone() for _ in range(2)]
    for one, generator in zip(changed, map(torch.Generator().manual_seed, (5, 6)), strict=True):
        one[:, position] += torch.randn(3, lens.d_model, generator=generator)
    patterns, ends = [], {"first": layer, "last": layer + 1}
    with prepare_passes(lens), torch.no_grad():
        partial_pass(
            lens,
            TOKENS.tokens,
            Pass(layout=every, first=0, last=lens.n_layers, keep=held, queries=queries),
        )
        for one in changed:
            visits = {("pattern", layer): Visit(readers=[(0, patterns.append)])}
            whole = Pass(layout=every, visits=visits, stream=every.values_by_row(one), **ends)
            partial_pass(lens, TOKENS.tokens, whole)
        alone = Layout(n_sequences=3, n_positions=21, begins=(position, position), alone=True)
        rows = torch.cat([one[:, position] for one in changed])[None]
        given = {"held": held, "queries": queries, "columns": columns}
        partial_pass(lens, TOKENS.tokens, Pass(layout=alone, stream=rows, **ends, **given))
    patterns = [row_shares(one) if lens.family.sigmoid else one for one in patterns]
    wanted = torch.cat([one[:, :, position + 1 :, position] for one in patterns])
    assert wanted.std() > 0.01
    assert_close(columns[layer], wanted)
