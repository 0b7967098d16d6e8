"""Where a trace sees a sink and where it sees none, on models whose truth was written first."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tiers import first

from sink_lens.activations.record import Reading, capture, stream
from sink_lens.activations.sink_mask import sink_rates
from sink_lens.chain import measure, tables
from sink_lens.chain.config import TraceConfig
from sink_lens.chain.inputs import find_sinks_elsewhere
from sink_lens.chain.links import LINKS
from sink_lens.chain.measure import CONDITION_READINGS, scout_and_measure
from sink_lens.chain.page.story import title
from sink_lens.chain.readings import attention_readings
from sink_lens.chain.terminal import brief_answer
from sink_lens.chain.trace import _condition_table, _locate_and_measure, _make_inputs, trace
from sink_lens.data.tokens import from_tensor
from sink_lens.engine.forward import run_with
from sink_lens.measures.rank import effective_rank
from sink_lens.models.load import wrap
from sink_lens.models.tiny import tiny_tokenizer
from sink_lens.records import read_run
from tests.zoo import build

CONFIG = TraceConfig(model="zoo", random_init=False, controls=5)


def lens_and_tokens(name, *, family=None, seed=0, sequences=8, length=40):
    zoo = build(name, seed=seed, family=family)
    tokens = zoo.draw(sequences, length=length, generator=torch.Generator().manual_seed(seed))
    return zoo, replace(wrap(zoo.model, tokenizer=tiny_tokenizer()), name=name), from_tensor(tokens)


FEW = replace(CONFIG, controls=1, intervention_sequences=3)
"""For what does not hang on the controls."""


def traced(name, folder, *, config=CONFIG, **which):
    zoo, lens, batch = lens_and_tokens(name, **which)
    return zoo, trace(lens, config=config, tokens=batch, out=folder, progress=False, report=False)


def text_of(shown):
    out = io.StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()


def few_delimiters():
    """A delimiter at position 20 in three of the scout's eight sequences, and in no other of 60."""
    zoo, lens, _ = lens_and_tokens("delimiter")
    ordinary = torch.tensor([i for i in range(3, 300) if i not in zoo.delimiters])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.stack(
        [ordinary[torch.randperm(len(ordinary), generator=generator)[:40]] for _ in range(60)]
    )
    tokens[:3, 20] = zoo.delimiters[0]
    return lens, from_tensor(tokens)


@pytest.mark.parametrize("only", [None, CONDITION_READINGS], ids=["traced", "other condition"])
def test_where_all_sequences_show_no_sink_the_studied_position_is_0_whatever_the_scout_saw(only):
    lens, tokens = few_delimiters()
    assert measure.scout(lens, tokens, config=CONFIG).sink_position == 20
    panel = scout_and_measure(
        lens, tokens, config=CONFIG, own=[link.readings for link in LINKS], only=only
    )
    assert panel.find_sink_positions(min_rate=CONFIG.min_sink_rate) == ()
    assert (panel.location.sink_positions, panel.location.sink_found, panel.sink_positions) == (
        (0,),
        False,
        (0,),
    )


def test_the_table_of_bos_conditions_says_which_position_is_studied(tmp_path):
    _, lens, _ = lens_and_tokens("bos_neuron")
    config = replace(
        CONFIG, tokens="random", sequences=8, length=24, bos="with", interventions=False
    )
    result = trace(lens, config=config, out=tmp_path / "run", progress=False, report=False)
    assert result.tables["conditions"]["sink_position"].tolist() == [
        result.location.sink_position,
        0,
    ]
    page = result.report().read_text("utf-8")
    assert ">sink position</th>" in page[page.index("With and without BOS") :]
    late = scout_and_measure(*few_delimiters(), config=CONFIG, only=CONDITION_READINGS)
    assert (
        tables.condition_row(late, condition="without", chosen=False, config=CONFIG)[
            "sink_position"
        ]
        == 0
    )


WITHOUT = [
    ("untrained", "llama"),
    ("untrained", "headnorm_sigmoid"),
    ("unread_variance", "llama"),
    (
        "sink_logit",
        "gpt_oss",
    ),  # the sink is a logit that has no key, and every other layer has a window of 8
    ("spike", "llama"),
    ("sigmoid", "headnorm"),
]
"""The last two are traced as the untrained one is."""


