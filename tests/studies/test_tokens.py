"""``sink-lens tokens``: its tables on models with planted sinks, what is printed, and what is refused."""

import pandas as pd
import pytest
import torch

from sink_lens import read_run, wrap
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError
from sink_lens.models.tiny import BOS_ID, planted, tiny_tokenizer
from sink_lens.report.html import page_content
from sink_lens.schema import tables_of
from sink_lens.studies.tokens.config import TokensConfig
from sink_lens.studies.tokens.run import is_delimiter, outlier_dimension_table, sink_tokens
from tests.tiny_families import tiny
from tests.zoo import build


@pytest.fixture(scope="module")
def delimiters(tmp_path_factory):
    """A model with several sinks a sequence, its sequences, and the run."""
    model = build("delimiter")
    tokens = model.draw(8, length=48, generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("runs") / "delimiters"
    return (
        model,
        tokens,
        sink_tokens(wrap(model.model), tokens=from_tensor(tokens), out=folder, progress=False),
    )


def test_the_tables_name_the_planted_tokens_their_layers_and_their_dimension(delimiters):
    model, tokens, found = delimiters
    truth = model.sinks(tokens)
    table = found.tables["sink_tokens"]
    assert set(zip(table["sequence"], table["position"], strict=True)) == set(
        map(tuple, truth.nonzero().tolist())
    )
    assert table["massive"].all()
    ((dimension,),) = {tuple(dimensions) for dimensions in model.truth.outliers.values()}
    assert set(table["dimensions"]) == {str(dimension)}
    sinks = table.loc[table["sink"]]
    first, last = min(model.truth.locked), max(model.truth.locked)
    assert set(sinks["sink_layers"]) == {f"{first}-{last}" if first < last else str(first)}
    assert set(table["massive_layers"]) == {
        f"{min(model.truth.outliers)}-{max(model.truth.outliers)}"
    }
    assert (sinks["received"] > 0.1).all()


def test_rates_by_token_and_by_position(delimiters):
    model, tokens, found = delimiters
    ids = found.tables["token_ids"].set_index("token_id")
    for token in model.delimiters:
        assert ids.loc[token, "massive_rate"] == 1
        assert ids.loc[token, "tokens"] == int((tokens[:, 1:] == token).sum())
    others = ids.drop(index=list(model.delimiters))[["sink_rate", "massive_rate"]]
    assert (others.fillna(0.0) == 0).all(axis=None)
    positions = found.tables["positions"].set_index("position")["massive_rate"]
    for position, rate in positions.items():
        assert rate == pytest.approx(float(model.sinks(tokens)[:, position].float().mean()))


def test_the_last_token_of_a_text_is_told_neither_to_be_a_sink_nor_to_be_none():
    tokens = torch.randint(3, 300, (4, 48), generator=torch.Generator().manual_seed(2))
    tokens[:, 0], tokens[:, 12], tokens[:, -1] = 7, BOS_ID, BOS_ID
    found = sink_tokens(wrap(planted().model), tokens=from_tensor(tokens), progress=False)
    row = found.tables["token_ids"].set_index("token_id").loc[BOS_ID]
    assert (row["tokens"], row["sink_rate"]) == (8, 1.0)
    assert pd.isna(found.tables["positions"]["sink_rate"].iloc[-1])


def test_every_table_is_there_and_the_page_shows_it(delimiters):
    _, _, found = delimiters
    assert set(read_run(found.folder).tables) == {table.name for table in tables_of("tokens")}
    page = page_content(read_run(found.folder))
    assert "massive activations of 384 tokens in 8 sequences" in page.title
    assert [figure.key for figure in page.figures if figure.missing] == []
    assert [table.key for table in page.tables if table.missing] == []


def test_a_model_without_sinks_says_so(tmp_path):
    model = build("untrained", family="llama")
    tokens = model.draw(6, length=32, generator=torch.Generator().manual_seed(0))
    found = sink_tokens(
        wrap(model.model), tokens=from_tensor(tokens), out=tmp_path / "run", progress=False
    )
    none = {"attention": "no sink", "norm": "no massive activation"}
    said = [f"by {way}: {what}, so no token is marked" for way, what in none.items()]
    assert [text.split(";")[0] for text in found.sentences] == said
    assert len(found.tables["sink_tokens"]) == 0
    page = page_content(read_run(found.folder))
    assert page.title == "No sink and no massive activation"
    assert [figure.key for figure in page.figures if figure.missing] == ["dimensions"]


def test_a_residual_sink_is_told_from_a_sink_tokens_dimension(tmp_path):
    # The planted model's neuron writes its dimension at BOS. A constant of 30 in another dimension of every ordinary
    # token's embedding is large on all of them; their other dimensions are about 0.2.
    model = planted()
    free = (model.outlier_dimension + 1) % model.model.config.hidden_size
    with torch.no_grad():
        model.model.model.embed_tokens.weight[3:, free] = 30.0
    tokens = torch.randint(3, 290, (4, 40), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = model.model.config.bos_token_id
    fields = {"massive_threshold": 2.0, "progress": False}
    found = sink_tokens(
        wrap(model.model), tokens=from_tensor(tokens), out=tmp_path / "run", **fields
    )
    residual = found.tables["dimensions"].query("kind == 'residual'")
    expected = {(free, layer, 1) for layer in range(len(model.model.model.layers))}
    assert (
        set(residual[["dimension", "layer", "coverage"]].itertuples(index=False, name=None))
        == expected
    )


def test_coverage_by_hand():
    # Four tokens, one of them marked. Dimension 7 is an outlier on two of the three others after layer 1 and on one
    # after layer 0; dimension 8 on the marked one alone.
    every = pd.DataFrame(
        {"sequence": 0, "position": range(4), "sink": [True, False, False, False], "massive": False}
    )
    rows = [
        (1, 1, 7, -40.0, 21.0),
        (1, 2, 7, 20.0, 25.0),
        (0, 2, 7, 3.0, 30.0),
        (1, 0, 8, 9.0, 50.0),
    ]
    outliers = pd.DataFrame(
        rows, columns=["layer", "position", "dimension", "value", "ratio"]
    ).assign(sequence=0)
    table = outlier_dimension_table(outliers, every, coverage=0.5)
    assert table.columns.tolist() == [
        "kind",
        "dimension",
        "layer",
        "coverage",
        "tokens",
        "value",
        "ratio",
    ]
    assert table.to_numpy().tolist() == [
        ["residual", 7, 0, 1 / 3, 3, 3.0, 30.0],
        ["residual", 7, 1, 2 / 3, 3, 30.0, 23.0],
        ["sink token", 8, 1, 1.0, 1, 9.0, 50.0],
    ]
    assert outlier_dimension_table(outliers.iloc[:0], every, coverage=0.5).empty


def test_prompts_of_different_lengths_are_taken(tmp_path):
    given = {"prompts": ["one two three four five six seven", "a b c"], "progress": False}
    found = sink_tokens(
        wrap(tiny("llama"), tokenizer=tiny_tokenizer()), out=tmp_path / "run", **given
    )
    tokens = found.tables["tokens"]
    assert (
        tokens.groupby("sequence")["position"].max().tolist()
        == (tokens["sequence"].value_counts() - 1).tolist()
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"gap": 1.0}, "gap is 1.0; need a number above 1"),
        ({"sink_threshold": 0.5}, "sink_threshold is 0.5; need a number above 1"),
        ({"coverage": 0.0}, "coverage is 0.0; need a share above 0"),
    ],
)
def test_what_cannot_be_run_is_refused(fields, text):
    with pytest.raises(InputError, match=text):
        TokensConfig(**fields)


def test_delimiters_have_no_letter_and_no_digit_or_are_special():
    texts = {".": True, "\n\n": True, "<s>": True, " the": False, "3": False}
    assert {
        text: is_delimiter(text, 1 if text == "<s>" else 5, frozenset({1})) for text in texts
    } == texts
