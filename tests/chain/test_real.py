"""What the default model shows, inside stated bands."""

import pytest
from rounding import close

from sink_lens import load
from sink_lens.activations.record import Reading, stream
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.page.words import is_off_distribution
from sink_lens.chain.placement import binding_kind
from sink_lens.chain.trace import trace
from sink_lens.data.corpora import bundled_text
from sink_lens.data.tokens import from_text
from sink_lens.measures.attention import sink_mass
from sink_lens.schema import DEFAULT_MODEL

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def lens():
    return load()


@pytest.fixture(scope="module")
def traced(lens, tmp_path_factory):
    config = TraceConfig(model=DEFAULT_MODEL, sequences=12, random_init=False, interventions=False)
    return trace(
        lens,
        config=config,
        out=tmp_path_factory.mktemp("real") / "text",
        progress=False,
        report=False,
    )


@pytest.fixture(scope="module")
def cut(lens, tmp_path_factory):
    """A trace of the default model on text with its interventions, which take minutes."""
    few = {"intervention_sequences": 2, "intervention_length": 32, "controls": 2}
    config = TraceConfig(model=DEFAULT_MODEL, random_init=False, **few)
    return trace(
        lens,
        config=config,
        out=tmp_path_factory.mktemp("real") / "cut",
        progress=False,
        report=False,
    )


def test_on_text_the_first_token_is_a_sink_of_most_heads(traced):
    assert traced.location.sink_positions == (0,)
    rate = traced.tables["conditions"].set_index("chosen").loc[True, "sink_rate"]
    assert 0.65 <= rate <= 0.85
    assert traced.tables["heads"]["sink_rate"].mean() == pytest.approx(rate, abs=1e-4)


def test_there_are_two_growth_steps_of_one_dimension_that_are_split_exactly(traced):
    steps = traced.location.steps
    assert [(step.first_layer, step.last_layer) for step in steps] == [(1, 2), (11, 11)]
    assert len({step.dimension for step in steps}) == 1
    table = traced.tables["growth_steps"]
    assert (table["ratio_after"] > 2 * table["ratio_before"]).all()
    assert table["split_error"].max() < 1e-4


def test_one_dimension_dominates(traced):
    outliers = [dims for layer, dims in traced.location.outliers.items() if layer >= 2]
    assert len(outliers) >= 20
    assert {dims[0] for dims in outliers} == {traced.location.steps[0].dimension}
    assert traced.tables["layers"]["dominance_ratio"].max() > 100


def test_super_neurons_are_found_at_both_steps(traced):
    supers = traced.super_neurons
    assert set(supers["layer"]) == {1, 2, 11}
    assert 5 <= len(supers) <= 15
    shares = supers.groupby("layer")["contribution_share"].sum()
    assert (shares > 0.7).all()
    assert (supers["spike_ratio"] > 10).all()


def test_the_sink_token_holds_the_effective_rank_down(traced):
    middle = traced.tables["layers"].iloc[15]
    assert middle["effective_rank"] < 6
    assert middle["effective_rank_without"] > 30


def test_the_links_have_their_verdicts(traced):
    # that of variance_preserved by S2 after W_O; the order of the tokens' variances is not kept (tau .01)
    assert traced.links.groupby("link")["measured"].first().tolist() == ["present"] * 6


@pytest.mark.exhaustive
def test_cutting_shows_the_same_chain(cut):
    frames = cut.tables
    effects = frames["effects"].set_index("edit")
    isolated = effects.loc["isolation"]
    assert isolated["baseline_target_mass"] < 0.02
    assert isolated["target_mass"] > 0.2
    assert isolated["control_mean"] < 0.02

    mediation = (
        frames["mediation"].query("intervention == 'isolation'").set_index(["frozen", "step"])
    )
    neurons = mediation.loc["neurons"]
    assert (neurons["surviving_share"] < 0.5).all()
    assert (neurons["control_surviving_share"] > 0.9).all()
    z = mediation.loc["z"]
    assert z["mass"].tolist() == close(z["baseline_mass"].tolist())

    assert binding_kind(frames["placement"]) == "positional"
    links = cut.links.groupby("link")[["measured", "intervened", "verdict"]].first()
    for name in ("aggregation_variance", "variance_neurons", "key_sink"):
        assert links.loc[name, ["measured", "intervened"]].tolist() == ["present", "holds"], name
        assert links.loc[name, "verdict"] in ("holds", "undecided"), name  # two sequences
    assert links.loc["variance_preserved"].tolist() == [
        "present",
        "undecided",
        "undecided",
    ]  # two sequences
    # other dimensions of the same neurons' columns carry the sink where the strongest is taken away; two sequences do
    # not decide that
    assert "holds" not in links.loc["neurons_dimension", ["intervened", "verdict"]].tolist()


@pytest.mark.exhaustive
def test_masking_the_sink_is_worth_more_than_a_nat(cut):
    primary = cut.tables["effects"].query("is_primary").set_index("link")
    assert (primary["masked_loss_nats"] - primary["baseline_loss_nats"] > 1).all()
    costly = [link for link, row in primary.iterrows() if is_off_distribution(row)]
    assert costly in ([], ["neurons_dimension"])


def test_the_parts_of_the_logit_and_both_bos_conditions_are_read(traced):
    rows = traced.links.set_index("statistic")
    share = rows.loc[["dimension_share_of_logit"]].iloc[0]
    assert 0.4 < share["value"] < 0.9
    assert rows.loc[["positive_share"]].iloc[0]["value"] > 0.99
    conditions = traced.tables["conditions"]
    assert conditions["condition"].tolist() == ["without", "with"]
    assert (conditions["sink_rate"] > 0.5).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("length", "kernels", "layers"),
    [(1024, ("fused", "eager"), None), (8192, ("fused",), frozenset({15}))],
)
def test_sink_mass_is_the_same_with_both_kernels_and_runs_at_8192_tokens(
    lens, length, kernels, layers
):
    def mass(view):
        return sink_mass(view["mass"][..., 0], valid=view.valid, key=0)

    tokens = from_text(bundled_text(), lens.tokenizer, sequences=1, length=length)
    reading = Reading(name="mass", sites=("mass",), function=mass, layers=layers)
    found, *other = (
        stream(lens, tokens, [reading], kernel=kernel).stacked("mass") for kernel in kernels
    )
    assert found.shape == (len(layers or range(lens.n_layers)), 1, lens.n_heads)
    assert ((found >= 0) & (found <= 1)).all()
    assert found.mean() > 0.2
    assert all((found - one).abs().max() < 1e-5 for one in other)