@pytest.mark.parametrize(("name", "family"), first(WITHOUT, stay=len(WITHOUT) - 2))
def test_without_a_sink_links_are_not_applicable_and_nothing_is_said_of_what_carries_it(
    name, family, tmp_path
):
    zoo, result = traced(name, tmp_path / "run", family=family, length=64)
    assert not result.location.sink_found
    assert (result.location.sink_position, set(result.links["verdict"])) == (0, {"not applicable"})
    said = text_of(brief_answer(result))
    assert said.count("No position is an attention sink") == 1
    page = result.report().read_text("utf-8")
    assert page.count("No position is an attention sink") >= 1
    for shown in (said, page):
        for claim in (
            "another path",
            "nother path exists",
            "step -1",
            "Position or token?",
            "survives",
        ):
            assert claim not in shown, claim
        assert "not applicable" in shown
    for table in ("mediation", "placement", "effects", "amplification"):
        assert result.tables[table].empty
    first = result.links.query("link == 'aggregation_variance' and is_primary").iloc[0]
    present = {"yes": "present", "no": "absent"}[zoo.truth.links["aggregation_variance"].present]
    assert first["measured"] in (present, "undecided")
    assert first["value"] == first["value"]
    assert f"measured: {first['measured']}" in page
    if name == "unread_variance":  # variance without a sink is a finding
        assert (first["measured"], first["intervened"]) == ("present", "no intervention")
        assert first["ci_low"] > 1.25


