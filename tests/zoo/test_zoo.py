"""How the zoo is built: names, families, places that move with the seed, and sequences."""

import numpy as np
import pytest
import torch
from tiers import first

from sink_lens import wrap
from sink_lens.chain.links.words import Phrase
from sink_lens.circuits.ablated import compute_circuit_metrics
from sink_lens.circuits.exact import exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.edits import metrics
from sink_lens.errors import InputError, ModelError
from sink_lens.models.tiny import planted
from tests.zoo import LINKS, ZOO, build
from tests.zoo.edges import sink_edges
from tests.zoo.headlines import untrue
from tests.zoo.mechanisms import LATER, MECHANISMS, wire
from tests.zoo.wiring import WIRED


@pytest.mark.parametrize("name", ZOO)
def test_same_seed_same_weights_and_other_seed_other_weights(name):
    first, again, other = (build(name, seed=seed) for seed in (1, 1, 2))
    weights, same, others = (
        torch.nn.utils.parameters_to_vector(zoo.model.parameters()) for zoo in (first, again, other)
    )
    assert torch.equal(weights, same)
    assert not torch.equal(weights, others)
    assert (first.name, first.family, first.seed) == (name, ZOO[name].families[0], 1)
    assert first.truth.makers == again.truth.makers
    assert tuple(first.truth.links) == LINKS
    assert all(parameter.dtype == torch.float32 for parameter in first.model.parameters())
    assert not first.model.training


@pytest.mark.parametrize(
    "name", [name for name, kind in ZOO.items() if kind.letter in (*"bcdefhjlpqrstuvwx", "af")]
)
def test_places_move_with_the_seed(name):
    truths = [build(name, seed=seed).truth for seed in range(8)]
    neurons = {tuple(maker for maker in truth.makers if maker.kind == "neuron") for truth in truths}
    assert len(neurons) == 8
    layers = {tuple(maker.layer for maker in truth.makers) for truth in truths}
    assert len(layers) > 1 or name in (
        "slow_growth",
        "eraser",
        "regrowth",
    )  # in every layer, or in the second
    if name != "direction":
        assert len({tuple(truth.outliers.values())[-1] for truth in truths}) > 4


def test_a_neuron_that_bos_triggers_is_planted_but_for_what_values_read():
    zoo, known = build("bos_neuron", seed=3), planted(seed=3)
    other = dict(known.model.named_parameters())
    for name, value in zoo.model.named_parameters():
        differs = (value != other[name]).sum(0).count_nonzero()
        assert differs == (1 if name.endswith("v_proj.weight") else 0), name  # one column
    assert [(maker.layer, maker.index) for maker in zoo.truth.makers] == [
        (known.layer, known.neuron)
    ]


def test_sequences_hold_no_token_twice_and_delimiters_are_sinks():
    zoo = build("delimiter", seed=4)
    tokens = zoo.draw(8, length=40, generator=torch.Generator().manual_seed(0))
    sinks = zoo.sinks(tokens)
    assert tokens.shape == (8, 40)
    assert (sinks.sum(1) == 3).all()
    assert not sinks[:, 0].any()
    for row, at in zip(tokens, sinks, strict=True):
        assert len(row[~at].unique()) == 37
        assert set(row[at].tolist()) <= set(zoo.delimiters)


def test_a_late_token_stands_once_in_each_sequence_and_is_a_sink_in_thirteen_of_32():
    zoo = build("late_stop", seed=4)
    tokens = zoo.draw(32, length=48, generator=torch.Generator().manual_seed(0))
    assert ((tokens == zoo.at).sum(1) == 1).all()
    sinks = zoo.sinks(tokens)
    assert int(sinks.any(1).sum()) == 13
    assert not sinks[:, :16].any()
    assert torch.equal(sinks.any(1), ~(tokens[:, 8:12] == zoo.at).any(1))
    said = Phrase(key="sink", text="The token x is an attention sink (62% of heads)", rows=())
    cut = tokens[sinks.any(1)][:1].repeat(4, 1)
    assert untrue(zoo, cut, [said]) == []  # one position in all, which the text does not say
    assert untrue(zoo, tokens, [said]) != []


