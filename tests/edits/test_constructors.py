"""An edit of the bridge is the same edit of the raw Hugging Face model, on every family and at every site."""

import functools
import itertools

import pytest
import torch
from mlps import UNGATED
from rounding import assert_moved, assert_rows_close

from sink_lens.edits.constructors import (
    EditError,
    add,
    clamp,
    edit,
    freeze,
    resample,
    scale,
    set_value,
    zero,
)
from sink_lens.engine.forward import run_with
from sink_lens.models.sites import SITES, sites_of
from sink_lens.models.tiny import VOCAB_SIZE
from tests.tiny_families import TINY_FAMILIES

BATCH, LENGTH, LAYER = 2, 18, 1
NO_GATE = ("gate", "up")
GROUPED = tuple(family for family in TINY_FAMILIES if family not in UNGATED)
CASES = [
    (family, site)
    for family in TINY_FAMILIES
    for site in SITES
    # test_hybrids.py, test_latent.py and test_gemma4.py edit them
    if site not in ("mixer_out", "q_latent", "kv_latent", "per_layer_out")
    # the neurons of experts are no module of the raw model: tests/models/test_experts.py edits them
    and not (family == "gpt_oss" and site in (*NO_GATE, "neurons"))
    and not (family in UNGATED and site == "gate")
]
MAKE = {
    "zero": lambda site, values, where: zero(site, **where),
    "set_value": lambda site, values, where: set_value(site, 0.7, **where),
    "add": lambda site, values, where: add(site, 0.3, factor=-2.0, **where),
    "scale": lambda site, values, where: scale(site, -1.5, **where),
    "clamp": lambda site, values, where: clamp(site, low=-0.05, high=0.1, **where),
    "frozen": lambda site, values, where: freeze(site, values, **where),
    "resample": lambda site, values, where: resample(
        site, values, generator=torch.Generator(), **where
    ),
    "edit": lambda site, values, where: edit(site, lambda x, at: x.flip(-1) + 0.5 * x, **where),
}
BY_HAND = {
    "zero": lambda x, values: 0 * x,
    "set_value": lambda x, values: 0 * x + 0.7,
    "add": lambda x, values: x - 0.6,
    "scale": lambda x, values: -1.5 * x,
    "clamp": lambda x, values: torch.where(x > 0.1, 0.1, torch.where(x < -0.05, -0.05, x)),
    "frozen": lambda x, values: values,
    "resample": lambda x, values: values[[1, 0]],  # of two sequences, each gets the other's
    "edit": lambda x, values: (
        torch.stack([x[..., -1 - last] for last in range(x.shape[-1])], -1) + 0.5 * x
    ),
}


