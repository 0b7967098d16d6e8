"""Published facts: the files are sound, corrupted facts are found, and no text raises a false alarm."""

import json

import pandas as pd
import pytest
import torch

from analyses.our_own.published_facts.facts import FACTS_SCHEMA, Fact, facts_of, is_about, read_facts
from analyses.our_own.published_facts.quantities import QUANTITIES, Value
from analyses.our_own.published_facts.quantities import measure_quantity as measure
from analyses.our_own.published_facts.run import FactsConfig, main, sentence, verdicts
from sink_lens.data.tokens import from_tensor
from sink_lens.errors import InputError
from sink_lens.models.load import wrap
from sink_lens.models.tiny import planted, tiny_tokenizer
from sink_lens.studies.observed import ObservedModel
from tests.zoo import build

ZOO = ("bos_neuron", "two_dimensions", "untrained")


def drawn(zoo, seed):
    return from_tensor(zoo.draw(8, length=32, generator=torch.Generator().manual_seed(seed)))


def facts_about(name, seen):
    """Facts of a model that we made: its numbers and sets as they are measured on one text."""
    rows = []
    numbers = "sink_rate first_token_share max_activation norm_ratio kurtosis dominance_ratio"
    sets = "sink_positions outlier_dimensions super_weights writing_neurons outlier_layers"
    for quantity in f"{numbers} {sets}".split():
        try:
            found = measure(quantity, seen)
        except InputError:
            continue
        kind = QUANTITIES[quantity].kind
        value = found.number
        if kind != "number":
            value = [list(one) if isinstance(one, tuple) else one for one in found.indices]
        tolerance = {"absolute": 0} if kind == "range" else {"exact": True}
        if quantity == "max_activation":  # a maximum over other text is another one
            tolerance = {"relative": 0.3}
        elif kind == "number":  # a published number has an interval of its own
            tolerance = {"relative": 0.1, "absolute": max(0.02, found.high - found.low)}
        row = {"id": f"{name}-{quantity}", "model": name, "quantity": quantity}
        rows.append(row | {"value": value, "tolerance": tolerance})
    return rows


def corrupted(row):
    value = row["value"]
    if not isinstance(value, list):
        wrong = value * 2 + 0.5
    elif not value:
        wrong = [[7, 7, 7]] if row["quantity"] == "super_weights" else [7]
    else:
        wrong = [[one[0], *(n + 1 for n in one[1:])] if isinstance(one, list) else one + 1 for one in value]
    return row | {"value": wrong, "id": f"{row['id']}-wrong"}


def written(path, rows):
    path.write_text(json.dumps({"schema": FACTS_SCHEMA, "facts": rows}))
    return str(path)


def test_the_facts_are_sound_and_many():
    facts = read_facts()
    comparable = [fact for fact in facts if fact.quantity is not None]
    assert len(comparable) >= 60
    assert len({fact.quantity for fact in comparable}) >= 20
    assert all(fact.source for fact in facts)
    assert all(fact.not_comparable for fact in facts if fact.quantity is None)
    assert {"bos", "dtype", "text", "length"} <= {name for fact in facts for name in fact.condition}
    rows = {fact.id: fact for fact in facts}
    assert rows["c32"].value == [[1, 2533, 7890]]
    assert rows["a6-zero"].value == 26_233_860
    assert rows["b24"].value == 0.677


@pytest.mark.parametrize("name", ZOO)
def test_every_corrupted_fact_is_found_and_no_text_raises_a_false_alarm(name, tmp_path):
    zoo = build(name)
    lens = wrap(zoo.model, name=name)
    rows = facts_about(name, ObservedModel(lens, drawn(zoo, 0)))
    assert len(rows) >= 8
    facts = written(tmp_path / "facts.json", rows)
    wrong = written(tmp_path / "wrong.json", [corrupted(row) for row in rows])
    for seed in range(1, 6):
        found = verdicts(lens, FactsConfig(facts=(facts, wrong)), tokens=drawn(zoo, seed))
        table = found.set_index("id")["verdict"]
        is_wrong = table.index.str.endswith("-wrong")
        assert [one for one, verdict in table[~is_wrong].items() if verdict != "agree"] == []
        assert [one for one, verdict in table[is_wrong].items() if verdict != "disagree"] == []


def fact(quantity, value, **rest):
    return Fact(id="f", model=("m",), quantity=quantity, value=value, **rest)


def test_a_number_agrees_within_tolerance_and_interval():
    wide = Value(number=1.0, low=0.8, high=1.2)
    assert fact("loss", 1.3, tolerance={"absolute": 0.1}).agrees(wide)
    assert not fact("loss", 1.31, tolerance={"absolute": 0.1}).agrees(wide)
    assert fact("loss", 1.33, tolerance={"relative": 0.1}).agrees(wide)
    assert fact("loss", 1.0).agrees(Value(number=1.1))  # 10% where no tolerance is named
    assert not fact("loss", 1.0, tolerance={"absolute": 0.05}).agrees(Value(number=1.1))