def test_sequences_begin_with_bos_where_a_model_has_one_and_the_callers_random_state_is_untouched():
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
    assert (build("redundant").draw(3, generator=generator)[:, 0] == 1).all()
    assert (build("variance").draw(3, generator=generator) > 2).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: build("sinkhole"),
            ModelError,
            r"no model 'sinkhole' in the zoo; need one of embedding, ",
        ),
        (
            lambda: build("sigmoid", family="llama"),
            ModelError,
            r"'sigmoid' cannot be written in 'llama'; need .*headn",
        ),
        (
            lambda: build("variance").draw(1, length=400, generator=torch.Generator()),
            InputError,
            "need 8 to 297",
        ),
        (lambda: wire("luck"), ModelError, "no mechanism 'luck'; need one of copy, "),
        (lambda: wire("copy", family="bloom"), ModelError, "wired in 'bloom'; need one of llama, "),
    ],
)
def test_what_cannot_be_built_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("first_window", "mistral"),
        ("head_feeds", "gemma3"),
        ("variance", "olmo2"),
        ("two_dimensions", "qwen3"),
    ],
)
def test_needed_edges_change_the_sink_and_edges_without_a_part_do_not(name, family):
    zoo = build(name, seed=11, family=family)
    truth, lens = sink_edges(zoo), wrap(zoo.model)
    assert truth is not None
    graph = Graph.of(lens)
    needed, spare = (np.isin(graph.names, list(names)) for names in (truth.needed, truth.spare))
    assert needed.sum() == len(truth.needed)
    others = np.random.default_rng(0).choice(np.flatnonzero(~needed & ~spare), 40, replace=False)
    tokens = zoo.draw(4, length=12, generator=torch.Generator().manual_seed(0))
    metric = metrics.sink_mass(0, layers=zoo.truth.locked)
    runs = Runs.make(lens, tokens, None, graph=graph, metric=metric, ablation="mean_ordinary")
    scores = exact_scores(runs, [*map(int, (*np.flatnonzero(needed), *others))])
    effects = np.abs(scores.mean(0)) / float(runs.gap.mean())
    assert effects[: needed.sum()].min() >= 0.03
    assert effects[needed.sum() :].max() < 0.03


def test_every_model_says_which_edges_it_has_or_that_none_is_needed_alone():
    zoos = {name: build(name, seed=3, family=kind.families[-1]) for name, kind in ZOO.items()}
    truths = {name: sink_edges(zoo) for name, zoo in zoos.items()}
    for name, truth in truths.items():
        assert truth is None or truth.needed | truth.spare <= set(
            Graph.of(wrap(zoos[name].model)).names
        ), name
    none_alone = {
        "slow_growth",
        "either_layer",
        "sink_logit",
        "delimiter",
        "unread_variance",
        "spike",
        "sigmoid",
    }
    not_derived = {
        "behind_bos",
        "common_beside_direction",
        "common_dimension",
        "either_embedding",
        "held_down",
    }
    not_derived |= {"half_of_sequences", "sixth_of_sequences", "second", "two_sinks", "untrained"}
    not_derived |= {"in_mixer_layer", "mixer_spike", "state_sink", "latent_key"}
    not_derived |= {
        "bystanders",
        "part_of_key",
        "small_dimension",
        "four_dimensions",
        "zero_values",
    }
    not_derived |= {
        "embedding_or_neuron",
        "known_by_dimension",
        "heads_in_a_step",
        "expert_neuron",
        "attention_step",
    }
    not_derived |= {"late_stop", "half_logits", "small_stream"}
    without = {name for name, truth in truths.items() if truth is None}
    assert without == none_alone | not_derived | {
        name for name in ZOO if name.startswith("broken_")
    }


