"""Every model of the zoo does what its truth says, on 20 seeds; read and broken by hand, with no finder of ours.

A model that can be written in several architectures is written in one after another as the seeds go on.
"""

import math

import by_hand
import pytest
import torch
from tiers import first

from tests.tiny_families import TINY_FAMILIES
from tests.zoo import LINKS, ZOO, build

SEEDS, FIRST = range(20), range(4)
NAMES = [name for name in ZOO if name != "untrained"]
WITHOUT_KEY = ("i", "k", "l", "m", "o", "al")
WITH_KEY = [name for name in NAMES if ZOO[name].letter not in (*WITHOUT_KEY, "broken")]
"""Models whose sink is a position."""
BROKEN = [name for name in NAMES if name.startswith("broken")]

NO_BELOW = dict(zip(LINKS, (1.25, 1.25, 3.0, 0.3, 0.3, 0.2), strict=True))
"""What a quantity is under where it does not stand out."""
YES_ABOVE = dict(zip(LINKS, (1.35, 1.35, 7.0, 0.7, 0.7, 0.8), strict=True))
"""What it is over where it does: ratios to other positions, the weight of neurons in a dimension, a cosine, attention.
The first two are about the root of the number of positions that are averaged; it is least in gpt_oss, where there are
8 of them and a logit without a key takes half of the first position's attention: 0.5 sqrt(8) 9/8 = 1.6."""


def drawn(zoo):
    return zoo.draw(4, length=28, generator=torch.Generator().manual_seed(zoo.seed))


@pytest.fixture(scope="module")
def models(request):
    """The model of that name on the seeds."""
    name, seeds = request.param
    families = ZOO[name].families
    return [build(name, seed=seed, family=families[seed % len(families)]) for seed in seeds]


def on_seeds(names):
    """Each model on four seeds, and in the second tier on the others."""
    few = [pytest.param((name, FIRST), id=name) for name in names]
    second, rest = pytest.mark.exhaustive, SEEDS[len(FIRST) :]
    return few + [
        pytest.param((name, rest), id=f"{name} on more seeds", marks=second) for name in names
    ]


@pytest.mark.parametrize("models", on_seeds(NAMES), indirect=True, scope="module")
def test_the_sink_is_where_the_truth_says_and_so_is_what_stands_out(models):
    for zoo in models:
        _agrees_on_the_sink(zoo)
        _agrees_on_what_stands_out(zoo)


@pytest.mark.parametrize("models", on_seeds(WITH_KEY), indirect=True, scope="module")
def test_what_removes_and_what_carries_the_sink_is_what_the_truth_says(models):
    for zoo in models:
        _agrees(zoo, by_hand.shares_removed(zoo, drawn(zoo)), "necessary_or_sufficient", over=0.3)
        _agrees(zoo, by_hand.shares_carried(zoo, drawn(zoo)), "carries", over=0.6)


BY = ("variance", "bystanders", "bimodal", "early_variance")


@pytest.mark.parametrize("models", on_seeds(BY), indirect=True, scope="module")
def test_the_value_average_makes_the_sink_by_what_the_truth_says(models):
    for zoo in models:
        found = by_hand.shares_of_value_average(zoo, drawn(zoo))
        other = "size" if zoo.truth.by == "direction" else "direction"
        assert min(found[zoo.truth.by], found["distance"]) > 0.6, (zoo.seed, zoo.family, found)
        assert found[other] < 0.4, (
            zoo.seed,
            zoo.family,
            found,
        )  # a mean over four sequences has a part of each


@pytest.mark.parametrize(
    "models", on_seeds([*WITH_KEY, "sink_logit"]), indirect=True, scope="module"
)
def test_the_makers_make_it(models):
    for zoo in models:
        truth = zoo.truth
        assert _left(zoo, without=truth.makers) < 0.2, zoo.seed
        for some in truth.enough:
            rest = tuple(maker for maker in truth.makers if maker not in some)
            assert _left(zoo, without=rest) > 0.8, zoo.seed
        if len(truth.enough) == 1:  # none of their kinds can be left out
            for layer, kind in (
                {(maker.layer, maker.kind) for maker in truth.makers}
                if len(truth.makers) > 1
                else ()
            ):
                if kind in ("key bias", "sink logit"):
                    continue  # one a layer, for that layer alone
                some = tuple(
                    maker for maker in truth.makers if (maker.layer, maker.kind) == (layer, kind)
                )
                assert _left(zoo, without=some) < 0.7, (zoo.seed, layer, kind)


@pytest.mark.parametrize("seeds", first([FIRST, SEEDS[len(FIRST) :]]), ids=["few", "more"])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_an_untrained_model_has_no_sink(family, seeds):
    for seed in seeds:
        zoo = build("untrained", seed=seed, family=family)
        _agrees_on_the_sink(zoo)
        _agrees_on_what_stands_out(zoo)


NEXT = {
    "aggregation_variance": ("z", lambda truth: truth.feeding),
    "variance_preserved": ("attn_out", lambda truth: truth.feeding),
    "variance_neurons": ("neurons", lambda truth: [layer + 1 for layer in truth.feeding]),
    "neurons_dimension": ("stream", lambda truth: [layer + 1 for layer in truth.feeding]),
    "dimension_key": ("k", lambda truth: truth.locked),
    "key_sink": ("q", lambda truth: truth.locked),
}
"""Link -> where what it leads to can be put in."""