def tokens(batch=BATCH):
    return torch.randint(3, VOCAB_SIZE, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def logits(lens, edits=(), ids=None, **options):
    ids = tokens() if ids is None else ids
    return run_with(lens, ids, edits, layers=[0], logits=True, loss=False, **options).logits


@functools.cache
def unedited(lens, batch=BATCH):
    return run_with(lens, tokens(batch), sites=sites_of(lens.family), logits=True)


def captured(lens, site, **drawn):
    return {
        layer: tensor
        for (name, layer), tensor in unedited(lens, **drawn).tensors.items()
        if name == site
    }


def part(family, site, number=0):
    """A layer and chosen indices of each axis, out of order; another part for every number from 0 to 6.

    In scores and pattern, queries and keys are taken within the past and the window.
    """
    per_layer = SITES[site].per_layer
    places = [[9, 6], [10, 7], [8]][number // 3] if per_layer else [2 * number + 1, 2 * number]
    chosen = {
        "position": ("positions", places),
        "query": ("positions", places),
        "key": ("keys", [5, 3, 4]),
        "head": ("heads", [3, 1]),
        "kv_head": ("heads", [1] if family in GROUPED else [3, 1]),
    }
    return number % 3 if per_layer else 0, [
        chosen.get(axis, ("units", [7, 0, 10])) for axis in SITES[site].axes.split()[1:]
    ]


def both(family, site, name, number):
    """One constructor's edit, and the same change by hand as ``raw_run`` takes it."""
    layer, chosen = part(family, site, number)
    indices = [one for _, one in chosen]
    values = torch.randn(BATCH, *map(len, indices), generator=torch.Generator().manual_seed(number))

    def change(view):
        places = list(itertools.product(*indices))
        old = torch.stack([view[(slice(None), *place)] for place in places], -1).view(values.shape)
        new = BY_HAND[name](old, values).flatten(1)
        for column, place in enumerate(places):
            view[(slice(None), *place)] = new[:, column]

    return MAKE[name](site, {layer: values}, {"layers": [layer], **dict(chosen)}), (
        site,
        layer,
        change,
    )


@pytest.mark.parametrize(("family", "site"), CASES)
def test_all_constructors_at_once_are_the_same_edits_of_the_raw_model(
    lens_of, raw_run, family, site
):
    edits, changes = zip(
        *(both(family, site, name, number) for number, name in enumerate(MAKE)), strict=True
    )
    # One that changes nothing would warn, and a warning is an error here.
    found = logits(lens_of(family), edits)
    assert_rows_close(found, raw_run(family, tokens(), changes))
    for number, name in enumerate(MAKE):
        assert_moved(found, logits(lens_of(family), [*edits[:number], *edits[number + 1 :]]), name)


@pytest.mark.parametrize(("family", "site"), CASES)
def test_a_self_patch_brings_back_every_bit(lens_of, family, site):
    """Noise, then the model's own values on top: what is written is what goes on."""
    lens = lens_of(family)
    noise = edit(site, lambda x, at: torch.where(x < -1e30, x, x + 0.3 * x.flip(1)))
    assert torch.equal(
        logits(lens, [noise, freeze(site, captured(lens, site))]), unedited(lens).logits
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_nothing_is_changed_in_place(lens_of, family):
    """Tensors read before an edit, frozen values, the weights and the next run stay as they are."""
    lens = lens_of(family)
    baseline = unedited(lens).logits
    kept = []

    def look(site):
        def change(x, at):
            kept.append((x, x.clone()))
            return x.clone() + 0.1

        return edit(site, change, layers=[LAYER], whole_batch=True)

    names = [
        site
        for name, site in CASES
        if name == family and SITES[site].per_layer and not SITES[site].observed
    ]
    values = {site: captured(lens, site)[LAYER] + 1 for site in names}
    copies = {site: tensor.clone() for site, tensor in values.items()}
    logits(
        lens,
        [
            one
            for site in names
            for one in (look(site), freeze(site, {LAYER: values[site]}), look(site))
        ],
    )
    assert len(kept) == 2 * len(names)
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)
    assert all(torch.equal(values[site], copies[site]) for site in names)
    assert torch.equal(logits(lens), baseline)


def test_edits_of_one_site_are_applied_in_the_order_given(lens_of, raw_run):
    double, one = (
        scale("mlp_out", 2.0, layers=[LAYER]),
        edit("mlp_out", lambda x, at: x + 1, layers=[LAYER]),
    )

    found = [logits(lens_of("llama"), edits) for edits in ([double, one], [one, double])]
    for own, change in zip(
        found, (lambda view: view.mul_(2).add_(1), lambda view: view.add_(1).mul_(2)), strict=True
    ):
        assert_rows_close(own, raw_run("llama", tokens(), [("mlp_out", LAYER, change)]))
    assert_moved(*found)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.parametrize(("first", "then"), [("z_raw", "z"), ("down_out", "mlp_out"), ("v", "z")])
def test_edits_of_two_sites_are_applied_in_the_order_of_the_layer(lens_of, family, first, then):
    """Also where both sites are one hook, as z_raw and z are without a head norm."""
    add = edit(first, lambda x, at: x + 1, layers=[LAYER])
    nothing = zero(then, layers=[LAYER])
    lens = lens_of(family)
    assert torch.equal(logits(lens, [add, nothing]), logits(lens, nothing))
    assert torch.equal(logits(lens, [nothing, add]), logits(lens, [add, nothing]))


def test_what_an_edit_reads_is_read_after_the_edits_there(lens_of):
    seen = []

    def change(x, at):
        seen.append(at.read.clone())
        return x + 1

    lens = lens_of("llama")
    reader = edit("mlp_out", change, reads="neurons", layers=[LAYER], whole_batch=True)
    logits(lens, [reader, zero("neurons", layers=[LAYER], units=[5])])
    assert torch.equal(seen[0][..., 5], torch.zeros(BATCH, LENGTH))
    own = captured(lens, "neurons")[LAYER]
    assert torch.equal(seen[0][..., :5], own[..., :5])
    logits(
        lens,
        [
            edit("z", change, reads="z_raw", layers=[LAYER], whole_batch=True),
            scale("z_raw", 3.0, layers=[LAYER]),
        ],
    )
    torch.testing.assert_close(seen[1], 3 * captured(lens, "z")[LAYER])  # one hook for both sites


def test_a_change_is_told_where_it_is_made(lens_of):
    seen = []

    def change(x, at):
        seen.append(
            (at.layer, at.sequences, at.n_sequences, at.positions.tolist(), at.valid.sum().item())
        )
        return x + 1

    logits(
        lens_of("gpt2"),
        edit("z", change, layers=[2, 0], positions=[4, 2]),
        ids=tokens(batch=3),
        batch_size=2,
    )
    batches = ((slice(0, 2), 36), (slice(2, 3), 18))
    # once more, the second in the first row
    assert seen.pop(1) == (0, slice(1, 3), *seen[0][2:])
    assert seen == [
        (layer, rows, 3, [4, 2], n_valid) for rows, n_valid in batches for layer in (0, 2)
    ]


@pytest.mark.parametrize(
    ("family", "site"),
    [
        (family, site)
        for family in GROUPED
        for site in ("k", "v")
        if (family, site) != ("olmo2", "k")
    ],
)
def test_a_key_value_head_reaches_the_heads_that_share_it_and_no_other(lens_of, family, site):
    # The norm of OLMo2's keys is over all heads together: there, zeros in one head change the others.
    lens = lens_of(family)
    before = captured(lens, "z")[LAYER]
    after = run_with(lens, tokens(), zero(site, layers=[LAYER], heads=[1]), sites=("z",)).tensors[
        "z", LAYER
    ]
    changed = (after != before).any(-1).any(1).any(0)
    assert changed.tolist() == [False, False, True, True]


@pytest.mark.parametrize("site", ["q", "k", "v"])
@pytest.mark.parametrize("family", ["phi3", "gpt2", "gpt_neox"])
def test_an_edit_of_a_part_of_a_fused_projection_leaves_the_others(lens_of, family, site):
    lens, sites = lens_of(family), ("q", "k", "v")
    before = unedited(lens).tensors
    after = run_with(lens, tokens(), zero(site, layers=[LAYER], heads=[1]), sites=sites).tensors
    for name in sites:
        same = [
            torch.equal(after[name, LAYER][:, :, head], before[name, LAYER][:, :, head])
            for head in range(2)
        ]
        assert same == [True, name != site]
    assert not after[site, LAYER][:, :, 1].any()


def test_resampling_gives_each_sequence_another_ones_values(lens_of):
    lens, ids = lens_of("llama"), tokens(batch=5)
    own = captured(lens, "neurons", batch=5)
    orders = set()
    for seed in range(6):
        drawn = resample("neurons", own, generator=torch.Generator().manual_seed(seed))
        after = run_with(lens, ids, drawn, sites=("neurons",), batch_size=2).tensors["neurons", 0]
        source = [int((own[0] == row).flatten(1).all(1).nonzero()) for row in after]
        assert sorted(source) == list(range(5))
        assert all(one != place for place, one in enumerate(source))
        orders.add(tuple(source))
    assert len(orders) > 1


def test_held_values_types_and_switched_off_gradients_give_the_same_edit(lens_of):
    lens = lens_of("llama")
    mean = captured(lens, "z")[LAYER].mean((0, 1), keepdim=True)
    whole = mean.expand(BATCH, LENGTH, 4, 12)
    assert torch.equal(
        logits(lens, freeze("z", {LAYER: mean})), logits(lens, freeze("z", {LAYER: whole}))
    )
    double = edit("z", lambda x, at: x.double() * 2, layers=[LAYER])
    expected = logits(lens, scale("z", 2.0, layers=[LAYER]))
    assert torch.equal(logits(lens, double), expected)
    with torch.inference_mode():
        found = logits(lens, double)
    assert_rows_close(found, expected)


def test_vectors_of_each_sequence_are_its_own_in_passes_of_any_size(lens_of):
    lens, ids = lens_of("llama"), tokens(batch=4)
    vectors = torch.randn(4, 1, 48, generator=torch.Generator().manual_seed(5))
    together, parts = (
        run_with(lens, ids, add("resid_post", vectors, layers=[0]), logits=True, batch_size=size)
        for size in (4, 2)
    )
    alone = run_with(lens, ids[3:], add("resid_post", vectors[3], layers=[0]), logits=True)
    for found in (together, parts):
        assert torch.allclose(found.logits[3:], alone.logits, atol=1e-5)
    with pytest.raises(
        EditError, match=r"has the shape \(2, 1, 48\), the chosen part \(4, 18, 48\)"
    ):
        run_with(lens, ids, add("resid_post", vectors[:2], layers=[0]), batch_size=2)
