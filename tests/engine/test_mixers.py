"""Mixers in passes over cells: up to a cell's first position the state is the baseline run's, of its own sequence."""

import itertools

import pytest
import torch
from cell_fixtures import numbers
from lenses import lens_of

from sink_lens.data.tokens import from_tensor
from sink_lens.edits.constructors import scale
from sink_lens.edits.metrics import evaluate, loss, norm, sink_mass
from sink_lens.engine import mixers
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.generation import generate
from sink_lens.engine.layout import Layout
from sink_lens.engine.partial_pass import Pass, Visit, partial_pass
from sink_lens.engine.plan import Plan
from sink_lens.errors import SiteError
from sink_lens.models.running import prepare_passes
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import HYBRID_FAMILIES

EVERY = pytest.mark.parametrize("family", HYBRID_FAMILIES)
RIGHT = mixers._run_mixer
CHUNK = 64
"""Positions that transformers computes at once in a gated delta rule; of Mamba 2 the tiny models' own field says 8."""
GATED_DELTA = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")


def tokens_of(length=21):
    return torch.randint(3, VOCAB_SIZE, (3, length), generator=torch.Generator().manual_seed(3))


def furthest(family):
    """The largest deviation of a cell from its pass of the bridge, in units of the metric's size.

    The text is longer than a chunk, and cells begin within the first chunk and with the second.
    """
    length, places, read = (
        (CHUNK + 5, (0, 7, 8, CHUNK), CHUNK + 2) if family in GATED_DELTA else (21, (0, 7, 8), 18)
    )
    tokens, lens = tokens_of(length), lens_of(family)
    last = min(3, lens.n_layers - 1)
    metrics = (loss(), sink_mass(2, layers=[last]), norm(read, layer=last))
    parts = itertools.product(("resid_pre", "mixer_out", "mlp_out"), (0, 2), places)
    edits = [
        scale(site, 10.0, layers=[layer], positions=[position]) for site, layer, position in parts
    ]
    cells = [cell_of_edits(edit) for edit in edits]
    engine = Engine(
        lens, from_tensor(tokens), cells, metrics, plan=Plan(path="blocks", prompts=3, pack=4)
    )
    found, off = numbers(engine), 0.0
    for place, edit in enumerate(edits):
        outcome = run_with(
            lens, tokens, edit, positions=(2, read), sites=("resid_post",), quiet=True
        )
        for metric in metrics:
            slow = evaluate(metric, outcome).double()
            off = max(
                off,
                float(((found[place, metric.name] - slow).abs() / slow.abs().clamp(min=1)).max()),
            )
    return off


def of_another_sequence(*args, held, place, **options):
    """A cell's sequences get each other's state."""
    held = {where: tuple(one.roll(1, 0) for one in tensors) for where, tensors in held.items()}
    return RIGHT(*args, held=held, place=place, **options)


def nothing_before(*args, held, place, **options):
    """The state at a cell's first position is empty."""
    return RIGHT(
        *args,
        held={place: tuple(map(torch.zeros_like, held.get(place, ())))},
        place=place,
        **options,
    )


def of_an_edited_run(*args, held, place, layout, **options):
    """What is held of the baseline run becomes that of the cells before."""
    if place not in held or layout.is_whole:
        return RIGHT(*args, held=held, place=place, layout=layout, **options)
    kept = {}
    out = RIGHT(*args, held=held, place=place, layout=layout, **options | {"keep": kept})
    held[place][0].copy_(kept[place][0][-len(held[place][0]) :])
    return out


@pytest.mark.filterwarnings("ignore:the edit:UserWarning")
@pytest.mark.parametrize("mistake", [of_another_sequence, nothing_before, of_an_edited_run])
def test_no_planted_mistake_of_the_state_passes(mistake, monkeypatch):
    monkeypatch.setattr(mixers, "_run_mixer", mistake)
    assert furthest("qwen3_5") >= 1e-3


@pytest.mark.filterwarnings("ignore:the edit:UserWarning")
@EVERY
def test_a_cell_that_begins_anywhere_in_a_chunk_is_a_whole_pass(family):
    assert furthest(family) <= 1e-5


@EVERY
def test_an_edit_changes_nothing_before_its_position(family):
    lens, sites = lens_of(family), ("resid_post",)
    edit = scale("mixer_out", 3.0, layers=[0], positions=[9])
    clean, edited = (run_with(lens, tokens_of(), edits, sites=sites) for edits in ((), edit))
    for layer in range(lens.n_layers):
        before, after = (run.tensors["resid_post", layer] for run in (clean, edited))
        assert torch.equal(before[:, :9], after[:, :9])
        assert not torch.equal(before[:, 9:], after[:, 9:])
    assert not torch.equal(before[:, 12:], after[:, 12:])  # the state carries it


@EVERY
def test_a_cached_generation_is_that_of_whole_passes(family):
    edit = scale("mixer_out", 1.5, layers=[0])
    found = generate(lens_of(family), [5, 9, 17, 40, 8], edit, max_new_tokens=4)
    ids = torch.tensor([[5, 9, 17, 40, 8, *found.ids]])  # each is the likeliest behind those before
    assert run_with(lens_of(family), ids, edit, logits=True).logits[0, 4:-1].argmax(
        -1
    ).tolist() == list(found.ids)


def test_a_layer_that_lacks_a_site_is_refused():
    lens = lens_of("qwen3_5")
    with pytest.raises(
        SiteError, match=r"layers 0,2 of .* have no attention .*, so no 'z'; need one of .* 1,3"
    ):
        run_with(lens, tokens_of(), scale("z", 2.0, layers=[0]))
    with pytest.raises(SiteError, match=r"have 'mixer_out'; need one of 0,2"):
        run_with(lens, tokens_of(), scale("mixer_out", 2.0, layers=[1]))
    everywhere = run_with(lens, tokens_of(), scale("z", 2.0), logits=True).logits
    where_it_is = run_with(lens, tokens_of(), scale("z", 2.0, layers=[1, 3]), logits=True).logits
    assert torch.equal(everywhere, where_it_is)


@EVERY
def test_one_position_computed_alone_has_the_state_of_the_baseline_before_it(family):
    """A layer with a mixer, at one position, from a stream that is changed there: as in a pass over all positions."""
    lens, position, layer = lens_of(family), 9, 2
    held, queries = {}, {}
    whole, one = (
        Layout(n_sequences=3, n_positions=21, begins=(where,), alone=where > 0)
        for where in (0, position)
    )
    stream = run_with(lens, tokens_of(), sites=["resid_pre"]).tensors["resid_pre", layer]
    change = torch.zeros_like(stream)
    change[:, position] = torch.randn(3, lens.d_model, generator=torch.Generator().manual_seed(5))
    found = []
    with prepare_passes(lens), torch.no_grad():
        everything = Pass(layout=whole, first=0, last=lens.n_layers, keep=held, queries=queries)
        partial_pass(lens, tokens_of(), everything)
        for layout in (whole, one):
            visits = {("resid_post", layer): Visit(readers=[(0, found.append)])}
            options = {"held": held, "queries": queries} if layout is one else {}
            ends = {
                "first": layer,
                "last": layer + 1,
                "stream": layout.values_by_row(stream + change),
            }
            partial_pass(lens, tokens_of(), Pass(layout=layout, visits=visits, **ends, **options))
    torch.testing.assert_close(found[1][:, 0], found[0][:, position], atol=1e-4, rtol=1e-5)