SMALL = 0.03
"""Part of the difference between the two prompts that an edge without a part may change, and one with a part must."""
CONFIRMED = [
    (name, WIRED[at % 6])
    for at, name in enumerate(sorted(MECHANISMS, key=lambda one: one in LATER))
]
"""Each mechanism in one architecture; the analysis `circuit_truth` confirms all of them in all."""


def runs_of(mechanism, ablation, *, n=3):
    clean, corrupted, metric = mechanism.pairs(
        n, generator=torch.Generator().manual_seed(mechanism.seed)
    )
    lens = wrap(mechanism.model)
    return Runs.make(lens, clean, corrupted, graph=Graph.of(lens), metric=metric, ablation=ablation)


def without(runs, edges):
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    kept[0, [runs.graph.index[edge] for edge in edges]] = False
    return float((runs.clean_values - compute_circuit_metrics(runs, kept)[0]).mean())


@pytest.mark.parametrize(("name", "family"), first(CONFIRMED, stay=8))
def test_needed_edges_change_the_answer_alone_and_no_other_edge_does(name, family):
    mechanism = wire(name, seed=7, family=family)
    whole = None
    for ablation in ("resample", "mean_ordinary", "zero"):
        runs = runs_of(mechanism, ablation)
        whole = whole or abs(float(runs.gap.mean()))  # a negation lowers the answer
        names = runs.graph.names
        needed = np.isin(names, list(mechanism.needed(ablation)))
        assert needed.sum() == len(mechanism.needed(ablation)) > 0
        others = ~needed & ~np.isin(names, list(mechanism.unjudged(ablation, names)))
        effects = np.abs(exact_scores(runs, range(len(names))).mean(0)) / whole
        assert effects[needed].min() > SMALL, (ablation, names[needed][effects[needed].argmin()])
        assert effects[others].max() < SMALL, (ablation, names[others][effects[others].argmax()])


@pytest.mark.parametrize(
    ("name", "family"), [("redundant", "qwen3"), ("either", "gemma2"), ("redundant", "gpt_neox")]
)
def test_spare_edges_change_the_answer_together_and_not_apart(name, family):
    mechanism = wire(name, seed=5, family=family)
    runs = runs_of(mechanism, "resample")
    whole = float(runs.gap.mean())
    spare = mechanism.spare("resample")
    carriers = sorted({edge.split("->")[0] for edge in spare} - {"input"})
    assert len(carriers) == 2
    out = [[edge for edge in spare if edge.startswith(f"{carrier}->")] for carrier in carriers]
    assert all(abs(without(runs, edges)) < 0.1 * whole for edges in out)
    assert without(runs, [edge for edges in out for edge in edges]) > 0.4 * whole


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt2"])
def test_a_backup_head_answers_where_the_mover_is_gone(family):
    mechanism = wire("ioi", seed=5, family=family)
    runs = runs_of(mechanism, "zero")
    (waiting,) = (
        edge for edge in mechanism.needed("zero") if edge.startswith("a1.") and "->a2." in edge
    )
    mover = waiting.partition("->")[0]
    out = f"{mover}->logits"
    lost = without(runs, [out])
    assert lost > 0.8 * float(runs.clean_values.mean())
    assert without(runs, [out, waiting]) < 0.2 * lost


def test_seeds_move_the_heads_and_ablations_change_what_is_needed():
    first = [wire("induction", seed=seed, family="gpt2") for seed in range(4)]
    assert len({frozenset(one.needed("resample")) for one in first}) > 1
    one = first[0]
    assert one.needed("resample") < one.needed("mean_ordinary") < one.needed("zero")
    assert one.needed("resample") == one.needed("mean_aligned")
    tokens = one.pairs(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tokens[0], one.pairs(3, generator=torch.Generator().manual_seed(0))[0])