def test_a_set_agrees_where_all_published_members_are_found():
    found = Value(indices=(3, 7))
    assert fact("outlier_dimensions", [7]).agrees(found)
    assert not fact("outlier_dimensions", [7], tolerance={"exact": True}).agrees(found)
    assert not fact("outlier_dimensions", [7, 8]).agrees(found)
    assert not fact("outlier_dimensions", []).agrees(found)
    assert fact("outlier_layers", [2, 8]).agrees(found)
    assert not fact("outlier_layers", [2, 9]).agrees(found)


def test_owners_and_suffixes_do_not_make_another_model():
    one = Fact(id="f", model=("meta-llama/Llama-2-7b-hf",), quantity="loss", value=1.0)
    assert is_about(one, ["/data/llama-2-7B"])
    assert not is_about(one, ["llama-2-13b"])


CASES = {
    "agrees": ({"quantity": "sink_rate", "value": 0.4}, {"bos": "with"}, "agree", ""),
    "other-bos": ({"quantity": "sink_rate", "value": 0.4}, {"bos": "without"}, "disagree", ""),
    "repeated": ({"quantity": "sink_rate", "value": 0.0}, {"tokens": "repeated", "bos": "without"}, "agree", ""),
    "text": ({"quantity": "perplexity", "value": 3}, {"text": "c4"}, "not comparable", "--text-name c4"),
    "dtype": ({"quantity": "perplexity", "value": 3}, {"dtype": "bfloat16"}, "not comparable", "give --dtype bfloat16"),
    "length": ({"quantity": "loss", "value": 3}, {"length": 99}, "not comparable", "give --length 99"),
    "none": ({"value": 3, "not_comparable": "the weights are not at hand"}, {}, "not comparable", "not at hand"),
    "absent": ({"quantity": "dimension_value", "value": 3}, {"dimension": 99}, "disagree", "no dimension 99"),
}


def test_each_fact_says_why_it_cannot_be_compared(tmp_path):
    lens = wrap(planted().model, tokenizer=tiny_tokenizer(adds_bos=True), name="acme/planted")
    rows = [{"id": name, "model": "Planted", "condition": at} | case for name, (case, at, _, _) in CASES.items()]
    found = verdicts(lens, FactsConfig(sequences=4, length=24, facts=(written(tmp_path / "f.json", rows),)))
    table = found.set_index("id")
    for name, (_, _, verdict, reason) in CASES.items():
        assert table.loc[name, "verdict"] == verdict, name
        assert reason in str(table.loc[name, "reason"]), name
    said = sentence(found, name=lens.name)
    assert said.startswith("2 of 4 comparable facts about acme/planted agree; not sink_rate 0.4 ± 0.04, measured ")
    assert said.endswith("; 4 cannot be compared.")


def test_the_script_takes_any_model_and_the_name_under_which_it_was_published(tmp_path, capsys):
    folder = tmp_path / "mine"
    planted().model.save_pretrained(folder)
    tiny_tokenizer(adds_bos=True).save_pretrained(folder)
    given = ["--model", str(folder), "--sequences", "4", "--length", "24"]
    assert main(given) == 0
    assert capsys.readouterr().out.startswith("No published fact about mine is known; name it with --as")
    assert main([*given, "--as", "facebook/opt-125m", "--csv", str(tmp_path / "facts.csv")]) == 1
    said = capsys.readouterr().out
    assert "about facebook/opt-125m agree; not largest_dimensions" in said
    table = pd.read_csv(tmp_path / "facts.csv")
    assert dict(zip(table["quantity"], table["verdict"], strict=True)) == {
        "bos_attention": "not comparable",  # 40 tokens are not at hand
        "largest_dimensions": "disagree",
    }
    assert main([*given, "--facts", "none.json"]) == 2
    assert "none.json cannot be read as facts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "model": "m", "quantity": "sink_rat", "value": 1}, "did you mean sink_rate"),
        ({"id": "x", "model": "m", "quantity": "sink_rate", "value": [1]}, "sink_rate is a number"),
        ({"id": "x", "model": "m", "quantity": "super_weights", "value": 1}, "super_weights is a list of indices"),
        ({"id": "x", "model": "m", "quantity": "outlier_layers", "value": [1]}, "a list of two layers"),
        ({"id": "x", "model": "m", "quantity": "dimension_value", "value": 1}, "lacks dimension"),
        ({"id": "x", "model": "m", "value": 1}, "names no quantity; need one, or the reason"),
        ({"id": "x", "model": "m", "quantity": 0.5, "value": 1}, "has the quantity 0.5; need the name of one"),
        ({"id": "x", "model": []}, "has no id or no model"),
        ({"id": "x", "model": "m", "quantity": "loss", "value": 1, "tol": {}}, "has 'tol', which is not known"),
        ({"id": "a", "model": ["m"], "quantity": "sink_rate", "value": 10**400}, "fact 0 of"),
    ],
)
def test_a_fact_that_cannot_be_used_is_refused(row, said, tmp_path):
    with pytest.raises(InputError, match="fact 0 of") as error:
        facts_of(written(tmp_path / "f.json", [row]))
    assert said in str(error.value)