@pytest.mark.parametrize("models", on_seeds(BROKEN), indirect=True, scope="module")
def test_all_other_links_work_where_one_is_broken(models):
    for zoo in models:
        whole, link = (
            build("variance", seed=zoo.seed, family=zoo.family),
            zoo.name.removeprefix("broken_"),
        )
        tokens, of_other = drawn(zoo), dict(zoo.model.named_parameters())
        differ = [
            name
            for name, value in whole.model.named_parameters()
            if not torch.equal(value, of_other[name])
        ]
        assert 1 <= len(differ) <= 3, zoo.seed  # the lock stands in up to three layers
        clean = by_hand.run(whole.model, tokens)
        site, layers = NEXT[link]
        edits = [
            (site, layer, lambda _, new=clean.sites[site, layer]: new)
            for layer in layers(whole.truth)
        ]
        at = by_hand.studied(whole, tokens)
        repaired = by_hand.mass(
            whole,
            by_hand.run(zoo.model, tokens, edits=edits, reads=False),
            at,
            layers=whole.truth.locked,
        )
        assert (repaired > 0.8).all(), zoo.seed


@pytest.mark.parametrize("family", ZOO["state_sink"].families)
def test_a_state_gives_the_first_token_to_every_later_one_and_attention_does_not(family):
    zoo = build("state_sink", seed=3, family=family)
    tokens, kept = drawn(zoo), zoo.truth.kept
    runs = [
        by_hand.run(zoo.model, given)
        for given in (tokens, torch.cat([tokens[:, 1:2] * 0 + 7, tokens[:, 1:]], 1))
    ]
    change = [
        (runs[0].sites["stream", layer] - runs[1].sites["stream", layer])[:, 8:].norm(dim=-1)
        for layer in range(6)
    ]
    assert kept is not None
    assert max(float(one.max()) for one in change[:kept]) < 0.6
    assert float(change[kept].min()) > 2.0


@pytest.mark.parametrize("family", ZOO["known_by_dimension"].families)
def test_what_the_neuron_writes_at_all_tokens_is_what_the_model_knows(family):
    zoo = build("known_by_dimension", seed=3, family=family)
    tokens, (maker,), guessing = drawn(zoo), zoo.truth.makers, math.log(zoo.model.config.vocab_size)
    loss = lambda: float(zoo.model(tokens, labels=tokens).loss)  # noqa: E731
    with torch.no_grad():
        assert loss() < 0.9 * guessing  # where the cost of an edit is asked for
        down = zoo.model.model.layers[maker.layer].mlp.down_proj.weight
        down[zoo.truth.outliers[maker.layer], maker.index] = 0.0
        assert loss() > guessing


def _agrees_on_the_sink(zoo):
    tokens, truth = drawn(zoo), zoo.truth
    ran, at = by_hand.run(zoo.model, tokens, reads=False), by_hand.studied(zoo, tokens)
    mass, locked = by_hand.mass(zoo, ran, at), list(truth.locked)
    free = [layer for layer in range(len(mass)) if layer not in locked]
    if truth.sink == "sink logit":
        null = by_hand.null_mass(ran)
        assert (null[locked] > 0.8).all(), zoo.seed
        assert (null[free] < 0.05).all(), zoo.seed
    elif truth.sink == "none":
        # Relative to what a row sums to: 1 for a softmax, about half the keys for a sigmoid.
        shares = (ran.pattern / ran.pattern.sum(-1, keepdim=True))[..., by_hand.EARLIEST :, :].mean(
            (1, 3)
        )
        assert shares.nan_to_num().max() < 0.2, zoo.seed  # nan without attention
    else:
        assert (mass[locked] > 0.8).all(), zoo.seed
        if heads := list(truth.logit_heads):
            null = by_hand.null_mass(ran)[:, heads]
            assert (null[locked] > 0.8).all(), zoo.seed
            assert (null[free] < 0.05).all(), zoo.seed
        if zoo.name == "slow_growth":  # there it grows from layer to layer
            assert (mass.mean(1).diff() > -0.05).all(), zoo.seed
            free = free[:2]
        assert (mass[free] < 0.3).all(), zoo.seed


def _agrees_on_what_stands_out(zoo):
    found = by_hand.present(zoo, drawn(zoo))
    for link in LINKS:
        said = zoo.truth.links[link].present
        if said == "yes":
            assert found[link] > YES_ABOVE[link], (zoo.seed, zoo.family, link)
        elif said == "no" and link in found:
            # Where there is no dimension to write: how much the largest is over the next.
            bound = (
                3.0 if link == "neurons_dimension" and not zoo.truth.outliers else NO_BELOW[link]
            )
            assert found[link] < bound, (zoo.seed, zoo.family, link)


def _agrees(zoo, found, question, *, over):
    for link in LINKS:
        said = getattr(zoo.truth.links[link], question)
        if said == "yes":
            assert found[link] > over, (zoo.seed, zoo.family, link)
        elif said == "in part":
            assert 0.15 < found[link] < 0.45, (zoo.seed, zoo.family, link)
        elif said == "no" and link in found:
            assert abs(found[link]) < 0.1, (zoo.seed, zoo.family, link)


def _left(zoo, *, without):
    """Attention to the sinks (or to the logit), in the locked layers, without these makers."""
    tokens, locked = drawn(zoo), list(zoo.truth.locked)
    with by_hand.without(zoo, without):
        ran = by_hand.run(zoo.model, tokens, reads=False)
    if zoo.truth.sink == "sink logit":
        return float(by_hand.null_mass(ran)[locked].mean())
    return float(by_hand.mass(zoo, ran, by_hand.studied(zoo, tokens), layers=locked).mean())