@pytest.mark.parametrize(
    ("name", "family"), [("sigmoid", "headnorm"), ("untrained", "headnorm_sigmoid")]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sigmoid_attention_near_one_half_is_a_sink_at_no_position(name, family, seed):
    _, lens, batch = lens_and_tokens(name, family=family, seed=seed, length=64)
    rate = sink_rates(lens, batch, threshold=0.3).nanmean(dim=(0, 1))
    assert rate.nan_to_num(0.0).max() == 0.0
    panel = scout_and_measure(lens, batch, config=CONFIG, own=[link.readings for link in LINKS])
    assert panel.location.sink_positions == (0,)
    assert not panel.location.sink_found
    # Shares of nearly equal weights: those of uniform attention, whatever the rows sum to.
    uniform = float((1 / torch.arange(2, 65).double()).mean())
    assert panel.at_sink("sink_mass", 0).mean().item() == pytest.approx(uniform, rel=0.25)
    outcome = run_with(lens, batch, positions=(0,), loss=False)
    torch.testing.assert_close(
        outcome.mass[..., 0], panel.at_sink("sink_mass", 0), atol=1e-5, rtol=0
    )


def test_the_sink_of_a_window_is_averaged_over_the_queries_that_reach_it(tmp_path):
    zoo, result = traced("first_window", tmp_path / "run", config=FEW, seed=1)
    assert (result.location.sink_position, result.location.sink_found) == (0, True)
    locked = {"locked": zoo.truth.locked}
    heads = result.tables["heads"].query(
        "sink_position == 0 and layer in @locked", local_dict=locked
    )
    assert (
        heads["sink_mass"].min() > 0.8
    )  # as the model's truth says; over all queries a quarter of it
    assert heads["sink_score"].min() > 0.8
    assert (heads["sink_rate"] == 1).all()
    assert result.tables["effects"]["baseline_sink_mass"].max() > 0.7


@pytest.mark.parametrize("path", ["capture", "pattern"])
def test_both_paths_average_over_the_queries_that_reach_the_key(path):
    zoo, lens, batch = lens_and_tokens("first_window")
    reach, key = zoo.truth.reach, 3
    assert [lens.reach(layer) for layer in range(lens.n_layers)] == [reach] * lens.n_layers
    column = Reading(name="column", sites=("mass",), function=lambda view: view["mass"][..., 0])
    if path == "capture":
        found = stream(lens, batch, attention_readings((key,)), keys=(key,), rows=torch.arange(40))
        found = found.stacked("sink_mass")[..., 0]
    else:
        found = run_with(lens, batch, positions=(key,), loss=False).mass[..., 0]
    columns = stream(lens, batch, [column], keys=(key,)).stacked("column")
    torch.testing.assert_close(
        found, columns[..., key + 1 : key + reach].mean(-1), atol=1e-5, rtol=0
    )
    assert (columns[..., key + reach :] == 0).all()


@pytest.mark.exhaustive
def test_the_chain_of_a_sink_that_some_sequences_have_is_asked_on_them_alone(tmp_path):
    zoo, result = traced("sixth_of_sequences", tmp_path / "run", sequences=20)
    verdicts = result.links.drop_duplicates("link").set_index("link")["verdict"]
    for link, truth in zoo.truth.links.items():
        assert verdicts[link] == ("holds" if truth.necessary_or_sufficient == "yes" else "fails"), (
            link
        )
    (maker,) = zoo.truth.makers
    assert (
        result.tables["maker_sets"].set_index("set").loc["half", "parts"]
        == f"{maker.layer}.{maker.index}"
    )
    heads = result.tables["heads"].query(
        "layer in @locked", local_dict={"locked": zoo.truth.locked}
    )
    assert (heads["sink_rate"] == 1).all()
    assert (result.tables["effects"]["n"] == 4).all()
    said = title(read_run(tmp_path / "run"))
    rate = round(100 * len(zoo.truth.locked) / zoo.model.config.num_hidden_layers)
    assert said.startswith(
        f"Position 0 is the attention sink. It is in 4 of 20 sequences, in {rate}% of their heads. "
    )
    assert "Some tokens there make it, and others do not" in said
    assert "which token comes first" not in said


def test_both_of_two_sinks_are_named_and_left_out_of_the_rank(tmp_path):
    zoo, lens, batch = lens_and_tokens("two_sinks", sequences=4)
    config = replace(CONFIG, interventions=False)
    result = trace(
        lens, config=config, tokens=batch, out=tmp_path / "run", progress=False, report=False
    )
    position, token = zoo.placed[0]
    assert (batch.tokens[:, position] == token).all()
    rate = round(100 * len(zoo.truth.locked) / zoo.model.config.num_hidden_layers)
    said = title(read_run(tmp_path / "run"))
    assert said.startswith(
        f"Position 0 is the attention sink ({rate}% of heads). So is position {position} ({rate}%"
    )
    middle = zoo.model.config.num_hidden_layers // 2
    states = capture(lens, batch, sites=["resid_post"], layers=[middle])["resid_post", middle]
    kept = [place for place in range(batch.n_positions) if place not in (0, position)]
    summary = result.tables["summary"].set_index("quantity")["value"]
    rank = float(effective_rank(states[:, kept].float()).mean())
    assert float(summary["effective_rank_without"]) == pytest.approx(rank, rel=1e-4)
    assert rank > 2 * float(
        effective_rank(states[:, 1:].float()).mean()
    )  # without position 0 alone


def test_a_sink_that_the_mean_over_sequences_misses_is_found(tmp_path):
    zoo, lens, _ = lens_and_tokens("sixth_of_sequences")
    tokens = replace(zoo, first_every=14).draw(
        28, length=28, generator=torch.Generator().manual_seed(0)
    )
    rate = sink_rates(lens, from_tensor(tokens), threshold=CONFIG.threshold).nanmean(dim=(0, 1))[0]
    assert 0 < rate < CONFIG.min_sink_rate
    where = {"out": tmp_path / "run", "progress": False, "report": False}
    result = trace(
        lens, config=replace(CONFIG, interventions=False), tokens=from_tensor(tokens), **where
    )
    assert (result.location.sink_position, result.location.sink_found) == (0, True)
    assert "It is in 2 of 28 sequences" in title(read_run(tmp_path / "run"))


def test_a_sink_of_three_sequences_is_too_few_to_test(tmp_path):
    _, result = traced("sixth_of_sequences", tmp_path / "run", sequences=18)
    assert set(result.links["verdict"]) <= {"present, not tested", "absent"}
    assert not any(len(result.tables[name]) for name in ("effects", "makers", "placement"))
    said = title(read_run(tmp_path / "run"))
    assert "It is in 3 of 18 sequences" in said
    shown = result.report().read_text("utf-8")
    assert "of heads have the sink at position 0, at threshold 0.3, in 3 of 18 sequences" in shown
    assert said.endswith("too few to test. What makes it was not tested")


def test_a_sink_elsewhere_is_compared_with_the_sequences_that_can_tell():
    rate = torch.full((1, 8, 2), torch.nan)
    rate[0, :4] = torch.tensor([[0.6, 0.0], [0.6, 0.0], [0.6, 0.0], [0.2, 0.5]])
    assert find_sinks_elsewhere(rate, position=0) == {3: 1}


def test_both_bos_conditions_are_of_the_studied_sequences(monkeypatch):
    """BOS is the sink; without it in two sequences, they are left out of both rows."""
    _, lens, _ = lens_and_tokens("bos_neuron")
    config = replace(CONFIG, tokens="random", sequences=8, length=24, bos="with")
    asked = _make_inputs(lens, None, config=config, links=LINKS, progress=False, fields={})
    asked.batch.tokens[:2, 0] = 7
    located, seen = _locate_and_measure(asked), []
    assert located.kept.tolist() == list(range(2, 8))
    measured = lambda _, batch, **how: seen.append(batch) or located.panel  # noqa: E731
    monkeypatch.setattr(type(asked), "measure", measured)
    table = _condition_table(asked, located)
    assert table["condition"].tolist() == ["with", "without"]
    assert torch.equal(seen[0].tokens, asked.other.tokens[2:])
